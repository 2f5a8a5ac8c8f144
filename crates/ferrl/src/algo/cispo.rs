//! CISPO, clipped importance-sampling policy optimisation (MiniMax, 2025, arXiv 2506.13585).
//!
//! Gradient of a token: `-min(ρ, 1 + ε) A ∇logp` with a detached weight; the mean over all tokens. Unlike in PPO every token keeps
//! a gradient, whose weight is bounded.
//!
//! Differences from the paper:
//! 1. The paper writes the loss as `-sg(min(ρ, 1 + ε)) A logp`. Ours is the function of `logp` that has this gradient:
//!    `-ρ A` up to the bound, `-(1 + ε)(1 + log(ρ / (1 + ε))) A` beyond. The numbers reported as loss differ, training
//!    does not.
//! 2. The bound is `clip_high = 4`, that is ratios up to 5; TRL's `epsilon_high` is our `1 + clip_high`. There is no lower bound:
//!    the paper's is too low to have an effect.
//! 3. `std` is the sample standard deviation (n - 1), plus 1e-4.

use super::math::surrogate::Surrogate;
use super::policy::{Advantage, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "cispo",
    about: "GRPO with a bounded importance weight instead of a clip: no token loses its gradient",
    paper: "MiniMax, MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, 2025, arXiv 2506.13585",
    source: include_str!("cispo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("cispo", defaults(), values),
};

fn defaults() -> Policy {
    let advantage = Advantage { divide_by_std: true, ..Default::default() };
    Policy { surrogate: Surrogate::Truncate, clip_high: 4.0, advantage, ..Default::default() }
}
