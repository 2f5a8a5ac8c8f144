//! Constants in normal form: sums of rational multiples of products of roots of primes, powers of pi and e,
//! logarithms of primes and i.
//!
//! Equal forms are equal numbers, without any rounding. Constants that have no form here (nested roots, sines of
//! odd angles) are compared numerically.

use super::{Budget, Const, Expr, Func, Num, Rational, Real, Stop, functions};
use std::collections::BTreeMap;

/// What a product may have beside its rational factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Atom {
    /// To a power between 0 and 1.
    Prime(u64),
    Pi,
    E,
    /// The logarithm of a prime.
    Ln(u64),
    /// To the first power.
    I,
}

/// An exponent in lowest terms, the denominator positive.
type Exponent = (i64, i64);
/// Atoms in order, with exponents that are not zero.
type Monomial = Vec<(Atom, Exponent)>;

/// A sum of products.
#[derive(Clone, Debug, PartialEq)]
pub struct Form(BTreeMap<Monomial, Rational>);

/// Sums with more terms are left to numbers.
const MOST_TERMS: usize = 24;
/// Largest prime that trial division looks for.
const MOST_PRIME: u64 = 4_000;

fn plus((a, b): Exponent, (c, d): Exponent) -> Option<Exponent> {
    small(&Rational::new(
        i128::from(a) * i128::from(d) + i128::from(c) * i128::from(b),
        i128::from(b) * i128::from(d),
    )?)
}

fn small(value: &Rational) -> Option<Exponent> {
    match value {
        Rational::Small(n, d) if n.abs() < 1 << 20 && *d < 1 << 20 => Some((*n, *d)),
        _ => None,
    }
}

/// The prime factors of a rational with their exponents, and its sign; none where they are not found.
fn factors(value: &Rational) -> Option<(i32, Vec<(u64, i64)>)> {
    let (_, num, den) = value.reduced().parts();
    let mut out: Vec<(u64, i64)> = Vec::new();
    for (part, sign) in [(num, 1), (den, -1)] {
        let mut rest = u64::try_from(part.to_u128()?).ok().filter(|n| *n > 0)?;
        let mut p = 2;
        while p * p <= rest && p <= MOST_PRIME {
            while rest % p == 0 {
                rest /= p;
                match out.last_mut() {
                    Some((q, n)) if *q == p && (*n > 0) == (sign > 0) => *n += sign,
                    _ => out.push((p, sign)),
                }
            }
            p += 1 + p % 2;
        }
        if rest > MOST_PRIME * MOST_PRIME {
            return None;
        }
        if rest > 1 {
            out.push((rest, sign));
        }
    }
    Some((value.sign(), out))
}

impl Form {
    fn rational(value: Rational) -> Form {
        Form::term(value, Vec::new())
    }

    fn term(coefficient: Rational, monomial: Monomial) -> Form {
        let mut terms = BTreeMap::new();
        if !coefficient.is_zero() {
            terms.insert(monomial, coefficient);
        }
        Form(terms)
    }

    fn atom(atom: Atom) -> Form {
        Form::term(Rational::ONE, vec![(atom, (1, 1))])
    }

    /// The only term.
    fn single(&self) -> Option<(&Monomial, &Rational)> {
        if self.0.len() == 1 { self.0.iter().next() } else { None }
    }

    /// The value where it is rational.
    fn as_rational(&self) -> Option<Rational> {
        match self.0.len() {
            0 => Some(Rational::ZERO),
            _ => self.single().filter(|(monomial, _)| monomial.is_empty()).map(|(_, c)| c.clone()),
        }
    }

    fn add(mut self, other: &Form) -> Option<Form> {
        for (monomial, c) in &other.0 {
            let sum = match self.0.get(monomial) {
                Some(old) => old.add(c),
                None => c.clone(),
            };
            if sum.is_zero() {
                self.0.remove(monomial);
            } else {
                self.0.insert(monomial.clone(), sum);
            }
        }
        (self.0.len() <= MOST_TERMS && !self.0.values().any(Rational::too_big)).then_some(self)
    }

