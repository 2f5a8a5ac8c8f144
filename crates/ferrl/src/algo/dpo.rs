//! Direct preference optimisation (Rafailov et al., 2023, arXiv 2305.18290).
//!
//! Loss, the mean over pairs: `-(1 - ε) log σ(β h) - ε log σ(-β h)` with `h = Δ_chosen - Δ_rejected`, where
//! `Δ = Σ_t logp_t - ref_logp_t` over the completion and ε is `label_smoothing`. `sft_coef` is the weight of the chosen completions'
//! negative log-likelihood, a mean over tokens (Pang et al., 2024, arXiv 2404.19733). `positive` is the penalty of DPO-Positive: see
//! `dpo_positive.rs`.
//!
//! Differences from the papers and from TRL:
//! 1. Divided by the pairs of the whole update, never of a micro-batch.
//! 2. Pang et al. divide the likelihood term by each completion's own length; ours is a mean over all chosen tokens of the
//!    update, as TRL's `sft` loss.
//! 3. TRL's `sigmoid` loss no longer reads its `label_smoothing`; ours is the original's conservative loss.

use super::math::{log_sigmoid, sigmoid};
use super::preference::{self, Pair, Term};
use super::{Algorithm, Entry, Feed, Needs, metrics, settings};
use crate::experience::{ByRole, Loss, MicroBatch};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "dpo",
    about: "direct preference optimisation: prefer the chosen completion, relative to a reference",
    paper: "Rafailov et al., Direct Preference Optimization, 2023, arXiv 2305.18290",
    source: include_str!("dpo.rs"),
    feed: Feed::Pairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| build("dpo", Options::default(), values),
};

/// Settings of DPO and of its variants, which differ only in their defaults.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Options {
    /// Strength of the regularisation towards the reference. (0, 1000]
    pub beta: f64,
    /// Label smoothing: assumed fraction of pairs with swapped labels. [0, 0.5)
    pub label_smoothing: f64,
    /// Weight of the SFT loss on the chosen completion. [0, 1000]
    pub sft_coef: f64,
    /// Weight of DPO-Positive's penalty on chosen completions that are less probable than under the reference. [0, 1000]
    pub positive: f64,
}

impl Default for Options {
    fn default() -> Self {
        Options { beta: 0.1, label_smoothing: 0.0, sft_coef: 0.0, positive: 0.0 }
    }
}

/// The method of that name: its defaults, overridden by the recipe.
pub(super) fn build(name: &'static str, defaults: Options, values: Value) -> Result<Box<dyn Algorithm>> {
    let mut merged = json!(defaults);
    if let (Some(merged), Value::Object(own)) = (merged.as_object_mut(), values) {
        merged.extend(own);
    }
    let o: Options = settings(name, merged)?;
    Ok(Box::new(Dpo(o)))
}

struct Dpo(Options);

impl Dpo {
    fn term(&self, p: &Pair) -> Term {
        let o = &self.0;
        let fallen = (-p.chosen.gain()).max(0.0);
        let z = o.beta * (p.chosen.gain() - p.rejected.gain() - o.positive * fallen);
        let e = o.label_smoothing;
        let loss = -(1.0 - e) * log_sigmoid(z) - e * log_sigmoid(-z);
        let slope = p.share * o.beta * (e * sigmoid(z) - (1.0 - e) * sigmoid(-z));
        let steeper = if fallen > 0.0 { 1.0 + o.positive } else { 1.0 };
        Term {
            loss: p.share * loss,
            chosen: slope * steeper,
            rejected: -slope,
            rewards: (o.beta * p.chosen.gain(), o.beta * p.rejected.gain()),
        }
        .add_sft(p, o.sft_coef)
    }
}

impl Algorithm for Dpo {
    fn needs(&self) -> Needs {
        Needs { reference: true, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        preference::loss(batch, stats, |p| self.term(p))
    }
}
