//! Natural numbers of any size, whose work is counted: a budget of steps takes the place of a clock.

use num_bigint::BigUint;
use num_integer::Integer;
use std::cell::Cell;
use std::cmp::Ordering;
use std::fmt;

thread_local! {
    /// Products of 64-bit limbs, or what costs about as much, since the thread began.
    static WORK: Cell<u64> = const { Cell::new(0) };
}

/// The work that big numbers have made on this thread so far; a budget takes the steps it is worth.
pub fn work() -> u64 {
    WORK.get()
}

fn count(work: u64) {
    WORK.set(WORK.get().wrapping_add(work));
}

/// A natural number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Nat(BigUint);

impl From<u128> for Nat {
    fn from(value: u128) -> Self {
        Nat(value.into())
    }
}

impl fmt::Display for Nat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Nat {
    /// Its 64-bit limbs, the lowest first.
    pub fn limbs(&self) -> Vec<u64> {
        self.0.to_u64_digits()
    }

    /// Number of 64-bit limbs.
    fn size(&self) -> u64 {
        self.0.bits().div_ceil(64)
    }

    pub fn is_zero(&self) -> bool {
        self.bits() == 0
    }

    pub fn is_one(&self) -> bool {
        self.bits() == 1
    }

    /// Number of bits; zero has none.
    pub fn bits(&self) -> u64 {
        self.0.bits()
    }

    /// The value, if it fits.
    pub fn to_u128(&self) -> Option<u128> {
        u128::try_from(&self.0).ok()
    }

    /// Number of factors of two; zero has none.
    pub fn trailing_zeros(&self) -> u64 {
        self.0.trailing_zeros().unwrap_or(0)
    }

    /// The number that a text of digits in this base stands for; no digits are zero.
    pub fn parse(digits: &[u8], base: u32) -> Option<Self> {
        let digit = |c: &u8| (*c as char).to_digit(base);
        match digits {
            [] => Some(Nat::default()),
            _ if digits.iter().all(|c| digit(c).is_some()) => BigUint::parse_bytes(digits, base).map(Nat),
            _ => None,
        }
    }

    /// `self * factor + term`.
    pub fn mul_add_small(self, factor: u64, term: u64) -> Self {
        Nat(self.0 * factor + term)
    }

    pub fn add(&self, other: &Nat) -> Nat {
        Nat(&self.0 + &other.0)
    }

    /// `self - other`, zero where that is negative.
    pub fn saturating_sub(&self, other: &Nat) -> Nat {
        if self.0 < other.0 { Nat::default() } else { Nat(&self.0 - &other.0) }
    }

    pub fn mul(&self, other: &Nat) -> Nat {
        count(self.size() * other.size());
        Nat(&self.0 * &other.0)
    }

    /// `self * 2^by`.
    pub fn shl(&self, by: u64) -> Nat {
        Nat(&self.0 << by)
    }

    /// `self / 2^by`, rounded down.
    pub fn shr(&self, by: u64) -> Nat {
        Nat(&self.0 >> by)
    }

    /// Quotient and remainder; none where `divisor` is zero.
    pub fn div_rem(&self, divisor: &Nat) -> Option<(Nat, Nat)> {
        if divisor.is_zero() {
            return None;
        }
        // The division of a limb by hardware costs as much as ten products.
        if self.0 >= divisor.0 {
            count((self.size() - divisor.size() + 1) * (divisor.size() + 10));
        }
        let (quotient, rest) = self.0.div_rem(&divisor.0);
        Some((Nat(quotient), Nat(rest)))
    }

    /// Greatest common divisor. Stein's algorithm shortens the larger number by about 1.4 bits in a round; one division first, for a
    /// number that divides the other, as factorials do.
    pub fn gcd(&self, other: &Nat) -> Nat {
        let (small, large) = if self.0 < other.0 { (self, other) } else { (other, self) };
        if large.div_rem(small).is_some_and(|(_, rest)| rest.is_zero()) {
            return small.clone();
        }
        let rounds = (self.bits() + other.bits()) * 7 / 10;
        count(rounds * (self.size().max(other.size()) + 10));
        Nat(self.0.gcd(&other.0))
    }

    /// The largest `r` with `r^n <= self`.
    pub fn root(&self, n: u32) -> Nat {
        if n <= 1 {
            return self.clone();
        }
        // Newton's method doubles the right bits in a round, of a power and a division each.
        let rounds = u64::from(self.bits().max(1).ilog2()) + 2;
        count(rounds * (self.size() + 1) * (self.size() + 10));
        Nat(self.0.nth_root(n))
    }

    pub fn pow(&self, n: u32) -> Nat {
        let size = (self.bits() * u64::from(n)).div_ceil(64);
        count(size * size / 2 + 1);
        Nat(self.0.pow(n))
    }

    pub fn compare(&self, other: &Nat) -> Ordering {
        self.0.cmp(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nat(text: &str) -> Nat {
        Nat::parse(text.as_bytes(), 10).expect("digits")
    }

    #[test]
    fn division_undoes_multiplication() {
        // 10^k - 1 and its neighbours reach the correction steps of the long division.
        let mut seeds = vec![nat("1"), nat("18446744073709551615"), nat("18446744073709551616")];
        seeds.extend((1..40).map(|k| nat(&"9".repeat(k * 3))));
        seeds.extend((1..40).map(|k| Nat::from(1).shl(k * 31).saturating_sub(&Nat::from(1))));
        for a in &seeds {
            for b in &seeds {
                let rest = b.saturating_sub(&Nat::from(1));
                let (q, r) = a.mul(b).add(&rest).div_rem(b).expect("not zero");
                assert_eq!((&q, &r), (a, &rest));
                assert_eq!(a.add(b).saturating_sub(b), *a);
            }
        }
        assert_eq!(nat("5").div_rem(&Nat::default()), None);
    }

    #[test]
    fn roots_and_divisors() {
        assert_eq!(nat("1000000000000000000000000000000").root(3), nat("10000000000"));
        assert_eq!(nat("999999999999999999999999999999").root(3), nat("9999999999"));
        assert_eq!(nat("121932631112635269").gcd(&nat("987654321000")), nat("987654321"));
        assert_eq!(nat("2").pow(100), nat("1267650600228229401496703205376"));
        assert_eq!(Nat::parse(b"4210", 7), Some(nat("1477")));
        assert_eq!(Nat::parse(b"8", 7), None);
    }
}