    fn scale(&self, by: &Rational) -> Form {
        if by.is_zero() {
            return Form(BTreeMap::new());
        }
        Form(self.0.iter().map(|(m, c)| (m.clone(), c.mul(by))).collect())
    }

    fn mul(&self, other: &Form, budget: &Budget) -> Option<Form> {
        let mut out = Form(BTreeMap::new());
        for (m, c) in &self.0 {
            for (n, d) in &other.0 {
                budget.spend(10 + m.len() as u64 + n.len() as u64).ok()?;
                let (factor, monomial) = product(m, n)?;
                out = out.add(&Form::term(c.mul(d).mul(&factor), monomial))?;
            }
        }
        Some(out)
    }

    fn recip(&self, budget: &Budget) -> Option<Form> {
        if let Some((monomial, c)) = self.single() {
            let inverse: Monomial = monomial.iter().map(|(atom, (n, d))| (*atom, (-n, *d))).collect();
            let (factor, monomial) = product(&inverse, &Vec::new())?;
            return Some(Form::term(c.recip()?.mul(&factor), monomial));
        }
        // Conjugates: a square root, or i, leaves the denominator with each.
        let (mut top, mut bottom) = (Form::rational(Rational::ONE), self.clone());
        for _ in 0..4 {
            let root = bottom
                .0
                .keys()
                .flatten()
                .find(|(atom, e)| *e == (1, 2) || *atom == Atom::I)
                .map(|(a, _)| *a)?;
            let flipped = bottom.0.iter().map(|(m, c)| {
                let has = m.iter().any(|(atom, e)| *atom == root && (*e == (1, 2) || root == Atom::I));
                (m.clone(), if has { c.neg() } else { c.clone() })
            });
            let conjugate = Form(flipped.collect());
            top = top.mul(&conjugate, budget)?;
            bottom = bottom.mul(&conjugate, budget)?;
            if bottom.0.len() == 1 {
                return top.mul(&bottom.recip(budget)?, budget);
            }
        }
        None
    }

    /// A single positive product to a rational power, or any form to a small integer power.
    fn pow(&self, power: &Rational, budget: &Budget) -> Option<Form> {
        if let Some(n) = power.to_i64() {
            if n < 0 {
                return self.recip(budget)?.pow(&power.neg(), budget);
            }
            if n > 24 && self.0.len() > 1 || n > 4_096 {
                return None;
            }
            let mut out = Form::rational(Rational::ONE);
            for bit in (0..64 - n.leading_zeros()).rev() {
                out = out.mul(&out, budget)?;
                if n >> bit & 1 == 1 {
                    out = out.mul(self, budget)?;
                }
            }
            return Some(out);
        }
        let (monomial, c) = self.single()?;
        let (sign, primes) = factors(c)?;
        let (n, d) = small(power)?;
        // Roots of negative numbers: i for square roots, a sign for odd ones.
        let unit = match (sign, d) {
            (1, _) => Form::rational(Rational::ONE),
            (_, 2) if n.rem_euclid(4) == 1 => Form::atom(Atom::I),
            (_, d) if d % 2 == 1 => Form::rational(if n % 2 == 0 { 1 } else { -1 }.into()),
            _ => return None,
        };
        if monomial.iter().any(|(atom, _)| *atom == Atom::I) {
            return None;
        }
        let mut out = unit;
        let atoms = monomial.iter().copied().chain(primes.into_iter().map(|(p, n)| (Atom::Prime(p), (n, 1))));
        for (atom, (a, b)) in atoms {
            let exponent =
                small(&Rational::new(i128::from(a) * i128::from(n), i128::from(b) * i128::from(d))?)?;
            let (factor, monomial) = product(&vec![(atom, exponent)], &Vec::new())?;
            out = out.mul(&Form::term(factor, monomial), budget)?;
        }
        Some(out)
    }

