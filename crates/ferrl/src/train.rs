//! One step of training, in the order in which things happen:
//! prompt -> rollout -> reward -> advantage -> loss -> gradients -> weights.

use crate::algo::{Algorithm, Wants};
use crate::batch::{balance, tokens, updates};
use crate::collect::Collected;
use crate::experience::{Metrics, MicroBatch};
use crate::recipe::Recipe;
use crate::reward::Rewards;
use crate::source::Source;
use ferrl_engine::generate::Sampler;
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{ByRole, Role, Schedule, StatGrads, Stats, Trainer};
use ferrl_engine::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

pub use crate::collect::Rollout;

/// Everything a stage of a run works with.
pub struct Stage {
    /// Its settings.
    pub recipe: Recipe,
    /// How it learns.
    pub algo: Box<dyn Algorithm>,
    /// What it learns from.
    pub wants: Wants,
    /// The model that is trained and sampled from.
    pub policy: Trainer,
    /// As the policy began; absent where nothing is held to it.
    pub reference: Option<Model>,
    /// Estimates values on its own weights; absent without a critic, or where it shares the policy's trunk.
    pub critic: Option<Trainer>,
    /// The policy's.
    pub tokenizer: Arc<Tokenizer>,
    /// Where examples come from.
    pub source: Box<dyn Source>,
    /// What answers are worth.
    pub rewards: Rewards,
    /// Samples answers; absent where they are given.
    pub sampler: Option<Sampler>,
    /// Learning rates of policy and critic.
    pub schedules: (Schedule, Schedule),
    /// Steps done.
    pub step: u64,
    /// Experience of the steps to come, sampled ahead by policies of earlier versions.
    pub ahead: VecDeque<Collected>,
    /// Is told what the step waits for: data, rollout, reward, annotate or train.
    pub waits: Waits,
}

/// Told in a word what a step is busy with.
pub type Waits = Arc<dyn Fn(&'static str) + Send + Sync>;

/// What a step did.
pub struct Report {
    /// Means by name.
    pub metrics: Metrics,
    /// Prompts with their graded answers and advantages, where there were any.
    pub rollouts: Vec<Rollout>,
    /// Passes over the data so far.
    pub epoch: f64,
}

impl Stage {
    /// One step: the whole straight line.
    pub fn step(&mut self) -> Result<Report> {
        let (mut clock, mut metrics) = (Clock::new(&self.waits), Metrics::default());
        let mut collected = self.collected(&mut clock, &mut metrics)?; //      prompt, rollout, reward
        metrics.join(std::mem::take(&mut collected.metrics));
        let Collected { mut experience, mut rollouts, epoch, .. } = collected;
        clock.waits_for("annotate");
        self.annotate(&mut experience)?; //                                    reference logp, values
        clock.lap("annotate", &mut metrics);
        clock.waits_for("train");
        metrics.join(self.algo.prepare(&mut experience)?); //                  advantage
        for s in &experience.sequences {
            if let Some(rollout) = rollouts.get_mut(s.trajectory) {
                let first = s.actions().next();
                rollout.advantage = first.and_then(|i| s.advantage.get(i).copied()).unwrap_or(0.0);
            }
        }
        let version = self.policy.model.version;
        let passes = self.algo.passes();
        for (n, update) in updates(&experience, passes, self.recipe.seed, self.step).iter().enumerate() {
            let batches = update.micro_batches(&experience, self.recipe.train.micro_batch_tokens)?;
            balance(&batches, &mut metrics);
            if self.strayed(&batches)? {
                metrics.add("updates/skipped", 1.0);
                continue;
            }
            let mut loss_value = 0.0;
            for batch in &batches {
                let stats = self.forward(batch)?;
                if n == 0 {
                    compare_logps(batch, &stats, version, &mut metrics);
                }
                let loss = self.algo.loss(batch, &stats); //                   loss
                self.backward(batch, &loss.grads)?; //                         gradients
                loss_value += loss.value;
                metrics.join(loss.metrics);
            }
            metrics.add("loss", loss_value);
            self.update(&mut metrics)?; //                                     weights
        }
        clock.lap("train", &mut metrics);
        let trained: usize = experience.sequences.iter().map(|s| s.ids.len()).sum();
        metrics.add("num_tokens", trained as f64);
        metrics.add("step_time", clock.total());
        self.step += 1;
        Ok(Report { metrics, rollouts, epoch })
    }

    fn forward(&mut self, batch: &MicroBatch<'_>) -> Result<ByRole<Stats>> {
        let tokens = tokens(batch.sequences.iter().copied());
        let mut all = ByRole::default();
        all.set(Role::Policy, self.policy.forward(&tokens)?);
        if let Some(critic) = &mut self.critic {
            all.set(Role::Critic, critic.forward(&tokens)?);
        }
        Ok(all)
    }

    fn backward(&mut self, batch: &MicroBatch<'_>, grads: &ByRole<StatGrads>) -> Result<()> {
        let tokens = tokens(batch.sequences.iter().copied());
        let missing = || Error::numerics("the loss gives no gradient for a model that is trained");
        self.policy.backward(&tokens, grads.get(Role::Policy).ok_or_else(missing)?)?;
        if let Some(critic) = &mut self.critic {
            critic.backward(&tokens, grads.get(Role::Critic).ok_or_else(missing)?)?;
        }
        Ok(())
    }

    fn update(&mut self, metrics: &mut Metrics) -> Result<()> {
        if self.step < self.algo.policy_frozen_steps() {
            self.policy.zero_grads()?;
        } else {
            let report = self.policy.update(self.schedules.0.at(self.step))?;
            metrics.add("grad_norm", report.grad_norm);
            metrics.add("learning_rate", report.learning_rate);
        }
        if let Some(critic) = &mut self.critic {
            let report = critic.update(self.schedules.1.at(self.step))?;
            metrics.add("critic/grad_norm", report.grad_norm);
        }
        Ok(())
    }
}

/// How far the trainer's log-probabilities are from the sampler's, over tokens that this version of the policy
/// sampled: exactly zero, because it has not moved.
fn compare_logps(batch: &MicroBatch<'_>, stats: &ByRole<Stats>, version: u64, metrics: &mut Metrics) {
    let Some(policy) = stats.get(Role::Policy) else { return };
    let (mut worst, mut any) = (0.0f64, false);
    for (row, s) in batch.rows().filter(|(_, s)| !s.version.is_empty()) {
        for i in s.actions().filter(|&i| s.version[i] == version) {
            let gap = (policy.logp[row + i] - s.sampled_logp[i]).abs() as f64;
            metrics.add("sampling/sampling_logp_difference/mean", gap);
            (worst, any) = (worst.max(gap), true);
        }
        s.actions().for_each(|i| metrics.add("sampling/lag", version.saturating_sub(s.version[i]) as f64));
    }
    if any {
        metrics.add_max("sampling/sampling_logp_difference/max", worst);
    }
}

/// Seconds of the phases of a step.
pub(crate) struct Clock {
    start: Instant,
    last: Instant,
    waits: Waits,
}

impl Clock {
    fn new(waits: &Waits) -> Self {
        Clock { start: Instant::now(), last: Instant::now(), waits: waits.clone() }
    }
    /// A phase begins.
    pub fn waits_for(&self, phase: &'static str) {
        (self.waits)(phase);
    }
    /// The phase is over.
    pub fn lap(&mut self, phase: &str, metrics: &mut Metrics) {
        metrics.add(&format!("timing/{phase}"), self.last.elapsed().as_secs_f64());
        self.last = Instant::now();
    }
    fn total(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
