//! Group relative policy optimisation (Shao et al., 2024, arXiv 2402.03300).
//!
//! For the completions to one prompt, `A = (r - mean) / (std + 1e-4)`, the same for all tokens of a completion. Loss: the mean
//! over completions of the mean over tokens of `-min(ρ A, clip(ρ) A) + β k3(logp, ref)`.
//!
//! Differences from the paper:
//! 1. `std` is the sample standard deviation (n - 1), as in TRL and RL2.
//! 2. The KL weight is 0.04 as in the paper; 0 drops the reference model.
//! 3. `kl.unbiased = true` multiplies the KL estimate by the ratio, as TRL does by default: k3's own gradient is not that of the
//!    reverse KL (DeepSeek-V3.2). Off is the paper's.
//! 4. TRL's default loss is the mean over all tokens, `aggregate = "token"` (its `loss_type = "dapo"`); ours is the paper's.
//! 5. With `mask_truncated` the means are over the other completions, as in verl; TRL divides by the number of all.

use super::math::aggregate::Aggregate;
use super::math::kl::Estimator;
use super::policy::{Advantage, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "grpo",
    about: "group relative policy optimisation: advantages relative to the completions of the same prompt",
    paper: "Shao et al., DeepSeekMath, 2024, arXiv 2402.03300",
    source: include_str!("grpo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("grpo", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl { coef: 0.04, place: KlPlacement::Loss, estimator: Estimator::K3, ..Default::default() };
    let advantage = Advantage { divide_by_std: true, ..Default::default() };
    Policy { aggregate: Aggregate::Sequence, kl, advantage, ..Default::default() }
}
