//! The kinds of training data of algorithms, and their kinds of rows.
//!
//! The columns of each [`RowKind`] are in `data/schema.rs`.

use crate::data::schema::RowKind;
use crate::recipe::Recipe;

/// What an algorithm learns from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// Demonstrations (SFT).
    Demonstrations,
    /// Sequences with a weight each, or groups of completions with rewards.
    Weighted,
    /// Pairs of a chosen and a rejected completion.
    Pairs,
    /// Pairs of a right and a wrong step after the same beginning.
    StepPairs,
    /// Completions labelled good or bad.
    Labelled,
    /// Completions with a probability.
    Targets,
    /// Prompts: completions are sampled and rewarded.
    Rollouts,
}

/// Properties of a kind.
struct FeedFacts {
    words: &'static str,
    row: RowKind,
    /// Whether a row may bring a group of completions with rewards instead.
    groups: bool,
}

impl Feed {
    fn kind(self) -> FeedFacts {
        let (words, row, groups) = match self {
            Feed::Demonstrations => ("demonstrations", RowKind::Sft, false),
            Feed::Weighted => ("completions with weights or rewards", RowKind::Sft, true),
            Feed::Pairs => ("pairs of a chosen and a rejected completion", RowKind::Preference, false),
            Feed::StepPairs => ("pairs of a right and a wrong step", RowKind::StepPreference, false),
            Feed::Labelled => ("completions labelled good or bad", RowKind::Unpaired, false),
            Feed::Targets => ("completions with a probability", RowKind::Target, false),
            Feed::Rollouts => ("its own completions and their rewards", RowKind::Prompt, true),
        };
        FeedFacts { words, row, groups }
    }

    pub fn words(self) -> &'static str {
        self.kind().words
    }

    /// Whether completions are sampled and rewarded.
    pub fn sampled(self) -> bool {
        self == Feed::Rollouts
    }

    pub fn paired(self) -> bool {
        matches!(self, Feed::Pairs | Feed::StepPairs)
    }

    /// The kind of its rows; `grouped` rows contain completions and rewards.
    pub fn row_kind(self, grouped: bool) -> RowKind {
        let kind = self.kind();
        if grouped && kind.groups { RowKind::Group } else { kind.row }
    }

    /// Prompts or examples per step.
    pub fn per_step(self, recipe: &Recipe) -> usize {
        if self.sampled() { recipe.rollout.prompts } else { recipe.train.batch }
    }
}
