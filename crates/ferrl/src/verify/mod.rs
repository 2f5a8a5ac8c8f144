//! Verifiers: built-in programs that score completions.
//!
//! Each is a file and a line of [`VERIFIERS`].

pub mod calibration;
pub mod chain;
pub mod choice;
pub mod code;
pub mod countdown;
pub mod exact;
pub mod f1;
pub mod format;
pub mod gsm8k;
pub mod json;
pub mod length;
pub mod math;
pub mod numeric;
pub mod options;
pub mod python;
pub mod regex_format;
mod take;

use crate::credit::gains;
use crate::fixes::unknown;
use ferrl_engine::{Error, Result, nearest};
pub use options::{Given, Hooks};
use schemars::{Schema, schema_for};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;

/// One completion to be scored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample<'a> {
    /// The rollout's number, for messages.
    pub id: u64,
    pub prompt: &'a str,
    /// The messages of the prompt, if it is a conversation.
    pub messages: &'a [Value],
    pub completion: &'a str,
    /// Its tokens with the stop token; empty if only the text is known.
    pub ids: &'a [u32],
    /// Its length in tokens, if known.
    pub tokens: Option<usize>,
    /// Whether it was truncated at the length limit.
    pub truncated: bool,
    /// The other columns of the data row.
    pub columns: RowColumns<'a>,
    /// File and row of the prompt, for messages; empty if unknown.
    pub place: &'a str,
}

impl<'a> Sample<'a> {
    /// A column of the prompt's row, by name or dotted path.
    pub fn column(&self, path: &str) -> Option<&'a Value> {
        self.columns.get(path)
    }

    /// An error about this sample, with its row, or else with the rollout's number.
    pub fn error(&self, error: Error) -> Error {
        if self.place.is_empty() { error.at(format!("rollout {}", self.id)) } else { error.at(self.place) }
    }
}

/// The columns of a row, under the names of the recipe and, for columns renamed by `data.columns`, also under those of the
/// file.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowColumns<'a> {
    /// By name after renaming.
    pub row: Option<&'a Map<String, Value>>,
    /// New name and old name of each renamed column.
    pub renamed: &'a [(String, String)],
}

impl<'a> From<&'a Map<String, Value>> for RowColumns<'a> {
    fn from(row: &'a Map<String, Value>) -> Self {
        RowColumns { row: Some(row), renamed: &[] }
    }
}

impl<'a> RowColumns<'a> {
    pub fn names(&self) -> Vec<&'a str> {
        let own = self.row.into_iter().flat_map(|row| row.keys().map(String::as_str));
        let old = self.renamed.iter().filter(|(new, _)| self.row.is_some_and(|r| r.contains_key(new)));
        own.chain(old.map(|(_, old)| old.as_str())).collect()
    }

    /// The column at a dotted path, such as `extra_info.target`.
    pub fn get(&self, path: &str) -> Option<&'a Value> {
        let row = self.row?;
        at_path(row, path).or_else(|| {
            let (new, _) = self.renamed.iter().find(|(_, old)| old == path)?;
            row.get(new)
        })
    }
}

/// Progress of the run when rewards are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Completed steps.
    pub step: u64,
    /// Steps of the stage; 0 if unknown.
    pub steps: u64,
    /// Passes over the data.
    pub epoch: f64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// The reward for training.
    pub reward: f64,
    /// Named components of the reward, before their weights.
    pub components: Vec<(String, f64)>,
    /// Logged only: usually whether the answer is right.
    pub score: Option<f64>,
    /// Whether an answer was found in the completion, for verifiers that extract one.
    pub found: Option<bool>,
    /// The extracted answer, if it depends on the row; otherwise see [`Verifier::extract`].
    pub extracted: Option<Value>,
    /// Why the completion does not earn the full reward, if there is more to say than that the answer is wrong.
    pub why: Option<String>,
    /// Rewards of its steps, with process rewards; their sum is the reward.
    pub steps: Vec<f64>,
    /// Additional columns for the saved completion.
    pub extra: Map<String, Value>,
}

impl Score {
    /// A score with a single component.
    pub fn single(name: &str, reward: f64) -> Self {
        let components = vec![(name.to_string(), reward)];
        Score { reward, components, score: Some(reward), ..Default::default() }
    }

    /// The score of a truncated completion: 0.
    fn wrong(mut self) -> Self {
        self.reward = 0.0;
        self.components.iter_mut().for_each(|(_, part)| *part = 0.0);
        self.steps.fill(0.0);
        self.score = self.score.map(|_| 0.0);
        self
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Scored(Score),
    /// No reward from this source; the other sources decide.
    Abstained,
    /// Scoring failed with this error. The completion is left out and counted as lost, not scored 0.
    Lost(Error),
}

/// Scoring of truncated completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncated {
    /// 0, whatever the text contains.
    #[default]
    Wrong,
    /// The verifier's score of the truncated text.
    Score,
}

