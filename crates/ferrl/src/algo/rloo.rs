//! RLOO, REINFORCE leave-one-out (Kool et al., 2019; for language models Ahmadian et al., 2024, arXiv 2402.14740).
//!
//! `A_i = R_i - mean of the other completions' R`, with `R` the reward minus `β` times the completion's summed `k1(old, ref)`. A
//! completion is one action: loss is the mean over completions of `-min(ρ A, clip(ρ) A)` with `ρ` the ratio of whole completions.
//!
//! Differences from the paper:
//! 1. The ratio and its clip, which are TRL's, have no effect with one update per rollout: there the gradient is the
//!    paper's `-A ∇ log π(completion)`.

use super::math::aggregate::Aggregate;
use super::math::kl::Estimator;
use super::math::surrogate::Ratio;
use super::policy::{Advantage, Baseline, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "rloo",
    about: "REINFORCE leave-one-out: the baseline is the mean of the other completions of the prompt",
    paper: "Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization, 2024, arXiv 2402.14740",
    source: include_str!("rloo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("rloo", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.05, place: KlPlacement::Reward, estimator: Estimator::K1, ..Default::default() };
    let advantage = Advantage { baseline: Baseline::Others, ..Default::default() };
    Policy { ratio: Ratio::Product, aggregate: Aggregate::Sequence, kl, advantage, ..Default::default() }
}
