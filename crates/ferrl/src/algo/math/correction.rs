//! Importance weights of tokens sampled by an older policy: truncated (TIS) or masked, per token or per sequence.

use ferrl_engine::math::exp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Correction by the ratio of the policy before the update to the one that sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Correction {
    /// Truncated or masked importance weights, or none.
    pub kind: CorrectionKind,
    /// Weights per token or per sequence.
    pub level: CorrectionLevel,
    /// Maximum weight: larger ones are truncated to it, or masked. (0, 1000000]
    pub cap: Option<f64>,
    /// Minimum weight: smaller ones are masked (`kind = "mask"` only). [0, 1000000]
    pub floor: Option<f64>,
}

/// Kind of correction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CorrectionKind {
    /// Weights are 1.
    #[default]
    None,
    /// `min(ratio, cap)`
    Truncate,
    /// The ratio inside the bounds, 0 outside.
    Mask,
}

/// Level of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CorrectionLevel {
    /// The ratio of each token.
    #[default]
    Token,
    /// The product of the ratios of a sequence, for all its tokens.
    Sequence,
}

impl Correction {
    /// One weight per entry of the two columns, which hold the actions of one sequence.
    pub fn weights(&self, old: &[f32], sampled: &[f32]) -> Vec<f32> {
        let (cap, floor) = (self.cap.unwrap_or(2.0), self.floor.unwrap_or(0.0));
        let bound = |log_ratio: f64| {
            let ratio = exp(log_ratio);
            match self.kind {
                CorrectionKind::None => 1.0,
                CorrectionKind::Truncate => ratio.min(cap),
                CorrectionKind::Mask if (floor..=cap).contains(&ratio) => ratio,
                CorrectionKind::Mask => 0.0,
            }
        };
        let gap = |(o, s): (&f32, &f32)| *o as f64 - *s as f64;
        match self.level {
            CorrectionLevel::Token => old.iter().zip(sampled).map(|p| bound(gap(p)) as f32).collect(),
            CorrectionLevel::Sequence => {
                let total: f64 = old.iter().zip(sampled).map(gap).sum();
                vec![bound(total) as f32; old.len()]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_one_on_policy_and_bounded_off_it() {
        let logp = [-1.0f32, -2.0];
        for kind in [CorrectionKind::None, CorrectionKind::Truncate, CorrectionKind::Mask] {
            for level in [CorrectionLevel::Token, CorrectionLevel::Sequence] {
                let c = Correction { kind, level, cap: Some(1.5), floor: Some(0.5) };
                assert_eq!(c.weights(&logp, &logp), [1.0, 1.0]);
            }
        }
        let c = |kind, level| Correction { kind, level, cap: Some(1.5), floor: Some(0.5) };
        let sampled = [-2.0f32, -2.2];
        let t = c(CorrectionKind::Truncate, CorrectionLevel::Token).weights(&logp, &sampled);
        assert!(t[0] == 1.5 && (t[1] - 0.2f32.exp()).abs() < 1e-6);
        assert_eq!(c(CorrectionKind::Mask, CorrectionLevel::Token).weights(&logp, &sampled)[0], 0.0);
        assert_eq!(
            c(CorrectionKind::Truncate, CorrectionLevel::Sequence).weights(&logp, &sampled),
            [1.5, 1.5]
        );
    }
}
