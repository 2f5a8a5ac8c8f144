//! Aggregation of token losses: the weight of each token.

use crate::experience::{ByRole, Loss, Metrics, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::train::Stats;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How losses per token are averaged. Every divisor is counted over the whole update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Aggregate {
    /// Mean over all tokens.
    Token,
    /// Mean over a trajectory's tokens, then over trajectories.
    Sequence,
    /// Sum over tokens, divided by trajectories times a fixed length (Dr. GRPO).
    Constant,
}

impl Aggregate {
    /// The weight of one token of a sequence; `length` is the fixed length of [`Aggregate::Constant`].
    pub fn weight(self, s: &Sequence, counts: &UpdateCounts, length: usize) -> f64 {
        let own = s.weight as f64;
        match self {
            Aggregate::Token => own / counts.tokens,
            Aggregate::Sequence => own / (counts.trajectories * s.trajectory_tokens.max(1) as f64),
            Aggregate::Constant => own / (counts.trajectories * length.max(1) as f64),
        }
    }
}

/// Weighted maximum likelihood, `-Σ w_t factor_t logp_t`, with the weights of an aggregation and its fixed length.
pub fn likelihood(
    batch: &MicroBatch<'_>,
    stats: &ByRole<Stats>,
    (aggregate, length): (Aggregate, usize),
    factor: impl Fn(&Sequence, usize) -> f64,
) -> Loss {
    let stats = stats.get(Role::Policy).expect("the policy was computed");
    let mut grads = Loss::zeros(batch.len());
    let (mut value, mut metrics) = (0.0, Metrics::default());
    for (row, s) in batch.rows() {
        let w = aggregate.weight(s, &batch.counts, length);
        for i in s.actions() {
            let w = w * factor(s, i);
            value -= w * stats.logp[row + i] as f64;
            grads.logp[row + i] = -w as f32;
            metrics.add("entropy", stats.entropy[row + i] as f64);
        }
    }
    Loss::policy(value, grads, metrics)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(trajectory: usize, tokens: usize) -> Sequence {
        let mut trained = vec![true; tokens + 1];
        trained[0] = false;
        let ids = vec![0; tokens + 1];
        Sequence { ids, trained, trajectory, trajectory_tokens: tokens, weight: 1.0, ..Default::default() }
    }

    #[test]
    fn weights_add_up_as_named() {
        let all = [sequence(0, 2), sequence(1, 6)];
        let counts = UpdateCounts::of(&all);
        let total = |a: Aggregate| -> Vec<f64> {
            all.iter().map(|s| a.weight(s, &counts, 8) * s.action_count() as f64).collect()
        };
        assert_eq!(total(Aggregate::Token), [0.25, 0.75]);
        assert_eq!(total(Aggregate::Sequence), [0.5, 0.5]);
        assert_eq!(total(Aggregate::Constant), [0.125, 0.375]);
    }
}
