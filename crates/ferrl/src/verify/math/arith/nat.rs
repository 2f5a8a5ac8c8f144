//! Natural numbers of any size: little-endian limbs of 64 bits without leading zeros.

use std::cell::Cell;
use std::cmp::Ordering;

thread_local! {
    /// Products of limbs, or what costs about as much, since the thread began.
    static WORK: Cell<u64> = const { Cell::new(0) };
}

/// The work that big numbers have made on this thread so far; a budget takes the steps it is worth.
pub fn work() -> u64 {
    WORK.get()
}

fn count(work: usize) {
    WORK.set(WORK.get().wrapping_add(work as u64));
}

/// A natural number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Nat(Vec<u64>);

impl From<u128> for Nat {
    fn from(value: u128) -> Self {
        Nat::trimmed(vec![value as u64, (value >> 64) as u64])
    }
}

impl Nat {
    fn trimmed(limbs: Vec<u64>) -> Self {
        let mut out = Nat(limbs);
        out.trim();
        out
    }

    fn trim(&mut self) {
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }

    /// The limbs, the lowest first.
    pub fn limbs(&self) -> &[u64] {
        &self.0
    }

    /// Whether this is zero.
    pub fn is_zero(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this is one.
    pub fn is_one(&self) -> bool {
        self.0 == [1]
    }

    /// Number of bits; zero has none.
    pub fn bits(&self) -> u64 {
        match self.0.last() {
            Some(top) => self.0.len() as u64 * 64 - u64::from(top.leading_zeros()),
            None => 0,
        }
    }

    /// The value, if it fits.
    pub fn to_u128(&self) -> Option<u128> {
        match self.0[..] {
            [] => Some(0),
            [a] => Some(u128::from(a)),
            [a, b] => Some(u128::from(a) | u128::from(b) << 64),
            _ => None,
        }
    }

    /// Number of factors of two; zero has none.
    pub fn trailing_zeros(&self) -> u64 {
        match self.0.iter().position(|limb| *limb != 0) {
            Some(at) => at as u64 * 64 + u64::from(self.0[at].trailing_zeros()),
            None => 0,
        }
    }

    /// The number a text of decimal digits stands for.
    pub fn parse(digits: &[u8], base: u64) -> Option<Self> {
        let mut value = Nat::default();
        for digit in digits {
            let digit = (*digit as char).to_digit(36).map(u64::from).filter(|d| *d < base)?;
            value = value.mul_add_small(base, digit);
        }
        Some(value)
    }

    /// `self * factor + term`.
    pub fn mul_add_small(mut self, factor: u64, term: u64) -> Self {
        let mut carry = u128::from(term);
        for limb in &mut self.0 {
            carry += u128::from(*limb) * u128::from(factor);
            *limb = carry as u64;
            carry >>= 64;
        }
        if carry != 0 {
            self.0.push(carry as u64);
        }
        Nat::trimmed(self.0)
    }

    /// `self + other`.
    pub fn add(&self, other: &Nat) -> Nat {
        let (long, short) = if self.0.len() >= other.0.len() { (self, other) } else { (other, self) };
        let mut limbs = long.0.clone();
        let mut carry = false;
        for (i, limb) in limbs.iter_mut().enumerate() {
            let (sum, over) = limb.overflowing_add(short.0.get(i).copied().unwrap_or(0));
            let (sum, more) = sum.overflowing_add(u64::from(carry));
            *limb = sum;
            carry = over || more;
        }
        if carry {
            limbs.push(1);
        }
        Nat(limbs)
    }

    /// `self - other`, zero where that is negative.
    pub fn saturating_sub(&self, other: &Nat) -> Nat {
        if self.compare(other) == Ordering::Less {
            return Nat::default();
        }
        let mut out = self.clone();
        out.subtract(other);
        out
    }

    /// Takes away what is not larger.
    fn subtract(&mut self, other: &Nat) {
        let mut borrow = false;
        for (i, limb) in self.0.iter_mut().enumerate() {
            let (diff, under) = limb.overflowing_sub(other.0.get(i).copied().unwrap_or(0));
            let (diff, more) = diff.overflowing_sub(u64::from(borrow));
            *limb = diff;
            borrow = under || more;
        }
        self.trim();
    }

    /// Divides by `2^by` in place.
    fn halve(&mut self, by: u64) {
        let (limbs, bits) = ((by / 64) as usize, by % 64);
        self.0.drain(..limbs.min(self.0.len()));
        if bits > 0 {
            let mut above = 0;
            for limb in self.0.iter_mut().rev() {
                (*limb, above) = (*limb >> bits | above, *limb << (64 - bits));
            }
        }
        self.trim();
    }

    /// `self * other`.
    pub fn mul(&self, other: &Nat) -> Nat {
        count(self.0.len() * other.0.len());
        let mut limbs = vec![0u64; self.0.len() + other.0.len()];
        for (i, a) in self.0.iter().enumerate() {
            let mut carry = 0u128;
            for (j, b) in other.0.iter().enumerate() {
                carry += u128::from(limbs[i + j]) + u128::from(*a) * u128::from(*b);
                limbs[i + j] = carry as u64;
                carry >>= 64;
            }
            limbs[i + other.0.len()] = carry as u64;
        }
        Nat::trimmed(limbs)
    }

    /// `self * 2^by`.
    pub fn shl(&self, by: u64) -> Nat {
        if self.is_zero() {
            return Nat::default();
        }
        let (limbs, bits) = ((by / 64) as usize, by % 64);
        let mut out = vec![0; limbs];
        let mut carry = 0u64;
        for limb in &self.0 {
            out.push(limb << bits | carry);
            carry = if bits == 0 { 0 } else { limb >> (64 - bits) };
        }
        out.push(carry);
        Nat::trimmed(out)
    }

    /// `self / 2^by`, rounded down.
    pub fn shr(&self, by: u64) -> Nat {
        let (limbs, bits) = ((by / 64) as usize, by % 64);
        let Some(kept) = self.0.get(limbs..) else { return Nat::default() };
        let mut out = Vec::with_capacity(kept.len());
        for (i, limb) in kept.iter().enumerate() {
            let above = kept.get(i + 1).copied().unwrap_or(0);
            out.push(limb >> bits | if bits == 0 { 0 } else { above << (64 - bits) });
        }
        Nat::trimmed(out)
    }

    /// Quotient and remainder; none where `divisor` is zero. Knuth's algorithm D.
    pub fn div_rem(&self, divisor: &Nat) -> Option<(Nat, Nat)> {
        let n = divisor.0.len();
        let top = divisor.0.last()?;
        if self.compare(divisor) == Ordering::Less {
            return Some((Nat::default(), self.clone()));
        }
        // The division of a limb by hardware costs as much as ten products.
        count((self.0.len() - n + 1) * (n + 10));
        if n == 1 {
            let mut rest = 0u128;
            let mut quotient = vec![0; self.0.len()];
            for (i, limb) in self.0.iter().enumerate().rev() {
                rest = rest << 64 | u128::from(*limb);
                quotient[i] = (rest / u128::from(*top)) as u64;
                rest %= u128::from(*top);
            }
            return Some((Nat::trimmed(quotient), Nat::from(rest)));
        }
        let shift = u64::from(top.leading_zeros());
        let v = divisor.shl(shift).0;
        let mut u = self.shl(shift).0;
        u.resize(self.0.len() + 1, 0);
        let m = u.len() - n;
        let mut quotient = vec![0; m];
        for j in (0..m).rev() {
            let head = u128::from(u[j + n]) << 64 | u128::from(u[j + n - 1]);
            let mut guess = head / u128::from(v[n - 1]);
            let mut rest = head % u128::from(v[n - 1]);
            while guess >> 64 != 0 || guess * u128::from(v[n - 2]) > (rest << 64 | u128::from(u[j + n - 2])) {
                guess -= 1;
                rest += u128::from(v[n - 1]);
                if rest >> 64 != 0 {
                    break;
                }
            }
            if !subtract_scaled(&mut u[j..=j + n], &v, guess as u64) {
                guess -= 1;
                add_back(&mut u[j..=j + n], &v);
            }
            quotient[j] = guess as u64;
        }
        Some((Nat::trimmed(quotient), Nat::trimmed(u).shr(shift)))
    }

    /// Greatest common divisor, by halving and subtracting.
    pub fn gcd(&self, other: &Nat) -> Nat {
        if self.is_zero() {
            return other.clone();
        }
        if other.is_zero() {
            return self.clone();
        }
        let twos = self.trailing_zeros().min(other.trailing_zeros());
        let mut a = self.shr(self.trailing_zeros());
        let mut b = other.shr(other.trailing_zeros());
        // One division where the sizes differ much.
        for _ in 0..2 {
            if a.bits() > b.bits() + 64
                && let Some((_, rest)) = a.div_rem(&b)
            {
                if rest.is_zero() {
                    return b.shl(twos);
                }
                a = rest.shr(rest.trailing_zeros());
            }
            std::mem::swap(&mut a, &mut b);
        }
        loop {
            match a.compare(&b) {
                Ordering::Equal => return a.shl(twos),
                Ordering::Less => std::mem::swap(&mut a, &mut b),
                Ordering::Greater => {}
            }
            count(2 * a.0.len() + 10);
            a.subtract(&b);
            a.halve(a.trailing_zeros());
        }
    }

    /// The largest `r` with `r^n <= self`, by Newton's method from above.
    pub fn root(&self, n: u32) -> Nat {
        if self.is_zero() || n <= 1 {
            return self.clone();
        }
        let mut guess = Nat::from(1).shl(self.bits() / u64::from(n) + 1);
        loop {
            let power = guess.pow(n - 1);
            let Some((quotient, _)) = self.div_rem(&power) else { return guess };
            let sum = guess.mul(&Nat::from(u128::from(n - 1))).add(&quotient);
            let Some((next, _)) = sum.div_rem(&Nat::from(u128::from(n))) else { return guess };
            if next.compare(&guess) != Ordering::Less {
                return guess;
            }
            guess = next;
        }
    }

    /// `self^n`.
    pub fn pow(&self, n: u32) -> Nat {
        let mut out = Nat::from(1);
        for bit in (0..32 - n.leading_zeros()).rev() {
            out = out.mul(&out);
            if n >> bit & 1 == 1 {
                out = out.mul(self);
            }
        }
        out
    }

    /// Which of two is larger.
    pub fn compare(&self, other: &Nat) -> Ordering {
        self.0.len().cmp(&other.0.len()).then_with(|| self.0.iter().rev().cmp(other.0.iter().rev()))
    }
}

/// `u -= factor * v`; false where that went below zero.
fn subtract_scaled(u: &mut [u64], v: &[u64], factor: u64) -> bool {
    let (mut borrow, mut carry) = (0u64, 0u128);
    for (i, limb) in u.iter_mut().enumerate() {
        carry += u128::from(v.get(i).copied().unwrap_or(0)) * u128::from(factor);
        let (diff, under) = limb.overflowing_sub(carry as u64);
        let (diff, more) = diff.overflowing_sub(borrow);
        carry >>= 64;
        borrow = u64::from(under) + u64::from(more);
        *limb = diff;
    }
    borrow == 0
}

fn add_back(u: &mut [u64], v: &[u64]) {
    let mut carry = 0u128;
    for (i, limb) in u.iter_mut().enumerate() {
        carry += u128::from(*limb) + u128::from(v.get(i).copied().unwrap_or(0));
        *limb = carry as u64;
        carry >>= 64;
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
