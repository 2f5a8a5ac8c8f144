//! DAPO, decoupled clip and dynamic sampling (Yu et al., 2025, arXiv 2503.14476).
//!
//! GRPO with four changes: the upper clip range is wider than the lower (0.28 and 0.2); the loss is the mean over all tokens; groups
//! with equal rewards are replaced by groups of further prompts (dynamic sampling); completions in the last fifth of the length
//! limit get a penalty that grows linearly to 1. No KL.
//!
//! Differences from the paper:
//! 1. A step draws further prompts at most `refills` times and uses fewer groups if that is not enough; groups are used in the
//!    order of the prompts, not in the order in which they finish.
//! 2. Groups are filtered by the task's reward alone, before the length penalty, as the authors' code filters by accuracy.
//! 3. `std` is the sample standard deviation (n - 1), plus 1e-4.

use super::policy::{Advantage, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "dapo",
    about: "GRPO with a higher upper clip range, token mean, dynamic sampling and a soft overlong penalty",
    paper: "Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025, arXiv 2503.14476",
    source: include_str!("dapo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("dapo", defaults(), values),
};

fn defaults() -> Policy {
    let advantage = Advantage { divide_by_std: true, ..Default::default() };
    // The paper's limit; a recipe may set another.
    let (length, overlong) = (20_480, 0.2);
    let sampling = Policy { filter_equal: true, refills: 5, ..Default::default() };
    Policy { clip_high: 0.28, length, overlong, advantage, ..sampling }
}
