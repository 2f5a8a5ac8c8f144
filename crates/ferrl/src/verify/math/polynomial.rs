//! Polynomials in one variable, by whose roots equations and inequalities are solved.

use super::sets::{End, OPEN};
use super::{Budget, Expr, Real, RealSet, Rel, VariableNames};
use std::cmp::Ordering;

/// Higher degrees are left unsolved.
const MOST_DEGREE: usize = 10;
/// Bits to which a root is known after the last step of Newton's method.
const ROOT_BITS: i64 = 200;

/// Coefficients, the constant first; the last is not zero.
#[derive(Clone, Debug)]
struct Poly(Vec<Real>);

impl Poly {
    fn constant(value: Real) -> Poly {
        Poly(vec![value]).trimmed()
    }

    /// Without leading zeros.
    fn trimmed(mut self) -> Poly {
        while self.0.last().is_some_and(Real::maybe_zero) {
            self.0.pop();
        }
        self
    }

    fn add(&self, other: &Poly) -> Option<Poly> {
        let at = |p: &Poly, k: usize| p.0.get(k).cloned().unwrap_or(Real::ZERO);
        let terms = (0..self.0.len().max(other.0.len())).map(|k| at(self, k).add(&at(other, k)).ok());
        Some(Poly(terms.collect::<Option<_>>()?).trimmed())
    }

    fn neg(&self) -> Poly {
        Poly(self.0.iter().map(Real::neg).collect())
    }

    fn mul(&self, other: &Poly, budget: &Budget) -> Option<Poly> {
        if self.0.is_empty() || other.0.is_empty() {
            return Some(Poly(Vec::new()));
        }
        let len = self.0.len() + other.0.len() - 1;
        if len > MOST_DEGREE + 1 {
            return None;
        }
        let mut out = vec![Real::ZERO; len];
        for (i, a) in self.0.iter().enumerate() {
            for (j, b) in other.0.iter().enumerate() {
                budget.spend(2 + a.cost() + b.cost()).ok()?;
                out[i + j] = out[i + j].add(&a.mul(b).ok()?).ok()?;
            }
        }
        Some(Poly(out).trimmed())
    }

    fn at(&self, x: &Real, budget: &Budget) -> Option<Real> {
        budget.spend(4 * self.0.len() as u64).ok()?;
        self.0.iter().rev().try_fold(Real::ZERO, |sum, c| sum.mul(x).ok()?.add(c).ok())
    }

    fn derivative(&self) -> Option<Poly> {
        let terms = self.0.iter().enumerate().skip(1).map(|(k, c)| c.mul(&(k as i64).into()).ok());
        Some(Poly(terms.collect::<Option<_>>()?).trimmed())
    }

    /// A number above the size of every root (Cauchy's bound).
    fn bound(&self) -> Option<Real> {
        let (lead, rest) = self.0.split_last()?;
        let mut most = 0.0f64;
        for c in rest {
            most = most.max(c.div(lead).ok()?.float().to_f64().abs());
        }
        (most < 1e9).then(|| Real::from(most as i64 + 2))
    }

    /// The real roots in order. Between two roots of its derivative a polynomial crosses zero once at most.
    fn roots(&self, budget: &Budget) -> Option<Vec<Real>> {
        match self.0.len() {
            0 => return None,
            1 => return Some(Vec::new()),
            2 => return Some(vec![self.0[0].neg().div(&self.0[1]).ok()?]),
            3 => return self.quadratic(),
            _ => {}
        }
        let bound = self.bound()?;
        let mut stops = vec![bound.neg()];
        stops.extend(self.derivative()?.roots(budget)?);
        stops.push(bound);
        let mut out: Vec<Real> = Vec::new();
        for (k, low) in stops.iter().enumerate() {
            let here = self.at(low, budget)?;
            if here.sign() == 0 {
                // A root of the derivative too: touched, not crossed.
                out.push(low.clone());
                continue;
            }
            let Some(high) = stops.get(k + 1) else { break };
            let there = self.at(high, budget)?;
            if here.sign() * there.sign() < 0 {
                out.push(self.between(low, high, budget)?);
            }
        }
        out.dedup_by(|a, b| a.compare(b) == Some(Ordering::Equal));
        Some(out)
    }

