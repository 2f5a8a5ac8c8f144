//! Extraction of the answer from a completion, for verifiers of texts.

use super::last_answer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the answer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum TakeText {
    /// In the last answer tag, or else the whole completion.
    #[default]
    Auto,
    /// In the last answer tag.
    Answer,
    /// The last line.
    LastLine,
    /// The whole completion.
    Whole,
}

/// Texts that a completion with an answer tag must contain.
pub(super) const TAG: &[&str] = &["<answer>", "</answer>"];

impl TakeText {
    /// The answer, trimmed; `None` if its tag or line is missing.
    pub fn from(self, completion: &str) -> Option<&str> {
        match self {
            TakeText::Auto => last_answer(completion).or(Some(completion.trim())),
            TakeText::Answer => last_answer(completion),
            TakeText::LastLine => completion.trim_end().lines().last().map(str::trim),
            TakeText::Whole => Some(completion.trim()),
        }
    }

    /// Texts that the completion must contain.
    pub fn reads(self) -> &'static [&'static str] {
        if self == TakeText::Answer { TAG } else { &[] }
    }
}
