//! Exact rationals: two machine words where they fit, big numbers otherwise.

use super::super::Nat;
use num_integer::gcd;
use std::cmp::Ordering;

/// Bits of numerator or denominator beyond which a value is no longer kept exactly.
const MOST_BITS: u64 = 32_768;
/// Bits beyond which a fraction is reduced: below, keeping common factors costs less than finding them.
const REDUCE_BITS: u64 = 1_024;
/// Bits of the smaller part beyond which common factors are no longer looked for: it would take milliseconds.
const MOST_REDUCED_BITS: u64 = 4_096;

/// A rational number. Small ones are in lowest terms; big ones need not be.
#[derive(Clone, Debug)]
pub enum Rational {
    /// Numerator and positive denominator.
    Small(i64, i64),
    /// Sign, numerator and denominator.
    Big(bool, Nat, Nat),
}

use Rational::{Big, Small};

impl From<i64> for Rational {
    fn from(value: i64) -> Self {
        Small(value, 1)
    }
}

impl PartialEq for Rational {
    fn eq(&self, other: &Self) -> bool {
        self.compare(other) == Ordering::Equal
    }
}

/// Both without common factors, where finding them is cheap: one divides the other, or one is not huge.
fn reduced_parts(num: Nat, den: Nat) -> (Nat, Nat) {
    let one = || Nat::from(1);
    if num.bits().min(den.bits()) <= MOST_REDUCED_BITS {
        let common = num.gcd(&den);
        return match (num.div_rem(&common), den.div_rem(&common)) {
            (Some((n, _)), Some((d, _))) => (n, d),
            _ => (num, den),
        };
    }
    match (num.div_rem(&den), den.div_rem(&num)) {
        (Some((whole, rest)), _) if rest.is_zero() => (whole, one()),
        (_, Some((whole, rest))) if rest.is_zero() => (one(), whole),
        _ => (num, den),
    }
}

impl Rational {
    pub const ZERO: Rational = Small(0, 1);
    pub const ONE: Rational = Small(1, 1);

    /// `num / den`; none where `den` is zero.
    pub fn new(num: i128, den: i128) -> Option<Self> {
        if den == 0 {
            return None;
        }
        let negative = (num < 0) != (den < 0);
        let (num, den) = (num.unsigned_abs(), den.unsigned_abs());
        let common = gcd(num, den);
        let (num, den) = (num / common, den / common);
        Some(match (i64::try_from(num), i64::try_from(den)) {
            (Ok(num), Ok(den)) => Small(if negative { -num } else { num }, den),
            _ => Big(negative, Nat::from(num), Nat::from(den)),
        })
    }

    /// `±num / den`; none where `den` is zero.
    pub fn from_parts(negative: bool, num: Nat, den: Nat) -> Option<Self> {
        if den.is_zero() {
            return None;
        }
        let twos = num.trailing_zeros().min(den.trailing_zeros());
        let (mut num, mut den) = if twos > 0 { (num.shr(twos), den.shr(twos)) } else { (num, den) };
        if !den.is_one() && num.bits().max(den.bits()) > REDUCE_BITS {
            (num, den) = reduced_parts(num, den);
        }
        match (num.to_u128(), den.to_u128()) {
            (Some(n), Some(d)) if n >> 127 == 0 && d >> 127 == 0 => {
                Rational::new(if negative { -(n as i128) } else { n as i128 }, d as i128)
            }
            _ => Some(Big(negative && !num.is_zero(), num, den)),
        }
    }

    /// Sign, numerator and denominator.
    pub fn parts(&self) -> (bool, Nat, Nat) {
        match self {
            Small(n, d) => {
                (*n < 0, Nat::from(u128::from(n.unsigned_abs())), Nat::from(u128::from(d.unsigned_abs())))
            }
            Big(negative, n, d) => (*negative, n.clone(), d.clone()),
        }
    }

    /// In lowest terms, unless both parts are huge.
    pub fn reduced(&self) -> Rational {
        let Big(negative, num, den) = self else { return self.clone() };
        let (num, den) = reduced_parts(num.clone(), den.clone());
        match (num.to_u128(), den.to_u128()) {
            (Some(_), Some(_)) => Rational::from_parts(*negative, num, den).unwrap_or_else(|| self.clone()),
            _ => Big(*negative, num, den),
        }
    }

