//! One step of training, in the order in which things happen:
//! prompt -> rollout -> reward -> advantage -> loss -> gradients -> weights.

use crate::algo::{Algorithm, Wants};
use crate::batch::{tokens, updates};
use crate::experience::{Experience, Kind, Metrics, MicroBatch};
use crate::recipe::Recipe;
use crate::reward::{Graded, Rewards};
use crate::rollout::{self, Answer};
use crate::source::{Item, Prompt, Source};
use ferrl_engine::generate::{Sampler, SamplingParams};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{ByRole, Role, Schedule, StatGrads, Stats, Trainer, stats};
use ferrl_engine::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

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
    /// Samples answers.
    pub sampler: Option<Sampler>,
    /// Learning rates of policy and critic.
    pub schedules: (Schedule, Schedule),
    /// Steps done.
    pub step: u64,
}

/// What a step did.
pub struct Report {
    /// Means by name.
    pub metrics: Metrics,
    /// Prompts with their graded answers and advantages, where there were any.
    pub rollouts: Vec<Rollout>,
}

/// One answer of a step, for people.
pub struct Rollout {
    /// The question.
    pub prompt: Prompt,
    /// The answer.
    pub answer: Answer,
    /// What it got.
    pub graded: Graded,
    /// How much better than expected that was.
    pub advantage: f32,
}

impl Stage {
    /// One step: the whole straight line.
    pub fn step(&mut self) -> Result<Report> {
        let mut clock = Clock::default();
        let (mut experience, mut rollouts, mut metrics) = self.experience(&mut clock)?; //     prompt, rollout, reward
        self.algo.extend(&mut experience)?;
        self.annotate(&mut experience)?; //                                                  reference logp, values
        clock.lap("annotate", &mut metrics);
        metrics.join(self.algo.prepare(&mut experience)?); //                                advantage
        for s in &experience.sequences {
            if let Some(rollout) = rollouts.get_mut(s.trajectory) {
                rollout.advantage = s.actions().next().map_or(0.0, |i| s.advantage[i]);
            }
        }
        if !experience.sequences.is_empty() {
            self.restart()?;
        }
        for (n, update) in
            updates(&experience, self.algo.passes(), self.recipe.seed, self.step).iter().enumerate()
        {
            let batches = update.micro_batches(&experience, self.recipe.train.micro_batch_tokens)?;
            if self.strayed(&batches)? {
                metrics.add("updates/skipped", 1.0);
                continue;
            }
            let mut loss_value = 0.0;
            for batch in &batches {
                let stats = self.forward(batch)?;
                if n == 0 {
                    compare_logps(batch, &stats, &mut metrics);
                }
                let loss = self.algo.loss(batch, &stats); //                                 loss
                self.backward(batch, &loss.grads)?; //                                       gradients
                loss_value += loss.value;
                metrics.join(loss.metrics);
            }
            metrics.add("loss", loss_value);
            self.update(&mut metrics)?; //                                                   weights
        }
        clock.lap("train", &mut metrics);
        let trained: usize = experience.sequences.iter().map(|s| s.ids.len()).sum();
        metrics.add("num_tokens", trained as f64);
        metrics.add("step_time", clock.total());
        self.step += 1;
        Ok(Report { metrics, rollouts })
    }

    /// What this step learns from: given sequences, or sampled and rewarded answers.
    fn experience(&mut self, clock: &mut Clock) -> Result<(Experience, Vec<Rollout>, Metrics)> {
        let mut metrics = Metrics::default();
        let sampled = self.wants == Wants::Rollouts;
        let r = &self.recipe.rollout;
        let items = self.source.next(if sampled { r.prompts } else { self.recipe.train.batch })?;
        let mut given = Experience::default();
        let mut prompts = Vec::new();
        for (i, item) in items.into_iter().enumerate() {
            match item {
                Item::Ask(prompt) => prompts.push(prompt),
                Item::Given(sequences) => {
                    for mut s in sequences {
                        (s.trajectory, s.group) = (given.sequences.len(), i);
                        s.pair = s.pair.map(|_| i);
                        s.trajectory_tokens = s.action_count();
                        given.sequences.push(s);
                    }
                }
            }
        }
        if !sampled {
            clock.lap("data", &mut metrics);
            return Ok((given, Vec::new(), metrics));
        }
        let params = rollout::params(r, &self.tokenizer, self.recipe.seed);
        let (mut experience, answers) = self.answer(&prompts, &params, r.samples, self.step)?;
        clock.lap("rollout", &mut metrics);
        let graded = self.rewards.score(&prompts, &answers, &mut experience, &mut metrics)?;
        clock.lap("reward", &mut metrics);
        let rollouts = answers
            .into_iter()
            .zip(graded)
            .map(|(answer, graded)| Rollout {
                prompt: prompts[answer.prompt].clone(),
                answer,
                graded,
                advantage: 0.0,
            })
            .collect();
        Ok((experience, rollouts, metrics))
    }

