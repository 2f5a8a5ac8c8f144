//! Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv 2402.01306): completions that are good or bad by themselves.
//!
//! Loss, the mean over completions: `λ_D (1 - σ(β (Δ - z)))` for a good one and `λ_U (1 - σ(β (z - Δ)))` for a bad one, with
//! `Δ = Σ_t logp_t - ref_logp_t`. The reference point `z = max(0, mean Δ)` is taken over mismatched pairs, each prompt
//! with the completion to the prompt before it in the batch, and no gradient flows through it.
//!
//! Differences from the paper and from TRL:
//! 1. The reference point is that of the whole update; TRL's is that of each micro-batch.
//! 2. An update of a single completion has no mismatched pair: `train.batch = 1` is refused, and a last batch of one has `z = 0`.
//! 3. The loss is a mean over good and bad completions together: `desirable_weight` times the number of good ones should be
//!    1 to 4/3 of `undesirable_weight` times that of bad ones.

use super::math::sigmoid;
use super::metrics::metric;
use super::preference::completion_logp;
use super::{Algorithm, Entry, Feed, Needs, Prepared, schema_for, settings};
use crate::experience::{ByRole, Evidence, Experience, Loss, Metrics, MicroBatch, Role};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use serde_json::{Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "kto",
    about: "Kahneman-Tversky optimisation: completions labelled good or bad, no pairs needed",
    paper: "Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024, arXiv 2402.01306",
    source: include_str!("kto.rs"),
    feed: Feed::Labelled,
    metrics: &[&[
        metric("kl", "The reference point z of the update."),
        metric("rewards/chosen", "beta times the gain over the reference, of good completions."),
        metric("rewards/rejected", "The same of bad ones."),
        metric("logps/chosen", "Log-probability of a good completion, summed over its tokens."),
        metric("logps/rejected", "The same of a bad one."),
    ]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build,
};

with_defaults! {
struct Options {
    /// Strength of the regularisation towards the reference. (0, 1000]
    beta: f64 = 0.1,
    /// Weight of good completions. [0, 1000]
    desirable_weight: f64 = 1.0,
    /// Weight of bad completions. [0, 1000]
    undesirable_weight: f64 = 1.0,
}
}

fn build(values: Value) -> Result<Box<dyn Algorithm>> {
    let options: Options = settings("kto", values)?;
    Ok(Box::new(Kto { options, reference_point: 0.0 }))
}

struct Kto {
    options: Options,
    /// The reference point of the current update.
    reference_point: f64,
}

impl Algorithm for Kto {
    fn needs(&self) -> Needs {
        Needs { reference: true, mismatched: true, batch: 2, ..Default::default() }
    }

    fn prepare(&mut self, e: &mut Experience) -> Result<Prepared> {
        let gains: Vec<f64> = e
            .sequences
            .iter()
            .filter(|s| s.kind == Evidence::Probe)
            .map(|s| s.sum(&s.old_logp) - s.sum(&s.ref_logp))
            .collect();
        self.reference_point = (gains.iter().sum::<f64>() / gains.len().max(1) as f64).max(0.0);
        e.sequences.retain(|s| s.kind != Evidence::Probe);
        let mut metrics = Metrics::default();
        metrics.add("kl", self.reference_point);
        Ok(metrics.into())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let o = &self.options;
        let mut grads = Loss::zeros(batch.len());
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for (row, s) in batch.rows() {
            let good = s.kind == Evidence::Labelled(true);
            let logp = completion_logp(stats, row, s);
            let gain = logp - s.sum(&s.ref_logp);
            let (side, weight, name) = if good {
                (1.0, o.desirable_weight, "chosen")
            } else {
                (-1.0, o.undesirable_weight, "rejected")
            };
            let w = weight * s.weight as f64 / batch.counts.sequences;
            let liked = sigmoid(side * o.beta * (gain - self.reference_point));
            value += w * (1.0 - liked);
            let slope = -w * side * o.beta * liked * (1.0 - liked);
            s.actions().for_each(|i| grads.logp[row + i] = slope as f32);
            metrics.add(&format!("rewards/{name}"), o.beta * gain);
            metrics.add(&format!("logps/{name}"), logp);
        }
        Loss::policy(value, grads, metrics)
    }
}
