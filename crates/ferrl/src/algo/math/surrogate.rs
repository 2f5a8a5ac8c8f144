//! Surrogate losses of a token as functions of the probability ratio: the clipped surrogate of PPO (Schulman et al.,
//! 2017, arXiv 1707.06347), `-min(r A, clip(r, 1 - low, 1 + high) A)`, and its variants.

use ferrl_engine::math::{exp, ln};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the ratio enters the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Surrogate {
    /// PPO: the minimum of the unclipped and the clipped objective.
    Clip,
    /// CISPO: the gradient's weight is the ratio, truncated at the upper bound; no token loses its gradient.
    Truncate,
    /// The unclipped ratio.
    Ratio,
    /// REINFORCE: the log-probability, without a ratio.
    Logp,
    /// Policy mirror descent (Kimi Team, 2025, arXiv 2501.12599): `-A l + tau / 2 l^2`, with `l` the log-ratio. The paper's has
    /// one ratio per completion: `ratio = "product"`, `aggregate = "sequence"`.
    Kimi,
}

/// Level of the probability ratio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Ratio {
    /// One per token.
    Token,
    /// One per sequence: the geometric mean over its tokens (GSPO).
    Mean,
    /// One per sequence: the product over its tokens (RLOO).
    Product,
}

impl Ratio {
    /// The logarithm of a sequence's ratio and its derivative with respect to each token's log-ratio; `None` for ratios per
    /// token.
    pub fn shared(self, log_ratios: &[f64]) -> Option<(f64, f64)> {
        let slope = match self {
            Ratio::Token => return None,
            Ratio::Mean => 1.0 / log_ratios.len().max(1) as f64,
            Ratio::Product => 1.0,
        };
        Some((slope * log_ratios.iter().sum::<f64>(), slope))
    }
}

/// Clip range of the ratio, and other constants of the surrogates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Lower clip range.
    pub low: f64,
    /// Upper clip range.
    pub high: f64,
    /// Dual clip: upper bound of the ratio if the advantage is negative.
    pub dual: Option<f64>,
    /// Weight of the squared log-ratio of [`Surrogate::Kimi`].
    pub tau: f64,
}

/// A token's loss, its derivative and whether it was clipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLoss {
    pub loss: f64,
    /// d loss / d log-ratio; with a ratio per token d loss / d logp.
    pub slope: f64,
    pub ratio: f64,
    /// Whether the lower bound clipped the gradient.
    pub clipped_low: bool,
    /// Whether the upper bound clipped (or, with truncation, reduced) the gradient.
    pub clipped_high: bool,
}

