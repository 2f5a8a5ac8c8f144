//! Algorithms: pure functions on numbers per token. None sees a tensor or a device.
//!
//! `prepare` runs once over everything an update learns from and fills columns: whatever a paper detaches from the
//! gradient is such a column. `loss` sees one micro-batch and the current statistics; it is an honest function of
//! them, a sum of terms divided by counts over the whole update. A new algorithm is one file and one line in
//! [`ALGORITHMS`]; one finite-difference test walks the list.

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

use crate::experience::{Experience, Loss, Metrics, MicroBatch, Sequence};
use crate::trust_region::TrustRegion;
use ferrl_engine::train::{ByRole, StatGrads, Stats};
use ferrl_engine::{Error, Result, nearest};
use metrics::Metric;
use serde_json::Value;

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Authors, title, year, identifier.
    pub paper: &'static str,
    /// The file it is written in: its first comment and the comments of its settings are the manual's text.
    pub source: &'static str,
    /// What it learns from.
    pub wants: Wants,
    /// What it writes at each step, in groups, beside what every run writes.
    pub metrics: &'static [&'static [Metric]],
    /// Its settings where a recipe says nothing.
    pub defaults: fn() -> Value,
    /// Builds it from its settings; unknown ones are refused.
    pub build: fn(Value) -> Result<Box<dyn Algorithm>>,
}

/// Every algorithm Ferrl knows.
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
    &orpo::ENTRY,
    &simpo::ENTRY,
    &step_dpo::ENTRY,
    &ppo::ENTRY,
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

/// What a recipe means that names none.
pub const DEFAULT: &Entry = &dr_grpo::ENTRY;
/// The method with a critic that RL2's `adv.estimator = gae` means.
pub const WITH_CRITIC: &Entry = &ppo::ENTRY;
/// The method whose name RL2 gives to returns without a critic.
pub const WITHOUT_CRITIC: &Entry = &reinforce::ENTRY;
/// The method that RL2's list for DeepSeek's GRPO means.
pub const GROUP_RELATIVE: &Entry = &grpo::ENTRY;

/// What an algorithm learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Sequences to imitate.
    Demonstrations,
    /// Sequences with a weight each, or groups of answers with rewards.
    Weighted,
    /// Pairs of a better and a worse answer.
    Pairs,
    /// Pairs of a right and a wrong step after the same beginning.
    StepPairs,
    /// Answers that are good or bad.
    Labelled,
    /// Answers with a probability.
    Targets,
    /// Prompts: the answers are sampled and rewarded.
    Rollouts,
}

impl Wants {
    /// Whether two sequences belong together.
    pub fn paired(self) -> bool {
        matches!(self, Wants::Pairs | Wants::StepPairs)
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Wants::Demonstrations => "demonstrations",
            Wants::Weighted => "answers with weights or rewards",
            Wants::Pairs => "pairs of a better and a worse answer",
            Wants::StepPairs => "pairs of a right and a wrong step",
            Wants::Labelled => "answers labelled good or bad",
            Wants::Targets => "answers with a probability",
            Wants::Rollouts => "its own answers and their rewards",
        }
    }
}

/// What must be computed before `prepare`, and what is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Log-probabilities under a frozen copy of the starting point, or under the teacher where there is one.
    pub reference: bool,
    /// A teacher in the reference's place.
    pub teacher: bool,
    /// The KL to the reference over the whole vocabulary, with each forward.
    pub full_kl: bool,
    /// Something to learn from even where nothing is rewarded.
    pub rewardless: bool,
    /// Arithmetic in f32: bf16 would lose what it measures.
    pub f32: bool,
    /// Values before the update.
    pub critic: bool,
    /// The model's score at each position instead of log-probabilities.
    pub score: bool,
    /// Samples per prompt that make sense at least.
    pub group: usize,
    /// Examples of an update that make sense at least.
    pub batch: usize,
    /// A copy of the weights the stage starts from.
    pub start: bool,
}

