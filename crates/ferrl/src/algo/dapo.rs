//! DAPO, decoupled clip and dynamic sampling (Yu et al., 2025, arXiv 2503.14476).
//!
//! GRPO with four changes: the upper clip bound is wider (0.28 over 0.2 below); the loss is the mean over all tokens; groups
//! whose completions all got the same reward are replaced by the next prompts; a completion in the last fifth of the length limit
//! loses up to 1 of its reward, growing evenly. No KL.
//!
//! Differences from the paper:
//! 1. A step asks for more prompts at most `refills` times and learns from fewer groups if that is not enough; the groups
//!    it takes are the first in the order of the prompts, whatever finished first.
//! 2. Groups are judged by the task's reward alone, before the length is punished, as the authors' code judges accuracy.
//! 3. `std` is the sample standard deviation (n - 1), plus 1e-4.

use super::policy::{Advantage, Policy, method};
use super::{Entry, Feed, metrics};
use schemars::schema_for;
use serde_json::json;

pub(super) const ENTRY: Entry = Entry {
    name: "dapo",
    about: "GRPO with a wider upper clip, token mean, dynamic sampling and a soft length limit",
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
