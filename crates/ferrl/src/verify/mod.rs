//! Verifiers: what a completion is worth.
//!
//! Each is a file of its own and a line of [`VERIFIERS`].

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
use schemars::Schema;
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;

/// One completion to be scored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample<'a> {
    /// The rollout's number, for messages.
    pub id: u64,
    /// The prompt's text.
    pub prompt: &'a str,
    /// The conversation that the prompt is, where it is one.
    pub messages: &'a [Value],
    /// The completion's text.
    pub completion: &'a str,
    /// Its tokens, the stop token included; empty where only the text is known.
    pub ids: &'a [u32],
    /// Its length in tokens, where it is known.
    pub tokens: Option<usize>,
    /// Whether the length limit cut it off.
    pub truncated: bool,
    /// The other columns of the data row.
    pub columns: RowColumns<'a>,
    /// File and row of the prompt, for messages; empty where it has none.
    pub place: &'a str,
}

impl<'a> Sample<'a> {
    /// A column of the prompt's row, by its name or dotted path.
    pub fn column(&self, path: &str) -> Option<&'a Value> {
        self.columns.get(path)
    }

    /// An error about this sample, under the row it is from, or else under the rollout's number.
    pub fn error(&self, error: Error) -> Error {
        if self.place.is_empty() { error.at(format!("rollout {}", self.id)) } else { error.at(self.place) }
    }
}

/// The columns of a row as a verifier finds them: under the names of the recipe, and under those of the file where
/// `data.columns` renames them.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowColumns<'a> {
    /// By their names after renaming.
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
    /// Every name there is.
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
    /// Steps done.
    pub step: u64,
    /// Steps of the stage; 0 if unknown.
    pub steps: u64,
    /// Passes over the data.
    pub epoch: f64,
}

/// What a verifier says of one completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// What training sees.
    pub reward: f64,
    /// Named parts of the reward, before their weights.
    pub components: Vec<(String, f64)>,
    /// Logged only: usually whether the answer is right.
    pub score: Option<f64>,
    /// Whether an answer was found in the completion, where the verifier looks for one.
    pub found: Option<bool>,
    /// What was taken as the answer, where it depends on the row as well; otherwise see [`Verifier::extract`].
    pub extracted: Option<Value>,
    /// Why the reward is not full, where the verifier can say more than that the answer is another.
    pub why: Option<String>,
    /// Rewards of its steps, where steps are rewarded; they add up to the reward.
    pub steps: Vec<f64>,
    /// What else is worth a column beside the completion.
    pub extra: Map<String, Value>,
}

impl Score {
    /// A score of one part that is the whole reward.
    pub fn single(name: &str, reward: f64) -> Self {
        let components = vec![(name.to_string(), reward)];
        Score { reward, components, score: Some(reward), ..Default::default() }
    }

    /// Nothing earned: what a completion gets that was cut off before its end.
    fn wrong(mut self) -> Self {
        self.reward = 0.0;
        self.components.iter_mut().for_each(|(_, part)| *part = 0.0);
        self.steps.fill(0.0);
        self.score = self.score.map(|_| 0.0);
        self
    }
}

/// The result of scoring one completion.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It has a score.
    Scored(Score),
    /// This source has no reward for it: others decide.
    Abstained,
    /// Its score could not be computed; the error says why. It is left out and counted, never taken for 0.
    Lost(Error),
}

/// What truncated completions get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncated {
    /// Nothing: a completion that was cut off has no answer, whatever stands in it.
    #[default]
    Wrong,
    /// The verifier's score of the text as it stands.
    Score,
}

/// Scores completions; one that was truncated is wrong unless `truncated` says otherwise.
pub fn score_all(
    verifier: &dyn Verifier,
    samples: &[Sample<'_>],
    at: Progress,
    truncated: Truncated,
) -> Result<Vec<Outcome>> {
    let outcomes = verifier.score_batch(samples, at)?;
    judge_truncated(verifier, samples, outcomes, truncated)
}

/// Rewards the steps of completions, which end at these bytes; a completion that was truncated is wrong unless `truncated`
/// says otherwise.
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
                // Its reward has a scale of its own; that nothing right was said holds all the same.
                true => score.score = Some(score.score.unwrap_or(score.reward).min(0.0)),
                false => *score = std::mem::take(score).wrong(),
            }
        }
    }
    Ok(outcomes)
}

