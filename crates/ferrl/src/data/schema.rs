//! Schemas of rows: RL2's and TRL's column names, as plain text or messages.

mod read;
mod value;

use std::fmt;

use ferrl_engine::{Error, Result, nearest};
use serde_json::Value;

use super::{Row, list};
use read::RowReader;
pub(super) use value::{is_assistant, is_strange};

/// Kind of rows that an algorithm is trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// Demonstrations (SFT).
    Sft,
    Preference,
    /// A right and a wrong step after the same beginning.
    StepPreference,
    /// A completion that is good or bad.
    Unpaired,
    /// A completion with a probability.
    Target,
    /// A prompt to sample from.
    Prompt,
    /// A prompt with several completions and their rewards.
    Group,
    /// A completion in steps, each right or wrong.
    Steps,
}

impl RowKind {
    pub const ALL: [RowKind; 8] = [
        RowKind::Sft,
        RowKind::Preference,
        RowKind::StepPreference,
        RowKind::Unpaired,
        RowKind::Target,
        RowKind::Prompt,
        RowKind::Group,
        RowKind::Steps,
    ];

    /// The sets of columns it accepts; any column of text may also be a list of messages.
    pub fn schemas(self) -> &'static [&'static [&'static str]] {
        match self {
            RowKind::Sft => &[
                &["messages"],
                &["prompt", "response"],
                &["prompt", "completion"],
                &["messages", "response"],
                &["instruction", "output"],
                &["text"],
            ],
            RowKind::Preference => &[
                &["prompt", "chosen", "rejected"],
                &["messages", "chosen", "rejected"],
                &["chosen", "rejected"],
            ],
            RowKind::StepPreference => &[
                &["prompt", "initial_reason_steps", "chosen", "rejected"],
                &["messages", "initial_reason_steps", "chosen", "rejected"],
            ],
            RowKind::Unpaired => &[
                &["prompt", "completion", "label"],
                &["prompt", "response", "label"],
                &["messages", "label"],
            ],
            RowKind::Target => &[
                &["prompt", "response", "target"],
                &["prompt", "completion", "target"],
                &["messages", "target"],
            ],
            RowKind::Prompt => &[&["prompt"], &["messages"], &["instruction"]],
            RowKind::Group => {
                &[&["prompt", "completions", "rewards"], &["messages", "completions", "rewards"]]
            }
            RowKind::Steps => &[&["prompt", "completions", "labels"], &["messages", "completions", "labels"]],
        }
    }
}

impl fmt::Display for RowKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RowKind::Sft => "supervised fine-tuning",
            RowKind::Preference => "preference pairs",
            RowKind::StepPreference => "pairs of steps",
            RowKind::Unpaired => "labelled completions",
            RowKind::Target => "soft targets",
            RowKind::Prompt => "prompts",
            RowKind::Group => "groups of completions",
            RowKind::Steps => "labelled steps",
        })
    }
}

/// A piece of a conversation, as text or as messages.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Text for the model as it is.
    Text(String),
    /// Messages for its chat template.
    Messages(Vec<Value>),
}

impl Content {
    /// As a value of a row: text or a list.
    pub fn value(&self) -> Value {
        match self {
            Content::Text(text) => text.clone().into(),
            Content::Messages(messages) => messages.clone().into(),
        }
    }
}

/// A row that fits a schema.
#[derive(Clone, Debug, PartialEq)]
pub enum RowFields {
    /// Text to imitate from its first token on.
    Text(String),
    /// A conversation whose assistant turns are imitated.
    Conversation(Vec<Value>),
    Completion {
        prompt: Content,
        completion: Content,
    },
    Pair {
        prompt: Content,
        chosen: Content,
        rejected: Content,
    },
    /// A right and a wrong step.
    StepPair {
        /// What is asked.
        prompt: Content,
        before: String,
        /// The right step.
        chosen: String,
        /// The wrong step.
        rejected: String,
    },
    /// A completion that is good or bad.
    Labelled {
        prompt: Content,
        completion: Content,
        /// Whether it is good.
        label: bool,
    },
    /// A completion with a probability.
    Target {
        prompt: Content,
        /// The completion.
        completion: Content,
        /// The probability.
        target: f32,
    },
    /// A prompt to answer.
    Prompt(Content),
    /// Completions to one prompt, with rewards.
    Group {
        prompt: Content,
        completions: Vec<Content>,
        /// Rewards by name, one per completion; a plain list is named `reward`.
        rewards: Vec<(String, Vec<f32>)>,
    },
    /// A completion in steps.
    Steps {
        prompt: Content,
        steps: Vec<String>,
        /// Whether each is right: 0 or 1, or anything between.
        labels: Vec<f32>,
    },
}

/// New column names for old ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ColumnNames(pub Vec<(String, String)>);

impl ColumnNames {
    /// The row under its new names; `a.b` reaches into an object.
    pub fn apply(&self, row: &Row) -> Result<Row> {
        let mut renamed = row.clone();
        for (new, old) in &self.0 {
            let value = match row.get(old) {
                Some(value) => {
                    if new != old && !self.0.iter().any(|(n, _)| n == old) {
                        renamed.shift_remove(old);
                    }
                    value
                }
                None => old
                    .split('.')
                    .try_fold(None, |inside: Option<&Value>, part| match inside {
                        None => row.get(part).map(Some),
                        Some(value) => value.get(part).map(Some),
                    })
                    .flatten()
                    .ok_or_else(|| unmapped(row, new, old))?,
            };
            renamed.insert(new.clone(), value.clone());
        }
        Ok(renamed)
    }
}