    /// Whether this is too large to be worth keeping exactly.
    pub fn too_big(&self) -> bool {
        match self {
            Small(..) => false,
            Big(_, n, d) => {
                n.bits() > MOST_BITS || d.bits() > MOST_BITS || n.bits() + d.bits() > 2 * MOST_BITS
            }
        }
    }

    /// Bits of the larger part.
    pub fn bits(&self) -> u64 {
        match self {
            Small(..) => 64,
            Big(_, n, d) => n.bits().max(d.bits()),
        }
    }

    /// Steps to be paid before an operation with another of this size; its work is counted when it is done.
    pub fn cost(&self) -> u64 {
        let Big(_, n, d) = self else { return 1 };
        4 + n.bits().max(d.bits()) / 128
    }

    /// Minus one, zero or one.
    pub fn sign(&self) -> i32 {
        match self {
            Small(n, _) => n.signum() as i32,
            Big(negative, n, _) => match (n.is_zero(), negative) {
                (true, _) => 0,
                (_, true) => -1,
                _ => 1,
            },
        }
    }

    pub fn is_zero(&self) -> bool {
        self.sign() == 0
    }

    /// The value as a machine integer, if it is one.
    pub fn to_i64(&self) -> Option<i64> {
        match self {
            Small(n, 1) => Some(*n),
            Small(..) => None,
            big => match big.reduced() {
                Small(n, 1) => Some(n),
                _ => None,
            },
        }
    }

    pub fn is_integer(&self) -> bool {
        match self {
            Small(_, d) => *d == 1,
            Big(_, n, d) => d.is_one() || n.div_rem(d).is_some_and(|(_, rest)| rest.is_zero()),
        }
    }

    /// Whether the denominator has no prime factors but 2 and 5, so that the decimal expansion ends.
    pub fn is_terminating(&self) -> bool {
        let (_, _, mut den) = self.reduced().parts();
        den = den.shr(den.trailing_zeros());
        let five = Nat::from(5);
        while let Some((quotient, rest)) = den.div_rem(&five) {
            if !rest.is_zero() || quotient.is_zero() {
                break;
            }
            den = quotient;
        }
        den.is_one()
    }

    pub fn neg(&self) -> Rational {
        match self {
            Small(n, d) if *n != i64::MIN => Small(-n, *d),
            _ => {
                let (negative, n, d) = self.parts();
                Big(!negative && !n.is_zero(), n, d)
            }
        }
    }

    pub fn add(&self, other: &Rational) -> Rational {
        if let (Small(a, b), Small(c, d)) = (self, other) {
            let (a, b, c, d) = (i128::from(*a), i128::from(*b), i128::from(*c), i128::from(*d));
            // |a d| and |c b| are at most 2^126, so their sum fits.
            if let Some(sum) = Rational::new(a * d + c * b, b * d) {
                return sum;
            }
        }
        let ((na, a, b), (nc, c, d)) = (self.parts(), other.parts());
        let (left, right, den) = (a.mul(&d), c.mul(&b), b.mul(&d));
        let (negative, num) = if na == nc {
            (na, left.add(&right))
        } else if left.compare(&right) == Ordering::Less {
            (nc, right.saturating_sub(&left))
        } else {
            (na, left.saturating_sub(&right))
        };
        Rational::from_parts(negative, num, den).unwrap_or(Rational::ZERO)
    }

    pub fn sub(&self, other: &Rational) -> Rational {
        self.add(&other.neg())
    }

    pub fn mul(&self, other: &Rational) -> Rational {
        if let (Small(a, b), Small(c, d)) = (self, other)
            && let Some(product) =
                Rational::new(i128::from(*a) * i128::from(*c), i128::from(*b) * i128::from(*d))
        {
            return product;
        }
        let ((na, a, b), (nc, c, d)) = (self.parts(), other.parts());
        Rational::from_parts(na != nc, a.mul(&c), b.mul(&d)).unwrap_or(Rational::ZERO)
    }

