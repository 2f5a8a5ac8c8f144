//! On-policy distillation (Agarwal et al., 2023, arXiv 2306.13649, with the student's own completions and the reverse KL).
//!
//! The student samples completions, the teacher scores every token. `full = true`: the loss is the token mean of KL(student || teacher)
//! over the whole vocabulary, with its exact gradient. `full = false`: each sampled token has the advantage
//! `teacher_logp - old_logp`, and the loss is the token mean of the clipped surrogate (Lu, "On-Policy Distillation", 2025).
//!
//! Differences from the paper:
//! 1. Only the student's own completions (the paper's lambda = 1) and the reverse KL (its beta = 1).
//! 2. As in the paper, the gradient does not flow through sampling.
//! 3. `reward_coef` adds group-relative advantages of the recipe's rewards; at 0 rewards are only logged, and need not be given.
//! 4. Teacher and student have one tokenizer.

use super::math::aggregate::Aggregate;
use super::math::kl::Estimator;
use super::metrics::{REWARDED, SURROGATE, metric};
use super::policy::{
    Advantage, Baseline, Kl, KlPlacement, NOTHING_TO_COMPARE, Policy, merged, reward_metrics,
};
use super::{Algorithm, Entry, Feed, Needs, Prepared, UpdatePlan, schema_for, settings};
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch, Role};
use ferrl_engine::Result;
use ferrl_engine::train::Stats;
use serde_json::{Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "distill",
    about: "on-policy distillation: a teacher scores every token of the student's own completions",
    paper: "Agarwal et al., On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes, 2023, arXiv 2306.13649",
    source: include_str!("distill.rs"),
    feed: Feed::Rollouts,
    metrics: &[
        REWARDED,
        SURROGATE,
        &[
            metric(
                "kl",
                "KL to the teacher per token: over the vocabulary, or its estimate with `full = false`.",
            ),
            metric("objective/kl", "The estimate's sum over a completion, with `full = false`."),
        ],
    ],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build,
};

with_defaults! {
struct Options {
    /// Use the exact KL over the vocabulary, not the sampled tokens alone.
    full: bool = true,
    /// Weight of the advantages of the rewards; 0 learns from the teacher alone. [0, 1000]
    reward_coef: f64 = 0.0,
    /// Aggregation of token losses.
    aggregate: Aggregate = Aggregate::Token,
    /// Fixed length of `aggregate = "constant"`; `rollout.max_new_tokens` by default. [0, 1048576]
    length: usize = 0,
    /// Lower clip range: ratios are clipped below `1 - clip_low`. (0, 1]
    clip_low: f64 = 0.2,
    /// Upper clip range: ratios are clipped above `1 + clip_high`. (0, 1000]
    clip_high: f64 = 0.2,
    /// Passes over each rollout (PPO epochs). [1, 1000]
    epochs: usize = 1,
    /// Updates per pass. [1, 1000000]
    minibatches: usize = 1,
}
}

fn build(values: Value) -> Result<Box<dyn Algorithm>> {
    let o: Options = settings("distill", merged(json!(Options::default()), values))?;
    // The teacher is the reference, and the KL to it is the whole advantage.
    let coef = if o.full { 0.0 } else { 1.0 };
    let kl = Kl { coef, place: KlPlacement::Advantage, estimator: Estimator::K1, ..Default::default() };
    let baseline = if o.reward_coef > 0.0 { Baseline::Group } else { Baseline::None };
    let policy = Policy {
        aggregate: o.aggregate,
        length: o.length,
        clip_low: o.clip_low,
        clip_high: o.clip_high,
        epochs: o.epochs,
        minibatches: o.minibatches,
        kl,
        advantage: Advantage { baseline, ..Default::default() },
        ..Default::default()
    };
    policy.check()?;
    Ok(Box::new(Distill { full: o.full, reward_coef: o.reward_coef, policy }))
}

struct Distill {
    full: bool,
    reward_coef: f64,
    policy: Policy,
}

impl Algorithm for Distill {
    fn needs(&self) -> Needs {
        Needs {
            reference: !self.full,
            teacher: true,
            full_kl: self.full,
            rewardless: self.reward_coef == 0.0,
            group: if self.reward_coef > 0.0 { 2 } else { 1 },
            one_per_prompt: (self.reward_coef > 0.0).then_some(NOTHING_TO_COMPARE),
            ..Default::default()
        }
    }

    fn prepare(&mut self, experience: &mut Experience) -> Result<Prepared> {
        let mut metrics = Metrics::default();
        reward_metrics(experience, &mut metrics);
        for s in &mut experience.sequences {
            s.reward.iter_mut().for_each(|r| *r *= self.reward_coef as f32);
        }
        metrics.join(self.policy.prepare(experience, self.policy.kl.coef, &mut None));
        Ok(metrics.into())
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        let mut loss = self.policy.loss(batch, stats, 0.0);
        if !self.full {
            return loss;
        }
        let policy = stats.get(Role::Policy).expect("the policy was computed");
        let mut grads = loss.grads.get(Role::Policy).cloned().unwrap_or_default();
        grads.kl = vec![0.0; batch.len()];
        for (row, s) in batch.rows() {
            let w = self.policy.aggregate.weight(s, &batch.counts, self.policy.length);
            for i in s.actions() {
                let kl = policy.kl[row + i] as f64;
                loss.value += w * kl;
                grads.kl[row + i] = w as f32;
                loss.metrics.add("kl", kl);
            }
        }
        loss.grads.set(Role::Policy, grads);
        loss
    }

    fn updates(&self) -> UpdatePlan {
        self.policy.updates()
    }
}
