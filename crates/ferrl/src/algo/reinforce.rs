//! REINFORCE (Williams, 1992, Machine Learning 8, doi 10.1007/BF00992696).
//!
//! Loss: the token mean of `-(R - b) logp`, with `R` the return of the whole completion and `b` a baseline.
//!
//! Differences from the paper:
//! 1. The baseline is the mean return of the rollout; `advantage.baseline` may be `moving` (an average over earlier
//!    rollouts, the paper's reinforcement comparison), `none`, or one of the group's. The rollout's mean contains the
//!    completion itself, which only scales the gradient by `1 - 1 / n` for `n` completions.
//! 2. `aggregate = "token"` divides by tokens; `constant` sums over a completion's tokens as the paper, up to a fixed factor.

use super::math::surrogate::Surrogate;
use super::policy::{Advantage, Baseline, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "reinforce",
    about: "the plain policy gradient, with the mean reward of the rollout as baseline",
    paper: "Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning, 1992, doi 10.1007/BF00992696",
    source: include_str!("reinforce.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("reinforce", defaults(), values),
};

fn defaults() -> Policy {
    let advantage = Advantage { baseline: Baseline::Batch, ..Default::default() };
    Policy { surrogate: Surrogate::Logp, advantage, ..Default::default() }
}
