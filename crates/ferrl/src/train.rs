//! One step of training, in the order in which things happen:
//! prompt -> rollout -> reward -> advantage -> loss -> gradients -> weights.

use crate::algo::{Algorithm, Wants};
use crate::batch::{tokens, updates};
use crate::experience::{Experience, Metrics, MicroBatch};
use crate::recipe::Recipe;
use crate::reward::{Graded, Rewards};
use crate::rollout::{self, Answer};
use crate::source::{Item, Prompt, Source};
use crate::{refill, trust_region};
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
    /// What the policy is held to, as it began or a teacher; absent where nothing is.
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
        self.annotate(&mut experience)?; //                                                  reference logp, values
        clock.lap("annotate", &mut metrics);
        metrics.join(self.algo.prepare(&mut experience)?); //                                advantage
        for s in &experience.sequences {
            if let Some(rollout) = rollouts.get_mut(s.trajectory) {
                rollout.advantage = s.actions().next().map_or(0.0, |i| s.advantage[i]);
            }
        }
        for (n, update) in
            updates(&experience, self.algo.passes(), self.recipe.seed, self.step).iter().enumerate()
        {
            let batches = update.micro_batches(&experience, self.recipe.train.micro_batch_tokens)?;
            if self.strayed(&batches)? {
                metrics.add("updates/skipped", 1.0);
                continue;
            }
            if let Some(region) = self.algo.trust_region() {
                metrics.join(trust_region::update(self, &batches, region)?); //                all the rest
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
        let (wanted, mut asked) = (r.prompts, prompts.len());
        let (mut experience, mut rollouts) = self.round(prompts, clock, &mut metrics)?;
        for _ in 0..self.algo.refills() {
            let Some(more) = refill::missing(&experience, &*self.algo, wanted) else { break };
            let ask = |item| if let Item::Ask(prompt) = item { Some(prompt) } else { None };
            let prompts: Vec<Prompt> = self.source.next(more)?.into_iter().filter_map(ask).collect();
            let count = prompts.len();
            let (round, more) = self.round(prompts, clock, &mut metrics)?;
            refill::append(&mut experience, round, asked, rollouts.len());
            rollouts.extend(more);
            asked += count;
        }
        if self.algo.refills() > 0 {
            refill::cut(&mut experience, &*self.algo, wanted);
        }
        metrics.add("completions/total_tokens", rollouts.iter().map(|r| r.answer.tokens as f64).sum());
        Ok((experience, rollouts, metrics))
    }

    /// Answers to prompts, rewarded.
    fn round(
        &mut self,
        prompts: Vec<Prompt>,
        clock: &mut Clock,
        metrics: &mut Metrics,
    ) -> Result<(Experience, Vec<Rollout>)> {
        let r = &self.recipe.rollout;
        let params = rollout::params(r, &self.tokenizer, self.recipe.seed);
        let (mut experience, answers) = self.answer(&prompts, &params, r.samples, self.step)?;
        clock.lap("rollout", metrics);
        let graded = self.rewards.score(&prompts, &answers, &mut experience, metrics)?;
        clock.lap("reward", metrics);
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
        Ok((experience, rollouts))
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
        if !needs.reference && !needs.critic {
            return Ok(());
        }
        let budget = self.recipe.train.micro_batch_tokens;
        let whole = updates(e, (1, 1), self.recipe.seed, self.step);
        let (mut ref_logp, mut values) = (Vec::new(), Vec::new());
        for batch in
            whole.iter().map(|u| u.micro_batches(e, budget)).collect::<Result<Vec<_>>>()?.iter().flatten()
        {
            let tokens = tokens(batch);
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
            if needs.critic {
                s.old_value = values[rows].to_vec();
            }
            row += s.ids.len();
        }
        Ok(())
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

    pub(crate) fn forward(&mut self, batch: &MicroBatch<'_>) -> Result<ByRole<Stats>> {
        let tokens = tokens(batch);
        let mut all = ByRole::default();
        let policy = match self.reference.as_ref().filter(|_| self.algo.needs().full_kl) {
            Some(teacher) => self.policy.forward_against(&tokens, teacher)?,
            None => self.policy.forward(&tokens)?,
        };
        all.set(Role::Policy, policy);
        if let Some(critic) = &mut self.critic {
            all.set(Role::Critic, critic.forward(&tokens)?);
        }
        Ok(all)
    }

    pub(crate) fn backward(&mut self, batch: &MicroBatch<'_>, grads: &ByRole<StatGrads>) -> Result<()> {
        let tokens = tokens(batch);
        let missing = || Error::numerics("the loss gives no gradient for a model that is trained");
        let policy = grads.get(Role::Policy).ok_or_else(missing)?;
        match self.reference.as_ref().filter(|_| self.algo.needs().full_kl) {
            Some(teacher) => self.policy.backward_against(&tokens, policy, teacher)?,
            None => self.policy.backward(&tokens, policy)?,
        }
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

/// How far the trainer's log-probabilities are from the sampler's: exactly zero when the policy has not moved.
pub(crate) fn compare_logps(batch: &MicroBatch<'_>, stats: &ByRole<Stats>, metrics: &mut Metrics) {
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
