//! Estimators of KL(policy || reference) from one sample, with `l = logp - ref_logp` (Schulman, "Approximating KL
//! Divergence", 2020): k1 = l, abs = |l|, k2 = l^2 / 2, k3 = e^-l - 1 + l; k3_sequence has the control variate of the whole
//! completion, `e^-L - 1 + l` with `L` the sum of `l`; full is the sum over the vocabulary, which the forward pass computes.

use ferrl_engine::math::exp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which estimator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Estimator {
    /// Unbiased, high variance, may be negative.
    K1,
    /// Absolute log-ratio.
    Abs,
    /// Biased, low variance; its gradient is that of the true KL on-policy.
    K2,
    /// Unbiased and never negative.
    K3,
    /// k3 with the ratio of the whole completion at every token (`seq_control_variate` of VinePPO): its sum is unbiased.
    #[serde(rename = "k3_sequence")]
    K3Sequence,
    /// Exact: the sum over the vocabulary at every token; in the loss only.
    Full,
}

impl Estimator {
    /// The estimate of one token; k3 for estimators that need more than a token (`Full`, `K3Sequence`).
    pub fn value(self, logp: f32, ref_logp: f32) -> f64 {
        let l = logp as f64 - ref_logp as f64;
        match self {
            Estimator::K1 => l,
            Estimator::Abs => l.abs(),
            Estimator::K2 => 0.5 * l * l,
            Estimator::K3 | Estimator::K3Sequence | Estimator::Full => exp(-l) - 1.0 + l,
        }
    }

    /// d estimate / d logp, of an estimate of one token.
    pub fn slope(self, logp: f32, ref_logp: f32) -> f64 {
        let l = logp as f64 - ref_logp as f64;
        match self {
            Estimator::K1 => 1.0,
            Estimator::Abs => l.signum(),
            Estimator::K2 => l,
            Estimator::K3 | Estimator::K3Sequence | Estimator::Full => 1.0 - exp(-l),
        }
    }

    /// The estimates of the tokens of one sequence, optionally clipped to the range from 0 to `clip`, and the derivative of their sum
    /// with respect to each token's log-probability.
    pub fn sequence(self, logps: &[f32], refs: &[f32], clip: Option<f64>) -> (Vec<f64>, Vec<f64>) {
        let pairs = || logps.iter().zip(refs);
        let whole = match self {
            Estimator::K3Sequence => exp(-pairs().map(|(l, r)| *l as f64 - *r as f64).sum::<f64>()),
            _ => 0.0,
        };
        let value = |(l, r): (&f32, &f32)| match self {
            Estimator::K3Sequence => whole - 1.0 + (*l as f64 - *r as f64),
            _ => self.value(*l, *r),
        };
        let free: Vec<f64> = pairs().map(value).collect();
        let inside = |v: f64| clip.is_none_or(|clip| v > 0.0 && v < clip);
        let open = free.iter().filter(|v| inside(**v)).count() as f64;
        let slopes = pairs().zip(&free).map(|((l, r), v)| match self {
            Estimator::K3Sequence => f64::from(inside(*v)) - open * whole,
            _ if inside(*v) => self.slope(*l, *r),
            _ => 0.0,
        });
        let slopes = slopes.collect();
        (free.into_iter().map(|v| clip.map_or(v, |clip| v.clamp(0.0, clip))).collect(), slopes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k1_and_k3_are_unbiased_and_k2_is_close() {
        // Two distributions over three tokens; expectations under the first are exact sums.
        let (p, q): ([f64; 3], [f64; 3]) = ([0.5, 0.3, 0.2], [0.4, 0.35, 0.25]);
        let exact: f64 = (0..3).map(|i| p[i] * (p[i] / q[i]).ln()).sum();
        let mean = |e: Estimator| -> f64 {
            (0..3).map(|i| p[i] * e.value(p[i].ln() as f32, q[i].ln() as f32)).sum()
        };
        assert!((mean(Estimator::K1) - exact).abs() < 1e-6);
        assert!((mean(Estimator::K3) - exact).abs() < 1e-6);
        assert!((mean(Estimator::K2) - exact).abs() < 0.1 * exact);
        assert!(mean(Estimator::Abs) > exact);
    }

    #[test]
    fn the_control_variate_of_a_completion_is_unbiased_in_its_sum() {
        // Two tokens drawn independently from p; the sum of the estimates over both has the expectation 2 KL.
        let (p, q): ([f64; 3], [f64; 3]) = ([0.5, 0.3, 0.2], [0.4, 0.35, 0.25]);
        let exact: f64 = (0..3).map(|i| p[i] * (p[i] / q[i]).ln()).sum();
        let mut mean = 0.0;
        for a in 0..3 {
            for b in 0..3 {
                let logs = |d: &[f64; 3]| [d[a].ln() as f32, d[b].ln() as f32];
                let (values, _) = Estimator::K3Sequence.sequence(&logs(&p), &logs(&q), None);
                mean += p[a] * p[b] * values.iter().sum::<f64>();
            }
        }
        assert!((mean - 2.0 * exact).abs() < 1e-6, "{mean} against {}", 2.0 * exact);
    }

    #[test]
    fn clipped_estimates_have_no_slope() {
        let refs = [0.0f32, 0.0, 0.0];
        let logps = [-3.0f32, -0.5, 0.5];
        let (values, slopes) = Estimator::K3.sequence(&logps, &refs, Some(10.0));
        assert_eq!((values[0], slopes[0]), (10.0, 0.0), "e^3 - 4 is 16");
        assert_eq!(values[1], Estimator::K3.value(-0.5, 0.0));
        assert_eq!(slopes[2], Estimator::K3.slope(0.5, 0.0));
        // Linguistic calibration's max(0, k1).
        let (values, slopes) = Estimator::K1.sequence(&logps, &refs, Some(100.0));
        assert_eq!((values, slopes), (vec![0.0, 0.0, 0.5], vec![0.0, 0.0, 1.0]));
        for clip in [None, Some(2.0)] {
            for estimator in [Estimator::K3Sequence, Estimator::K3, Estimator::K2] {
                let sum = |logps: &[f32; 3]| estimator.sequence(logps, &refs, clip).0.iter().sum::<f64>();
                let at = [-0.4f32, 0.3, 0.2];
                let slopes = estimator.sequence(&at, &refs, clip).1;
                for i in 0..3 {
                    let moved = |h: f32| {
                        let mut at = at;
                        at[i] += h;
                        sum(&at)
                    };
                    let numeric = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                    assert!((numeric - slopes[i]).abs() < 2e-3, "{estimator:?} {clip:?} {i}");
                }
            }
        }
    }

    #[test]
    fn kl_slopes_equal_finite_differences() {
        for e in [Estimator::K1, Estimator::Abs, Estimator::K2, Estimator::K3] {
            for l in [-1.5f32, -0.2, 0.4, 2.0] {
                let h = 1e-3f32;
                let numeric = (e.value(l + h, 0.0) - e.value(l - h, 0.0)) / (2.0 * h as f64);
                assert!((numeric - e.slope(l, 0.0)).abs() < 1e-3, "{e:?} {l}");
            }
        }
    }
}