    fn quadratic(&self) -> Option<Vec<Real>> {
        let [c, b, a] = &self.0[..] else { return None };
        let four_ac = a.mul(c).ok()?.mul(&4.into()).ok()?;
        let inside = b.mul(b).ok()?.sub(&four_ac).ok()?;
        let below = a.mul(&2.into()).ok()?;
        let root = match inside.sign() {
            -1 => return Some(Vec::new()),
            0 => return Some(vec![b.neg().div(&below).ok()?]),
            _ => inside.root(2).ok()?,
        };
        let mut roots =
            vec![b.neg().sub(&root).ok()?.div(&below).ok()?, b.neg().add(&root).ok()?.div(&below).ok()?];
        if a.sign() < 0 {
            roots.reverse();
        }
        Some(roots)
    }

    /// The one root between two points of different signs: by halving to where machine numbers end, then by
    /// Newton's method; a fraction with the leading coefficient below is taken exactly.
    fn between(&self, low: &Real, high: &Real, budget: &Budget) -> Option<Real> {
        let (mut low, mut high) = (low.clone(), high.clone());
        let rising = self.at(&high, budget)?.sign() > 0;
        let half = |a: &Real, b: &Real| -> Option<Real> {
            let mid = a.add(b).ok()?.div(&2.into()).ok()?;
            Some(Real::Float(mid.float()))
        };
        for _ in 0..50 {
            let mid = half(&low, &high)?;
            match self.at(&mid, budget)?.sign() {
                0 => return Some(self.exact(mid, budget)),
                sign if (sign > 0) == rising => high = mid,
                _ => low = mid,
            }
        }
        let slope = self.derivative()?;
        let mut root = half(&low, &high)?.float().bounded(i64::MIN / 4, false);
        for _ in 0..4 {
            let at = Real::Float(root);
            let step = self.at(&at, budget)?.div(&slope.at(&at, budget)?).ok()?;
            let next = root.sub(step.float());
            root = next.bounded(i64::MIN / 4, false);
        }
        let root = Real::Float(root.bounded(root.exp - ROOT_BITS, false));
        Some(self.exact(root, budget))
    }

    /// A root as the fraction that it is, where the coefficients are integers.
    fn exact(&self, root: Real, budget: &Budget) -> Real {
        let fraction = || {
            let lead = self.0.last()?.rational()?.to_i64()?;
            let top = root.mul(&lead.into()).ok()?.float().round()?;
            let value = Real::from(top).div(&lead.into()).ok()?;
            let near = value.sub(&root).ok()?.abs().float().to_f64() < 1e-12;
            (near && self.at(&value, budget)?.is_exact_zero()).then_some(value)
        };
        fraction().unwrap_or(root)
    }
}

