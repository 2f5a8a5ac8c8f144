//! Bradley-Terry reward model (Bradley & Terry, 1952; Stiennon et al., 2020, arXiv 2009.01325).
//!
//! Loss, the mean over pairs: `-log σ(r_chosen - r_rejected - m) + c (r_chosen + r_rejected)^2`; `r` is the score at the
//! last token. `m` is the row's `margin` (Touvron et al., 2023, arXiv 2307.09288), 0 without such a column. `c` is `centre`, which
//! regularises the mean score towards zero (Eisenstein et al., 2023, arXiv 2312.09244). The first `head_only_steps` train only the
//! score head, so that the gradients of a random head do not damage the trunk; then the optimizer state is reset.
//!
//! Differences from common implementations:
//! 1. Divided by the pairs of the whole update.
//! 2. Centring is off by default; TRL recommends 0.01.

use super::math::{log_sigmoid, sigmoid};
use super::metrics::metric;
use super::{Algorithm, Entry, Feed, Needs, UpdatePlan, json, settings};
use crate::experience::{ByRole, Loss, Metrics, MicroBatch, Role};
use ferrl_engine::train::Stats;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "rm",
    about: "reward model: score the chosen completion above the rejected one",
    paper: "Stiennon et al., Learning to summarize from human feedback, 2020, arXiv 2009.01325",
    source: include_str!("reward_model.rs"),
    feed: Feed::Pairs,
    metrics: &[&[
        metric("rewards/chosen", "Score of the chosen completion."),
        metric("rewards/rejected", "Score of the rejected one."),
        metric("rewards/margins", "The difference of the two."),
        metric("rewards/accuracies", "Fraction of pairs in which the chosen completion has the larger one."),
    ]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(BradleyTerry(settings("rm", values)?))),
};

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Coefficient of the regularisation of scores towards zero. [0, 1000]
    centre: f64,
    /// Initial steps that train only the score head. [0, 1000000000]
    head_only_steps: u64,
}

struct BradleyTerry(Options);

impl Algorithm for BradleyTerry {
    fn needs(&self) -> Needs {
        Needs { score: true, ..Default::default() }
    }

    fn updates(&self) -> UpdatePlan {
        UpdatePlan { head_only_steps: self.0.head_only_steps, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let mut grads = Loss::zeros(batch.len());
        grads.value = vec![0.0; batch.len()];
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for [(row_c, chosen), (row_r, rejected)] in batch.pairs() {
            let (c, r) = (row_c + chosen.ids.len() - 1, row_r + rejected.ids.len() - 1);
            let (good, bad) = (stats.value[c] as f64, stats.value[r] as f64);
            let margin = good - bad;
            let lead = margin - chosen.margin as f64;
            let w = chosen.weight as f64 / batch.counts.pairs;
            let sum = good + bad;
            value += w * (self.0.centre * sum * sum - log_sigmoid(lead));
            let (slope, pull) = (-w * sigmoid(-lead), 2.0 * w * self.0.centre * sum);
            grads.value[c] = (pull + slope) as f32;
            grads.value[r] = (pull - slope) as f32;
            metrics.add("rewards/accuracies", f64::from(margin > 0.0));
            metrics.add("rewards/margins", margin);
            metrics.add("rewards/chosen", good);
            metrics.add("rewards/rejected", bad);
        }
        Loss::policy(value, grads, metrics)
    }
}
