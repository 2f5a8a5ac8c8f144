//! Real numbers of 256 bits with a bound on their error.
//!
//! A value is `±m / 2^256 * 2^exp` with `m >= 2^255`, off by about `2^err` at most. The bound leaves out the
//! last few bits of every rounding; comparisons allow [`SLACK`] for them.

use super::super::Rational;

/// Bits of the mantissa.
pub const BITS: i64 = 256;
/// Bits by which a true error may exceed its bound: the sum of the roundings of a million operations.
pub const SLACK: i64 = 28;
/// An operand this much smaller than the other is lost in their sum.
const ABSORBED: i64 = 180;
/// The bound of an exact value.
const EXACT: i64 = i64::MIN / 4;
/// Exponents beyond this are treated as overflow.
const MOST_EXP: i64 = 1 << 40;

/// A real number with an error bound.
#[derive(Clone, Copy, Debug)]
pub struct Float {
    /// Sign.
    pub neg: bool,
    /// Binary exponent.
    pub exp: i64,
    man: [u64; 4],
    /// Binary exponent of the error.
    pub err: i64,
    /// A summand vanished beside a much larger one: two such values may look equal and differ.
    pub lost: bool,
}

impl Float {
    /// Exactly zero.
    pub const ZERO: Float = Float { neg: false, exp: EXACT, man: [0; 4], err: EXACT, lost: false };

    /// Whether all bits of the value are zero.
    pub fn is_zero(&self) -> bool {
        self.man[3] == 0
    }

    /// Whether the value cannot be told from zero.
    pub fn maybe_zero(&self) -> bool {
        self.is_zero() || self.exp <= self.err + SLACK
    }

    /// The value of a wide mantissa, highest limb last, times `2^exp`; normalised.
    fn normal(neg: bool, wide: &[u64], exp: i64, err: i64, lost: bool) -> Float {
        let Some(top) = wide.iter().rposition(|limb| *limb != 0) else {
            return Float { err, lost, ..Float::ZERO };
        };
        let shift = wide[top].leading_zeros();
        let limb = |i: isize| if i >= 0 { wide[i as usize] } else { 0 };
        let mut man = [0; 4];
        for (k, out) in man.iter_mut().enumerate() {
            let at = top as isize - 3 + k as isize;
            *out = if shift == 0 { limb(at) } else { limb(at) << shift | limb(at - 1) >> (64 - shift) };
        }
        let exp = exp - 64 * (wide.len() - 1 - top) as i64 - i64::from(shift);
        Float { neg, exp, man, err: err.max(exp - BITS), lost }
    }

    pub fn int(value: i64) -> Float {
        Float { err: EXACT, ..Float::normal(value < 0, &[value.unsigned_abs()], 64, EXACT, false) }
    }

    /// A finite machine number.
    pub fn from_f64(value: f64) -> Float {
        let bits = value.to_bits();
        let exp = (bits >> 52 & 0x7ff) as i64;
        if exp == 0 || exp == 0x7ff {
            return Float::ZERO;
        }
        let man = (bits & ((1 << 52) - 1)) | 1 << 52;
        Float::normal(value < 0.0, &[man], exp - 1075 + 64, EXACT, false)
    }

    /// The nearest machine number, for starting values.
    pub fn to_f64(self) -> f64 {
        if self.is_zero() || self.exp < -1000 {
            return 0.0;
        }
        // The leading bit is implied; the sum of exponents is that of `1.xxx`.
        let exp = (self.exp.min(1000) + 1022) as u64;
        f64::from_bits(u64::from(self.neg) << 63 | exp << 52 | (self.man[3] << 1) >> 12)
    }

    /// A rational, rounded.
    pub fn from_rational(value: &Rational) -> Float {
        let (neg, num, den) = value.parts();
        if num.is_zero() {
            return Float::ZERO;
        }
        let shift = BITS + 1 + den.bits() as i64 - num.bits() as i64;
        let (num, den, shift) = if shift >= 0 {
            (num.shl(shift as u64), den, shift)
        } else {
            (num, den.shl(shift.unsigned_abs()), shift)
        };
        let Some((quotient, rest)) = num.div_rem(&den) else { return Float::ZERO };
        let limbs = quotient.limbs();
        let out = Float::normal(neg, &limbs, 64 * limbs.len() as i64 - shift, EXACT, false);
        let exact = rest.is_zero() && quotient.trailing_zeros() + 256 >= quotient.bits();
        // A number that needs most of the mantissa may differ from its neighbours in what is cut off.
        let lost = value.bits() > BITS as u64 - 2 * SLACK as u64;
        if exact { Float { err: EXACT, ..out } } else { Float { lost, ..out } }
    }