/// An expression as a quotient of polynomials in its only variable.
fn fraction(expr: &Expr, names: &VariableNames, budget: &Budget) -> Option<(Poly, Poly)> {
    budget.spend(2).ok()?;
    let one = || Poly::constant(1.into());
    let constant = |expr: &Expr| -> Option<(Poly, Poly)> {
        let value = names.at(0, budget).num(expr).ok()?;
        Some((Poly::constant(value.real().ok()?.clone()), one()))
    };
    let varies = |expr: &Expr| names.all.iter().any(|name| expr.mentions(name));
    if !varies(expr) {
        return constant(expr);
    }
    match expr {
        Expr::Var(_) => Some((Poly(vec![Real::ZERO, 1.into()]), one())),
        Expr::Neg(a) => fraction(a, names, budget).map(|(n, d)| (n.neg(), d)),
        Expr::Div(a, b) => {
            let ((an, ad), (bn, bd)) = (fraction(a, names, budget)?, fraction(b, names, budget)?);
            Some((an.mul(&bd, budget)?, ad.mul(&bn, budget)?))
        }
        Expr::Mul(items) => items.iter().try_fold((one(), one()), |(n, d), item| {
            let (a, b) = fraction(item, names, budget)?;
            Some((n.mul(&a, budget)?, d.mul(&b, budget)?))
        }),
        Expr::Add(items) => items.iter().try_fold((Poly(Vec::new()), one()), |(n, d), item| {
            let (a, b) = fraction(item, names, budget)?;
            Some((n.mul(&b, budget)?.add(&a.mul(&d, budget)?)?, d.mul(&b, budget)?))
        }),
        Expr::Pow(a, power) => {
            let Expr::Num(power, _) = &**power else { return None };
            let power = power.to_i64().filter(|n| n.unsigned_abs() <= MOST_DEGREE as u64)?;
            let (mut n, mut d) = (one(), one());
            let (a, b) = fraction(a, names, budget)?;
            for _ in 0..power.unsigned_abs() {
                (n, d) = (n.mul(&a, budget)?, d.mul(&b, budget)?);
            }
            Some(if power < 0 { (d, n) } else { (n, d) })
        }
        _ => None,
    }
}

/// The numbers for which `left rel right` holds, where both are quotients of polynomials.
pub fn solve(left: &Expr, rel: Rel, right: &Expr, names: &VariableNames, budget: &Budget) -> Option<RealSet> {
    let difference = Expr::Add(vec![left.clone(), right.clone().negated()]);
    let (top, bottom) = fraction(&difference, names, budget)?;
    let (zeros, poles) = (top.roots(budget)?, bottom.roots(budget)?);
    let mut stops: Vec<(Real, bool)> = Vec::new();
    for (stop, pole) in zeros.into_iter().map(|x| (x, false)).chain(poles.into_iter().map(|x| (x, true))) {
        let mut at = 0;
        while at < stops.len() && stops[at].0.compare(&stop)? == Ordering::Less {
            at += 1;
        }
        match stops.get_mut(at) {
            Some(known) if known.0.compare(&stop)? == Ordering::Equal => known.1 |= pole,
            _ => stops.insert(at, (stop, pole)),
        }
    }
    let holds = |x: &Real| -> Option<bool> {
        let sign = top.at(x, budget)?.sign() * bottom.at(x, budget)?.sign();
        Some(satisfies(rel, sign))
    };
    let mut out = RealSet::empty();
    let open = |value: &Real| End { value: Some(value.clone()), closed: false };
    let mut low = OPEN;
    for (k, (stop, pole)) in stops.iter().enumerate() {
        let before = match k.checked_sub(1) {
            Some(last) => stops[last].0.add(stop).ok()?.div(&2.into()).ok()?,
            None => stop.sub(&1.into()).ok()?,
        };
        if holds(&before)? {
            out = out.union(RealSet::interval(low, open(stop))?)?;
        }
        if !pole && satisfies(rel, 0) {
            out = out.union(RealSet::point(stop.clone()))?;
        }
        low = open(stop);
    }
    let beyond = stops.last().map_or(Ok(Real::ZERO), |(stop, _)| stop.add(&1.into())).ok()?;
    if holds(&beyond)? {
        out = out.union(RealSet::interval(low, OPEN)?)?;
    }
    Some(out)
}

/// Whether a number of this sign stands in a relation to zero.
fn satisfies(rel: Rel, sign: i32) -> bool {
    match rel {
        Rel::Eq => sign == 0,
        Rel::Ne => sign != 0,
        Rel::Lt => sign < 0,
        Rel::Le => sign <= 0,
        Rel::Gt => sign > 0,
        Rel::Ge => sign >= 0,
        _ => false,
    }
}
