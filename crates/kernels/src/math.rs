//! exp, ln, pow, sin and cos of our own, so that results do not depend on the system's libm.

/// `e^x`; 0 below -745, infinity above 709.8.
pub fn exp(x: f64) -> f64 {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    if x.is_nan() {
        return x;
    }
    if x > 709.782_712_893_384 {
        return f64::INFINITY;
    }
    if x < -745.2 {
        return 0.0;
    }
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut sum = 1.0;
    for k in (1..=13).rev() {
        sum = 1.0 + sum * r / k as f64;
    }
    // Two factors, because 2^n alone may overflow or underflow.
    let half = (n * 0.5).trunc();
    let pow2 = |n: f64| f64::from_bits(((n as i64 + 1023) as u64) << 52);
    sum * pow2(half) * pow2(n - half)
}

/// Natural logarithm; subnormal numbers count as zero.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x < f64::MIN_POSITIVE {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)).
    let bits = x.to_bits();
    let mut e = ((bits >> 52) & 0x7ff) as i32 - 1023;
    let mut m = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    let t = (m - 1.0) / (m + 1.0);
    let t2 = t * t;
    let mut series = 0.0;
    for k in (0..12).rev() {
        series = series * t2 + 1.0 / (2 * k + 1) as f64;
    }
    2.0 * t * series + e as f64 * std::f64::consts::LN_2
}

/// `x^y` for positive `x`, with relative error below 4e-15 for results between 1e-12 and 1e12.
pub fn pow(x: f64, y: f64) -> f64 {
    exp(y * ln(x))
}

/// Sine and cosine of an angle below a million revolutions.
pub fn sin_cos(x: f64) -> (f64, f64) {
    const HALF_PI_HIGH: f64 = 1.570_796_326_734_125_6;
    const HALF_PI_LOW: f64 = 6.077_100_506_506_192e-11;
    let n = (x * std::f64::consts::FRAC_2_PI).round();
    let r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW;
    let r2 = r * r;
    let (mut sin, mut cos) = (0.0, 0.0);
    for k in (0..9).rev() {
        let k2 = 2 * k;
        sin = 1.0 - sin * r2 / ((k2 + 2) * (k2 + 3)) as f64;
        cos = 1.0 - cos * r2 / ((k2 + 1) * (k2 + 2)) as f64;
    }
    sin *= r;
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_agree_with_f64() {
        for i in 0..4000 {
            let (x, y) = (1.5 + f64::from(i) * 2503.7, f64::from(i % 257) / 256.0);
            assert!((pow(x, y) / x.powf(y) - 1.0).abs() < 4e-15, "{x}^{y}");
        }
        assert_eq!((pow(7.5, 0.0), pow(1.0, 12.0)), (1.0, 1.0));
    }

    #[test]
    fn scalar_functions_agree_with_f64() {
        for i in -7000..7090 {
            let x = i as f64 * 0.1;
            assert!((exp(x) / x.exp() - 1.0).abs() < 4e-16 * (1.0 + x.abs()).ln().max(1.0), "{x}");
        }
        assert!(exp(-800.0) == 0.0 && exp(800.0).is_infinite() && exp(f64::NAN).is_nan() && exp(0.0) == 1.0);
        for i in 1..20000 {
            let x = i as f32 * 0.37;
            assert!((ln(x as f64) - (x as f64).ln()).abs() < 1e-13);
            let a = i as f64 * 3.7 - 30000.0;
            let (s, c) = sin_cos(a);
            assert!((s - a.sin()).abs() < 1e-11 && (c - a.cos()).abs() < 1e-11, "{a}");
        }
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(-1.0).is_nan() && ln(1e-40) < -92.0);
    }
}
