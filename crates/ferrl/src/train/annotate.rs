//! Passes without gradients before an update: reference, critic, and the policy if it was updated since sampling.

use crate::batch::{Update, tokens};
use crate::experience::{Evidence, Experience, MicroBatch, Sequence};
use crate::ranks::{Teams, each};
use crate::train::Stage;
use ferrl_engine::Result;
use ferrl_engine::model::{Frozen, Model};
use ferrl_engine::train::stats;

impl Stage {
    /// Computes log-probabilities under the reference, values of the critic, and the policy's log-probabilities of completions that
    /// the current version did not sample.
    pub(crate) fn annotate(&mut self, e: &mut Experience) -> Result<()> {
        let needs = self.algo.needs();
        if needs.mismatched {
            e.add_mismatched();
        }
        let now = self.policy.model.version;
        let sampled = self.feed.sampled();
        let asked = |s: &Sequence| s.kind == Evidence::Probe || sampled && sampled_by_another(s, now);
        let moved = e.sequences.iter().any(asked);
        if !needs.reference && !needs.critic && !moved {
            return Ok(());
        }
        let bins = Update::whole(e).bins(e, self.recipe.train.micro_batch_tokens)?;
        let references = self.reference_logps(e, &bins)?;
        if needs.critic || moved {
            self.gather_weights()?;
        }
        let teams = Teams::of(&self.ranks, &self.policy.model);
        let computed = each(&teams, &bins, |bin| {
            let temperature = bin.first().map_or(1.0, |&i| e.sequences[i].divisor());
            let batch = tokens(bin.iter().map(|&i| &e.sequences[i]));
            let values = match needs.critic {
                true => {
                    let model = self.critic.as_ref().map_or(&self.policy.model, |c| &c.model);
                    stats(model, &batch, temperature)?.value
                }
                false => Vec::new(),
            };
            let own = match bin.iter().any(|&i| asked(&e.sequences[i])) {
                true => stats(&self.policy.model, &batch, temperature)?.logp,
                false => Vec::new(),
            };
            Ok((values, own))
        })?;
        for ((bin, reference), (values, own)) in bins.into_iter().zip(references).zip(computed) {
            let mut row = 0;
            for i in bin {
                let s = &mut e.sequences[i];
                let rows = row..row + s.ids.len();
                row = rows.end;
                let cut = |column: &[f32]| column.get(rows.clone()).map_or(Vec::new(), <[f32]>::to_vec);
                (s.ref_logp, s.old_value) = (cut(&reference), cut(&values));
                if asked(s) {
                    s.old_logp = cut(&own);
                    // Completions without stored log-probabilities count as sampled by the current policy.
                    if s.sampled_logp.is_empty() {
                        s.sampled_logp = s.old_logp.clone();
                    }
                }
            }
        }
        Ok(())
    }

    /// Log-probabilities of the bins' sequences under the reference; empty if the algorithm needs none.
    fn reference_logps(&mut self, e: &Experience, bins: &[Vec<usize>]) -> Result<Vec<Vec<f32>>> {
        if !self.algo.needs().reference {
            return Ok(vec![Vec::new(); bins.len()]);
        }
        let ranks = self.ranks.clone();
        let under = |model: &Model| {
            each(&Teams::of(&ranks, model), bins, |bin| {
                let temperature = bin.first().map_or(1.0, |&i| e.sequences[i].divisor());
                Ok(stats(model, &tokens(bin.iter().map(|&i| &e.sequences[i])), temperature)?.logp)
            })
        };
        if self.reference.as_ref().is_some_and(Frozen::is_split) {
            self.release_whole(); // one model at a time is gathered
        }
        match &mut self.reference {
            Some(model) => model.gathered(under),
            None => self.policy.at_start(under),
        }
    }

    /// Whether the mean ratio of new to old policy is above `skip_ratio`.
    pub(crate) fn exceeds_skip_ratio(&mut self, batches: &[MicroBatch<'_>]) -> Result<bool> {
        let Some(limit) = self.algo.updates().skip_ratio else { return Ok(false) };
        self.gather_weights()?;
        let teams = Teams::of(&self.ranks, &self.policy.model);
        let now = each(&teams, batches, |batch| {
            let tokens = tokens(batch.sequences.iter().copied());
            Ok(stats(&self.policy.model, &tokens, batch.temperature())?.logp)
        })?;
        self.release_weights()?;
        let (mut sum, mut count) = (0.0, 0.0);
        for (batch, logp) in batches.iter().zip(now) {
            for (row, s) in batch.rows() {
                for i in s.actions() {
                    sum += ferrl_engine::math::exp((logp[row + i] - s.old_logp[i]) as f64);
                    count += 1.0;
                }
            }
        }
        Ok(sum / count > limit)
    }
}

/// Whether a token was sampled by another policy version, or by an unknown one.
fn sampled_by_another(s: &Sequence, version: u64) -> bool {
    s.sampled_logp.is_empty() || s.actions().any(|i| s.version.get(i) != Some(&version))
}
