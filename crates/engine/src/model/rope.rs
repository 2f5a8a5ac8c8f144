//! RoPE frequencies: every scaling scheme as transformers computes it, in `f32` where it does.

use std::f64::consts::TAU;

use super::config::{Rope, RopeScaling};
use crate::math::{ln, pow};

impl Rope {
    /// The angle per position for each rotated pair of dimensions, and the factor on cos and sin.
    ///
    /// `context` is the run's longest sequence. Only LongRoPE uses it: it has one set of divisors up to the context of
    /// pre-training and another beyond. transformers chooses per forward pass; Ferrl chooses once per run, so that a token's logp
    /// does not depend on the other sequences of a batch.
    pub fn inv_freq(&self, context: usize) -> (Vec<f32>, f32) {
        let powers = self.powers();
        let plain = || powers.iter().map(|p| 1.0 / p);
        match &self.scaling {
            RopeScaling::None => (plain().collect(), 1.0),
            RopeScaling::Linear { factor } => (plain().map(|f| f / *factor as f32).collect(), 1.0),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let stretch = |f| llama3(f, factor, low_freq_factor, high_freq_factor, original);
                (plain().map(stretch).collect(), 1.0)
            }
            &RopeScaling::Yarn { factor, beta_fast, beta_slow, original, attention_factor, truncate } => {
                let ramp = self.yarn_ramp(beta_fast, beta_slow, original, truncate);
                let blend = |(p, ramp): (&f32, f32)| {
                    let keep = 1.0 - ramp;
                    1.0 / (factor as f32 * p) * (1.0 - keep) + 1.0 / p * keep
                };
                (powers.iter().zip(ramp).map(blend).collect(), attention_factor as f32)
            }
            RopeScaling::PerDimension { short, long, original, attention_factor } => {
                let divisors = if context > *original { long } else { short };
                let inverse = |(p, d): (&f32, &f64)| 1.0 / (*d as f32 * p);
                (powers.iter().zip(divisors).map(inverse).collect(), *attention_factor as f32)
            }
        }
    }

    /// `theta^(2i/d)` for `i = 0, 1, ...`
    fn powers(&self) -> Vec<f32> {
        let dim = self.rotary_dim as f32;
        let power = |i| pow(f64::from(self.theta as f32), f64::from((2 * i) as f32 / dim)) as f32;
        (0..self.rotary_dim / 2).map(power).collect()
    }

    /// 0 where YaRN leaves a frequency unchanged, 1 where it divides it.
    fn yarn_ramp(&self, beta_fast: f64, beta_slow: f64, original: f64, truncate: bool) -> Vec<f32> {
        let dim = self.rotary_dim as f64;
        let dimension_of = |rotations: f64| dim * ln(original / (rotations * TAU)) / (2.0 * ln(self.theta));
        let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let at = |i| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        (0..self.rotary_dim / 2).map(at).collect()
    }
}

