//! Elementary functions of [`Float`]: argument reduction, then Taylor series or Newton's method.

use super::float::{BITS, Float};
use std::sync::OnceLock;

/// `1 / n` for the coefficients of series: a product costs less than a division.
fn over(n: usize) -> Float {
    static TABLE: OnceLock<Vec<Float>> = OnceLock::new();
    let table = TABLE.get_or_init(|| (0..512).map(|n: u64| Float::int(1).div_int(n.max(1))).collect());
    table.get(n).copied().unwrap_or(Float::ZERO)
}

/// Pi, by Machin's formula.
pub fn pi() -> Float {
    static PI: OnceLock<Float> = OnceLock::new();
    *PI.get_or_init(|| {
        let small = |n: u64| atan_series(Float::int(1).div_int(n));
        small(5).scale(2).sub(small(239)).scale(2)
    })
}

/// The natural logarithm of two: `2 atanh(1/3)`.
pub fn ln2() -> Float {
    static LN2: OnceLock<Float> = OnceLock::new();
    *LN2.get_or_init(|| {
        let third = Float::int(1).div_int(3);
        odd_series(third, third.mul(third)).scale(1)
    })
}

/// `x + x r / 3 + x r^2 / 5 + ...` for `|r| < 1/2`.
fn odd_series(x: Float, ratio: Float) -> Float {
    let (mut power, mut sum) = (x, x);
    for k in 1..200 {
        power = power.mul(ratio);
        if power.is_zero() || power.exp < sum.exp - BITS - 4 {
            break;
        }
        sum = sum.add(power.mul(over(2 * k + 1)));
    }
    sum.bounded(sum.err, x.lost)
}

fn atan_series(x: Float) -> Float {
    odd_series(x, x.mul(x).neg())
}

/// Whether the `power` of a small number is lost beside one.
fn vanishes(x: Float, power: i64) -> bool {
    x.exp * power < -180 && !x.maybe_zero()
}

/// `e^x`; none where that is out of range.
pub fn exp(x: Float) -> Option<Float> {
    static INVERSE: OnceLock<Float> = OnceLock::new();
    if x.is_zero() {
        return Some(Float::int(1).bounded(x.err, x.lost));
    }
    if x.exp > 41 {
        return None;
    }
    let turns = x.mul(*INVERSE.get_or_init(|| ln2().recip().unwrap_or(Float::ZERO))).round()?;
    let rest = x.sub(ln2().mul(Float::int(turns))).scale(-8);
    let (mut term, mut sum) = (Float::int(1), Float::int(1));
    for n in 1..60 {
        term = term.mul(rest).mul(over(n));
        if term.is_zero() || term.exp < -BITS - 16 {
            break;
        }
        sum = sum.add(term);
    }
    for _ in 0..8 {
        sum = sum.mul(sum);
    }
    let out = sum.scale(turns);
    let rounding = out.exp - BITS + 12 + x.exp.max(0);
    Some(out.bounded(rounding.max(x.err + out.exp), x.lost || vanishes(x, 1)))
}

/// The natural logarithm of a positive number.
pub fn ln(x: Float) -> Option<Float> {
    if x.neg || x.maybe_zero() {
        return None;
    }
    // A mantissa near one keeps its precision; otherwise the power of two is split off.
    let near_one = x.exp == 1 && x.to_f64() < 1.5 || x.exp == 0 && x.to_f64() > 0.7;
    let turns = if near_one { 0 } else { x.exp };
    let unit = x.scale(-turns);
    let mut y = Float::from_f64(first_ln(unit.to_f64()));
    for _ in 0..2 {
        let e = exp(y)?;
        let step = unit.sub(e).div(unit.add(e))?.scale(1);
        y = y.add(step);
    }
    let out = y.add(ln2().mul(Float::int(turns)));
    let rounding = 12 - BITS + (64 - i64::from(turns.unsigned_abs().leading_zeros()));
    Some(out.bounded(rounding.max(x.err - x.exp), x.lost))
}

/// The logarithm of a number between 0.5 and 1.5 to machine precision, by operations that every machine rounds alike.
fn first_ln(x: f64) -> f64 {
    let z = (x - 1.0) / (x + 1.0);
    let mut sum = 0.0;
    for k in (0..20).rev() {
        sum = sum * z * z + 1.0 / f64::from(2 * k + 1);
    }
    2.0 * z * sum
}

