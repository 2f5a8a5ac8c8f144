//! Behaviour cloning weighted by advantage: maximum likelihood with a weight per completion.
//!
//! Loss: `-Σ w_t A logp_t` with the weights `w_t` of supervised fine-tuning and one `A` for each completion. `A` is the row's
//! `advantage`, 1 by default (plain SFT); or, for rows with `completions` and `rewards`, the completion's reward, minus the mean of
//! its group with `baseline = "group"`.
//!
//! Differences from common implementations:
//! 1. A negative `A` makes a completion less probable without bound; `clip_negative` (on by default) sets negative weights to 0.
//! 2. Divisors count all completions of the whole update, also those of weight 0.
//! 3. Advantage-weighted regression (Peng et al., 2019) weights a completion by `exp(A / β)`; here the weight is `A` itself.

use super::math::advantage::centre;
use super::math::aggregate::{Aggregate, likelihood};
use super::metrics::{ENTROPY, metric};
use super::{Algorithm, Entry, Feed, Needs, Prepared, json, settings};
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(super) const ENTRY: Entry = Entry {
    name: "mle",
    about: "weighted behaviour cloning: maximum likelihood weighted by reward or advantage",
    paper: "Peng et al., Advantage-Weighted Regression, 2019, arXiv 1910.00177",
    source: include_str!("mle.rs"),
    feed: Feed::Weighted,
    metrics: &[&[
        metric("reward", "Reward of a completion, or its advantage if the rows have that."),
        metric("advantage", "Weight of a completion, after the baseline."),
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
    /// Baseline that is subtracted from rewards.
    baseline: MleBaseline = MleBaseline::None,
    /// Divide by the standard deviation within the group.
    divide_by_std: bool = false,
    /// Set negative weights to 0, so that completions worse than the baseline are ignored.
    clip_negative: bool = true,
}
}

/// Baseline of a reward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum MleBaseline {
    /// No baseline.
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
