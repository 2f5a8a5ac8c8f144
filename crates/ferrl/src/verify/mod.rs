//! Verifiers: what a completion is worth.
//!
//! Each is a file of its own and a line of [`VERIFIERS`].

pub mod chain;
pub mod countdown;
pub mod exact;
pub mod length;
pub mod numeric;
pub mod options;
pub mod python;
pub mod regex_format;

use ferrl_engine::{Class, Error, Result, nearest};
pub use options::{Options, Setting};
use serde_json::{Map, Value};
use std::ops::Range;

/// One completion to be scored.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The rollout's number, for messages.
    pub id: u64,
    /// What the model was asked.
    pub prompt: &'a str,
    /// What it answered.
    pub completion: &'a str,
    /// The other columns of the data row.
    pub columns: &'a Map<String, Value>,
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
}

impl Score {
    /// A score of one part that is the whole reward.
    pub fn single(name: &str, reward: f64) -> Self {
        Score { reward, components: vec![(name.to_string(), reward)], score: Some(reward) }
    }
}

/// Turns completions into rewards.
///
/// An error for which [`dropped`] holds concerns that sample alone: the caller leaves it out and counts it.
/// Any other error is a mistake in the recipe or the data and ends the run.
pub trait Verifier: Send + Sync {
    /// The name a recipe uses.
    fn name(&self) -> &str;
    /// One line for listings.
    fn about(&self) -> &'static str;
    /// The score of one completion.
    fn score(&self, sample: &Sample<'_>) -> Result<Score>;
    /// The scores of many, in their order.
    fn score_batch(&self, samples: &[Sample<'_>]) -> Vec<Result<Score>> {
        samples.iter().map(|s| self.score(s)).collect()
    }
    /// The first wrong step of a completion, as a range of its bytes; none where every step is right.
    fn wrong_step(&self, _sample: &Sample<'_>) -> Result<Option<Range<usize>>> {
        Err(Error::usage(format!("{} judges whole answers, not steps", self.name()))
            .fix("a verifier that finds the first wrong step, such as chain"))
    }
}

/// Whether an error of a verifier costs only the sample: a worker process failed, not the run's settings.
pub fn dropped(error: &Error) -> bool {
    error.class == Class::Device
}

/// A verifier's place in the registry.
pub struct Entry {
    /// The name a recipe uses.
    pub name: &'static str,
    /// One line for listings.
    pub about: &'static str,
    /// Every option with its default and meaning.
    pub settings: &'static [Setting],
    /// Makes one from checked options.
    pub build: fn(&Options<'_>) -> Result<Box<dyn Verifier>>,
}

/// All verifiers.
pub const VERIFIERS: &[Entry] = &[
    countdown::ENTRY,
    chain::ENTRY,
    exact::ENTRY,
    numeric::ENTRY,
    regex_format::ENTRY,
    length::ENTRY,
    python::ENTRY,
];

/// The verifier of that name with these options.
pub fn build(name: &str, options: &Map<String, Value>) -> Result<Box<dyn Verifier>> {
    let names = VERIFIERS.iter().map(|e| e.name);
    let Some(entry) = VERIFIERS.iter().find(|e| e.name == name) else {
        let all = names.clone().collect::<Vec<_>>().join(", ");
        let error = Error::usage(format!("unknown verifier {name:?}, expected one of {all}"));
        return Err(match nearest(name, names) {
            Some(near) => error.fix(format!("verifier = {near:?}")),
            None => error,
        });
    };
    (entry.build)(&Options::checked(entry.name, entry.settings, options)?)
}

/// The column at a dotted path, such as `extra_info.target`.
pub fn column<'a>(columns: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = columns.get(path) {
        return Some(value);
    }
    let (head, rest) = path.split_once('.')?;
    column(columns.get(head)?.as_object()?, rest)
}

/// The column at a dotted path, or an error that names those there are.
pub fn required<'a>(sample: &Sample<'a>, path: &str, verifier: &str) -> Result<&'a Value> {
    column(sample.columns, path).ok_or_else(|| {
        let names: Vec<&str> = sample.columns.keys().map(String::as_str).collect();
        let there = if names.is_empty() { "none".to_string() } else { names.join(", ") };
        let error = Error::data(format!("{verifier} needs column {path:?}; the row has {there}"))
            .at(format!("rollout {}", sample.id));
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
        assert_eq!(column(row, "extra_info.target"), Some(&json!(3)));
        assert_eq!(column(row, "a.b"), Some(&json!(1)));
        assert_eq!(column(row, "extra_info.x"), None);
    }
}