/// Scores completions; truncated ones according to `truncated`.
pub fn score_all(
    verifier: &dyn Verifier,
    samples: &[Sample<'_>],
    at: Progress,
    truncated: Truncated,
) -> Result<Vec<Outcome>> {
    let outcomes = verifier.score_batch(samples, at)?;
    judge_truncated(verifier, samples, outcomes, truncated)
}

/// Rewards the steps of completions, which end at these bytes; truncated completions according to `truncated`.
pub fn score_steps(
    verifier: &dyn Verifier,
    samples: &[Sample<'_>],
    ends: &[Vec<usize>],
    at: Progress,
    truncated: Truncated,
) -> Result<Vec<Outcome>> {
    let outcomes = verifier.score_steps(samples, ends, at)?;
    judge_truncated(verifier, samples, outcomes, truncated)
}

fn judge_truncated(
    verifier: &dyn Verifier,
    samples: &[Sample<'_>],
    mut outcomes: Vec<Outcome>,
    truncated: Truncated,
) -> Result<Vec<Outcome>> {
    if outcomes.len() != samples.len() {
        return Err(miscounted(verifier.name(), outcomes.len(), samples.len()));
    }
    let cut_off =
        outcomes.iter_mut().zip(samples).filter(|(_, s)| s.truncated && truncated == Truncated::Wrong);
    for (outcome, _) in cut_off {
        if let Outcome::Scored(score) = outcome {
            match verifier.judges_truncated() {
                // The verifier's reward is kept, but the completion does not count as right.
                true => score.score = Some(score.score.unwrap_or(score.reward).min(0.0)),
                false => *score = std::mem::take(score).wrong(),
            }
        }
    }
    Ok(outcomes)
}

/// The error of a source that does not return one score per completion.
pub(crate) fn miscounted(name: &str, got: usize, want: usize) -> Error {
    Error::data(format!("{name} gave {got} scores for {want} completions"))
        .fix("one score for every completion, in their order")
}

/// Turns completions into rewards.
///
/// A failure for a single completion is an [`Outcome::Lost`]; an error is a mistake in the recipe or the data and ends the
/// run.
pub trait Verifier: Send + Sync {
    /// The name a recipe uses.
    fn name(&self) -> &str;
    /// The score of one completion.
    fn score(&self, sample: &Sample<'_>) -> Result<Score>;
    fn score_batch(&self, samples: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        samples.iter().map(|s| self.score(s).map(Outcome::Scored)).collect()
    }
    /// Whether its reward is meaningful for a truncated completion: it depends on the length, or has a scale on which 0 is not
    /// the reward of a wrong answer.
    fn judges_truncated(&self) -> bool {
        false
    }
    /// Checks that the row has the columns that scoring needs. The sample's completion is empty, and user code is not
    /// called.
    fn check(&self, sample: &Sample<'_>) -> Result<()> {
        self.score(sample).map(|_| ())
    }
    /// The extracted answer of a completion, for verifiers that extract one.
    fn extract(&self, _completion: &str) -> Option<String> {
        None
    }
    /// Texts that a right completion must contain; a stop string must not remove them.
    fn reads(&self) -> &'static [&'static str] {
        &[]
    }
    /// The user's file that it runs, if any.
    fn file(&self) -> Option<&Path> {
        None
    }
    /// Metrics since the last call, by name.
    fn take_metrics(&self) -> Vec<(String, f64)> {
        Vec::new()
    }
    /// Whether scoring starts a process, so that several should run concurrently.
    fn waits(&self) -> bool {
        false
    }
    /// A line for the user on how it runs here.
    fn summary(&self) -> Option<String> {
        None
    }
    /// Whether it can reward steps.
    fn scores_steps(&self) -> bool {
        false
    }
    /// The scores of a batch whose steps end at these bytes, with rewards of steps: differences of the prefix's value, which is 1 until
    /// the first wrong step, 0 from it on, and the completion's reward at the end.
    fn score_steps(
        &self,
        samples: &[Sample<'_>],
        ends: &[Vec<usize>],
        _at: Progress,
    ) -> Result<Vec<Outcome>> {
        let one = |(sample, ends): (&Sample<'_>, &Vec<usize>)| {
            let wrong = self.wrong_step(sample)?.map_or(usize::MAX, |range| range.start);
            let score = self.score(sample)?;
            let mut values: Vec<f64> = ends.iter().map(|&end| f64::from(u8::from(end <= wrong))).collect();
            if let Some(last) = values.last_mut() {
                *last = score.reward;
            }
            Ok(Outcome::Scored(Score { steps: gains(&values), ..score }))
        };
        samples.iter().zip(ends).map(one).collect()
    }
    /// The first wrong step of a completion, as a range of bytes; `None` if all steps are right.
    fn wrong_step(&self, _sample: &Sample<'_>) -> Result<Option<Range<usize>>> {
        Err(Error::usage(format!("{} scores whole completions, not steps", self.name()))
            .fix("a verifier that finds the first wrong step, such as chain"))
    }
}

/// A verifier's place in the registry.
pub struct Entry {
    /// The name a recipe uses.
    pub name: &'static str,
    pub about: &'static str,
    pub schema: fn() -> Schema,
    /// Builds the verifier from its options; unknown options are an error.
    pub build: fn(&Given<'_>) -> Result<Box<dyn Verifier>>,
}

pub const VERIFIERS: &[Entry] = &[
    countdown::ENTRY,
    chain::ENTRY,
    calibration::ENTRY,
    exact::ENTRY,
    f1::ENTRY,
    choice::ENTRY,
    numeric::ENTRY,
    gsm8k::ENTRY,
    math::ENTRY,
    json::ENTRY,
    format::ENTRY,
    code::ENTRY,
    regex_format::ENTRY,
    length::ENTRY,
    python::ENTRY,
];

pub fn build(name: &str, options: &Map<String, Value>) -> Result<Box<dyn Verifier>> {
    build_with(name, options, &Hooks::default())
}

/// The same with the hooks of a run.
pub fn build_with(name: &str, options: &Map<String, Value>, hooks: &Hooks) -> Result<Box<dyn Verifier>> {
    let fix = |near: &str| format!("verifier = {near:?}");
    let found = VERIFIERS.iter().find(|e| e.name == name);
    let entry = found.ok_or_else(|| unknown("verifier", name, VERIFIERS.iter().map(|e| e.name), fix))?;
    (entry.build)(&Given { verifier: entry.name, options, hooks })
}

/// The column at a dotted path, such as `extra_info.target`.
pub fn column<'a>(columns: RowColumns<'a>, path: &str) -> Option<&'a Value> {
    columns.get(path)
}

fn at_path<'a>(columns: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = columns.get(path) {
        return Some(value);
    }
    let (head, rest) = path.split_once('.')?;
    at_path(columns.get(head)?.as_object()?, rest)
}

/// The column at a dotted path, or an error that lists the row's columns.
pub fn required<'a>(sample: &Sample<'a>, path: &str, verifier: &str) -> Result<&'a Value> {
    sample.columns.get(path).ok_or_else(|| {
        let names = sample.columns.names();
        let there = if names.is_empty() { "none".to_string() } else { names.join(", ") };
        let error =
            sample.error(Error::data(format!("{verifier} needs column {path:?}; the row has {there}")));
        match nearest(path, names) {
            Some(near) => error.fix(format!("name the column in the verifier's options: {near:?}?")),
            None => error.fix("name the column in the verifier's options"),
        }
    })
}

