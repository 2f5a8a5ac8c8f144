//! The value of a tree at a point: variables stand for fixed numbers, unknown functions for fixed hashes.
//!
//! Two expressions that agree at several points in 256 bits are taken for equal; where no variable, root or
//! transcendental function occurs the arithmetic is exact and so is the verdict.

use super::arith::float::Float;
use super::arith::transcend;
use super::ast::Big;
use super::{Budget, Const, Expr, Func, MathResult, Num, Rational, Real, Stop, functions};
use std::collections::BTreeSet;

/// Points at which expressions are compared.
pub const POINTS: usize = 9;

/// Least numerator over 64, number of numerators, and the variables that are negative, by rank modulo 8.
const LAYOUT: [(i64, u64, u8); POINTS] = [
    (32, 160, 0b0000_0000),
    (32, 160, 0b1111_1111),
    (64, 448, 0b0101_0101),
    (4, 56, 0b0011_0011),
    (640, 3_200, 0b0000_0000),
    (32, 160, 0b0000_1111),
    (12, 80, 0b1010_1010),
    (4, 56, 0b0000_0000),
    (64, 448, 0b0000_0000),
];

#[derive(Clone, Debug)]
pub enum Value {
    Num(Num),
    /// A matrix: number of columns, entries by rows.
    Mat(usize, Vec<Num>),
}

/// What variables stand for.
pub struct Env<'a> {
    /// Which of the [`POINTS`].
    pub point: usize,
    /// All variables; their ranks decide their signs.
    pub names: &'a BTreeSet<String>,
    /// Variables that stand for integers.
    pub integers: &'a BTreeSet<String>,
    pub budget: &'a Budget,
    /// Indices of sums, innermost last.
    bound: Vec<(String, Num)>,
    /// Whether an even root, a logarithm or a broken power of a negative number was taken: the point lies outside
    /// the real domain, and branches decide the value.
    pub outside: bool,
}

fn mix(mut x: u64) -> u64 {
    // The finaliser of SplitMix64.
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h ^ u64::from(b)))
}

/// A hash of a number that does not depend on its last bits.
fn fingerprint(value: &Real) -> u64 {
    let value = value.float();
    if value.maybe_zero() {
        return 1;
    }
    // Rounded to 120 bits: adding and taking away a larger power of two drops the rest.
    let big = Float::int(if value.neg { -1 } else { 1 }).scale(value.exp + 256 - 121);
    let rounded = value.add(big).sub(big);
    mix(rounded.head() ^ mix(rounded.exp as u64 ^ u64::from(rounded.neg) << 63))
}

impl<'a> Env<'a> {
    /// The variables at a point.
    pub fn new(
        point: usize,
        names: &'a BTreeSet<String>,
        integers: &'a BTreeSet<String>,
        budget: &'a Budget,
    ) -> Self {
        Env { point, names, integers, budget, bound: Vec::new(), outside: false }
    }

    /// The variables with one of them set.
    pub fn with(mut self, name: &str, value: Num) -> Self {
        self.bound.push((name.to_string(), value));
        self
    }

