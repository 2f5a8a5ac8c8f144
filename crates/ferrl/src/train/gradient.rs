//! The gradient of one rollout without an update, for analyses.

use super::{Clock, Stage};
use crate::batch::updates;
use crate::experience::Metrics;
use ferrl_engine::Result;

impl Stage {
    /// Samples the next rollout and returns the gradient of its first update as one vector, without an update. The next rollout has
    /// other prompts and random numbers.
    pub fn sample_gradient(&mut self) -> Result<Vec<f32>> {
        let (mut clock, mut metrics) = (Clock::new(&self.waits), Metrics::default());
        let mut experience = self.next_experience(&mut clock, &mut metrics)?.experience;
        self.annotate(&mut experience)?;
        self.algo.prepare(&mut experience)?;
        self.step += 1;
        self.policy.zero_grads();
        if let Some(update) = updates(&experience, self.algo.updates(), self.recipe.seed, self.step).first() {
            for batch in &update.micro_batches(&experience, self.recipe.train.micro_batch_tokens)? {
                let stats = self.forward_only(batch)?;
                let loss = self.algo.loss(batch, &stats);
                self.backward(batch, &loss.grads)?;
            }
        }
        let mut all = Vec::new();
        for i in 0..self.policy.model.params.len() {
            all.extend(self.policy.gradient(i)?.into_iter().flatten());
        }
        self.policy.zero_grads();
        if let Some(critic) = &mut self.critic {
            critic.zero_grads();
        }
        Ok(all)
    }
}
