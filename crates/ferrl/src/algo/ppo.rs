//! Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347) with a critic, as used for language models by
//! Ouyang et al. (2022, arXiv 2203.02155).
//!
//! Reward per token: `-β k1(old, ref)`, plus the task's reward at the last token. Advantages by generalised advantage
//! estimation, whitened over all action tokens. Loss: the token mean of `-min(ρ A, clip(ρ) A)`, and for the critic the
//! token mean of `max((V - R)^2, (clip(V, V_old ± c) - R)^2)`.
//!
//! Differences from the paper:
//! 1. γ = λ = 1 by default: the task's reward comes at the end.
//! 2. The critic's square is not halved unless `critic.half = true`.
//! 3. One pass over each rollout by default; `epochs` and `minibatches` give the original's several.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Baseline, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "ppo",
    about: "proximal policy optimisation with a critic",
    paper: "Schulman et al., Proximal Policy Optimization Algorithms, 2017, arXiv 1707.06347",
    source: include_str!("ppo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("ppo", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.05, place: KlPlacement::Reward, estimator: Estimator::K1, ..Default::default() };
    let advantage =
        Advantage { baseline: Baseline::Critic, normalise: Normalise::Whiten, ..Default::default() };
    Policy { kl, advantage, ..Default::default() }
}