/// The text of the last closed `<answer>…</answer>`, trimmed.
pub fn last_answer(text: &str) -> Option<&str> {
    let end = text.rfind("</answer>")?;
    let start = text[..end].rfind("<answer>")? + "<answer>".len();
    // A second closing tag is ignored.
    let inner = text[start..end].split("</answer>").next().unwrap_or_default();
    Some(inner.trim())
}

/// The text of the last `\boxed{…}` whose braces close, trimmed.
pub fn last_boxed(text: &str) -> Option<&str> {
    let open = text.rfind("\\boxed{")? + "\\boxed".len();
    group_end(text, open).map(|end| text[open + 1..end].trim())
}

/// The end of the group whose opening brace is at `open`.
pub(crate) fn group_end(text: &str, open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (at, byte) in text.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_names_and_keys_get_a_hint() {
        let none = Map::new();
        let error = build("countdwn", &none).err().expect("no such verifier").to_string();
        assert!(error.contains("verifier = \"countdown\""), "{error}");
        let mut options = Map::new();
        options.insert("formt".into(), json!("plain"));
        let error = build("countdown", &options).err().expect("no such option").to_string();
        assert!(error.contains("format"), "{error}");
    }

    #[test]
    fn the_last_closed_answer_counts() {
        assert_eq!(last_answer("<answer> 1 </answer> x <answer>2</answer>"), Some("2"));
        assert_eq!(last_answer("<answer>1</answer><answer>2"), Some("1"));
        assert_eq!(last_answer("<answer>1<answer>2</answer></answer>"), Some("2"));
        assert_eq!(last_answer("1</answer>"), None);
        assert_eq!(last_answer("</answer><answer>"), None);
    }

    #[test]
    fn columns_are_found_by_dotted_paths() {
        let row = json!({"extra_info": {"target": 3}, "a.b": 1});
        let row = row.as_object().expect("an object");
        let columns = RowColumns::from(row);
        assert_eq!(columns.get("extra_info.target"), Some(&json!(3)));
        assert_eq!(columns.get("a.b"), Some(&json!(1)));
        assert_eq!(columns.get("extra_info.x"), None);
    }

    /// Was: `options = { column = "answer" }` failed as soon as `data.columns` had made a `response` of `answer`.
    #[test]
    fn a_renamed_column_is_found_under_both_names() {
        let row = json!({"response": "7"});
        let renamed = [("response".to_string(), "answer".to_string())];
        let columns = RowColumns { row: row.as_object(), renamed: &renamed };
        assert_eq!(columns.get("response"), Some(&json!("7")));
        assert_eq!(columns.get("answer"), Some(&json!("7")));
        assert_eq!(columns.names(), ["response", "answer"]);
    }
}
