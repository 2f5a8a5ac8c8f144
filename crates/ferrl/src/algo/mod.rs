//! Algorithms: pure functions on numbers per token. None sees a tensor or a device.
//!
//! `prepare` runs once over everything an update learns from and fills columns: whatever a paper detaches from the
//! gradient is such a column. `loss` sees one micro-batch and the current statistics; it is an honest function of
//! them, a sum of terms divided by counts over the whole update. A new algorithm is one file and one line in
//! [`ALGORITHMS`]; one finite-difference test walks the list.

pub mod math;
pub mod policy;

mod dpo;
mod dr_grpo;
mod grpo;
mod ppo;
mod reward_model;
mod sft;

use crate::experience::{Experience, Loss, Metrics, MicroBatch};
use ferrl_engine::train::{ByRole, StatGrads, Stats};
use ferrl_engine::{Error, Result, nearest};
use serde_json::Value;

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Authors, title, year, identifier.
    pub paper: &'static str,
    /// What it learns from.
    pub wants: Wants,
    /// Its settings where a recipe says nothing.
    pub defaults: fn() -> Value,
    /// Builds it from its settings; unknown ones are refused.
    pub build: fn(Value) -> Result<Box<dyn Algorithm>>,
}

/// Every algorithm Ferrl knows.
pub const ALGORITHMS: &[&Entry] =
    &[&sft::ENTRY, &reward_model::ENTRY, &dpo::ENTRY, &ppo::ENTRY, &grpo::ENTRY, &dr_grpo::ENTRY];

/// What a recipe means that names none.
pub const DEFAULT: &Entry = &dr_grpo::ENTRY;
/// The method with a critic that RL2's `adv.estimator = gae` means.
pub const WITH_CRITIC: &Entry = &ppo::ENTRY;
/// The method that RL2's list for DeepSeek's GRPO means.
pub const GROUP_RELATIVE: &Entry = &grpo::ENTRY;

/// What an algorithm learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// Sequences to imitate.
    Demonstrations,
    /// Pairs of a better and a worse answer.
    Pairs,
    /// Prompts: the answers are sampled and rewarded.
    Rollouts,
}

/// What must be computed before `prepare`, and what is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Log-probabilities under a frozen copy of the starting point.
    pub reference: bool,
    /// Values before the update.
    pub critic: bool,
    /// The model's score at each position instead of log-probabilities.
    pub score: bool,
    /// Samples per prompt that make sense at least.
    pub group: usize,
}

/// A method of learning.
pub trait Algorithm: Send {
    /// What must be computed for it.
    fn needs(&self) -> Needs;
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
    /// Updates at the start that train the critic alone.
    fn policy_frozen_steps(&self) -> u64 {
        0
    }
    /// The ratio of new to old policy beyond which a whole update is skipped.
    fn skip_ratio(&self) -> Option<f64> {
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

/// Reads settings, with the nearest name for an unknown one.
pub fn settings<T: serde::de::DeserializeOwned>(algorithm: &str, values: Value) -> Result<T> {
    serde_json::from_value(values).map_err(|e| {
        let message = e.to_string();
        let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
        let error = Error::usage(message.clone()).at(format!("algo ({algorithm})"));
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