/// A method of learning.
pub trait Algorithm: Send {
    /// What must be computed for it.
    fn needs(&self) -> Needs;
    /// Adds sequences of [`Kind::Probe`](crate::experience::Kind), whose log-probabilities `prepare` wants to see before
    /// anything changes, and which it takes out again.
    fn extend(&self, _experience: &mut Experience) -> Result<()> {
        Ok(())
    }
    /// Fills columns (advantages, targets, weights) over everything the update learns from.
    fn prepare(&mut self, experience: &mut Experience) -> Result<Metrics>;
    /// The loss of one micro-batch and its gradients.
    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss;
    /// The policy's gradients, where they do not depend on the current statistics: forward and backward then run in
    /// one pass. They are those that [`Algorithm::loss`] gives, and no other model is trained.
    fn known_grads(&self, _batch: &MicroBatch<'_>) -> Option<StatGrads> {
        None
    }
    /// Passes over the experience, and updates in each pass.
    fn passes(&self) -> (usize, usize) {
        (1, 1)
    }
    /// Steps at the start that train the critic alone.
    fn policy_frozen_steps(&self) -> u64 {
        0
    }
    /// Steps at the start that train the head alone; the optimizer starts anew after them.
    fn head_only_steps(&self) -> u64 {
        0
    }
    /// Whether every step's updates begin at the weights the stage started from.
    fn restarts(&self) -> bool {
        false
    }
    /// The ratio of new to old policy beyond which a whole update is skipped.
    fn skip_ratio(&self) -> Option<f64> {
        None
    }
    /// How often more prompts may be asked for in place of those whose answers teach nothing.
    fn refills(&self) -> usize {
        0
    }
    /// Whether anything can be learned from the rewarded answers to one prompt.
    fn teaches(&self, _group: &[&Sequence]) -> bool {
        true
    }
    /// Whether every gradient of a prepared update is zero, so that its passes would be computed for nothing.
    fn learns_nothing(&self, _experience: &Experience) -> bool {
        false
    }
    /// How far an update may go, where a search for the step takes the optimizer's place.
    fn trust_region(&self) -> Option<TrustRegion> {
        None
    }
    /// What must survive a restart.
    fn state(&self) -> Value {
        Value::Null
    }
    /// Puts back what [`Algorithm::state`] gave.
    fn restore(&mut self, _state: &Value) -> Result<()> {
        Ok(())
    }
}

/// The algorithm of that name.
pub fn find(name: &str) -> Result<&'static Entry> {
    ALGORITHMS.iter().copied().find(|e| e.name == name).ok_or_else(|| {
        let names: Vec<&str> = ALGORITHMS.iter().map(|e| e.name).collect();
        let hint = nearest(name, names.iter().copied()).unwrap_or(names[0]);
        Error::usage(format!("unknown algorithm {name:?}, expected one of {}", names.join(", ")))
            .fix(format!("algo.name = \"{hint}\""))
    })
}

/// Reads settings, with the nearest name for an unknown one. `"off"` is no value: what has one by default can be
/// switched off.
pub fn settings<T: serde::de::DeserializeOwned>(algorithm: &str, mut values: Value) -> Result<T> {
    switch_off(&mut values);
    serde_json::from_value(values).map_err(|e| {
        let message = e.to_string();
        let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        let place =
            if algorithm.contains('.') { algorithm.to_string() } else { format!("algo ({algorithm})") };
        let error = Error::usage(in_words(&message)).at(place);
        match quoted.split_first() {
            Some((bad, known)) if message.starts_with("unknown") => {
                match nearest(bad, known.iter().copied()) {
                    Some(near) => error.fix(format!("did you mean {near:?}?")),
                    None => error,
                }
            }
            _ => error,
        }
    })
}

/// What the reader of settings says, without the names of its types.
fn in_words(message: &str) -> String {
    let invalid = ["invalid type: ", "invalid value: "].iter().find_map(|start| message.strip_prefix(start));
    let Some((got, expected)) = invalid.and_then(|rest| rest.split_once(", expected ")) else {
        return message.replace("unknown field", "unknown key").replace('`', "\"");
    };
    let expected = match expected {
        "f64" | "f32" => "a number",
        "usize" | "u64" | "u32" => "a whole number from 0 up",
        "a boolean" => "true or false",
        "a string" | "string or map" => "text",
        other if other.starts_with("struct ") => "a table",
        other => other,
    };
    let got = match got.split_once(' ') {
        Some(("integer", number)) => format!("the number {number}"),
        Some(("floating", number)) => format!("the number {}", number.trim_start_matches("point ")),
        Some(("string", text)) => format!("the text {text}"),
        Some(("boolean", value)) => value.to_string(),
        _ => got.replace("sequence", "a list").replace("map", "a table"),
    };
    format!("expected {expected}, got {}", got.replace('`', ""))
}

fn switch_off(value: &mut Value) {
    match value {
        Value::String(word) if word == crate::recipe::OFF => *value = Value::Null,
        Value::Object(map) => map.values_mut().for_each(switch_off),
        _ => {}
    }
}
