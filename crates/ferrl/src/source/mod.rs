//! Where examples come from, one at a time and in an order that can be taken up again.

mod files;

pub use files::{FileSource, encoding, schema_of};

use crate::experience::Sequence;
use ferrl_engine::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A question to be answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Its number in the run: decides the random numbers of its answers.
    pub index: u64,
    /// Token ids.
    pub ids: Vec<u32>,
    /// The text, for rewards and people.
    pub text: String,
    /// The conversation it is, where it is one.
    pub messages: Vec<Value>,
    /// All other columns of its row.
    pub columns: Map<String, Value>,
    /// New and old name of each column that the recipe renames.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub renamed: Vec<(String, String)>,
}

/// One example.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// Sequences to learn from as they are: one demonstration, or both sides of a pair.
    Given(Vec<Sequence>),
    /// A prompt to be answered.
    Ask(Prompt),
    /// A prompt whose answers are given, with their rewards.
    Graded(Group),
}

/// Answers to one prompt that nobody has to sample or judge.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// The question.
    pub prompt: Prompt,
    /// The answers, prompt included; rewards are in place.
    pub answers: Vec<Sequence>,
    /// File and row, for messages.
    pub place: String,
}

/// A stream of examples.
pub trait Source: Send {
    /// The next `n`.
    fn next(&mut self, n: usize) -> Result<Vec<Item>>;
    /// How many there are in an epoch; `None` without end.
    fn epoch(&self) -> Option<usize>;
    /// Passes over the data so far; 0 for a stream without end.
    fn epochs(&self) -> f64 {
        0.0
    }
    /// Whether all prompts come with answers and rewards: nothing is sampled then.
    fn graded(&self) -> bool {
        false
    }
    /// Where the stream stands.
    fn state(&self) -> Value;
    /// Goes to where the stream stood.
    fn restore(&mut self, state: &Value) -> Result<()>;
}
