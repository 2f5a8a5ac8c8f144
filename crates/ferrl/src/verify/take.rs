//! Which part of a completion is its answer, for verifiers of texts.

use super::last_answer;

/// Where the answer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Take {
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

impl Take {
    /// By their names in recipes.
    pub const ALL: &[(&str, Take)] = &[
        ("auto", Take::Auto),
        ("answer", Take::Answer),
        ("last_line", Take::LastLine),
        ("whole", Take::Whole),
    ];

    /// The answer, trimmed; none where its tag or line is missing.
    pub fn from(self, completion: &str) -> Option<&str> {
        match self {
            Take::Auto => last_answer(completion).or(Some(completion.trim())),
            Take::Answer => last_answer(completion),
            Take::LastLine => completion.trim_end().lines().last().map(str::trim),
            Take::Whole => Some(completion.trim()),
        }
    }

    /// What a completion must contain.
    pub fn reads(self) -> &'static [&'static str] {
        if self == Take::Answer { TAG } else { &[] }
    }
}
