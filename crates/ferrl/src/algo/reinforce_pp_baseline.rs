//! REINFORCE++ with baseline (Hu et al., 2025, arXiv 2501.03262, the variant for several completions per prompt).
//!
//! Advantage: `R - mean of the group`, then `(A - mean) / std` over all tokens of the whole rollout. Loss: the token mean
//! of PPO's clipped surrogate plus `β k2(logp, ref)`.
//!
//! Differences from the paper:
//! 1. `std` is the sample standard deviation (n - 1), plus 1e-8.
//! 2. The KL weight is 0.001; 0 drops the reference model.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "reinforce_pp_baseline",
    about: "REINFORCE++ with the mean of the group as baseline and the KL in the loss",
    paper: "Hu et al., REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization, 2025, arXiv 2501.03262",
    source: include_str!("reinforce_pp_baseline.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("reinforce_pp_baseline", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.001, place: KlPlacement::Loss, estimator: Estimator::K2, ..Default::default() };
    let advantage = Advantage { normalise: Normalise::Whiten, ..Default::default() };
    Policy { kl, advantage, ..Default::default() }
}
