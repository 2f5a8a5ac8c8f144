//! What can be a reward: a verifier, a Python file, a model, or a function of yours.

use crate::verify::{self, Outcome, Progress, Sample, Score, Truncated, Verifier};
use ferrl_engine::{Error, Result};

/// A source of rewards.
///
/// `Fn(&Sample) -> f64` is one, so a closure serves as a reward. What concerns one completion alone is an
/// [`Outcome::Lost`]; an error is a mistake in the recipe or the data and ends the run.
pub trait Reward: Send + Sync {
    /// Its name in metrics (`rewards/NAME/mean`) and messages.
    fn name(&self) -> &str;
    /// The score of each completion, in their order.
    fn score(&self, completions: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>>;
    /// Whether it can reward the steps of a completion.
    fn scores_steps(&self) -> bool {
        false
    }
    /// The score of each completion with the rewards of its steps, which end at these bytes of its text and whose rewards add
    /// up to the completion's.
    fn score_steps(
        &self,
        _completions: &[Sample<'_>],
        _ends: &[Vec<usize>],
        _at: Progress,
    ) -> Result<Vec<Outcome>> {
        Err(Error::usage(format!("{} rewards whole completions, not steps", self.name())).at("reward"))
    }
    /// Whether completions to this prompt could be scored: its row has the columns that are needed. The sample's
    /// completion is empty, and code of users is not called.
    fn check(&self, _prompt: &Sample<'_>) -> Result<()> {
        Ok(())
    }
    /// The verifier, where it is one: a verifier's score says whether a completion is right.
    fn verifier(&self) -> Option<&dyn Verifier> {
        None
    }
}

impl<F: Fn(&Sample<'_>) -> f64 + Send + Sync> Reward for F {
    fn name(&self) -> &str {
        "function"
    }
    fn score(&self, completions: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        Ok(completions.iter().map(|c| Outcome::Scored(Score::single("function", self(c)))).collect())
    }
}

/// A verifier, and what truncated completions get.
pub struct Verified {
    /// Scores texts.
    pub verifier: Box<dyn Verifier>,
    /// What truncated completions get.
    pub truncated: Truncated,
}

impl Reward for Verified {
    fn name(&self) -> &str {
        self.verifier.name()
    }
    fn score(&self, completions: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>> {
        verify::score_all(&*self.verifier, completions, at, self.truncated)
    }
    fn scores_steps(&self) -> bool {
        self.verifier.scores_steps()
    }
    fn score_steps(
        &self,
        completions: &[Sample<'_>],
        ends: &[Vec<usize>],
        at: Progress,
    ) -> Result<Vec<Outcome>> {
        verify::score_steps(&*self.verifier, completions, ends, at, self.truncated)
    }
    fn check(&self, prompt: &Sample<'_>) -> Result<()> {
        self.verifier.check(prompt)
    }
    fn verifier(&self) -> Option<&dyn Verifier> {
        Some(&*self.verifier)
    }
}
