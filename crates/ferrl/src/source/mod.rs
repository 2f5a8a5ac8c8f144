//! Where examples come from, one at a time and in an order that can be taken up again.

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

/// A prompt to be answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prompt {
    /// Its number in the run: decides the random numbers of its completions.
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
    /// File and row, for messages.
    #[serde(default)]
    pub place: String,
    /// The episode it begins, where it has several turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<EpisodeKey>,
}

/// One example.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// Sequences to learn from as they are: one demonstration, or both sides of a pair.
    Given(Vec<Sequence>),
    /// A prompt to be answered.
    Ask(Prompt),
    /// A prompt whose completions are given, with their rewards.
    Graded(RewardedGroup),
}

/// Completions of one prompt that the data gives together with their rewards.
#[derive(Clone, Debug, PartialEq)]
pub struct RewardedGroup {
    /// The prompt.
    pub prompt: Prompt,
    /// The completions, prompt included; rewards are in place.
    pub answers: Vec<Sequence>,
    /// File and row, for messages.
    pub place: String,
}

/// Called with the number of rows that are done and of all rows; `false` ends the work early, without an error.
pub type SurveyProgress<'a> = &'a mut dyn FnMut(usize, usize) -> bool;

/// An example as it is looked at before the first step.
#[derive(Clone, Copy)]
pub struct SurveyedExample<'a> {
    /// The example.
    pub item: &'a Item,
    /// File and row, or the number in a generated task.
    pub place: &'a str,
    /// Whether evaluations read it, and training does not.
    pub held_out: bool,
}

/// Refuses an example that cannot be used; called from many threads.
pub type ExampleCheck<'a> = &'a (dyn Fn(SurveyedExample<'_>) -> Result<()> + Sync);

/// What a source holds: the start of a run says it, and so does its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceSummary {
    /// Rows of all files; none for a generated task, which has no end.
    pub rows: Option<usize>,
    /// Tokens of all rows; none where nothing is known yet.
    pub tokens: Option<usize>,
    /// Those of them that are trained (0 for prompts).
    pub trained: usize,
    /// Whether every row was counted; an estimate from some of them otherwise.
    pub exact: bool,
    /// Sequences cut to `data.max_length`.
    pub truncated: usize,
    /// Rows left out because the cut left nothing to train.
    pub dropped: usize,
    /// Tokens of the longest sequence, as it is trained.
    pub longest: usize,
}

/// A stream of examples.
pub trait ExampleSource: Send {
    /// The next `n` examples, or what is left of the epoch.
    fn next(&mut self, n: usize) -> Result<Vec<Item>>;
    /// How many there are in an epoch; `None` without end.
    fn epoch(&self) -> Option<usize>;
    /// Passes over the data so far; 0 for a stream without end.
    fn epochs(&self) -> f64 {
        0.0
    }
    /// Number of batches of up to `batch` examples in `epochs` passes over the data: the last one of a pass is smaller. `None` without
    /// end.
    fn batches(&self, epochs: f64, batch: usize) -> Option<u64> {
        self.epoch().map(|rows| (epochs * rows.div_ceil(batch.max(1)) as f64).ceil() as u64)
    }
    /// Whether all prompts come with completions and rewards: nothing is sampled then.
    fn graded(&self) -> bool {
        false
    }
    /// Number of sequences truncated so far, and drawn so far.
    fn cut(&self) -> usize {
        0
    }
    /// Reads every example once, in the order of the files, and refuses the first that cannot be learned from. What is only
    /// doubtful is raised as a warning. Where the stream stands does not change.
    fn check(&mut self, progress: SurveyProgress<'_>) -> Result<()> {
        self.check_with(&|_| Ok(()), progress)
    }
    /// The same with a look of the caller's at every example.
    fn check_with(&mut self, _look: ExampleCheck<'_>, _progress: SurveyProgress<'_>) -> Result<()> {
        Ok(())
    }
    /// What is there to learn from: exact after [`ExampleSource::check`].
    fn summary(&self) -> SourceSummary {
        SourceSummary::default()
    }
    /// Where the stream stands.
    fn state(&self) -> Value;
    /// Goes to where the stream stood.
    fn restore(&mut self, state: &Value) -> Result<()>;
}
