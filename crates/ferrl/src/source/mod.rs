//! Sources of examples, in a resumable order.

mod item;
mod mixture;
mod survey;

pub use item::prompt_of;
pub use mixture::{Mixture, MixturePart, ReadingPurpose, encoding};
pub use survey::ModelRoom;

use crate::episode::EpisodeKey;
use crate::experience::Sequence;
use ferrl_engine::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Its number in the run, which determines the random numbers of its completions.
    pub index: u64,
    /// Token ids.
    pub ids: Vec<u32>,
    /// The text, for rewards and logs.
    pub text: String,
    /// Its messages, if it is a conversation.
    pub messages: Vec<Value>,
    /// All other columns of its row.
    pub columns: Map<String, Value>,
    /// New and old name of each column that the recipe renames.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renamed: Vec<(String, String)>,
    /// File and row, for messages.
    #[serde(default)]
    pub place: String,
    /// Its episode, if it has several turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<EpisodeKey>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// Given sequences: one demonstration, or both completions of a pair.
    Sequences(Vec<Sequence>),
    Prompt(Prompt),
    /// A prompt with given completions and rewards.
    Group(RewardedGroup),
}

/// Given completions of one prompt with their rewards.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardedGroup {
    pub prompt: Prompt,
    /// The completions, prompt included; rewards are in place.
    pub completions: Vec<Sequence>,
    /// File and row, for messages.
    pub place: String,
}

/// Called with the number of checked rows and of all rows; `false` ends the check early, without an error.
pub type SurveyProgress<'a> = &'a mut dyn FnMut(usize, usize) -> bool;

/// An example in the check before the first step.
#[derive(Clone, Copy)]
pub struct SurveyedExample<'a> {
    pub item: &'a Item,
    /// File and row, or the number in a generated task.
    pub place: &'a str,
    /// Whether it is held out for evaluations.
    pub held_out: bool,
}

/// Refuses an example that cannot be used; called from many threads.
pub type ExampleCheck<'a> = &'a (dyn Fn(SurveyedExample<'_>) -> Result<()> + Sync);

/// Summary of a source, for the start of a run and its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceSummary {
    /// Rows of all files; `None` for a generated task, which is endless.
    pub rows: Option<usize>,
    /// Tokens of all rows; `None` if unknown.
    pub tokens: Option<usize>,
    /// Those of them that are trained (0 for prompts).
    pub trained: usize,
    /// Whether all rows were counted; otherwise an estimate.
    pub exact: bool,
    /// Sequences truncated to `data.max_length`.
    pub truncated: usize,
    /// Rows left out because truncation leaves no trained token.
    pub dropped: usize,
    /// Tokens of the longest sequence, as it is trained.
    pub longest: usize,
}