/// A source of rewards that does not give one score for each completion.
pub(crate) fn miscounted(name: &str, got: usize, want: usize) -> Error {
    Error::data(format!("{name} gave {got} scores for {want} completions"))
        .fix("one score for every completion, in their order")
}

/// Turns completions into rewards.
///
/// What concerns one completion alone is an [`Outcome::Lost`]; an error is a mistake in the recipe or the data and ends
/// the run.
pub trait Verifier: Send + Sync {
    /// The name a recipe uses.
    fn name(&self) -> &str;
    /// The score of one completion.
    fn score(&self, sample: &Sample<'_>) -> Result<Score>;
    /// The scores of many, in their order.
    fn score_batch(&self, samples: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        samples.iter().map(|s| self.score(s).map(Outcome::Scored)).collect()
    }
    /// Whether its reward is meaningful for a truncated completion: it depends on the length, or has a scale on which 0 is not
    /// the reward of a wrong answer.
    fn judges_truncated(&self) -> bool {
        false
    }
    /// Whether completions to this sample's prompt could be scored: the row has what is needed. The sample's completion is
    /// empty, and code of users is not called.
    fn check(&self, sample: &Sample<'_>) -> Result<()> {
        self.score(sample).map(|_| ())
    }
    /// What it takes as the answer in a completion, where it looks for one.
    fn extract(&self, _completion: &str) -> Option<String> {
        None
    }
    /// Text that must stand in a completion for it to be right; a stop string must not cut it off.
    fn reads(&self) -> &'static [&'static str] {
        &[]
    }
    /// The user's file that it runs, where it does.
    fn file(&self) -> Option<&Path> {
        None
    }
    /// What it logged since the last call, by name.
    fn take_metrics(&self) -> Vec<(String, f64)> {
        Vec::new()
    }
    /// Whether a score takes the time of a process, so that several are worth computing at a time.
    fn waits(&self) -> bool {
        false
    }
    /// What else a user wants to know of how it works here, in one line.
    fn summary(&self) -> Option<String> {
        None
    }
    /// Whether it can reward the steps of a completion.
    fn scores_steps(&self) -> bool {
        false
    }
    /// The scores of many whose steps end at these bytes, each with the rewards of its steps: what each adds to the value of the
    /// prefix, which is 1 while no step is wrong, 0 from the first wrong one on, and the completion's reward at its end.
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
    /// The first wrong step of a completion, as a range of its bytes; none where every step is right.
    fn wrong_step(&self, _sample: &Sample<'_>) -> Result<Option<Range<usize>>> {
        Err(Error::usage(format!("{} judges whole answers, not steps", self.name()))
            .fix("a verifier that finds the first wrong step, such as chain"))
    }
}

/// A verifier's place in the registry.
pub struct Entry {
    /// The name a recipe uses.
    pub name: &'static str,
    /// One line for listings.
    pub about: &'static str,
    /// The JSON Schema of its options.
    pub schema: fn() -> Schema,
    /// Makes one from its options; unknown ones are refused.
    pub build: fn(&Given<'_>) -> Result<Box<dyn Verifier>>,
}

/// All verifiers.
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

/// The verifier of that name with these options.
pub fn build(name: &str, options: &Map<String, Value>) -> Result<Box<dyn Verifier>> {
    build_with(name, options, &Hooks::default())
}

/// The same for a run, which hears what user code prints and may end its waits.
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

/// The column at a dotted path, or an error that names those there are.
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
    // A second closing tag belongs to no answer.
    let inner = text[start..end].split("</answer>").next().unwrap_or_default();
    Some(inner.trim())
}

/// The text of the last `\boxed{…}` whose braces close, trimmed.
pub fn last_boxed(text: &str) -> Option<&str> {
    let open = text.rfind("\\boxed{")? + "\\boxed".len();
    group_end(text, open).map(|end| text[open + 1..end].trim())
}

/// Where the group ends whose opening brace stands at `open`.
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
