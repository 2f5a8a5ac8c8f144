//! The token loss: surrogate, KL, entropy bonus and value loss.

use super::{Baseline, KlPlacement, Policy};
use crate::algo::math::aggregate::Aggregate;
use crate::algo::math::kl::Estimator;
use crate::algo::math::surrogate::{Bounds, TokenLoss};
use crate::experience::{ByRole, Loss, Mean, Metrics, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::math::exp;
use ferrl_engine::train::{StatGrads, Stats};

/// Sums over the tokens of a micro-batch.
#[derive(Default)]
struct Sums {
    loss: f64,
    entropy: Mean,
    ratio: Mean,
    low: Mean,
    high: Mean,
    clipped: Mean,
}

impl Sums {
    /// Counts a ratio: a token's, or that of a whole completion.
    fn add_clip(&mut self, t: &TokenLoss) {
        self.low.add(f64::from(t.clipped_low));
        self.high.add(f64::from(t.clipped_high));
        self.clipped.add(f64::from(t.clipped_low || t.clipped_high));
    }

    fn metrics(self) -> Metrics {
        let mut metrics = Metrics::default();
        metrics.add_all("entropy", self.entropy);
        metrics.add_all("policy/ratio", self.ratio);
        metrics.add_all("clip_ratio/low_mean", self.low);
        metrics.add_all("clip_ratio/high_mean", self.high);
        metrics.add_all("clip_ratio/region_mean", self.clipped);
        metrics
    }
}

impl Policy {
    /// Loss of a micro-batch: surrogate, entropy bonus, KL and value loss.
    pub fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>, kl_coef: f64) -> Loss {
        let policy = stats.get(Role::Policy).expect("the policy was computed");
        let n = batch.len();
        let mut grads = Loss::zeros(n);
        if self.entropy_coef != 0.0 {
            grads.entropy = vec![0.0; n];
        }
        if kl_coef > 0.0 && self.kl.estimator == Estimator::Full {
            grads.kl = vec![0.0; n];
        }
        let mut sums = Sums::default();
        for (row, s) in batch.rows() {
            let w = self.aggregate.weight(s, &batch.counts, self.length);
            let kl_coef = kl_coef * self.kl_scale(s, &batch.counts);
            self.sequence_loss(policy, (row, s), (w, kl_coef), &mut grads, &mut sums);
        }
        let (mut value, mut metrics) = (sums.loss, sums.metrics());
        let mut by_role = ByRole::default();
        if self.advantage.baseline == Baseline::Critic {
            let own = stats.get(Role::Critic);
            let (loss, dvalue) = self.critic_loss(batch, &own.unwrap_or(policy).value, &mut metrics);
            value += loss;
            if own.is_some() {
                let critic = StatGrads { value: dvalue, ..Default::default() };
                by_role.set(Role::Critic, critic);
            } else {
                grads.value = dvalue;
            }
        }
        by_role.set(Role::Policy, grads);
        Loss { value, grads: by_role, metrics }
    }

    /// Adds the loss of one sequence, weighted with `w`; writes the gradients of its rows.
    fn sequence_loss(
        &self,
        policy: &Stats,
        (row, s): (usize, &Sequence),
        (w, kl_coef): (f64, f64),
        grads: &mut StatGrads,
        sums: &mut Sums,
    ) {
        let bounds = Bounds { low: self.clip_low, high: self.clip_high, dual: self.dual_clip, tau: self.tau };
        let at: Vec<usize> = s.actions().collect();
        let gaps: Vec<f64> = at.iter().map(|&i| policy.logp[row + i] as f64 - s.old_logp[i] as f64).collect();
        let shared = self.ratio.shared(&gaps);
        // The gradient of the sequence's ratio, and from it that of each token.
        let (mut into_shared, mut slopes) = (0.0, vec![0.0; at.len()]);
        let kl = self.sequence_kl(policy, (row, s), &at, (w, kl_coef), grads);
        for (n, ((&i, &gap), slope)) in at.iter().zip(&gaps).zip(&mut slopes).enumerate() {
            let (logp, entropy) = (policy.logp[row + i], policy.entropy[row + i] as f64);
            let log_ratio = shared.map_or(gap, |(log_ratio, _)| log_ratio);
            let t = self.surrogate.term(log_ratio, logp as f64, s.advantage[i] as f64, bounds);
            let c = s.correction[i] as f64;
            let mut loss = c * t.loss;
            match shared {
                Some(_) => into_shared += c * t.slope,
                None => *slope = c * t.slope,
            }
            if let Some((values, kl_slopes)) = &kl {
                let weight = if self.kl.unbiased { exp(log_ratio) } else { 1.0 };
                loss += weight * values[n];
                *slope += weight * kl_slopes[n];
                if self.kl.unbiased {
                    // The derivative of the ratio is the ratio.
                    *(if shared.is_some() { &mut into_shared } else { slope }) += weight * values[n];
                }
            }
            sums.loss += w * (loss - self.entropy_coef * entropy);
            if self.entropy_coef != 0.0 {
                grads.entropy[row + i] = (-w * self.entropy_coef) as f32;
            }
            sums.entropy.add(entropy);
            sums.ratio.add(t.ratio);
            if shared.is_none() || n == 0 {
                sums.add_clip(&t);
            }
        }
        let each = shared.map_or(0.0, |(_, slope)| into_shared * slope);
        for (&i, slope) in at.iter().zip(slopes) {
            grads.logp[row + i] = (w * (slope + each)) as f32;
        }
    }

    /// Factor of a token's KL before the token's weight; with `kl.sum` it cancels the weight's divisor except for the number of
    /// completions.
    fn kl_scale(&self, s: &Sequence, counts: &UpdateCounts) -> f64 {
        match self.aggregate {
            _ if !self.kl.sum => 1.0,
            Aggregate::Token => counts.tokens / counts.trajectories,
            Aggregate::Sequence => s.trajectory_tokens.max(1) as f64,
            Aggregate::Constant => self.length.max(1) as f64,
        }
    }

    /// The KL of a sequence's tokens in the loss, before the weight `w`, and its derivatives; also stores the gradient with respect to
    /// the exact KL.
    fn sequence_kl(
        &self,
        policy: &Stats,
        (row, s): (usize, &Sequence),
        at: &[usize],
        (w, kl_coef): (f64, f64),
        grads: &mut StatGrads,
    ) -> Option<(Vec<f64>, Vec<f64>)> {
        if kl_coef <= 0.0 || self.kl.place != KlPlacement::Loss {
            return None;
        }
        let (mut values, mut slopes) = match self.kl.estimator {
            Estimator::Full => {
                at.iter().for_each(|&i| grads.kl[row + i] = (w * kl_coef) as f32);
                (at.iter().map(|&i| policy.kl[row + i] as f64).collect(), vec![0.0; at.len()])
            }
            _ => {
                let now: Vec<f32> = at.iter().map(|&i| policy.logp[row + i]).collect();
                let refs: Vec<f32> = at.iter().map(|&i| s.ref_logp[i]).collect();
                self.kl.estimates(&now, &refs)
            }
        };
        for value in values.iter_mut().chain(&mut slopes) {
            *value *= kl_coef;
        }
        Some((values, slopes))
    }

    fn critic_loss(&self, batch: &MicroBatch<'_>, values: &[f32], metrics: &mut Metrics) -> (f64, Vec<f32>) {
        let mut grads = vec![0.0; batch.len()];
        let mut total = 0.0;
        let scale = self.critic.coef * if self.critic.half { 0.5 } else { 1.0 };
        let (mut clips, mut errors) = (Mean::default(), Mean::default());
        for (row, s) in batch.rows() {
            let w = scale * self.aggregate.weight(s, &batch.counts, self.length);
            for i in s.actions() {
                let (v, old, target) =
                    (values[row + i] as f64, s.old_value[i] as f64, s.target_value[i] as f64);
                let free = v - target;
                let held = self.critic.clip.map_or(v, |c| v.clamp(old - c, old + c)) - target;
                let clipped = held * held > free * free;
                let error = if clipped { held } else { free };
                total += w * error * error;
                // If the clipped error is larger, the loss does not depend on the value.
                grads[row + i] = if clipped { 0.0 } else { (2.0 * w * free) as f32 };
                clips.add(f64::from(clipped));
                errors.add(free * free);
            }
        }
        metrics.add_all("value/clip_ratio", clips);
        metrics.add_all("value/error", errors);
        (total, grads)
    }
}