    /// `e` to this power: rational parts, multiples of logarithms, and multiples of i pi at the usual angles.
    fn exp(&self, budget: &Budget) -> Option<Form> {
        let mut out = Form::rational(Rational::ONE);
        for (monomial, c) in &self.0 {
            let part = match monomial[..] {
                [] => Form::term(Rational::ONE, vec![(Atom::E, small(c)?)]),
                [(Atom::Ln(p), (1, 1))] => Form::rational(i64::try_from(p).ok()?.into()).pow(c, budget)?,
                [(Atom::Pi, (1, 1)), (Atom::I, _)] => {
                    let (cos, sin) = (cosine(c)?, cosine(&Rational::new(1, 2)?.sub(c))?);
                    cos.add(&sin.mul(&Form::atom(Atom::I), budget)?)?
                }
                _ => return None,
            };
            out = out.mul(&part, budget)?;
        }
        Some(out)
    }

    /// The logarithm of a positive product of primes and powers of e.
    fn ln(&self) -> Option<Form> {
        let (monomial, c) = self.single()?;
        let (1, primes) = factors(c)? else { return None };
        let mut out = Form::rational(Rational::ZERO);
        let atoms = monomial.iter().copied().chain(primes.into_iter().map(|(p, n)| (Atom::Prime(p), (n, 1))));
        for (atom, (n, d)) in atoms {
            let factor = Rational::new(n.into(), d.into())?;
            out = out.add(&match atom {
                Atom::Prime(p) => Form::term(factor, vec![(Atom::Ln(p), (1, 1))]),
                Atom::E => Form::rational(factor),
                _ => return None,
            })?;
        }
        Some(out)
    }
}

/// The product of two monomials: what becomes rational, and the rest.
fn product(a: &Monomial, b: &Monomial) -> Option<(Rational, Monomial)> {
    let mut all: Monomial = a.clone();
    for (atom, e) in b {
        match all.iter_mut().find(|(known, _)| known == atom) {
            Some((_, old)) => *old = plus(*old, *e)?,
            None => all.push((*atom, *e)),
        }
    }
    let mut factor = Rational::ONE;
    for (atom, (n, d)) in &mut all {
        match atom {
            Atom::Prime(p) => {
                let whole = n.div_euclid(*d);
                *n -= whole * *d;
                factor = factor.mul(&Rational::from(i64::try_from(*p).ok()?).pow(whole)?);
            }
            Atom::I => {
                if matches!(n.rem_euclid(4), 2 | 3) {
                    factor = factor.neg();
                }
                *n = n.rem_euclid(2);
            }
            _ => {}
        }
    }
    all.retain(|(_, (n, _))| *n != 0);
    all.sort_unstable();
    Some((factor, all))
}

/// `cos(turn * pi)` for multiples of 15 degrees.
fn cosine(turn: &Rational) -> Option<Form> {
    let twelfths = turn.mul(&12.into()).to_i64()?.rem_euclid(24);
    let root = |n: u64, c: Rational| Form::term(c, vec![(Atom::Prime(n), (1, 2))]);
    let quarter = Rational::new(1, 4)?;
    let six = |c: Rational| Form::term(c, vec![(Atom::Prime(2), (1, 2)), (Atom::Prime(3), (1, 2))]);
    let positive = |k: i64| -> Option<Form> {
        Some(match k {
            0 => Form::rational(Rational::ONE),
            1 => six(quarter.clone()).add(&root(2, quarter.clone()))?,
            2 => root(3, Rational::new(1, 2)?),
            3 => root(2, Rational::new(1, 2)?),
            4 => Form::rational(Rational::new(1, 2)?),
            5 => six(quarter.clone()).add(&root(2, quarter.neg()))?,
            _ => Form::rational(Rational::ZERO),
        })
    };
    let k = if twelfths > 12 { 24 - twelfths } else { twelfths };
    if k <= 6 { positive(k) } else { Some(positive(12 - k)?.scale(&Rational::from(-1))) }
}

