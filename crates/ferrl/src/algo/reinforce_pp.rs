//! REINFORCE++ (Hu et al., 2025, arXiv 2501.03262).
//!
//! Advantage of token t: `R - β Σ_{i >= t} k1_i`, then `(A - mean) / std` over all tokens of the whole rollout. Loss: the
//! token mean of PPO's clipped surrogate. No critic and no groups: one completion per prompt is enough.
//!
//! Differences from the paper:
//! 1. `std` is the sample standard deviation (n - 1), plus 1e-8.
//! 2. The KL weight is 0.01, the value of the authors' implementation; 0 drops the reference model.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Baseline, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "reinforce_pp",
    about: "REINFORCE++: advantages normalised over all tokens of the rollout, KL in the reward, no critic",
    paper: "Hu et al., REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization, 2025, arXiv 2501.03262",
    source: include_str!("reinforce_pp.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("reinforce_pp", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.01, place: KlPlacement::Reward, estimator: Estimator::K1, ..Default::default() };
    let (baseline, normalise) = (Baseline::None, Normalise::Whiten);
    let advantage = Advantage { baseline, normalise, to_go: true, ..Default::default() };
    Policy { kl, advantage, ..Default::default() }
}
