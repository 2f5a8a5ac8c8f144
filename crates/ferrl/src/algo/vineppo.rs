//! VinePPO (Kazemnejad et al., 2024, arXiv 2410.01679): PPO whose values come from continuations instead of a critic.
//!
//! A completion is split into steps. From the prompt and from the end of each step but the last, the policy samples `K`
//! continuations (`vine.samples`); the value of that state is their mean reward, `V(s_i) = mean_k R(s_i, y_k)`, and that of
//! the end is 0. The advantage of step `i` is `A_i = r_i + V(s_(i+1)) - V(s_i)`, where only the last step has a reward, the
//! completion's; every token of a step has the step's advantage. Advantages are whitened over the rollout. Loss: the token
//! mean of `-min(ρ A, clip(ρ) A)`, plus `β` times the mean over completions of the sum of `clip(k3, 0, 10)`.
//!
//! States after the first `vine.max_steps` are not estimated but back-filled from the end, `V(s_i) = r_i + V(s_(i+1))`;
//! equal prefixes of a prompt are one state. `vine.interval` samples as many continuations as a confidence interval asks for.
//! Of an episode with several turns every turn is a step, and a continuation plays on in a fresh environment that the earlier
//! actions have brought to the same state.
//!
//! Differences from the paper and its code:
//! 1. A state is a prefix of sampled tokens, not of text that is tokenized again; a token on the border of two steps belongs
//!    to the one that holds its first character, and so does the state behind it.
//! 2. A continuation may be as long as what the completion had left (`rollout.max_new_tokens` for both together); a truncated
//!    one gets what the recipe gives truncated completions, instead of a fixed penalty.
//! 3. One pass over each rollout by default; `epochs = 2`, `minibatches = 8` and `skip_ratio = 10` are the paper's.
//!    Advantages are whitened over the rollout, not over each minibatch.
//! 4. A completion without a value for every state (a reward was lost) is left out, like one that cannot be split.

use super::math::advantage::Normalise;
use super::math::kl::Estimator;
use super::policy::{Advantage, Baseline, Kl, KlPlacement, Policy, method};
use super::{Entry, Feed, metrics};
use schemars::schema_for;
use serde_json::json;

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
