//! GSPO, group sequence policy optimisation (Zheng et al., 2025, arXiv 2507.18071).
//!
//! GRPO with one ratio for a completion, the geometric mean of its tokens' ratios: `s = exp(mean_t (logp_t - old_t))`. Loss:
//! the mean over completions of `-min(s A, clip(s) A)`. `s` varies far less than a token's ratio, so the clip range is narrow.
//!
//! Differences from the paper:
//! 1. GSPO-token, the variant with an advantage per token, is not a setting: its gradient is the same if all tokens of a completion
//!    have one advantage, as here.
//! 2. `std` is the sample standard deviation (n - 1), plus 1e-4.

use super::math::aggregate::Aggregate;
use super::math::surrogate::Ratio;
use super::policy::{Advantage, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "gspo",
    about: "GRPO with one probability ratio per completion",
    paper: "Zheng et al., Group Sequence Policy Optimization, 2025, arXiv 2507.18071",
    source: include_str!("gspo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("gspo", defaults(), values),
};

fn defaults() -> Policy {
    let advantage = Advantage { divide_by_std: true, ..Default::default() };
    Policy {
        ratio: Ratio::Mean,
        clip_low: 3e-4,
        clip_high: 4e-4,
        aggregate: Aggregate::Sequence,
        advantage,
        ..Default::default()
    }
}
