//! Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290).
//!
//! Loss: `-log σ(β (Δ_chosen - Δ_rejected))`, the mean over pairs, with `Δ = Σ_t logp_t - ref_logp_t` over the answer.
//!
//! Differences from common implementations:
//! 1. Divided by the pairs of the whole update.

use super::math::{log_sigmoid, sigmoid};
use super::{Algorithm, Entry, Needs, Wants, settings};
use crate::experience::{Experience, Loss, Metrics, MicroBatch, Sequence};
use ferrl_engine::Result;
use ferrl_engine::train::{ByRole, Role, Stats};
use serde::{Deserialize, Serialize};
use serde_json::json;

pub(super) const ENTRY: Entry = Entry {
    name: "dpo",
    about: "direct preference optimisation: prefer the chosen answer, measured against a reference",
    paper: "Rafailov et al., Direct Preference Optimization, 2023, arXiv 2305.18290",
    wants: Wants::Pairs,
    defaults: || json!(Options::default()),
    build: |values| Ok(Box::new(Dpo(settings("dpo", values)?))),
};

#[derive(Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// How strongly the policy is held to the reference.
    beta: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { beta: 0.1 }
    }
}

struct Dpo(Options);

impl Algorithm for Dpo {
    fn needs(&self) -> Needs {
        Needs { reference: true, ..Default::default() }
    }

    fn prepare(&mut self, _experience: &mut Experience) -> Result<Metrics> {
        Ok(Metrics::default())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let beta = self.0.beta;
        let mut grads = Loss::zeros(batch.len());
        let (mut value, mut metrics) = (0.0, Metrics::default());
        let logp =
            |row: usize, s: &Sequence| -> f64 { s.actions().map(|i| stats.logp[row + i] as f64).sum() };
        for [(row_c, chosen), (row_r, rejected)] in batch.pairs() {
            let (logp_c, logp_r) = (logp(row_c, chosen), logp(row_r, rejected));
            let reward_c = beta * (logp_c - chosen.sum(&chosen.ref_logp));
            let reward_r = beta * (logp_r - rejected.sum(&rejected.ref_logp));
            let margin = reward_c - reward_r;
            let w = chosen.weight as f64 / batch.counts.pairs;
            value -= w * log_sigmoid(margin);
            let slope = -w * beta * sigmoid(-margin);
            chosen.actions().for_each(|i| grads.logp[row_c + i] = slope as f32);
            rejected.actions().for_each(|i| grads.logp[row_r + i] = -slope as f32);
            metrics.add("rewards/chosen", reward_c);
            metrics.add("rewards/rejected", reward_r);
            metrics.add("rewards/margins", margin);
            metrics.add("rewards/accuracies", f64::from(margin > 0.0));
            metrics.add("logps/chosen", logp_c);
            metrics.add("logps/rejected", logp_r);
        }
        Loss::policy(value, grads, metrics)
    }
}
