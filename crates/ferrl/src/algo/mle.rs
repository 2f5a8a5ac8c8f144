//! Behaviour cloning weighted by advantage: maximum likelihood in which each completion counts for how good it was.
//!
//! Loss: `-Σ w_t A logp_t` with the weights `w_t` of supervised fine-tuning and one `A` for each completion. `A` is the row's
//! `advantage`, 1 where there is none (then this is plain imitation); or, for rows with `completions` and `rewards`, the
//! completion's reward, less the mean of its group with `baseline = "group"`.
//!
//! Differences from common implementations:
//! 1. A negative `A` makes a completion less probable without bound; `clip_negative` (on by default) takes such completions as 0.
//! 2. Divisors count all completions, also those of weight 0, and are those of the whole update.
//! 3. Advantage-weighted regression (Peng et al., 2019) weighs a completion by `exp(A / β)`; here its weight is `A` itself.

use super::math::advantage::centre;
use super::math::aggregate::{Aggregate, likelihood};
use super::metrics::{ENTROPY, metric};
use super::{Algorithm, Entry, Feed, Needs, Prepared, settings};
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

pub(super) const ENTRY: Entry = Entry {
    name: "mle",
    about: "behaviour cloning: imitate each completion as much as its reward or advantage says",
    paper: "Peng et al., Advantage-Weighted Regression, 2019, arXiv 1910.00177",
    source: include_str!("mle.rs"),
    feed: Feed::Weighted,
    metrics: &[&[
        metric("reward", "Reward of a completion, or its advantage where the rows have that."),
        metric("advantage", "What a completion counts for, after the baseline."),
        ENTROPY,
    ]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(Mle(settings("mle", values)?))),
};

with_defaults! {
struct Options {
    /// Aggregation of token losses.
    aggregate: Aggregate = Aggregate::Token,
    /// Fixed length of `aggregate = "constant"`. [1, 1048576]
    length: usize = 1024,
    /// What is subtracted from rewards.
    baseline: MleBaseline = MleBaseline::None,
    /// Divide by the standard deviation within the group.
    divide_by_std: bool = false,
    /// Take completions worse than the baseline as 0 instead of making them less probable.
    clip_negative: bool = true,
}
}

/// What a reward is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum MleBaseline {
    /// Nothing: the reward itself.
    None,
    /// The mean of the completions to the same prompt.
    Group,
}

struct Mle(Options);

impl Algorithm for Mle {
    fn needs(&self) -> Needs {
        Needs { constant_gradients: true, ..Default::default() }
    }

    fn prepare(&mut self, e: &mut Experience) -> Result<Prepared> {
        let mut metrics = Metrics::default();
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, s) in e.sequences.iter().enumerate() {
            groups.entry(s.group).or_default().push(i);
        }
        for members in groups.into_values() {
            let mut all: Vec<f64> = members.iter().map(|&i| e.sequences[i].total_reward()).collect();
            all.iter().for_each(|r| metrics.add("reward", *r));
            if self.0.baseline == MleBaseline::Group {
                all = centre(&all, self.0.divide_by_std);
            }
            for (&i, a) in members.iter().zip(&all) {
                let a = if self.0.clip_negative { a.max(0.0) } else { *a };
                let s = &mut e.sequences[i];
                s.advantage = vec![a as f32; s.ids.len()];
                metrics.add("advantage", a);
            }
        }
        Ok(metrics.into())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        likelihood(batch, stats, (self.0.aggregate, self.0.length), |s, i| s.advantage[i] as f64)
    }
}
