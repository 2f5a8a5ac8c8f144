//! Complex numbers whose parts stay exact as long as they can.

use super::super::{MathResult, Rational, Real, Stop};
use super::float::Float;
use super::transcend;
use std::cmp::Ordering;

/// A complex number.
#[derive(Clone, Debug)]
pub struct Num {
    pub re: Real,
    pub im: Real,
}

impl From<Real> for Num {
    fn from(re: Real) -> Self {
        Num { re, im: Real::ZERO }
    }
}

impl From<Rational> for Num {
    fn from(value: Rational) -> Self {
        Real::from(value).into()
    }
}

impl From<i64> for Num {
    fn from(value: i64) -> Self {
        Real::from(value).into()
    }
}

impl From<Float> for Num {
    fn from(value: Float) -> Self {
        Real::Float(value).into()
    }
}

impl Num {
    /// The imaginary unit.
    pub fn i() -> Num {
        Num { re: Real::ZERO, im: 1.into() }
    }

    /// Whether the imaginary part cannot be told from zero.
    pub fn is_real(&self) -> bool {
        self.im.maybe_zero()
    }

    /// The value where it is a real number.
    pub fn real(&self) -> MathResult<&Real> {
        if self.is_real() { Ok(&self.re) } else { Err(Stop::Undefined) }
    }

    /// The value where it is a small integer.
    pub fn integer(&self) -> Option<i64> {
        match self.real().ok()? {
            Real::Rat(value) => value.to_i64(),
            value @ Real::Float(x) => {
                let near = x.round()?;
                (value.compare(&near.into()) == Some(Ordering::Equal)).then_some(near)
            }
        }
    }

    /// Steps that a product costs.
    pub fn cost(&self) -> u64 {
        self.re.cost() + if self.im.is_exact_zero() { 0 } else { 3 * self.im.cost() }
    }

    /// Whether this cannot be told from zero.
    pub fn maybe_zero(&self) -> bool {
        self.re.maybe_zero() && self.im.maybe_zero()
    }

    /// Whether two are equal: certainly so, or to more than a hundred bits with nothing lost on the way.
    pub fn same(&self, other: &Num) -> bool {
        self.re.compare(&other.re) == Some(Ordering::Equal)
            && self.im.compare(&other.im) == Some(Ordering::Equal)
    }

    /// Whether two certainly differ.
    pub fn differs(&self, other: &Num) -> bool {
        let apart = |a: &Real, b: &Real| matches!(a.compare(b), Some(Ordering::Less | Ordering::Greater));
        apart(&self.re, &other.re) || apart(&self.im, &other.im)
    }

    pub fn neg(&self) -> Num {
        Num { re: self.re.neg(), im: self.im.neg() }
    }

    pub fn add(&self, other: &Num) -> MathResult<Num> {
        Ok(Num { re: self.re.add(&other.re)?, im: self.im.add(&other.im)? })
    }

    pub fn sub(&self, other: &Num) -> MathResult<Num> {
        self.add(&other.neg())
    }

    pub fn mul(&self, other: &Num) -> MathResult<Num> {
        if self.im.is_exact_zero() && other.im.is_exact_zero() {
            return Ok(self.re.mul(&other.re)?.into());
        }
        let re = self.re.mul(&other.re)?.sub(&self.im.mul(&other.im)?)?;
        let im = self.re.mul(&other.im)?.add(&self.im.mul(&other.re)?)?;
        Ok(Num { re, im })
    }

    pub fn recip(&self) -> MathResult<Num> {
        if self.im.is_exact_zero() {
            return Ok(Real::from(1).div(&self.re)?.into());
        }
        let norm = self.re.mul(&self.re)?.add(&self.im.mul(&self.im)?)?;
        Ok(Num { re: self.re.div(&norm)?, im: self.im.neg().div(&norm)? })
    }

    pub fn div(&self, other: &Num) -> MathResult<Num> {
        if self.im.is_exact_zero() && other.im.is_exact_zero() {
            return Ok(self.re.div(&other.re)?.into());
        }
        self.mul(&other.recip()?)
    }

    pub fn abs(&self) -> MathResult<Num> {
        if self.im.is_exact_zero() {
            return Ok(self.re.abs().into());
        }
        Ok(self.re.mul(&self.re)?.add(&self.im.mul(&self.im)?)?.root(2)?.into())
    }