fn unmapped(row: &Row, new: &str, old: &str) -> Error {
    let have: Vec<&str> = row.keys().map(String::as_str).collect();
    let near = nearest(old, have.iter().copied());
    Error::data(format!("there is no column {old:?} to use as {new:?}; the columns are {}", list(&have))).fix(
        match near {
            Some(near) => format!("did you mean {near:?}? write {new} = {near:?} in data.columns"),
            None => format!("name one of them for {new} in data.columns"),
        },
    )
}

/// Reads a row as what is wanted; also gives the columns that no schema used.
///
/// `prompt` replaces the prompt of the row.
pub fn parse(row: &Row, kind: RowKind, prompt: Option<String>) -> Result<(RowFields, Row)> {
    let mut reader = RowReader::new(row, prompt);
    let fields = match kind {
        RowKind::Sft => reader.sft(),
        RowKind::Preference => reader.preference(),
        RowKind::StepPreference => reader.step_preference(),
        RowKind::Unpaired => reader.unpaired(),
        RowKind::Target => reader.target(),
        RowKind::Prompt => reader.prompt_only(),
        RowKind::Group => reader.group(),
        RowKind::Steps => reader.steps(),
    }?;
    let Some(fields) = fields else { return Err(misfit(row, kind)) };
    let used = reader.used();
    let extra = row.iter().filter(|(k, _)| !used.contains(&k.as_str()));
    Ok((fields, extra.map(|(k, v)| (k.clone(), v.clone())).collect()))
}

/// Other names of columns, the most common first.
const ALIASES: &[(&str, &[&str])] = &[
    ("messages", &["conversation", "chat", "dialogue", "dialog", "turns"]),
    ("prompt", &["question", "query", "problem", "instruction", "input", "user", "context", "prompts"]),
    (
        "response",
        &["answer", "output", "reply", "assistant", "solution", "target", "responses", "ground_truth"],
    ),
    ("completion", &["answer", "output", "reply", "assistant", "solution", "target"]),
    ("chosen", &["accepted", "preferred", "better", "winner", "response_chosen", "positive"]),
    ("rejected", &["refused", "dispreferred", "worse", "loser", "response_rejected", "negative"]),
    ("label", &["labels", "is_good", "correct", "preference"]),
    ("target", &["score", "probability", "rating"]),
    ("completions", &["responses", "answers", "generations", "samples", "outputs"]),
    ("rewards", &["scores", "reward", "ratings"]),
    ("text", &["content", "document", "body"]),
];

/// For each column a schema lacks, the one of the row that it seems to be.
fn mapping(schema: &[&'static str], have: &[&str]) -> Option<Vec<(&'static str, String)>> {
    let mut free: Vec<&str> = have.iter().copied().filter(|h| !schema.contains(h)).collect();
    let mut found = Vec::new();
    for name in schema.iter().copied().filter(|n| !have.contains(n)) {
        let known = ALIASES.iter().find(|(n, _)| *n == name).map_or(&[][..], |(_, others)| others);
        let is = |h: &&str| known.iter().any(|k| h.eq_ignore_ascii_case(k));
        let by_name = known.iter().find_map(|k| free.iter().copied().find(|h| h.eq_ignore_ascii_case(k)));
        let old = nearest(name, free.iter().copied().filter(|h| !is(h))).or(by_name)?;
        free.retain(|h| *h != old);
        found.push((name, old.to_owned()));
    }
    (!found.is_empty()).then_some(found)
}

/// The error for a row that fits none of the schemas.
fn misfit(row: &Row, kind: RowKind) -> Error {
    let names = |null: bool| row.iter().filter(move |(_, v)| v.is_null() == null).map(|(k, _)| k.as_str());
    let (have, empty): (Vec<&str>, Vec<&str>) = (names(false).collect(), names(true).collect());
    // The columns of a schema that are there without a value, where nothing else is missing.
    let unfilled = kind.schemas().iter().find_map(|schema| {
        let lacks = schema.iter().filter(|name| !have.contains(name)).copied().collect::<Vec<_>>();
        lacks.iter().all(|name| empty.contains(name)).then(|| list(&lacks))
    });
    if let Some(columns) = unfilled {
        return Error::data(format!("the row has no value in {columns}, which {kind} needs"))
            .fix(format!("fill in {columns}, or leave the row out"));
    }
    let schemas: Vec<String> = kind.schemas().iter().map(|s| s.join(" + ")).collect();
    let found = kind.schemas().iter().filter_map(|s| mapping(s, &have));
    Error::data(format!(
        "the row does not fit {kind}: got columns {}; expected {}",
        list(&have),
        schemas.join(", or ")
    ))
    .fix(match found.min_by_key(Vec::len) {
        Some(pairs) => {
            let one = |(new, old): &(&str, String)| format!("{new} = {old:?}");
            let pairs = pairs.iter().map(one).collect::<Vec<_>>().join(", ");
            format!("data.columns = {{ {pairs} }}, if that is what these columns hold")
        }
        None if ["chosen", "rejected"].iter().all(|side| have.contains(side)) => {
            "`ferrl data unpair` makes two labelled completions of each pair".into()
        }
        None => "rename the columns, or map them in data.columns: new name = old name".into(),
    })
}
