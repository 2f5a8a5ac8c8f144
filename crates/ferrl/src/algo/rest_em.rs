//! ReST-EM (Singh et al., 2023, arXiv 2312.06585), also known as rejection-sampling fine-tuning.
//!
//! Each step is one iteration of expectation and maximisation. E: sample completions, keep those with a reward of at least
//! `threshold`, at most `per_prompt` per prompt. M: fine-tune on them, `epochs` passes of `minibatches` updates with
//! the loss `-mean_t logp_t`, averaged over completions.
//!
//! Differences from the paper:
//! 1. `restart = true` fine-tunes the stage's initial model anew at each step, as the paper does; by default each step continues
//!    from the previous one, which needs far fewer updates.
//! 2. The paper fine-tunes as long as the reward on held-out prompts rises. Early stopping is a setting of the run:
//!    `checkpoint.metric = "eval/pass@1"` with `eval.every = 1` and `checkpoint.patience = 1` stops at the first step without
//!    improvement, and with `checkpoint.keep_best = 1` and `checkpoint.use_best = true` the best checkpoint is the result. Off by
//!    default: without `restart` a step is one small update, whose effect is within the noise of an evaluation.
//! 3. The first `per_prompt` right completions are kept in the order of samples, without duplicates.
//! 4. A step whose completions are all wrong makes no update.

use super::math::aggregate::{Aggregate, likelihood};
use super::metrics::{ENTROPY, REWARDED, metric};
use super::policy::reward_metrics;
use super::{Algorithm, Entry, Feed, Needs, Prepared, UpdatePlan, json, schema_for, settings};
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use std::collections::{BTreeMap, BTreeSet};

pub(super) const ENTRY: Entry = Entry {
    name: "rest_em",
    about: "rejection-sampling fine-tuning: SFT on the policy's own right completions",
    paper: "Singh et al., Beyond Human Data: Scaling Self-Training for Problem-Solving with Language Models, 2023, arXiv 2312.06585",
    source: include_str!("rest_em.rs"),
    feed: Feed::Rollouts,
    metrics: &[REWARDED, &[metric("kept", "Fraction of completions that are trained on."), ENTROPY]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(RestEm(settings("rest_em", values)?))),
};

with_defaults! {
struct Options {
    /// Minimum reward of a completion that is kept. [-1000000, 1000000]
    threshold: f64 = 1.0,
    /// Maximum number of kept completions per prompt. [1, 65536]
    per_prompt: usize = 10,
    /// Start every step from the stage's initial weights.
    restart: bool = false,
    /// Passes over the kept completions (epochs). [1, 1000]
    epochs: usize = 1,
    /// Updates per pass. [1, 1000000]
    minibatches: usize = 1,
    /// Aggregation of token losses.
    aggregate: Aggregate = Aggregate::Sequence,
    /// Fixed length of `aggregate = "constant"`. [1, 1048576]
    length: usize = 1024,
}
}

struct RestEm(Options);

impl Algorithm for RestEm {
    fn needs(&self) -> Needs {
        Needs { start: self.0.restart, constant_gradients: true, ..Default::default() }
    }

    fn prepare(&mut self, e: &mut Experience) -> Result<Prepared> {
        let mut metrics = Metrics::default();
        reward_metrics(e, &mut metrics);
        let mut rewards: BTreeMap<usize, f64> = BTreeMap::new();
        for s in &e.sequences {
            *rewards.entry(s.trajectory).or_default() += s.total_reward();
        }
        let mut kept: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        let mut seen: BTreeSet<Vec<u32>> = BTreeSet::new();
        let before = e.sequences.len() as f64;
        e.sequences.retain(|s| {
            let right = rewards[&s.trajectory] >= self.0.threshold;
            let own = kept.entry(s.group).or_default();
            let room = own.contains(&s.trajectory) || own.len() < self.0.per_prompt;
            let keep = right && room && seen.insert(s.ids.clone());
            if keep {
                own.insert(s.trajectory);
            }
            keep
        });
        metrics.add("kept", e.sequences.len() as f64 / before.max(1.0));
        for s in &mut e.sequences {
            s.advantage = vec![1.0; s.ids.len()];
        }
        Ok(metrics.into())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        likelihood(batch, stats, (self.0.aggregate, self.0.length), |_, _| 1.0)
    }

    fn updates(&self) -> UpdatePlan {
        let Options { epochs, minibatches, restart, .. } = self.0;
        UpdatePlan { epochs, minibatches, restart, ..Default::default() }
    }
}
