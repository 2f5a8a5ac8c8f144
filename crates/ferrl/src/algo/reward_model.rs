//! Bradley-Terry reward model (Bradley & Terry, 1952; Stiennon et al., 2020, arXiv 2009.01325).
//!
//! Loss: `-log σ(r_chosen - r_rejected)`, the mean over pairs; `r` is the score at the last token.
//!
//! Differences from common implementations:
//! 1. Divided by the pairs of the whole update.

use super::math::{log_sigmoid, sigmoid};
use super::{Algorithm, Entry, Needs, Wants, settings};
use crate::experience::{Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::Result;
use ferrl_engine::train::{ByRole, Role, Stats};
use serde::{Deserialize, Serialize};
use serde_json::json;

pub(super) const ENTRY: Entry = Entry {
    name: "rm",
    about: "reward model: score the chosen answer above the rejected one",
    paper: "Stiennon et al., Learning to summarize from human feedback, 2020, arXiv 2009.01325",
    wants: Wants::Pairs,
    defaults: || json!(Options::default()),
    build: |values| settings::<Options>("rm", values).map(|_| Box::new(RewardModel) as Box<dyn Algorithm>),
};

/// It has none, and says so of any that is given.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {}

struct RewardModel;

impl Algorithm for RewardModel {
    fn needs(&self) -> Needs {
        Needs { score: true, ..Default::default() }
    }

    fn prepare(&mut self, _experience: &mut Experience) -> Result<Metrics> {
        Ok(Metrics::default())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let mut grads = Loss::zeros(batch.len());
        grads.value = vec![0.0; batch.len()];
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for [(row_c, chosen), (row_r, rejected)] in batch.pairs() {
            let (c, r) = (row_c + chosen.ids.len() - 1, row_r + rejected.ids.len() - 1);
            let margin = (stats.value[c] - stats.value[r]) as f64;
            let w = chosen.weight as f64 / batch.counts.pairs;
            value -= w * log_sigmoid(margin);
            let slope = -w * sigmoid(-margin);
            grads.value[c] = slope as f32;
            grads.value[r] = -slope as f32;
            metrics.add("rewards/accuracies", f64::from(margin > 0.0));
            metrics.add("rewards/margins", margin);
            metrics.add("rewards/chosen", stats.value[c] as f64);
            metrics.add("rewards/rejected", stats.value[r] as f64);
        }
        Loss::policy(value, grads, metrics)
    }
}