pub fn sin_cos(x: Float) -> Option<(Float, Float)> {
    static INVERSE: OnceLock<Float> = OnceLock::new();
    if x.is_zero() {
        return Some((x, Float::int(1).bounded(x.err, x.lost)));
    }
    let quarter = pi().scale(-1);
    let turns = x.mul(*INVERSE.get_or_init(|| pi().scale(-1).recip().unwrap_or(Float::ZERO))).round()?;
    let rest = x.sub(quarter.mul(Float::int(turns)));
    // An eighth of the angle needs fewer terms; three doublings lead back.
    let part = rest.scale(-3);
    let square = part.mul(part).neg();
    let series = |first: Float, start: usize| {
        let (mut term, mut sum) = (first, first);
        for k in 0..40 {
            let n = start + 2 * k;
            term = term.mul(square).mul(over(n + 1)).mul(over(n + 2));
            if term.is_zero() || term.exp < -BITS - 16 {
                break;
            }
            sum = sum.add(term);
        }
        sum
    };
    let (mut sin, mut cos) = (series(part, 1), series(Float::int(1), 0));
    for _ in 0..3 {
        (sin, cos) = (sin.mul(cos).scale(1), cos.mul(cos).sub(sin.mul(sin)));
    }
    let err = (x.exp.max(0) - BITS + 8).max(x.err);
    // Near a multiple of a right angle the cosine of the rest is lost beside one.
    let lost = x.lost || turns == 0 && vanishes(rest, 2);
    let fix = |y: Float| y.bounded(err, lost);
    let (sin, cos) = (fix(sin), fix(cos));
    Some(match turns.rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, sin.neg()),
        2 => (sin.neg(), cos.neg()),
        _ => (cos.neg(), sin),
    })
}

pub fn atan(x: Float) -> Option<Float> {
    if x.is_zero() {
        return Some(x);
    }
    if x.exp > 1 {
        let rest = atan(x.recip()?)?;
        let quarter = pi().scale(-1);
        return Some((if x.neg { quarter.neg() } else { quarter }).sub(rest));
    }
    let one = Float::int(1);
    let mut y = x;
    for _ in 0..3 {
        y = y.div(one.add(one.add(y.mul(y)).sqrt()?))?;
    }
    let out = atan_series(y).scale(3);
    Some(out.bounded((out.exp - BITS + 8).max(x.err), x.lost))
}

/// The angle of the point `(x, y)`, in `(-pi, pi]`; none at the origin.
pub fn atan2(y: Float, x: Float) -> Option<Float> {
    if x.maybe_zero() {
        if y.maybe_zero() {
            return None;
        }
        let quarter = pi().scale(-1);
        return Some(if y.neg { quarter.neg() } else { quarter });
    }
    let base = atan(y.div(x)?)?;
    Some(match (x.neg, y.neg && !y.maybe_zero()) {
        (false, _) => base,
        (true, false) => base.add(pi()),
        (true, true) => base.sub(pi()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::float::SLACK;
    use super::super::rational::Rational;
    use super::*;

    fn close(a: Float, b: Float) -> bool {
        let diff = a.sub(b);
        (diff.is_zero() || diff.exp <= diff.err + SLACK) && diff.err < -150
    }

    fn float(n: i128, d: i128) -> Float {
        Float::from_rational(&Rational::new(n, d).expect("fine"))
    }

    #[test]
    fn constants_have_their_published_digits() {
        // The first 60 decimals of pi and of ln 2.
        let digits = |text: &str| {
            let value = super::super::nat::Nat::parse(text.as_bytes(), 10).expect("digits");
            let ten = super::super::nat::Nat::from(10).pow(text.len() as u32 - 1);
            Float::from_rational(&Rational::from_parts(false, value, ten).expect("fine"))
        };
        let want = digits("3141592653589793238462643383279502884197169399375105820974944");
        assert!(pi().sub(want).exp < -195);
        let want = digits("0693147180559945309417232121458176568075500134360255254120680");
        assert!(ln2().sub(want).exp < -195);
    }

    #[test]
    fn functions_satisfy_their_identities() {
        for (n, d) in [(1, 3), (-5, 7), (22, 7), (-100, 3), (1, 1000), (999, 1000), (31, 2)] {
            let x = float(n, d);
            let e = exp(x).expect("in range");
            assert!(close(ln(e).expect("positive"), x), "ln exp {n}/{d}");
            assert!(close(exp(x.neg()).expect("in range").mul(e), Float::int(1)));
            let (s, c) = sin_cos(x).expect("small");
            assert!(close(s.mul(s).add(c.mul(c)), Float::int(1)));
            let (s2, _) = sin_cos(x.scale(1)).expect("small");
            assert!(close(s2, s.mul(c).scale(1)));
            let (s, c) = sin_cos(atan(x).expect("fine")).expect("small");
            assert!(close(s, c.mul(x)), "tan atan {n}/{d}");
        }
        let (s, _) = sin_cos(pi().div_int(6)).expect("small");
        assert!(close(s, float(1, 2)));
        assert!(sin_cos(pi()).expect("small").0.maybe_zero());
    }
}
