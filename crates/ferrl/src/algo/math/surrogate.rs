//! The clipped surrogate of PPO (Schulman et al., 2017, arXiv 1707.06347):
//! `-min(r A, clip(r, 1 - low, 1 + high) A)` with `r = exp(logp - old_logp)`.

use ferrl_engine::math::exp;

/// A token's loss and what happened to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Surrogate {
    /// The loss of this token.
    pub loss: f64,
    /// d loss / d logp
    pub slope: f64,
    /// The probability ratio.
    pub ratio: f64,
    /// Whether the lower bound stopped the gradient.
    pub clipped_low: bool,
    /// Whether the upper bound stopped the gradient.
    pub clipped_high: bool,
}

/// The clipped surrogate of one token; the bounds are distances from 1.
pub fn clipped(logp: f32, old_logp: f32, advantage: f32, low: f64, high: f64) -> Surrogate {
    let ratio = exp(logp as f64 - old_logp as f64);
    let a = advantage as f64;
    let clipped_low = a < 0.0 && ratio < 1.0 - low;
    let clipped_high = a > 0.0 && ratio > 1.0 + high;
    if clipped_low || clipped_high {
        let bound = if clipped_low { 1.0 - low } else { 1.0 + high };
        return Surrogate { loss: -bound * a, slope: 0.0, ratio, clipped_low, clipped_high };
    }
    Surrogate { loss: -ratio * a, slope: -ratio * a, ratio, clipped_low, clipped_high }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clip_is_inactive_on_policy() {
        for a in [-2.0, 0.5] {
            let s = clipped(-1.3, -1.3, a, 0.2, 0.2);
            assert_eq!((s.loss, s.slope, s.ratio), (-a as f64, -a as f64, 1.0));
        }
    }

    #[test]
    fn the_lower_bound_is_one_minus_low() {
        // A well-known bug clipped at `low` itself.
        let at = |r: f64, a| clipped(r.ln() as f32, 0.0, a, 0.2, 0.28);
        assert!(at(0.79, -1.0).clipped_low && !at(0.81, -1.0).clipped_low);
        assert!(at(1.29, 1.0).clipped_high && !at(1.27, 1.0).clipped_high);
        assert!(
            !at(0.5, 1.0).clipped_low && !at(2.0, -1.0).clipped_high,
            "the pessimistic side is never clipped"
        );
        assert!((at(0.5, -1.0).loss - 0.8).abs() < 1e-6 && (at(2.0, 1.0).loss + 1.28).abs() < 1e-6);
    }
}
