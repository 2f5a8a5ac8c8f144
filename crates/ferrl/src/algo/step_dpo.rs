//! Step-DPO (Lai et al., 2024, arXiv 2406.18629): preference on one step of a reasoning chain.
//!
//! The loss of DPO where the prompt is `x, s_1 .. s_(k-1)`, all right so far, and the two completions are only step `k`: one
//! right, the other the first wrong one. Only the tokens of that step are trained.
//!
//! Data: columns `prompt`, `initial_reason_steps` (the steps before, may be empty), `chosen` and `rejected`, the names of
//! the authors' data set. `ferrl steps` makes such rows from a model's own mistakes.
//!
//! Differences from the paper:
//! 1. β = 0.5, as in the authors' script for 7B models (0.4 in that for 72B).
//! 2. No end-of-sequence token is added after a step.
//! 3. `label_smoothing`, `sft_coef` and `positive` are those of DPO.

use super::{Entry, Feed, dpo, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "step_dpo",
    about: "DPO on single reasoning steps: the first wrong step against a right one",
    paper: "Lai et al., Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs, 2024, arXiv 2406.18629",
    source: include_str!("step_dpo.rs"),
    feed: Feed::StepPairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(defaults()),
    schema: || schema_for!(dpo::Options),
    build: |values| dpo::build("step_dpo", defaults(), values),
};

fn defaults() -> dpo::Options {
    dpo::Options { beta: 0.5, ..Default::default() }
}
