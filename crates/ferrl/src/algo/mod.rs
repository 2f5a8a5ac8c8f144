//! Algorithms: pure functions on numbers per token. None sees a tensor or a device.
//!
//! `prepare` runs once over all data of a step and fills columns: everything that a paper detaches from the gradient is a column.
//! `loss` gets one micro-batch and the current statistics and returns a sum of terms divided by counts over the whole update, with
//! its exact gradient. A new algorithm is one file and one line in [`ALGORITHMS`]; a finite-difference test checks all of them.

mod feed;
pub mod math;
pub mod metrics;
pub mod policy;
mod preference;

mod cispo;
mod classifier;
mod dapo;
mod distill;
mod dpo;
mod dpo_positive;
mod dr_grpo;
mod gdpo;
mod grpo;
mod gspo;
mod implicit_prm;
mod ipo;
mod kto;
mod mle;
mod orpo;
mod ppo;
mod reinforce;
mod reinforce_pp;
mod reinforce_pp_baseline;
mod rest_em;
mod reward_model;
mod rloo;
mod sft;
mod simpo;
mod step_dpo;
mod trpo;
mod vineppo;

pub use feed::Feed;

use crate::credit::Vine;
use crate::experience::{ByRole, Experience, Loss, Metrics, MicroBatch};
use crate::fixes::unknown;
use crate::recipe::read_settings;
use crate::refill::Refill;
use crate::trust_region::TrustRegion;
use ferrl_engine::train::Stats;
use ferrl_engine::{Error, Result};
use metrics::Metric;
use schemars::{JsonSchema, Schema, schema_for};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes.
    pub name: &'static str,
    pub about: &'static str,
    /// Authors, title, year, identifier.
    pub paper: &'static str,
    /// Its source file, whose module comment is the manual's text.
    pub source: &'static str,
    pub feed: Feed,
    /// Its metrics, in groups, without those of every run.
    pub metrics: &'static [&'static [Metric]],
    pub defaults: fn() -> Value,
    pub schema: fn() -> Schema,
    /// Builds it from its settings; unknown settings are an error.
    pub build: fn(Value) -> Result<Box<dyn Algorithm>>,
}

impl Entry {
    /// A recipe's settings without `name`; `length` defaults to the maximum completion length for sampling algorithms that use
    /// it.
    pub fn filled(&self, values: &Map<String, Value>, max_new_tokens: usize) -> Map<String, Value> {
        let mut values = values.clone();
        values.shift_remove("name");
        let defaults = (self.defaults)();
        let setting = |key: &str| values.get(key).unwrap_or(&defaults[key]);
        let measured =
            setting("aggregate") == "constant" || setting("overlong").as_f64().is_some_and(|o| o > 0.0);
        if measured && self.feed.sampled() && !values.contains_key("length") {
            values.insert("length".into(), max_new_tokens.into());
        }
        values
    }
}

pub const ALGORITHMS: &[&Entry] = &[
    &sft::ENTRY,
    &mle::ENTRY,
    &rest_em::ENTRY,
    &reward_model::ENTRY,
    &classifier::ENTRY,
    &dpo::ENTRY,
    &dpo_positive::ENTRY,
    &ipo::ENTRY,
    &kto::ENTRY,
    &implicit_prm::ENTRY,
    &orpo::ENTRY,
    &simpo::ENTRY,
    &step_dpo::ENTRY,
    &ppo::ENTRY,
    &vineppo::ENTRY,
    &grpo::ENTRY,
    &dr_grpo::ENTRY,
    &reinforce::ENTRY,
    &reinforce_pp::ENTRY,
    &reinforce_pp_baseline::ENTRY,
    &rloo::ENTRY,
    &dapo::ENTRY,
    &gspo::ENTRY,
    &cispo::ENTRY,
    &gdpo::ENTRY,
    &trpo::ENTRY,
    &distill::ENTRY,
];

/// The key of dynamic sampling.
pub const REFILLS: &str = "algo.refills";

pub const DEFAULT: &Entry = &dr_grpo::ENTRY;
/// The method of RL2's `adv.estimator = gae`, with a critic.
pub const WITH_CRITIC: &Entry = &ppo::ENTRY;

pub const REWARD_MODEL: &Entry = &reward_model::ENTRY;
/// The method of RL2's `adv.estimator = reinforce`.
pub const WITHOUT_CRITIC: &Entry = &reinforce::ENTRY;
/// The method of RL2's options for DeepSeek's GRPO.
pub const GROUP_RELATIVE: &Entry = &grpo::ENTRY;

