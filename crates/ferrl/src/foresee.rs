//! Gradients before the forward pass.
//!
//! A loss wants the policy's log-probabilities and gives gradients by them; then the head computes its logits a second
//! time to flow the gradients back. But the first update on fresh answers finds, to the last bit, the log-probabilities
//! that the sampler told. So the loss is asked for its gradients beforehand, forward and backward run in one pass, and the
//! head computes its logits once. Should a log-probability turn out otherwise, what was computed is dropped and the two
//! passes are taken, now and from then on: the gradients are the same bits either way.

use crate::batch::tokens;
use crate::experience::MicroBatch;
use crate::train::Stage;
use ferrl_engine::Result;
use ferrl_engine::train::{ByRole, Role, StatGrads, Stats};

impl Stage {
    /// Statistics of every role, and whether the gradients have already been flown back.
    pub(crate) fn forward_early(&mut self, batch: &MicroBatch<'_>) -> Result<(ByRole<Stats>, bool)> {
        let policy = |stats: Stats| {
            let mut all = ByRole::default();
            all.set(Role::Policy, stats);
            (all, true)
        };
        self.policy.temperature = batch.temperature();
        if let Some(grads) = self.algo.known_grads(batch) {
            let tokens = tokens(batch.sequences.iter().copied());
            return Ok(policy(self.policy.forward_backward(&tokens, &grads)?));
        }
        if let Some((grads, logp)) = self.foresee(batch) {
            let tokens = tokens(batch.sequences.iter().copied());
            if let Some(stats) = self.policy.foreseen(&tokens, &grads, &logp)? {
                return Ok(policy(stats));
            }
            self.foresees = false;
        }
        Ok((self.forward(batch)?, false))
    }

    /// The policy's gradients at the log-probabilities the sampler told, where they can only be those: the policy has
    /// not moved since, no other model is trained, and the loss asks for nothing else.
    fn foresee(&self, batch: &MicroBatch<'_>) -> Option<(StatGrads, Vec<f32>)> {
        let (needs, version) = (self.algo.needs(), self.policy.model.version);
        if !self.foresees || self.critic.is_some() || needs.critic || needs.full_kl {
            return None;
        }
        // What the loss may not look at is not a number, so that a loss which does is found out.
        let mut stats = Stats { entropy: vec![f32::NAN; batch.len()], ..Default::default() };
        stats.logp = vec![0.0; batch.len()];
        for (row, s) in batch.rows() {
            for i in s.actions() {
                if s.version.get(i) != Some(&version) {
                    return None;
                }
                stats.logp[row + i] = s.sampled_logp[i];
            }
        }
        let logp = stats.logp.clone();
        let mut by_role = ByRole::default();
        by_role.set(Role::Policy, stats);
        let grads = self.algo.loss(batch, &by_role).grads.get(Role::Policy)?.clone();
        let by_logp = grads.is_logp_alone() && grads.logp.iter().all(|g| g.is_finite());
        by_logp.then_some((grads, logp))
    }
}