    /// `1 / self`; none where that is undefined.
    pub fn recip(&self) -> Option<Rational> {
        let (negative, n, d) = self.parts();
        Rational::from_parts(negative, d, n)
    }

    /// `self / other`; none where that is undefined.
    pub fn div(&self, other: &Rational) -> Option<Rational> {
        Some(self.mul(&other.recip()?))
    }

    /// `self^n`; none where that is undefined or too large to keep.
    pub fn pow(&self, n: i64) -> Option<Rational> {
        if n < 0 {
            return self.recip()?.pow(n.checked_neg()?);
        }
        let (negative, num, den) = self.reduced().parts();
        let bits = num.bits().max(den.bits());
        if bits > 1 && (n as u64).saturating_mul(bits - 1) > MOST_BITS {
            return None;
        }
        // A part of one bit is 0 or 1, whose powers are themselves.
        let power = |x: &Nat| if x.bits() <= 1 && n > 0 { x.clone() } else { x.pow(n as u32) };
        Rational::from_parts(negative && n % 2 != 0, power(&num), power(&den))
    }

    /// The exact `n`-th root of a number that is not negative, if it is rational.
    pub fn root(&self, n: u32) -> Option<Rational> {
        if n == 0 || self.sign() < 0 {
            return None;
        }
        let (_, num, den) = self.reduced().parts();
        if num.bits().max(den.bits()) > 4_096 || n > 4_096 {
            return None;
        }
        let exact = |x: &Nat| {
            let root = x.root(n);
            (root.pow(n) == *x).then_some(root)
        };
        Rational::from_parts(false, exact(&num)?, exact(&den)?)
    }

    /// The largest integer that is not above.
    pub fn floor(&self) -> Rational {
        let (negative, num, den) = self.parts();
        let Some((quotient, rest)) = num.div_rem(&den) else { return Rational::ZERO };
        let up = negative && !rest.is_zero();
        let magnitude = if up { quotient.add(&Nat::from(1)) } else { quotient };
        Rational::from_parts(negative, magnitude, Nat::from(1)).unwrap_or(Rational::ZERO)
    }

    pub fn compare(&self, other: &Rational) -> Ordering {
        if let (Small(a, b), Small(c, d)) = (self, other) {
            return (i128::from(*a) * i128::from(*d)).cmp(&(i128::from(*c) * i128::from(*b)));
        }
        let signs = self.sign().cmp(&other.sign());
        if signs != Ordering::Equal {
            return signs;
        }
        let ((negative, a, b), (_, c, d)) = (self.parts(), other.parts());
        let order = a.mul(&d).compare(&c.mul(&b));
        if negative { order.reverse() } else { order }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rational(n: i128, d: i128) -> Rational {
        Rational::new(n, d).expect("not over zero")
    }

    #[test]
    fn small_and_big_rationals_agree() {
        let values = [0, 1, -1, 7, -12, i64::MAX, i64::MIN, i64::MAX - 1];
        for a in values {
            for b in values.into_iter().filter(|b| *b != 0) {
                let x = rational(a.into(), b.into());
                let big = Big(x.sign() < 0, x.parts().1, x.parts().2);
                assert_eq!(x, big);
                assert_eq!(x.add(&x), big.add(&big));
                assert_eq!(x.sub(&x).sign(), 0);
                assert_eq!(x.mul(&rational(b.into(), 1)), Rational::from(a));
                assert_eq!(x.neg().neg(), x);
                assert_eq!(x.floor(), big.floor());
                assert_eq!(x.pow(3), big.pow(3));
            }
        }
    }

    #[test]
    fn powers_roots_and_limits() {
        assert_eq!(rational(2, 3).pow(-3), Some(rational(27, 8)));
        assert_eq!(Rational::ZERO.pow(-1), None);
        assert_eq!(Rational::from(-1).pow(i64::MAX), Some(Rational::from(-1)));
        assert_eq!(Rational::from(2).pow(1_000_000), None);
        assert_eq!(rational(8, 27).root(3), Some(rational(2, 3)));
        assert_eq!(rational(8, 27).root(2), None);
        assert_eq!(rational(-7, 2).floor(), Rational::from(-4));
        assert!(rational(3, 40).is_terminating() && !rational(1, 12).is_terminating());
    }
}
