//! Vectorised exp, tanh and sigmoid.

use super::simd::Simd;

/// `e^x`, within 2 units in the last place; 0 below -87.3, infinity above 88.7.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    let (low, high) = (s.splat(-87.336_54), s.splat(88.722_83));
    let clamped = s.min(high, s.max(low, x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts (Cody-Waite): the first has few bits, so n times it is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.fma(p, s.mul(r, r), s.add(r, s.splat(1.0)));
    // n = 128 would overflow the scale alone: split it.
    let half = s.round(s.mul(n, s.splat(0.5)));
    let y = s.mul(s.mul(p, s.pow2(half)), s.pow2(s.sub(n, half)));
    let y = s.select_lt(x, low, s.splat(0.0), y);
    s.select_lt(high, x, s.splat(f32::INFINITY), y)
}

/// Hyperbolic tangent: odd polynomial near zero, exponentials elsewhere.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let two = s.splat(2.0);
    let x = s.min(s.splat(20.0), s.max(s.splat(-20.0), x));
    let e = exp(s, s.mul(two, x));
    let far = s.sub(s.splat(1.0), s.div(two, s.add(e, s.splat(1.0))));
    let square = s.mul(x, x);
    let mut p = s.splat(-5.704_988_5e-3);
    for c in [2.063_909e-2, -5.373_971_4e-2, 0.133_314_42, -0.333_332_83] {
        p = s.fma(p, square, s.splat(c));
    }
    let near = s.fma(s.mul(p, square), x, x);
    s.select_lt(square, s.splat(0.390_625), near, far)
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{LANES, Level, multiversion};

    multiversion! {
        fn apply<S>(s, which: usize, x: &[f32; LANES]) -> [f32; LANES] {
            let mut out = [0f32; LANES];
            // SAFETY: both arrays hold sixteen elements.
            unsafe {
                let v = s.load(x.as_ptr());
                let y = match which { 0 => exp(s, v), 1 => tanh(s, v), _ => sigmoid(s, v) };
                s.store(out.as_mut_ptr(), y);
            }
            out
        }
    }

    #[test]
    fn vector_functions_agree_with_f64_on_every_level() {
        for level in Level::available() {
            for i in -4000..4000 {
                let x: [f32; LANES] = std::array::from_fn(|j| i as f32 * 0.022 + j as f32 * 0.0013);
                for (which, exact) in
                    [(0, f64::exp as fn(f64) -> f64), (1, f64::tanh), (2, |x| 1.0 / (1.0 + (-x).exp()))]
                {
                    for (x, y) in x.iter().zip(apply(level, which, &x)) {
                        let want = exact(*x as f64);
                        let close =
                            ((y as f64 - want) / want).abs() < 4e-7 || (y as f64 - want).abs() < 1.2e-38;
                        assert!(close, "{level:?} {which} {x}: {y} {want}");
                    }
                }
            }
            let special = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 1e30, -100.0, 0.0, -0.0];
            let x: [f32; LANES] = std::array::from_fn(|i| special[i % 8]);
            let e = apply(level, 0, &x);
            assert_eq!(&e[..2], &[0.0, f32::INFINITY]);
            assert!(e[2].is_nan() && e[3] == 0.0 && e[4] == f32::INFINITY && e[5] == 0.0 && e[6] == 1.0);
        }
    }
}
