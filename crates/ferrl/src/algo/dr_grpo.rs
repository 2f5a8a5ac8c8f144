//! Dr. GRPO (Liu et al., "Understanding R1-Zero-Like Training", 2025, arXiv 2503.20783).
//!
//! GRPO without its two biases: `A = r - mean` (no division by the standard deviation, which favours prompts that are nearly
//! always or nearly never solved), and no division by a completion's own length (which favours long wrong completions).
//!
//! Differences from the paper:
//! 1. `aggregate = "token"` divides by the update's trained tokens, as RL2 does, and is the default; the paper's constant
//!    is `aggregate = "constant"`.

use super::policy::{Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "dr_grpo",
    about: "GRPO without division by standard deviation or length; the default",
    paper: "Liu et al., Understanding R1-Zero-Like Training: A Critical Perspective, 2025, arXiv 2503.20783",
    source: include_str!("dr_grpo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(Policy::default()),
    schema: || schema_for!(Policy),
    build: |values| method("dr_grpo", Policy::default(), values),
};
