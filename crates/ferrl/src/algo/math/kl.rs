//! Estimators of KL(policy || reference) from one sample, with `l = logp - ref_logp` (Schulman, "Approximating KL
//! Divergence", 2020): k1 = l, abs = |l|, k2 = l^2 / 2, k3 = e^-l - 1 + l.

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
}

impl Estimator {
    /// The estimate.
    pub fn value(self, logp: f32, ref_logp: f32) -> f64 {
        let l = logp as f64 - ref_logp as f64;
        match self {
            Estimator::K1 => l,
            Estimator::Abs => l.abs(),
            Estimator::K2 => 0.5 * l * l,
            Estimator::K3 => exp(-l) - 1.0 + l,
        }
    }
    /// d estimate / d logp.
    pub fn slope(self, logp: f32, ref_logp: f32) -> f64 {
        let l = logp as f64 - ref_logp as f64;
        match self {
            Estimator::K1 => 1.0,
            Estimator::Abs => l.signum(),
            Estimator::K2 => l,
            Estimator::K3 => 1.0 - exp(-l),
        }
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
    fn slopes_are_derivatives() {
        for e in [Estimator::K1, Estimator::Abs, Estimator::K2, Estimator::K3] {
            for l in [-1.5f32, -0.2, 0.4, 2.0] {
                let h = 1e-3f32;
                let numeric = (e.value(l + h, 0.0) - e.value(l - h, 0.0)) / (2.0 * h as f64);
                assert!((numeric - e.slope(l, 0.0)).abs() < 1e-3, "{e:?} {l}");
            }
        }
    }
}
