//! Which part of a completion is its answer, for verifiers of texts.

use super::last_answer;

/// Where the answer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeText {
    /// In the last answer tag, or else the whole completion.
    Auto,
    /// In the last answer tag.
    Answer,
    /// The last line.
    LastLine,
    /// The whole completion.
    Whole,
}

/// What a completion must contain for an answer in a tag.
pub(super) const TAG: &[&str] = &["<answer>", "</answer>"];

impl TakeText {
    /// By their names in recipes.
    pub const ALL: &[(&str, TakeText)] = &[
        ("auto", TakeText::Auto),
        ("answer", TakeText::Answer),
        ("last_line", TakeText::LastLine),
        ("whole", TakeText::Whole),
    ];

    /// The answer, trimmed; none where its tag or line is missing.
    pub fn from(self, completion: &str) -> Option<&str> {
        match self {
            TakeText::Auto => last_answer(completion).or(Some(completion.trim())),
            TakeText::Answer => last_answer(completion),
            TakeText::LastLine => completion.trim_end().lines().last().map(str::trim),
            TakeText::Whole => Some(completion.trim()),
        }
    }

    /// What a completion must contain.
    pub fn reads(self) -> &'static [&'static str] {
        if self == TakeText::Answer { TAG } else { &[] }
    }
}