    /// The same value with another error bound.
    pub fn bounded(self, err: i64, lost: bool) -> Float {
        Float { err, lost, ..self }
    }

    pub fn neg(self) -> Float {
        Float { neg: !self.neg && !self.is_zero(), ..self }
    }

    /// `self * 2^by`.
    pub fn scale(self, by: i64) -> Float {
        if self.is_zero() {
            self
        } else {
            Float { exp: self.exp + by, err: self.err.max(EXACT - by) + by, ..self }
        }
    }

    pub fn add(self, other: Float) -> Float {
        let (a, b) = if self.is_zero() || !other.is_zero() && other.exp > self.exp {
            (other, self)
        } else {
            (self, other)
        };
        let (err, lost) = (a.err.max(b.err), a.lost || b.lost);
        if b.is_zero() {
            return Float { err, lost, ..a };
        }
        let gap = a.exp - b.exp;
        let lost = lost || gap > ABSORBED && b.exp > b.err + 2 * SLACK;
        if gap >= BITS {
            return Float { err: err.max(a.exp - BITS), lost, ..a };
        }
        // One limb of room above for the carry and one below for the bits shifted out.
        let mut wide = [0u64; 6];
        wide[1..5].copy_from_slice(&a.man);
        let mut low = [0u64; 6];
        let (limbs, bits) = ((gap / 64) as usize, gap % 64);
        for i in 0..4 {
            let at = i as isize + 1 - limbs as isize;
            if at >= 0 {
                low[at as usize] |= b.man[i] >> bits;
            }
            if bits != 0 && at >= 1 {
                low[at as usize - 1] |= b.man[i] << (64 - bits);
            }
        }
        let mut neg = a.neg;
        if a.neg == b.neg {
            let mut carry = false;
            for (x, y) in wide.iter_mut().zip(low) {
                let (sum, over) = x.overflowing_add(y);
                let (sum, more) = sum.overflowing_add(u64::from(carry));
                (*x, carry) = (sum, over || more);
            }
        } else {
            let mut borrow = false;
            for (x, y) in wide.iter_mut().zip(low) {
                let (diff, under) = x.overflowing_sub(y);
                let (diff, more) = diff.overflowing_sub(u64::from(borrow));
                (*x, borrow) = (diff, under || more);
            }
            if borrow {
                // Equal exponents and the second was larger: negate.
                neg = b.neg;
                let mut carry = true;
                for x in &mut wide {
                    let (sum, over) = (!*x).overflowing_add(u64::from(carry));
                    (*x, carry) = (sum, over);
                }
            }
        }
        Float::normal(neg, &wide, a.exp + 64, err, lost)
    }

    pub fn sub(self, other: Float) -> Float {
        self.add(other.neg())
    }

    pub fn mul(self, other: Float) -> Float {
        let lost = self.lost || other.lost;
        if self.is_zero() || other.is_zero() {
            let err = match (self.is_zero(), other.is_zero()) {
                (true, true) => self.err.saturating_add(other.err).max(EXACT),
                (true, false) => self.err.saturating_add(other.exp).max(EXACT),
                _ => other.err.saturating_add(self.exp).max(EXACT),
            };
            return Float { err, lost, ..Float::ZERO };
        }
        let mut wide = [0u64; 8];
        for i in 0..4 {
            let mut carry = 0u128;
            for j in 0..4 {
                carry += u128::from(wide[i + j]) + u128::from(self.man[i]) * u128::from(other.man[j]);
                wide[i + j] = carry as u64;
                carry >>= 64;
            }
            wide[i + 4] = carry as u64;
        }
        let err = (self.err + other.exp).max(other.err + self.exp).max(EXACT);
        Float::normal(self.neg != other.neg, &wide, self.exp + other.exp, err, lost)
    }