impl Surrogate {
    /// The loss of one token with this log-ratio, log-probability and advantage.
    pub fn term(self, log_ratio: f64, logp: f64, a: f64, bounds: Bounds) -> TokenLoss {
        let ratio = exp(log_ratio);
        let free =
            TokenLoss { loss: -ratio * a, slope: -ratio * a, ratio, clipped_low: false, clipped_high: false };
        match self {
            Surrogate::Ratio => free,
            Surrogate::Logp => TokenLoss { loss: -a * logp, slope: -a, ..free },
            Surrogate::Kimi => TokenLoss {
                loss: (0.5 * bounds.tau * log_ratio - a) * log_ratio,
                slope: bounds.tau * log_ratio - a,
                ..free
            },
            Surrogate::Clip => {
                let clipped_low = a < 0.0 && ratio < 1.0 - bounds.low;
                let clipped_high = a > 0.0 && ratio > 1.0 + bounds.high;
                let held = |bound: f64| TokenLoss { loss: -bound * a, slope: 0.0, ..free };
                match bounds.dual {
                    _ if clipped_low => TokenLoss { clipped_low, ..held(1.0 - bounds.low) },
                    _ if clipped_high => TokenLoss { clipped_high, ..held(1.0 + bounds.high) },
                    Some(dual) if a < 0.0 && ratio > dual => held(dual),
                    _ => free,
                }
            }
            Surrogate::Truncate => {
                // The antiderivative of min(r, cap) with respect to log r, so that the gradient is that of the loss.
                let cap = 1.0 + bounds.high;
                if ratio <= cap {
                    return free;
                }
                let loss = -a * cap * (1.0 + log_ratio - ln(cap));
                TokenLoss { loss, slope: -a * cap, clipped_high: true, ..free }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { low: 0.2, high: 0.28, dual: None, tau: 0.1 };

    #[test]
    fn clip_is_inactive_on_policy() {
        for a in [-2.0, 0.5] {
            for kind in [Surrogate::Clip, Surrogate::Truncate, Surrogate::Ratio] {
                let s = kind.term(0.0, -1.3, a, BOUNDS);
                assert_eq!((s.loss, s.slope, s.ratio), (-a, -a, 1.0));
                assert!(!s.clipped_low && !s.clipped_high);
            }
            assert_eq!(Surrogate::Logp.term(0.0, -1.3, a, BOUNDS).slope, -a);
            assert_eq!(Surrogate::Kimi.term(0.0, -1.3, a, BOUNDS).slope, -a);
        }
    }

    #[test]
    fn mirror_descent_has_its_optimum_where_the_log_ratio_is_the_advantage_over_tau() {
        let at = |l: f64| Surrogate::Kimi.term(l, 0.0, 0.3, BOUNDS);
        assert!(at(3.0).slope.abs() < 1e-12 && at(2.9).slope < 0.0 && at(3.1).slope > 0.0);
        assert!(at(3.0).loss < at(2.0).loss && at(3.0).loss < at(4.0).loss);
    }

    #[test]
    fn the_lower_bound_is_one_minus_low() {
        // A well-known bug clipped at `low` itself.
        let at = |r: f64, a| Surrogate::Clip.term(r.ln(), 0.0, a, BOUNDS);
        assert!(at(0.79, -1.0).clipped_low && !at(0.81, -1.0).clipped_low);
        assert!(at(1.29, 1.0).clipped_high && !at(1.27, 1.0).clipped_high);
        assert!(
            !at(0.5, 1.0).clipped_low && !at(2.0, -1.0).clipped_high,
            "the pessimistic side is never clipped"
        );
        assert!((at(0.5, -1.0).loss - 0.8).abs() < 1e-6 && (at(2.0, 1.0).loss + 1.28).abs() < 1e-6);
    }

    #[test]
    fn the_second_bound_holds_back_negative_advantages_only() {
        let bounds = Bounds { dual: Some(3.0), ..BOUNDS };
        let at = |r: f64, a| Surrogate::Clip.term(r.ln(), 0.0, a, bounds);
        assert_eq!((at(5.0, -1.0).loss, at(5.0, -1.0).slope), (3.0, 0.0));
        assert!((at(2.9, -1.0).slope - 2.9).abs() < 1e-12);
        assert!((at(5.0, 1.0).loss + 1.28).abs() < 1e-12);
    }

    #[test]
    fn truncation_keeps_every_gradient_and_is_continuous() {
        let bounds = Bounds { high: 1.0, ..BOUNDS };
        let at = |l: f64| Surrogate::Truncate.term(l, 0.0, 1.0, bounds);
        assert!((at(1.5).slope + 2.0).abs() < 1e-12 && at(1.5).clipped_high);
        let edge = 2f64.ln();
        assert!((at(edge - 1e-9).loss - at(edge + 1e-9).loss).abs() < 1e-7);
        let numeric = (at(1.5 + 1e-5).loss - at(1.5 - 1e-5).loss) / 2e-5;
        assert!((numeric - at(1.5).slope).abs() < 1e-6);
    }

    #[test]
    fn shared_ratios_are_mean_and_product() {
        let logs = [0.1, 0.3];
        assert_eq!(Ratio::Token.shared(&logs), None);
        assert_eq!(Ratio::Mean.shared(&logs), Some((0.2, 0.5)));
        assert_eq!(Ratio::Product.shared(&logs), Some((0.4, 1.0)));
    }
}