    /// The angle in `(-pi, pi]`.
    pub fn arg(&self) -> MathResult<Real> {
        if self.is_real() {
            return match self.re.sign() {
                0 => Err(Stop::Undefined),
                1 => Ok(Real::ZERO),
                _ => Ok(Real::Float(transcend::pi())),
            };
        }
        self.im.atan2(&self.re)
    }

    pub fn exp(&self) -> MathResult<Num> {
        let size = self.re.exp()?;
        if self.im.is_exact_zero() {
            return Ok(size.into());
        }
        let (sin, cos) = self.im.sin_cos()?;
        Ok(Num { re: size.mul(&cos)?, im: size.mul(&sin)? })
    }

    /// The principal natural logarithm.
    pub fn ln(&self) -> MathResult<Num> {
        if self.im.is_exact_zero() && self.re.sign() > 0 {
            return Ok(self.re.ln()?.into());
        }
        Ok(Num { re: self.abs()?.re.ln()?, im: self.arg()? })
    }

    /// The principal `n`-th root; odd roots of negative reals are real.
    pub fn root(&self, n: u32) -> MathResult<Num> {
        if n == 0 {
            return Err(Stop::Undefined);
        }
        if self.maybe_zero() {
            return Ok(0.into());
        }
        if self.is_real() {
            return match (self.re.sign() < 0, n) {
                (false, _) => Ok(self.re.root(n)?.into()),
                (true, 2) => Ok(Num { re: Real::ZERO, im: self.re.neg().root(2)? }),
                (true, n) if n % 2 == 1 => Ok(self.re.neg().root(n)?.neg().into()),
                _ => self.ln()?.div(&i64::from(n).into())?.exp(),
            };
        }
        if n == 2 {
            // The stable form: the part of the larger magnitude first.
            let size = self.abs()?.re;
            let half: Real = Rational::new(1, 2).map_or(Real::ZERO, Real::from);
            let re = size.add(&self.re)?.mul(&half)?.root(2)?;
            let im = size.sub(&self.re)?.mul(&half)?.root(2)?;
            return Ok(Num { re, im: if self.im.sign() < 0 { im.neg() } else { im } });
        }
        self.ln()?.div(&i64::from(n).into())?.exp()
    }

    pub fn powi(&self, n: i64) -> MathResult<Num> {
        if self.im.is_exact_zero() {
            return Ok(self.re.powi(n)?.into());
        }
        if n.unsigned_abs() > 4_096 {
            return self.ln()?.mul(&n.into())?.exp();
        }
        let (mut base, mut out, mut left) = (self.clone(), Num::from(1), n.unsigned_abs());
        while left > 0 {
            if left & 1 == 1 {
                out = out.mul(&base)?;
            }
            left >>= 1;
            if left > 0 {
                base = base.mul(&base)?;
            }
        }
        if n < 0 { out.recip() } else { Ok(out) }
    }

    /// `self^power`, the principal value; a rational power of odd denominator of a negative real is real.
    pub fn pow(&self, power: &Num) -> MathResult<Num> {
        if let Real::Rat(exponent) = &power.re
            && power.im.is_exact_zero()
        {
            if let Some(n) = exponent.to_i64() {
                return self.powi(n);
            }
            if let Rational::Small(p, q) = exponent
                && *q <= 4_096
            {
                return self.root(*q as u32)?.powi(*p);
            }
        }
        if let Some(n) = power.integer() {
            return self.powi(n);
        }
        if self.maybe_zero() {
            return if power.re.sign() > 0 { Ok(0.into()) } else { Err(Stop::Undefined) };
        }
        self.ln()?.mul(power)?.exp()
    }

    pub fn sin_cos(&self) -> MathResult<(Num, Num)> {
        let (sin, cos) = self.re.sin_cos()?;
        if self.im.is_exact_zero() {
            return Ok((sin.into(), cos.into()));
        }
        let up = self.im.exp()?;
        let down = self.im.neg().exp()?;
        let half: Real = Rational::new(1, 2).map_or(Real::ZERO, Real::from);
        let cosh = up.add(&down)?.mul(&half)?;
        let sinh = up.sub(&down)?.mul(&half)?;
        let s = Num { re: sin.mul(&cosh)?, im: cos.mul(&sinh)? };
        let c = Num { re: cos.mul(&cosh)?, im: sin.mul(&sinh)?.neg() };
        Ok((s, c))
    }
}
