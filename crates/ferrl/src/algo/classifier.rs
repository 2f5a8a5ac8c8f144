//! Binary classifier with soft targets: the score at the last token is a logit.
//!
//! Loss, the mean over completions: `-t log σ(s) - (1 - t) log(1 - σ(s))`, where `t` in [0, 1] is the row's `target`: a label,
//! a fraction of graders, or a forecast (the forecaster of Band et al., 2024, arXiv 2404.00474; the verifier of whole solutions of
//! Cobbe et al., 2021, arXiv 2110.14168).
//!
//! Differences from common implementations:
//! 1. Divided by the completions of the whole update.
//! 2. `head_only_steps` as for the reward model.

use super::math::{log_sigmoid, sigmoid};
use super::metrics::metric;
use super::{Algorithm, Entry, Feed, Needs, Prepared, UpdatePlan, json, settings};
use crate::experience::{ByRole, Evidence, Experience, Loss, Metrics, MicroBatch, Role};
use ferrl_engine::train::Stats;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "classifier",
    about: "binary classifier: predict the probability that a completion is good",
    paper: "Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021, arXiv 2110.14168",
    source: include_str!("classifier.rs"),
    feed: Feed::Targets,
    metrics: &[&[
        metric("accuracy", "Fraction of completions whose probability is on the target's side of one half."),
        metric("brier", "Squared difference between probability and target."),
        metric("probability", "The predicted probability."),
    ]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(Classifier(settings("classifier", values)?))),
};

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Initial steps that train only the score head. [0, 1000000000]
    head_only_steps: u64,
}

struct Classifier(Options);

impl Algorithm for Classifier {
    fn needs(&self) -> Needs {
        Needs { score: true, ..Default::default() }
    }

    fn prepare(&mut self, e: &mut Experience) -> Result<Prepared> {
        match e.sequences.iter().find(|s| !matches!(s.kind, Evidence::Target(_))) {
            Some(s) => Err(Error::data(format!("a completion without a target: {:?}", s.kind))),
            None => Ok(Prepared::default()),
        }
    }

    fn updates(&self) -> UpdatePlan {
        UpdatePlan { head_only_steps: self.0.head_only_steps, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let stats = stats.get(Role::Policy).expect("the policy was computed");
        let mut grads = Loss::zeros(batch.len());
        grads.value = vec![0.0; batch.len()];
        let (mut value, mut metrics) = (0.0, Metrics::default());
        for (row, s) in batch.rows() {
            let Evidence::Target(target) = s.kind else { continue };
            let (at, target) = (row + s.ids.len() - 1, target as f64);
            let score = stats.value[at] as f64;
            let w = s.weight as f64 / batch.counts.sequences;
            value -= w * (target * log_sigmoid(score) + (1.0 - target) * log_sigmoid(-score));
            let p = sigmoid(score);
            grads.value[at] = (w * (p - target)) as f32;
            metrics.add("accuracy", f64::from((p > 0.5) == (target > 0.5)));
            metrics.add("brier", (p - target) * (p - target));
            metrics.add("probability", p);
        }
        Loss::policy(value, grads, metrics)
    }
}