fn llama3(freq: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = TAU as f32 / freq;
    if wavelength > (original / low) as f32 {
        return freq / factor as f32;
    }
    if wavelength < (original / high) as f32 {
        return freq;
    }
    let smooth = (original as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * freq / factor as f32 + smooth * freq
}

#[cfg(test)]
mod tests {
    use super::*;

    // Every expected list was printed by transformers 5.22.

    fn check(theta: f64, rotary_dim: usize, scaling: RopeScaling, context: usize, want: &[f32], gain: f32) {
        let (freq, got_gain) = Rope { theta, rotary_dim, scaling }.inv_freq(context);
        assert_eq!(freq.len(), want.len());
        for (i, (g, w)) in freq.iter().zip(want).enumerate() {
            assert!((g - w).abs() <= 3e-7 * w, "frequency {i}: {g} is not {w}");
        }
        assert!((got_gain - gain).abs() < 1e-6);
    }

    /// Frequencies came from the system's library, so the same model could give other bits on another system.
    #[test]
    fn powers_are_our_own_and_what_the_library_rounded_to() {
        let (mut all, mut other) = (0, 0);
        for theta in [1e4, 1e5, 1.3e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7] {
            for rotary_dim in (2..=256).step_by(2) {
                let rope = Rope { theta, rotary_dim, scaling: RopeScaling::None };
                for (i, got) in rope.powers().into_iter().enumerate() {
                    let exponent = f64::from((2 * i) as f32 / rotary_dim as f32);
                    let want = f64::from(theta as f32).powf(exponent) as f32;
                    assert!(got.to_bits().abs_diff(want.to_bits()) <= 1, "{theta} {rotary_dim} {i}");
                    (all, other) = (all + 1, other + usize::from(got != want));
                }
            }
        }
        assert!(all > 80_000 && other == 0, "{other} of {all} round to a neighbour");
    }

    #[test]
    fn unscaled_and_linear() {
        let plain = [
            1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.05623413, 0.03162278, 0.017782794, 0.01,
            0.0056234132, 0.0031622779, 0.0017782794, 0.001, 0.0005623413, 0.0003162278, 0.00017782794,
        ];
        check(10_000.0, 32, RopeScaling::None, 1, &plain, 1.0);
        let halved = plain.map(|f: f32| f / 2.5);
        check(10_000.0, 32, RopeScaling::Linear { factor: 2.5 }, 1, &halved, 1.0);
    }

    #[test]
    fn llama3_matches_transformers() {
        let want = [
            1.0, 0.44036663, 0.19392276, 0.0853971, 0.03760603, 0.01656044, 0.007292665, 0.003211446,
            0.000524846, 7.7846555e-05, 3.4281024e-05, 1.5096218e-05, 6.6478697e-06, 2.9274997e-06,
            1.2891732e-06, 5.677088e-07,
        ];
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original: 8192.0,
        };
        check(500_000.0, 32, scaling, 1, &want, 1.0);
    }

    #[test]
    fn yarn_matches_transformers() {
        let want = [
            1.0, 0.4216965, 0.17782794, 0.074989416, 0.03162278, 0.013335215, 0.0047799014, 0.0016599617,
            0.00055, 0.00016867858, 4.4456985e-05, 1.8747356e-05, 7.905694e-06, 3.3338035e-06, 1.4058534e-06,
            5.9284343e-07,
        ];
        let mut scaling = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original: 32768.0,
            attention_factor: 1.138629436111989,
            truncate: true,
        };
        check(1e6, 32, scaling, 1, &want, 1.1386294);
        let want = [
            1.0, 0.56234133, 0.31622776, 0.17782794, 0.1, 0.05623413, 0.03162278, 0.01509612, 0.0057901046,
            0.0017382187, 0.00012395246, 4.4456985e-05, 2.5e-05, 1.40585325e-05, 7.9056945e-06,
            4.4456983e-06,
        ];
        scaling = RopeScaling::Yarn {
            factor: 40.0,
            beta_fast: 16.0,
            beta_slow: 2.0,
            original: 4096.0,
            attention_factor: 1.0879546,
            truncate: false,
        };
        check(1e4, 32, scaling, 1, &want, 1.0879546);
    }

    #[test]
    fn longrope_chooses_by_the_context() {
        let scaling = RopeScaling::PerDimension {
            short: vec![1.05, 1.1, 1.2, 1.3, 1.5, 1.7],
            long: vec![1.1, 1.5, 3.0, 8.0, 20.0, 50.0],
            original: 4096,
            attention_factor: 1.1902380714238083,
        };
        let short = [0.952381, 0.19585769, 0.0386799, 0.0076923077, 0.0014362895, 0.00027303468];
        check(1e4, 12, scaling.clone(), 4096, &short, 1.1902381);
        let long = [0.9090909, 0.14362897, 0.01547196, 0.00125, 0.00010772171, 9.283179e-06];
        check(1e4, 12, scaling, 4097, &long, 1.1902381);
    }
}
