//! Real numbers that stay exact as long as they can.

use super::super::{Rational, Stop};
use super::float::{Float, SLACK};
use super::transcend;
use std::cmp::Ordering;

/// A real number.
#[derive(Clone, Debug)]
pub enum Real {
    /// Exact.
    Rat(Rational),
    /// To 256 bits.
    Float(Float),
}

use Real::Rat;

/// A value or the reason why there is none.
pub type MathResult<T> = Result<T, Stop>;

fn float(value: Option<Float>) -> MathResult<Real> {
    match value {
        Some(value) if value.in_range() => Ok(Real::Float(value)),
        _ => Err(Stop::Undefined),
    }
}

impl From<i64> for Real {
    fn from(value: i64) -> Self {
        Rat(value.into())
    }
}

impl From<Rational> for Real {
    fn from(value: Rational) -> Self {
        if value.too_big() { Real::Float(Float::from_rational(&value)) } else { Rat(value) }
    }
}

impl Real {
    pub const ZERO: Real = Rat(Rational::ZERO);

    /// To 256 bits.
    pub fn float(&self) -> Float {
        match self {
            Rat(value) => Float::from_rational(value),
            Real::Float(value) => *value,
        }
    }

    /// The exact value, where it is known.
    pub fn rational(&self) -> Option<&Rational> {
        match self {
            Rat(value) => Some(value),
            Real::Float(_) => None,
        }
    }

    /// Steps that a product of this size costs.
    pub fn cost(&self) -> u64 {
        match self {
            Rat(value) => value.cost(),
            Real::Float(_) => 2,
        }
    }

    pub fn is_exact_zero(&self) -> bool {
        matches!(self, Rat(value) if value.is_zero())
    }

    /// Whether this cannot be told from zero.
    pub fn maybe_zero(&self) -> bool {
        match self {
            Rat(value) => value.is_zero(),
            Real::Float(value) => value.maybe_zero(),
        }
    }

    /// Minus one, zero or one; zero where it cannot be told from zero.
    pub fn sign(&self) -> i32 {
        match self {
            Rat(value) => value.sign(),
            Real::Float(value) if value.maybe_zero() => 0,
            Real::Float(value) => 1 - 2 * i32::from(value.neg),
        }
    }

    pub fn neg(&self) -> Real {
        match self {
            Rat(value) => Rat(value.neg()),
            Real::Float(value) => Real::Float(value.neg()),
        }
    }

    pub fn abs(&self) -> Real {
        if self.sign() < 0 { self.neg() } else { self.clone() }
    }

    pub fn add(&self, other: &Real) -> MathResult<Real> {
        match (self, other) {
            (Rat(a), Rat(b)) => Ok(a.add(b).into()),
            (Rat(a), b) | (b, Rat(a)) if a.is_zero() => Ok(b.clone()),
            _ => float(Some(self.float().add(other.float()))),
        }
    }

    pub fn sub(&self, other: &Real) -> MathResult<Real> {
        self.add(&other.neg())
    }

    pub fn mul(&self, other: &Real) -> MathResult<Real> {
        match (self, other) {
            (Rat(a), Rat(b)) => Ok(a.mul(b).into()),
            (Rat(a), _) | (_, Rat(a)) if a.is_zero() => Ok(Real::ZERO),
            _ => float(Some(self.float().mul(other.float()))),
        }
    }

    pub fn div(&self, other: &Real) -> MathResult<Real> {
        match (self, other) {
            (_, other) if other.maybe_zero() => Err(Stop::Undefined),
            (Rat(a), Rat(b)) => a.div(b).map(Real::from).ok_or(Stop::Undefined),
            (Rat(a), _) if a.is_zero() => Ok(Real::ZERO),
            _ => float(self.float().div(other.float())),
        }
    }

    /// The `n`-th root of a number that is not negative.
    pub fn root(&self, n: u32) -> MathResult<Real> {
        if let Rat(value) = self
            && let Some(root) = value.root(n)
        {
            return Ok(Rat(root));
        }
        if n == 2 {
            return float(self.float().sqrt());
        }
        if self.maybe_zero() {
            return Ok(Real::ZERO);
        }
        self.ln()?.div(&i64::from(n).into())?.exp()
    }

    pub fn powi(&self, n: i64) -> MathResult<Real> {
        if let Rat(value) = self {
            if value.is_zero() && n < 0 {
                return Err(Stop::Undefined);
            }
            if let Some(power) = value.pow(n) {
                return Ok(power.into());
            }
        }
        let (mut base, mut left) = (self.float(), n.unsigned_abs());
        let mut out = Float::int(1);
        while left > 0 {
            if left & 1 == 1 {
                out = out.mul(base);
            }
            base = base.mul(base);
            left >>= 1;
            if left > 0 && !base.in_range() || !out.in_range() {
                return Err(Stop::Undefined);
            }
        }
        if n < 0 { float(out.recip()) } else { float(Some(out)) }
    }

    pub fn exp(&self) -> MathResult<Real> {
        if self.is_exact_zero() {
            return Ok(1.into());
        }
        float(transcend::exp(self.float()))
    }

    /// The natural logarithm of a positive number.
    pub fn ln(&self) -> MathResult<Real> {
        match self {
            Rat(value) if *value == Rational::ONE => Ok(Real::ZERO),
            _ => float(transcend::ln(self.float())),
        }
    }

    pub fn sin_cos(&self) -> MathResult<(Real, Real)> {
        if self.is_exact_zero() {
            return Ok((Real::ZERO, 1.into()));
        }
        let (sin, cos) = transcend::sin_cos(self.float()).ok_or(Stop::Undefined)?;
        Ok((Real::Float(sin), Real::Float(cos)))
    }

    /// The angle of the point `(x, self)`.
    pub fn atan2(&self, x: &Real) -> MathResult<Real> {
        if self.is_exact_zero() && x.sign() > 0 {
            return Ok(Real::ZERO);
        }
        float(transcend::atan2(self.float(), x.float()))
    }

    /// The largest integer that is not above, where there is no doubt which.
    pub fn floor(&self) -> MathResult<Real> {
        match self {
            Rat(value) => Ok(Rat(value.floor())),
            Real::Float(value) => {
                let near = value.round().ok_or(Stop::Undefined)?;
                let rest = value.sub(Float::int(near));
                let below = !rest.maybe_zero() && rest.neg;
                Ok((near - i64::from(below)).into())
            }
        }
    }

    /// Which of two is larger; none where they cannot be told apart and may differ.
    pub fn compare(&self, other: &Real) -> Option<Ordering> {
        if let (Rat(a), Rat(b)) = (self, other) {
            return Some(a.compare(b));
        }
        let (a, b) = (self.float(), other.float());
        let diff = a.sub(b);
        if !diff.maybe_zero() {
            return Some(if diff.neg { Ordering::Less } else { Ordering::Greater });
        }
        let scale = if a.maybe_zero() || b.maybe_zero() { 0 } else { a.exp.min(b.exp) };
        // Fewer than a hundred agreeing bits, or a summand that vanished: no proof that they are equal.
        let known = diff.err + SLACK < scale - 100 && !a.lost && !b.lost;
        known.then_some(Ordering::Equal)
    }
}
