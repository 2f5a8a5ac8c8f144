//! VinePPO (Kazemnejad et al., 2024, arXiv 2410.01679): PPO with Monte-Carlo values from continuations instead of a critic.
//!
//! A completion is split into steps. From the prompt and from the end of each step but the last, the policy samples `K`
//! continuations (`vine.samples`); the value of that state is their mean reward, `V(s_i) = mean_k R(s_i, y_k)`, and that of
//! the end is 0. The advantage of step `i` is `A_i = r_i + V(s_(i+1)) - V(s_i)`, where only the last step has a reward, the
//! completion's; every token of a step has the step's advantage. Advantages are whitened over the rollout. Loss: the token
//! mean of `-min(ρ A, clip(ρ) A)`, plus `β` times the mean over completions of the sum of `clip(k3, 0, 10)`.
//!
//! States after the first `vine.max_steps` are not estimated but back-filled from the end, `V(s_i) = r_i + V(s_(i+1))`;
//! equal prefixes of a prompt are one state. `vine.interval` adds continuations until the confidence interval of a value is narrow
//! enough. In an episode with several turns every turn is a step, and a continuation plays on in a fresh environment in which the
//! earlier actions are replayed.
//!
//! Differences from the paper and its code:
//! 1. A state is a prefix of sampled tokens, not of text that is tokenized again; a token across the border of two steps belongs
//!    to the step of its first character, and so does the state after it.
//! 2. Prefix and continuation together have at most `rollout.max_new_tokens` tokens; a truncated continuation gets the recipe's
//!    reward of truncated completions, instead of a fixed penalty.
//! 3. One pass over each rollout by default; `epochs = 2`, `minibatches = 8` and `skip_ratio = 10` are the paper's.
//!    Advantages are whitened over the rollout, not over each minibatch.
//! 4. Completions that cannot be split, or with a state without a value (a reward failed), are left out of the update.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Baseline, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, json, metrics, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "vineppo",
    about: "PPO with Monte-Carlo values of steps in place of a critic",
    paper: "Kazemnejad et al., VinePPO: Unlocking RL Potential For LLM Reasoning Through Refined Credit Assignment, 2024, \
            arXiv 2410.01679",
    source: include_str!("vineppo.rs"),
    feed: Feed::Rollouts,
    metrics: metrics::POLICY,
    defaults: || json!(defaults()),
    schema: || schema_for!(Policy),
    build: |values| method("vineppo", defaults(), values),
};

fn defaults() -> Policy {
    let kl = Kl {
        coef: 1e-4,
        place: KlPlacement::Loss,
        estimator: Estimator::K3,
        clip: Some(10.0),
        sum: true,
        ..Default::default()
    };
    let advantage =
        Advantage { baseline: Baseline::Steps, normalise: Normalise::Whiten, ..Default::default() };
    Policy { kl, advantage, ..Default::default() }
}
