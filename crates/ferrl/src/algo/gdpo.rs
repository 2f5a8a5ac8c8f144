//! GDPO, group reward-decoupled normalisation policy optimisation (Liu et al., 2026, arXiv 2601.05242).
//!
//! For several rewards: each is normalised by itself within the group, `A_k = (r_k - mean) / (std + 1e-4)`; their weighted
//! sum is normalised over the completions of the rollout, `(A - mean) / (std + 1e-4)`. The loss is GRPO's. Rewards of small variance
//! keep their weight, and combinations of rewards that GRPO would map to one advantage remain distinct.
//!
//! Differences from the paper:
//! 1. The rewards are the recipe's `[[reward]]` sources, with their weights; components that a source reports in addition are only
//!    logged.
//! 2. `filter_equal` drops a group only if each of the rewards is equal for all its completions.
//! 3. `std` is the sample standard deviation (n - 1). The normalisation over the rollout counts completions, as in TRL, not tokens.
//! 4. No KL by default.

use super::math::advantage::Normalise;
use super::math::aggregate::Aggregate;
use super::policy::{Advantage, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "gdpo",
    about: "GRPO for several rewards, each normalised separately",
    paper: "Liu et al., GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization, 2026, arXiv 2601.05242",
    source: include_str!("gdpo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("gdpo", defaults(), values),
};

fn defaults() -> Policy {
    let normalise = Normalise::Answers;
    let advantage = Advantage { divide_by_std: true, parts: true, normalise, ..Default::default() };
    Policy { aggregate: Aggregate::Sequence, advantage, ..Default::default() }
}