    fn variable(&self, name: &str) -> Num {
        if let Some((_, value)) = self.bound.iter().rev().find(|(bound, _)| bound == name) {
            return value.clone();
        }
        let h = mix(hash(name).wrapping_add((self.point as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        if self.integers.contains(name) {
            return (2 + (h % 11) as i64).into();
        }
        let (low, span, signs) = LAYOUT[self.point % POINTS];
        let rank = self.names.iter().position(|n| n == name).unwrap_or(0);
        let numerator = (low + ((h >> 8) % span) as i64) | 1;
        let numerator = if signs >> (rank % 8) & 1 == 1 { -numerator } else { numerator };
        Rational::new(numerator.into(), 64).unwrap_or(Rational::ONE).into()
    }

    /// An unknown function: the same for equal arguments.
    fn unknown(&self, name: &str, args: &[Num]) -> Num {
        let mut h = hash(name);
        for arg in args {
            h = mix(h ^ fingerprint(&arg.re)).wrapping_add(fingerprint(&arg.im));
        }
        Rational::new(i128::from(1u64 << 32 | mix(h) >> 32), 1 << 32).unwrap_or(Rational::ONE).into()
    }

    /// The number that an expression is.
    pub fn num(&mut self, expr: &Expr) -> MathResult<Num> {
        match self.value(expr)? {
            Value::Num(value) => Ok(value),
            Value::Mat(1, mut entries) if entries.len() == 1 => entries.pop().ok_or(Stop::Undefined),
            Value::Mat(..) => Err(Stop::Undefined),
        }
    }

    fn nums(&mut self, items: &[Expr]) -> MathResult<Vec<Num>> {
        items.iter().map(|item| self.num(item)).collect()
    }

    pub fn value(&mut self, expr: &Expr) -> MathResult<Value> {
        self.budget.spend(1)?;
        match expr {
            Expr::Add(items) => self.sum(items),
            Expr::Neg(a) => Ok(match self.value(a)? {
                Value::Num(a) => Value::Num(a.neg()),
                Value::Mat(cols, a) => Value::Mat(cols, a.iter().map(Num::neg).collect()),
            }),
            Expr::Mul(items) => self.product(items),
            Expr::Div(a, b) => self.quotient(a, b),
            Expr::Pow(a, b) => self.power(a, b),
            Expr::Unit(a, _) => self.value(a),
            Expr::Tuple(_, items, _) => Ok(Value::Mat(1, self.nums(items)?)),
            Expr::Matrix(rows) => {
                let cols = rows.first().map_or(0, Vec::len);
                let entries: MathResult<Vec<Num>> = rows.iter().flatten().map(|e| self.num(e)).collect();
                Ok(Value::Mat(cols, entries?))
            }
            number => self.number(number).map(Value::Num),
        }
    }

    /// The value of an expression that is never a matrix.
    fn number(&mut self, expr: &Expr) -> MathResult<Num> {
        match expr {
            Expr::Num(value, _) => Ok(value.clone().into()),
            Expr::Const(Const::Pi) => Ok(transcend::pi().into()),
            Expr::Const(Const::E) => Ok(Real::from(1).exp()?.into()),
            Expr::Const(Const::I) => Ok(Num::i()),
            Expr::Var(name) => Ok(self.variable(name)),
            Expr::Text(text) => Ok(self.unknown(&text.to_lowercase(), &[])),
            Expr::Root(n, a) => self.root(n, a),
            Expr::Fact(a) => {
                let a = self.num(a)?;
                functions::factorial(&a, 1, self.budget)
            }
            Expr::DoubleFact(a) => {
                let a = self.num(a)?;
                functions::factorial(&a, 2, self.budget)
            }
            Expr::Binom(a, b) => {
                let (a, b) = (self.num(a)?, self.num(b)?);
                functions::binomial(&a, &b, self.budget)
            }
            Expr::Abs(a) => match self.value(a)? {
                Value::Num(a) => Ok(a.abs()?),
                Value::Mat(cols, entries) if entries.len() == cols * cols => self.determinant(cols, entries),
                Value::Mat(_, entries) => self.norm(&entries),
            },
            Expr::Func(func, args) => self.function(*func, args),
            Expr::Call(name, args) if name == "pmod" => self.residue(args),
            Expr::Call(name, args) => {
                let args = self.nums(args)?;
                Ok(self.unknown(name, &args))
            }
            Expr::Percent(a) => self.num(a)?.div(&100.into()),
            Expr::Degree(a) => {
                let turn = Num::from(transcend::pi()).div(&180.into())?;
                self.num(a)?.mul(&turn)
            }
            Expr::Big(kind, variable, low, high, body) => {
                self.big(*kind, variable, low.as_deref(), high.as_deref(), body)
            }
            Expr::Ratio(parts) => {
                let [a, b] = &parts[..] else { return Err(Stop::Undefined) };
                let (a, b) = (self.num(a)?, self.num(b)?);
                a.div(&b)
            }
            // Infinity, sets, relations, lists and signs have no value.
            _ => Err(Stop::Undefined),
        }
    }

    fn quotient(&mut self, top: &Expr, bottom: &Expr) -> MathResult<Value> {
        let bottom = self.num(bottom)?;
        self.budget.spend(20)?;
        match self.value(top)? {
            Value::Num(top) => {
                self.budget.spend(top.cost() + bottom.cost())?;
                Ok(Value::Num(top.div(&bottom)?))
            }
            Value::Mat(cols, entries) => {
                let entries: MathResult<Vec<Num>> = entries.iter().map(|e| e.div(&bottom)).collect();
                Ok(Value::Mat(cols, entries?))
            }
        }
    }

    fn root(&mut self, n: &Expr, a: &Expr) -> MathResult<Num> {
        let (n, a) = (self.num(n)?, self.num(a)?);
        self.budget.spend(if n.integer() == Some(2) { 60 } else { 700 } + a.cost())?;
        self.outside |= a.re.sign() < 0 && n.integer().is_none_or(|n| n % 2 == 0);
        match n.integer().and_then(|n| u32::try_from(n).ok()) {
            Some(n) => a.root(n),
            None => a.pow(&n.recip()?),
        }
    }

    fn function(&mut self, func: Func, args: &[Expr]) -> MathResult<Num> {
        if func == Func::Det {
            return match args.first().map(|a| self.value(a)) {
                Some(Ok(Value::Mat(cols, entries))) => self.determinant(cols, entries),
                _ => Err(Stop::Undefined),
            };
        }
        let args = self.nums(args)?;
        let size = args.iter().map(Num::cost).sum::<u64>();
        let per_part = if args.iter().all(Num::is_real) { 1 } else { 3 };
        self.budget.spend(functions::steps(func) * per_part + size)?;
        let logarithm = matches!(func, Func::Ln | Func::Log);
        self.outside |= logarithm && args.iter().any(|arg| arg.re.sign() < 0);
        functions::apply(func, &args)
    }

    fn sum(&mut self, items: &[Expr]) -> MathResult<Value> {
        let mut total: Option<Value> = None;
        for item in items {
            let value = self.value(item)?;
            total = Some(match (total, value) {
                (None, value) => value,
                (Some(Value::Num(a)), Value::Num(b)) => {
                    self.budget.spend(1 + a.cost().max(b.cost()) / 2)?;
                    Value::Num(a.add(&b)?)
                }
                (Some(Value::Mat(m, a)), Value::Mat(n, b)) if m == n && a.len() == b.len() => {
                    let sums: MathResult<Vec<Num>> = a.iter().zip(&b).map(|(a, b)| a.add(b)).collect();
                    Value::Mat(m, sums?)
                }
                _ => return Err(Stop::Undefined),
            });
        }
        total.ok_or(Stop::Undefined)
    }

    fn product(&mut self, items: &[Expr]) -> MathResult<Value> {
        let mut total = Value::Num(1.into());
        for item in items {
            let value = self.value(item)?;
            total = self.times(total, value)?;
        }
        Ok(total)
    }

    fn power(&mut self, base: &Expr, exponent: &Expr) -> MathResult<Value> {
        let power = self.num(exponent)?;
        match self.value(base)? {
            Value::Num(base) => {
                let bits = power.integer().map_or(64, |n| 64 - u64::from(n.unsigned_abs().leading_zeros()));
                // The exact power may grow to the limit of what is kept: pay for its last squaring.
                let size = power.integer().map_or(1, |n| n.unsigned_abs().min(600)) * base.cost() / 8;
                let transcendental = if power.integer().is_none() || !base.is_real() { 1_000 } else { 0 };
                self.budget.spend(8 + 4 * bits + size.pow(2) / 64 + transcendental)?;
                self.outside |= base.re.sign() < 0 && power.integer().is_none();
                Ok(Value::Num(base.pow(&power)?))
            }
            base @ Value::Mat(..) => {
                let n = power.integer().filter(|n| (1..=64).contains(&n.abs())).ok_or(Stop::Undefined)?;
                let base = if n < 0 { self.inverse(base)? } else { base };
                let n = n.abs();
                let mut out = base.clone();
                for _ in 1..n {
                    out = self.times(out, base.clone())?;
                }
                Ok(out)
            }
        }
    }

    /// A class of remainders: its least member and the modulus say all.
    fn residue(&mut self, args: &[Expr]) -> MathResult<Num> {
        let [value, modulus] = &self.nums(args)?[..] else { return Err(Stop::Undefined) };
        let rest = functions::apply(super::ast::Func::Mod, &[value.clone(), modulus.clone()])?;
        Ok(self.unknown("pmod", &[rest, modulus.clone()]))
    }

    /// A bound of a sum or integral, where infinity is as good as any number.
    fn bound_of_sum(&mut self, bound: &Expr) -> MathResult<Num> {
        match bound {
            Expr::Const(Const::Infinity) => Ok(self.unknown("infinity", &[])),
            Expr::Neg(inner) if matches!(**inner, Expr::Const(Const::Infinity)) => {
                Ok(self.unknown("-infinity", &[]))
            }
            _ => self.num(bound),
        }
    }

    fn big(
        &mut self,
        kind: Big,
        variable: &str,
        low: Option<&Expr>,
        high: Option<&Expr>,
        body: &Expr,
    ) -> MathResult<Num> {
        let low = low.map(|e| self.bound_of_sum(e)).transpose()?;
        let high = high.map(|e| self.bound_of_sum(e)).transpose()?;
        if let (Big::Sum | Big::Product, false, Some(from), Some(to)) = (
            kind,
            variable.is_empty(),
            low.as_ref().and_then(Num::integer),
            high.as_ref().and_then(Num::integer),
        ) && to.saturating_sub(from) < 3_000
        {
            let mut total = Num::from(i64::from(kind == Big::Product));
            for k in from..=to {
                self.bound.push((variable.to_string(), k.into()));
                let term = self.num(body);
                self.bound.pop();
                let term = term?;
                self.budget.spend(1 + total.cost().max(term.cost()))?;
                total = if kind == Big::Sum { total.add(&term)? } else { total.mul(&term)? };
            }
            return Ok(total);
        }
        // No closed value: what it says is its bounds and its body, whatever the index is called.
        let mut says: Vec<Num> = low.into_iter().chain(high).collect();
        for k in [3i64, 7] {
            self.bound.push((variable.to_string(), k.into()));
            let term = self.num(body);
            self.bound.pop();
            says.push(term?);
        }
        let name = format!("{kind:?}");
        Ok(self.unknown(&name, &says))
    }
}
