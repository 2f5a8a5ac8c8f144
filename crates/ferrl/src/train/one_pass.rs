//! The one-pass head: gradients precomputed before the forward pass.
//!
//! A loss maps the policy's log-probabilities to gradients with respect to them; backward then recomputes the logits of the
//! head. Two kinds of gradients are known before the forward pass: those that do not depend on the statistics
//! ([`Needs::constant_gradients`](crate::algo::Needs)), and those of the first update on fresh completions, whose
//! log-probabilities the sampler has stored, bit for bit. With them forward and backward run in one pass and the head
//! computes its logits once. If a log-probability differs, the pass is discarded and two passes are made, now and from
//! then on: the gradients have the same bits either way.

use crate::batch::tokens;
use crate::experience::{ByRole, MicroBatch, Role};
use crate::train::Stage;
use ferrl_engine::Result;
use ferrl_engine::train::{StatGrads, Stats};

/// Gradients of the policy that were computed before its forward pass.
pub(crate) struct Precomputed {
    grads: StatGrads,
    /// The log-probabilities for which they are valid; `None` if for any.
    logp: Option<Vec<f32>>,
}

impl Stage {
    /// The gradients of a micro-batch, if known before its forward pass.
    pub(crate) fn precompute(&self, batch: &MicroBatch<'_>) -> Option<Precomputed> {
        let needs = self.algo.needs();
        if needs.constant_gradients {
            let grads = self.gradients_at(vec![0.0; batch.len()], batch)?;
            return Some(Precomputed { grads, logp: None });
        }
        if !self.one_pass || self.critic.is_some() || needs.critic || needs.full_kl {
            return None;
        }
        let logp = recorded_logp(batch, self.policy.model.version)?;
        let grads = self.gradients_at(logp.clone(), batch)?;
        let usable = grads.is_logp_alone() && grads.logp.iter().all(|g| g.is_finite());
        usable.then_some(Precomputed { grads, logp: Some(logp) })
    }

    /// The gradients of the loss at these log-probabilities. The entropy is NaN: gradients that depend on it are not
    /// finite.
    fn gradients_at(&self, logp: Vec<f32>, batch: &MicroBatch<'_>) -> Option<StatGrads> {
        let mut stats = ByRole::default();
        let entropy = vec![f32::NAN; batch.len()];
        stats.set(Role::Policy, Stats { logp, entropy, ..Default::default() });
        self.algo.loss(batch, &stats).grads.get(Role::Policy).cloned()
    }

    /// Forward and backward in one pass; `None`, without added gradients, if a log-probability differs or one pass would not be
    /// faster.
    pub(crate) fn forward_backward(
        &mut self,
        batch: &MicroBatch<'_>,
        precomputed: &Precomputed,
    ) -> Result<Option<ByRole<Stats>>> {
        let tokens = tokens(batch.sequences.iter().copied());
        self.policy.temperature = batch.temperature();
        let stats = match &precomputed.logp {
            None => Some(self.policy.forward_backward(&tokens, &precomputed.grads)?),
            Some(logp) => self.policy.one_pass(&tokens, &precomputed.grads, logp)?,
        };
        self.one_pass &= stats.is_some();
        Ok(stats.map(|stats| {
            let mut all = ByRole::default();
            all.set(Role::Policy, stats);
            all
        }))
    }
}

/// The sampler's log-probabilities, if the policy has not been updated since.
fn recorded_logp(batch: &MicroBatch<'_>, version: u64) -> Option<Vec<f32>> {
    let mut logp = vec![0.0; batch.len()];
    for (row, s) in batch.rows() {
        for i in s.actions() {
            if s.version.get(i) != Some(&version) {
                return None;
            }
            logp[row + i] = s.sampled_logp[i];
        }
    }
    Some(logp)
}