/// The form of a constant; none where it has none.
pub fn form(expr: &Expr, budget: &Budget) -> Option<Form> {
    budget.spend(2).ok()?;
    match expr {
        Expr::Num(value, _) => Some(Form::rational(value.clone())),
        Expr::Const(Const::Pi) => Some(Form::atom(Atom::Pi)),
        Expr::Const(Const::E) => Some(Form::atom(Atom::E)),
        Expr::Const(Const::I) => Some(Form::atom(Atom::I)),
        Expr::Neg(a) => Some(form(a, budget)?.scale(&Rational::from(-1))),
        Expr::Add(items) => {
            items.iter().try_fold(Form::rational(Rational::ZERO), |sum, item| sum.add(&form(item, budget)?))
        }
        Expr::Mul(items) => items
            .iter()
            .try_fold(Form::rational(Rational::ONE), |all, item| all.mul(&form(item, budget)?, budget)),
        Expr::Div(a, b) => form(a, budget)?.mul(&form(b, budget)?.recip(budget)?, budget),
        Expr::Pow(a, b) => power(&form(a, budget)?, &form(b, budget)?, budget),
        Expr::Root(n, a) => {
            let n = form(n, budget)?.as_rational()?;
            form(a, budget)?.pow(&n.recip()?, budget)
        }
        Expr::Percent(a) => Some(form(a, budget)?.scale(&Rational::new(1, 100)?)),
        Expr::Degree(a) => form(a, budget)?.scale(&Rational::new(1, 180)?).mul(&Form::atom(Atom::Pi), budget),
        Expr::Fact(a) => rational_function(&[a], |args| functions::factorial(&args[0], 1, budget), budget),
        Expr::Binom(a, b) => {
            rational_function(&[a, b], |args| functions::binomial(&args[0], &args[1], budget), budget)
        }
        Expr::Func(func, args) => function(*func, args, budget),
        Expr::Unit(a, _) => form(a, budget),
        _ => None,
    }
}

fn power(base: &Form, exponent: &Form, budget: &Budget) -> Option<Form> {
    if let Some(power) = exponent.as_rational() {
        return base.pow(&power, budget);
    }
    base.ln()?.mul(exponent, budget)?.exp(budget)
}

fn rational_function(
    args: &[&Expr],
    apply: impl Fn(&[Num]) -> Result<Num, Stop>,
    budget: &Budget,
) -> Option<Form> {
    let args: Option<Vec<Num>> = args.iter().map(|a| Some(form(a, budget)?.as_rational()?.into())).collect();
    match apply(&args?).ok()?.re {
        Real::Rat(value) => Some(Form::rational(value)),
        Real::Float(_) => None,
    }
}

fn function(func: Func, args: &[Expr], budget: &Budget) -> Option<Form> {
    let mut forms = args.iter().map(|arg| form(arg, budget));
    let first = forms.next()??;
    // Angles are rational multiples of pi.
    let turn = || match first.0.len() {
        0 => Some(Rational::ZERO),
        _ => first.single().filter(|(m, _)| m[..] == [(Atom::Pi, (1, 1))]).map(|(_, c)| c.clone()),
    };
    let cos = || cosine(&turn()?);
    let sin = || cosine(&Rational::new(1, 2)?.sub(&turn()?));
    match func {
        Func::Cos => cos(),
        Func::Sin => sin(),
        Func::Tan => sin()?.mul(&cos()?.recip(budget)?, budget),
        Func::Cot => cos()?.mul(&sin()?.recip(budget)?, budget),
        Func::Sec => cos()?.recip(budget),
        Func::Csc => sin()?.recip(budget),
        Func::Ln => first.ln(),
        Func::Log => forms.next()??.ln()?.mul(&first.ln()?.recip(budget)?, budget),
        Func::Exp => first.exp(budget),
        _ => None,
    }
}
