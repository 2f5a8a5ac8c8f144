//! Monte-Carlo credit of the completions of a step, for algorithms with values of steps.

use super::Clock;
use crate::algo::no_step_values;
use crate::credit::{self, Continuations, StepCredit};
use crate::experience::{Experience, Metrics};
use crate::reward::{CompletionBatch, CompletionScores};
use crate::rollout::{self, Actor};
use crate::train::Stage;
use ferrl_engine::Result;

impl Stage {
    /// Fills the `credit` column by continuing every step of the completions, with the policy that sampled them.
    pub(super) fn credit(
        &mut self,
        batch: CompletionBatch<'_>,
        scores: &[CompletionScores],
        experience: &mut Experience,
        (own, clock, timing): (&mut Metrics, &mut Clock, &mut Metrics),
    ) -> Result<Vec<Option<StepCredit>>> {
        // Trees have the advantages of their steps already.
        let vine = self.algo.vine().filter(|_| !self.recipe.search.train);
        let Some(vine) = vine else { return Ok(vec![None; batch.completions.len()]) };
        clock.waits_for("credit");
        let params = rollout::params(&self.recipe.rollout, &self.stops, self.recipe.seed);
        let given = || no_step_values("given completions cannot be continued");
        let generator = self.generator.as_mut().ok_or_else(given)?;
        let actor = Actor {
            generator: &mut **generator,
            policy: &self.policy.model,
            tokenizer: &self.tokenizer,
            stops: &self.stops,
            environments: &self.environments,
            ranks: &self.ranks,
        };
        let mut continuations = Continuations { actor, params, rewards: &self.rewards, vine };
        let credits = credit::credit(&mut continuations, batch, scores, experience, own)
            .map_err(|e| crate::setup::too_small(e, &self.recipe.rollout))?;
        clock.lap("credit", timing);
        Ok(credits)
    }
}