    /// `self / n` for a small `n`.
    pub fn div_int(self, n: u64) -> Float {
        let mut wide = [0u64; 5];
        let mut rest = 0u128;
        for i in (0..4).rev() {
            rest = rest << 64 | u128::from(self.man[i]);
            wide[i + 1] = (rest / u128::from(n)) as u64;
            rest %= u128::from(n);
        }
        wide[0] = ((rest << 64) / u128::from(n)) as u64;
        Float::normal(self.neg, &wide, self.exp, self.err, self.lost)
    }

    /// `1 / self`, by Newton's method; none for what may be zero.
    pub fn recip(self) -> Option<Float> {
        if self.maybe_zero() {
            return None;
        }
        let unit = Float { neg: false, exp: 0, err: EXACT, ..self };
        let mut guess = Float::from_f64(1.0 / unit.to_f64());
        for _ in 0..3 {
            guess = guess.mul(Float::int(2).sub(unit.mul(guess)));
        }
        let exp = guess.exp - self.exp;
        Some(Float { neg: self.neg, exp, err: (exp - BITS).max(self.err - self.exp + exp), ..guess })
    }

    /// `self / other`; none where `other` may be zero.
    pub fn div(self, other: Float) -> Option<Float> {
        Some(self.mul(other.recip()?))
    }

    /// The square root of what is not negative.
    pub fn sqrt(self) -> Option<Float> {
        if self.maybe_zero() {
            return Some(Float { err: self.err / 2, lost: self.lost, ..Float::ZERO });
        }
        if self.neg {
            return None;
        }
        let odd = self.exp.rem_euclid(2);
        let unit = Float { exp: odd, err: EXACT, ..self };
        let mut guess = Float::from_f64(1.0 / unit.to_f64().sqrt());
        for _ in 0..3 {
            let fix = Float::int(3).sub(unit.mul(guess).mul(guess));
            guess = guess.mul(fix).scale(-1);
        }
        let root = unit.mul(guess);
        let exp = root.exp + (self.exp - odd) / 2;
        Some(Float { exp, err: (exp - BITS).max(self.err - exp), ..root })
    }

    /// Whether the exponent is within reason.
    pub fn in_range(&self) -> bool {
        self.is_zero() || self.exp.abs() < MOST_EXP
    }

    /// The nearest integer, if it is small and the error leaves no doubt which.
    pub fn round(self) -> Option<i64> {
        if self.is_zero() || self.exp < 0 {
            return Some(0);
        }
        if self.exp > 62 || self.err > -2 {
            return None;
        }
        let whole = (self.man[3] >> (63 - self.exp)) as i64;
        let nearest = (whole >> 1) + (whole & 1);
        Some(if self.neg { -nearest } else { nearest })
    }

    /// The top 64 bits of the mantissa.
    pub fn head(&self) -> u64 {
        self.man[3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: Float, b: Float) -> bool {
        let diff = a.sub(b);
        diff.is_zero() || diff.exp <= diff.err + SLACK && diff.err < a.exp - 200
    }

    #[test]
    fn field_axioms_hold_to_the_last_bits() {
        let values: Vec<Float> = [(1, 3), (-7, 5), (1_000_003, 7), (3, 1_000_003), (1, 1), (-2, 1)]
            .iter()
            .map(|(n, d)| Float::from_rational(&Rational::new(*n, *d).expect("fine")))
            .collect();
        for a in &values {
            for b in &values {
                let (a, b) = (*a, *b);
                assert!(close(a.add(b).sub(b), a));
                assert!(close(a.mul(b).div(b).expect("not zero"), a));
                assert!(close(a.add(b).mul(a), a.mul(a).add(a.mul(b))));
            }
            let square = a.mul(*a);
            let root = square.sqrt().expect("not negative");
            assert!(close(root.mul(root), square));
        }
    }

    #[test]
    fn additions_record_an_absorbed_summand() {
        let tiny = Float::int(3).scale(-300);
        assert!(Float::int(1).add(tiny).lost);
        assert!(!Float::int(1).add(tiny.scale(200)).lost);
        assert!(!Float::int(1).add(Float { err: tiny.exp, ..tiny }).lost);
    }

    #[test]
    fn rounding() {
        for (n, d, want) in
            [(7, 2, 4), (-7, 2, -4), (1, 3, 0), (2, 3, 1), (-2, 3, -1), (100, 1, 100), (0, 1, 0)]
        {
            let value = Float::from_rational(&Rational::new(n, d).expect("fine"));
            assert_eq!(value.round(), Some(want), "{n}/{d}");
        }
    }
}
