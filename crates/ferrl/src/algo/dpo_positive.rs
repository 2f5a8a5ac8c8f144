//! DPO-Positive (Pal et al., 2024, "Smaug", arXiv 2402.13228).
//!
//! The loss of DPO with `h = Δ_chosen - Δ_rejected - λ max(0, ref_logp(chosen) - logp(chosen))`: where two completions differ
//! in few tokens, DPO may make both less probable as long as the rejected one falls faster; the last term penalises that.
//! λ is `positive`.
//!
//! Differences from the paper:
//! 1. λ = 50 and β = 0.1, as VinePPO ran it on MATH (it took β = 0.3 on GSM8K, as the paper does).
//! 2. `label_smoothing` and `sft_coef` are those of DPO.

use super::{Entry, Feed, dpo, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "dpo_positive",
    about: "DPO with a penalty on chosen completions that are less probable than under the reference",
    paper: "Pal et al., Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive, 2024, arXiv 2402.13228",
    source: include_str!("dpo_positive.rs"),
    feed: Feed::Pairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(defaults()),
    schema: || schema_for!(dpo::Options),
    build: |values| dpo::build("dpo_positive", defaults(), values),
};

fn defaults() -> dpo::Options {
    dpo::Options { positive: 50.0, ..Default::default() }
}
