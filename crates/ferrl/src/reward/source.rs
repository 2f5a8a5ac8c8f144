//! Sources of rewards: a verifier, a Python file, a model, or a closure.

use crate::verify::{self, Outcome, Progress, Sample, Score, Truncated, Verifier};
use ferrl_engine::{Error, Result};

/// A source of rewards.
///
/// Closures `Fn(&Sample) -> f64` implement it. A failure for a single completion is an [`Outcome::Lost`]; an error is a mistake in
/// the recipe or the data and ends the run.
pub trait Reward: Send + Sync {
    /// Its name in metrics (`rewards/NAME/mean`) and messages.
    fn name(&self) -> &str;
    /// The score of each completion, in their order.
    fn score(&self, completions: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>>;
    /// Whether it can reward the steps of a completion.
    fn scores_steps(&self) -> bool {
        false
    }
    /// The score of each completion with the rewards of its steps, which end at these bytes of its text; their sum is the
    /// completion's reward.
    fn score_steps(
        &self,
        _completions: &[Sample<'_>],
        _ends: &[Vec<usize>],
        _at: Progress,
    ) -> Result<Vec<Outcome>> {
        Err(Error::usage(format!("{} rewards whole completions, not steps", self.name())).at("reward"))
    }
    /// Checks that the row of this prompt has the columns that scoring needs. The sample's completion is empty, and user code is
    /// not called.
    fn check(&self, _prompt: &Sample<'_>) -> Result<()> {
        Ok(())
    }
    /// The verifier, if it is one: its score decides whether a completion is right.
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

/// A verifier with the scoring of truncated completions.
pub struct Verified {
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