/// What must be computed before `prepare`, and what is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Log-probabilities under the reference: a frozen copy of the initial policy, or the teacher if there is one.
    pub reference: bool,
    /// A teacher in place of the reference.
    pub teacher: bool,
    /// The KL to the reference over the whole vocabulary, with each forward.
    pub full_kl: bool,
    /// Whether there is a learning signal without rewards.
    pub rewardless: bool,
    /// f32 arithmetic: bf16 would round away what it measures.
    pub f32: bool,
    /// Values before the update.
    pub critic: bool,
    /// The model's score at each position instead of log-probabilities.
    pub score: bool,
    /// Probes before `prepare`: each prompt with the completion to the previous prompt
    /// ([`Experience::add_mismatched`]).
    pub mismatched: bool,
    /// Whether the gradients of the loss do not depend on the statistics, so that forward and backward run in one pass.
    pub constant_gradients: bool,
    /// Minimum completions per prompt.
    pub group: usize,
    /// Minimum examples per update.
    pub batch: usize,
    /// A copy of the stage's initial weights.
    pub start: bool,
    /// Why one completion per prompt is too few, if it is.
    pub one_per_prompt: Option<Refusal>,
    /// Why one completion per step is too few, if it is.
    pub one_per_step: Option<Refusal>,
    /// Why a randomly initialised model cannot be the reference; `None` if it can.
    pub random_reference: Option<Refusal>,
}

/// A recipe that an algorithm refuses: the key to change, the reason, and a fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The key to change.
    pub key: &'static str,
    /// The reason, after the algorithm's name.
    pub why: &'static str,
    pub fix: &'static str,
}

/// How the updates of a step are made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdatePlan {
    /// Passes over the experience.
    pub epochs: usize,
    /// Updates per pass.
    pub minibatches: usize,
    /// Initial steps that train only the critic.
    pub policy_frozen_steps: u64,
    /// Initial steps that train only the head; the optimizer state is reset after them.
    pub head_only_steps: u64,
    /// Whether every step starts from the stage's initial weights.
    pub restart: bool,
    /// Skip an update whose mean ratio of new to old policy exceeds this.
    pub skip_ratio: Option<f64>,
    /// Dynamic sampling: rounds of further prompts in place of those without learning signal.
    pub refill: Option<Refill>,
    /// Line search within a trust region, in place of the optimizer.
    pub trust_region: Option<TrustRegion>,
}

impl Default for UpdatePlan {
    fn default() -> Self {
        UpdatePlan {
            epochs: 1,
            minibatches: 1,
            policy_frozen_steps: 0,
            head_only_steps: 0,
            restart: false,
            skip_ratio: None,
            refill: None,
            trust_region: None,
        }
    }
}

/// A setting of an algorithm that does not fit the rest of the recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// The key to change.
    pub key: &'static str,
    /// What does not fit.
    pub what: String,
    pub fix: String,
}

impl UpdatePlan {
    /// The error if a step of that many completions has fewer completions than minibatches.
    pub fn fits_completions(&self, completions: usize) -> Option<Misfit> {
        let minibatches = self.minibatches;
        (minibatches > completions).then(|| Misfit {
            key: "algo.minibatches",
            what: format!("{completions} completions cannot be split into {minibatches} minibatches"),
            fix: format!("algo.minibatches = {completions} at most, or more rollout.prompts"),
        })
    }

    /// The error if the policy is never trained in that many steps.
    pub fn fits_steps(&self, total: u64) -> Option<Misfit> {
        let frozen = self.policy_frozen_steps;
        (frozen > 0 && frozen >= total).then(|| Misfit {
            key: "algo.critic_warmup",
            what: format!(
                "the first {frozen} steps train only the critic, but there are {total}: the policy is never trained"
            ),
            fix: "a smaller algo.critic_warmup, or more steps".into(),
        })
    }
}

/// Result of `prepare`.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// Means over the step.
    pub metrics: Metrics,
    /// Whether every gradient is zero, so that the update is skipped.
    pub no_signal: bool,
}

impl From<Metrics> for Prepared {
    fn from(metrics: Metrics) -> Self {
        Prepared { metrics, no_signal: false }
    }
}

/// A method of learning: what it needs, how its updates are made, its columns, its loss.
pub trait Algorithm: Send {
    /// What must be computed before `prepare`.
    fn needs(&self) -> Needs;
    /// How the updates of a step are made.
    fn updates(&self) -> UpdatePlan {
        UpdatePlan::default()
    }
    /// Fills columns (advantages, targets, weights) over the whole experience of a step; removes probes.
    fn prepare(&mut self, _experience: &mut Experience) -> Result<Prepared> {
        Ok(Prepared::default())
    }
    /// The loss of one micro-batch and its gradients.
    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss;
    /// How the values of steps are estimated, where the algorithm learns from them.
    fn vine(&self) -> Option<&Vine> {
        None
    }
    /// State that a checkpoint stores.
    fn state(&self) -> Value {
        Value::Null
    }
    fn restore(&mut self, _state: &Value) -> Result<()> {
        Ok(())
    }
}

/// The error of `baseline = "steps"` where values of steps cannot be estimated.
pub(crate) fn no_step_values(why: &str) -> Error {
    Error::usage(why).at("algo.advantage.baseline").fix("algo.advantage.baseline = \"group\" or \"critic\"")
}

pub fn find(name: &str) -> Result<&'static Entry> {
    ALGORITHMS.iter().copied().find(|e| e.name == name).ok_or_else(|| {
        unknown("algorithm", name, ALGORITHMS.iter().map(|e| e.name), |near| format!("algo.name = {near:?}"))
    })
}

/// Reads the settings of an algorithm; errors name the key.
pub fn settings<T: DeserializeOwned + JsonSchema>(name: &str, values: Value) -> Result<T> {
    read_settings(&format!("algo ({name})"), values.as_object().unwrap_or(&Map::new()))
}