    /// Samples answers from the policy as it is now.
    pub fn answer(
        &mut self,
        prompts: &[Prompt],
        params: &SamplingParams,
        samples: usize,
        step: u64,
    ) -> Result<(Experience, Vec<Answer>)> {
        let sampler = self.sampler.as_mut().expect("a stage that samples has a sampler");
        rollout::collect(sampler, &self.policy.model, &self.tokenizer, prompts, params, samples, step)
    }

    /// Log-probabilities under the reference and values under the critic, before anything changes.
    fn annotate(&mut self, e: &mut Experience) -> Result<()> {
        let needs = self.algo.needs();
        let probes = e.sequences.iter().any(|s| s.kind == Kind::Probe);
        if !needs.reference && !needs.critic && !probes {
            return Ok(());
        }
        let budget = self.recipe.train.micro_batch_tokens;
        let whole = updates(e, (1, 1), self.recipe.seed, self.step);
        let (mut ref_logp, mut values, mut old_logp) = (Vec::new(), Vec::new(), Vec::new());
        for batch in
            whole.iter().map(|u| u.micro_batches(e, budget)).collect::<Result<Vec<_>>>()?.iter().flatten()
        {
            let tokens = tokens(batch);
            if batch.sequences.iter().any(|s| s.kind == Kind::Probe) {
                old_logp.extend(self.policy.stats(&tokens)?.logp);
            } else if probes {
                old_logp.resize(old_logp.len() + batch.len(), 0.0);
            }
            if let Some(reference) = self.reference.as_ref().filter(|_| needs.reference) {
                ref_logp.extend(stats(reference, &tokens, self.policy.temperature)?.logp);
            }
            if needs.critic {
                let model = self.critic.as_ref().map_or(&self.policy.model, |c| &c.model);
                values.extend(stats(model, &tokens, self.policy.temperature)?.value);
            }
        }
        let mut row = 0;
        for s in &mut e.sequences {
            let rows = row..row + s.ids.len();
            if needs.reference {
                s.ref_logp = ref_logp[rows.clone()].to_vec();
            }
            if s.kind == Kind::Probe {
                s.old_logp = old_logp[rows.clone()].to_vec();
            }
            if needs.critic {
                s.old_value = values[rows].to_vec();
            }
            row += s.ids.len();
        }
        Ok(())
    }

    /// Back to the stage's first weights, for algorithms that fine-tune those at every step.
    fn restart(&mut self) -> Result<()> {
        match &self.reference {
            Some(start) if self.algo.restarts() => self.policy.restart_from(start),
            _ => Ok(()),
        }
    }

    /// Whether the policy has moved so far that this update would be wrong.
    fn strayed(&mut self, batches: &[MicroBatch<'_>]) -> Result<bool> {
        let Some(limit) = self.algo.skip_ratio() else { return Ok(false) };
        let (mut sum, mut count) = (0.0, 0.0);
        for batch in batches {
            let now = self.policy.stats(&tokens(batch))?;
            for (row, s) in batch.rows() {
                for i in s.actions() {
                    sum += ferrl_engine::math::exp((now.logp[row + i] - s.old_logp[i]) as f64);
                    count += 1.0;
                }
            }
        }
        Ok(sum / count > limit)
    }

    fn forward(&mut self, batch: &MicroBatch<'_>) -> Result<ByRole<Stats>> {
        let tokens = tokens(batch);
        let mut all = ByRole::default();
        all.set(Role::Policy, self.policy.forward(&tokens)?);
        if let Some(critic) = &mut self.critic {
            all.set(Role::Critic, critic.forward(&tokens)?);
        }
        Ok(all)
    }

    fn backward(&mut self, batch: &MicroBatch<'_>, grads: &ByRole<StatGrads>) -> Result<()> {
        let tokens = tokens(batch);
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
            let rate = self.schedules.0.at(self.step);
            let head_only = self.algo.head_only_steps();
            if head_only > 0 && self.step == head_only {
                self.policy.optimizer.restart();
            }
            let report = if self.step < head_only {
                self.policy.update_head(rate)?
            } else {
                self.policy.update(rate)?
            };
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

/// How far the trainer's log-probabilities are from the sampler's: exactly zero when the policy has not moved.
fn compare_logps(batch: &MicroBatch<'_>, stats: &ByRole<Stats>, metrics: &mut Metrics) {
    let Some(policy) = stats.get(Role::Policy) else { return };
    let (mut worst, mut any) = (0.0f64, false);
    for (row, s) in batch.rows().filter(|(_, s)| !s.sampled_logp.is_empty()) {
        for i in s.actions() {
            let gap = (policy.logp[row + i] - s.sampled_logp[i]).abs() as f64;
            metrics.add("sampling/sampling_logp_difference/mean", gap);
            (worst, any) = (worst.max(gap), true);
        }
    }
    if any {
        metrics.add_max("sampling/sampling_logp_difference/max", worst);
    }
}

/// Seconds of the phases of a step.
struct Clock {
    start: Instant,
    last: Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { start: Instant::now(), last: Instant::now() }
    }
}

impl Clock {
    fn lap(&mut self, phase: &str, metrics: &mut Metrics) {
        metrics.add(&format!("timing/{phase}"), self.last.elapsed().as_secs_f64());
        self.last = Instant::now();
    }
    fn total(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
