//! Implicit process rewards (Yuan et al., 2024, arXiv 2412.01981): an outcome reward model whose reward is a log-ratio, and which
//! therefore rewards every step without labels of steps.
//!
//! `r(y) = β Σ_t (logp_t - ref_logp_t)`. Loss, the mean over completions: the cross-entropy
//! `-[l log σ(r(y)) + (1 - l) log(1 - σ(r(y)))]` with `l` = 1 for a right completion and 0 for a wrong one. With
//! `q_t = β Σ_(i<=t) (logp_i - ref_logp_i)` the reward of a step is the difference of `q` at its end and its start; the
//! rewards of all steps add up to `r(y)`. `[[reward]]` with `options = { kind = "implicit" }` uses the trained model.
//!
//! Differences from the paper:
//! 1. The paper's other losses are algorithms of their own here: `dpo` on pairs and `kto` on labels train the same log-ratio.
//! 2. The authors' text drops the minus of the cross-entropy; this is the loss that their code minimises.

use super::math::{log_sigmoid, sigmoid};
use super::metrics::metric;
use super::preference::completion_logp;
use super::{Algorithm, Entry, Feed, Needs, json, schema_for, settings};
use crate::experience::{ByRole, Evidence, Loss, Metrics, MicroBatch, Role};
use ferrl_engine::train::Stats;

pub(super) const ENTRY: Entry = Entry {
    name: "implicit_prm",
    about: "implicit process rewards: a log-ratio trained on outcomes that rewards every step",
    paper: "Yuan et al., Free Process Rewards without Process Labels, 2024, arXiv 2412.01981",
    source: include_str!("implicit_prm.rs"),
    feed: Feed::Labelled,
    metrics: &[&[
        metric("rewards/chosen", "Reward of right completions, beta times their log-ratio."),
        metric("rewards/rejected", "The same of wrong ones."),
        metric("rewards/accuracies", "Fraction of completions whose reward has the sign of their label."),
    ]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(ImplicitPrm(settings("implicit_prm", values)?))),
};

with_defaults! {
struct Options {
    /// Scale of the log-ratio in the reward. (0, 1000]
    beta: f64 = 0.05,
}
}

struct ImplicitPrm(Options);

impl Algorithm for ImplicitPrm {
    fn needs(&self) -> Needs {
        Needs { reference: true, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let mut grads = Loss::zeros(batch.len());
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for (row, s) in batch.rows() {
            let right = s.kind == Evidence::Labelled(true);
            let side = if right { 1.0 } else { -1.0 };
            let reward = self.0.beta * (completion_logp(stats, row, s) - s.sum(&s.ref_logp));
            let w = s.weight as f64 / batch.counts.sequences;
            value -= w * log_sigmoid(side * reward);
            let slope = -w * side * self.0.beta * sigmoid(-side * reward);
            s.actions().for_each(|i| grads.logp[row + i] = slope as f32);
            metrics.add(if right { "rewards/chosen" } else { "rewards/rejected" }, reward);
            metrics.add("rewards/accuracies", f64::from((reward > 0.0) == right));
        }
        Loss::policy(value, grads, metrics)
    }
}
