//! One training step, in order:
//! prompt -> rollout -> reward -> advantage -> loss -> gradients -> weights.
//!
//! `collect` draws prompts, samples and rewards; `credit` samples continuations of steps; `annotate` runs the passes without
//! gradients; `one_pass` precomputes gradients; `rollback` undoes a failed step.

mod annotate;
mod collect;
mod credit;
mod experts;
mod gradient;
mod one_pass;
mod rollback;
mod split;

use crate::algo::{Algorithm, Feed};
use crate::batch::{balance, tokens, updates};
use crate::episode::Environments;
use crate::experience::{ByRole, Experience, Loss, Mean, Metrics, MicroBatch, Role};
use crate::health::Health;
use crate::parallel;
use crate::partial::Unfinished;
use crate::place::CompletionLengths;
use crate::ranks::{Teams, interleave};
use crate::recipe::Recipe;
use crate::reward::Rewards;
use crate::search::Searcher;
use crate::signal::{self, Signal};
use crate::source::Mixture;
use crate::trust_region;
use crate::verify::Hooks;
use crate::warnings::Warnings;
use ferrl_engine::generate::{Generator, Stops};
use ferrl_engine::model::Frozen;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{ModelTrainer, Schedule, StatGrads, Stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

pub use collect::{ScoredRollout, StepExperience};
pub use rollback::Before;
pub use split::TrainAndRollout;

use one_pass::Precomputed;

/// A stage of a run: models, data, rewards and state.
pub struct Stage {
    pub recipe: Recipe,
    pub algo: Box<dyn Algorithm>,
    pub feed: Feed,
    /// The model that is trained and sampled from.
    pub policy: ModelTrainer,
    /// The reference: the initial policy, or a teacher; `None` if the algorithm needs none, or if the policy is an adapter on the
    /// reference.
    pub reference: Option<Frozen>,
    /// The critic with its own weights; `None` without a critic, or if it shares the policy's trunk.
    pub critic: Option<ModelTrainer>,
    pub tokenizer: Arc<Tokenizer>,
    /// Stop tokens and stop strings of completions.
    pub stops: Stops,
    /// The ranks of the run; this process alone without several ranks.
    pub ranks: Ranks,
    /// Ranks of this rank's group (tensor and context parallelism), in training and in rollouts.
    pub teams: TrainAndRollout,
    pub source: Mixture,
    pub rewards: Rewards,
    pub environments: Environments,
    /// Search in rollouts and evaluations, with `[search]`.
    pub searcher: Option<Searcher>,
    /// Samples completions; `None` if completions are given.
    pub generator: Option<Box<dyn Generator>>,
    /// Learning rates of policy and critic.
    pub schedules: (Schedule, Schedule),
    /// Completed steps.
    pub step: u64,
    /// Experience of future steps, sampled ahead by earlier policy versions.
    pub ahead: VecDeque<StepExperience>,
    /// Prompts with unfinished completions (`rollout.partial_tokens`).
    pub unfinished: Vec<Unfinished>,
    /// Lengths of earlier completions, used only to distribute prompts over ranks.
    pub lengths: CompletionLengths,
    /// Whether trainer and sampler log-probabilities have been equal so far; see `one_pass`.
    pub one_pass: bool,
    /// Number of trained tokens so far, prompts included; the runner adds those of earlier stages.
    pub num_tokens: u64,
    /// Whether a step whose gradients are all zero is skipped.
    pub skips_empty: bool,
    /// Detects steps without learning signal.
    pub signal: Signal,
    /// Detects metrics that stay out of bounds.
    pub health: Health,
    /// Whether an update is in progress; stays true if an update failed halfway.
    pub updating: bool,
    pub warnings: Warnings,
    /// Called with the phase of the step: data, rollout, reward, credit, annotate or train.
    pub waits: Waits,
}

/// Steps before warnings about rounded changes: B starts at zero.
const ROUNDING_STEPS: u64 = 20;

/// A listener for the phases of a step.
pub type Waits = Arc<dyn Fn(&'static str) + Send + Sync>;

pub struct StepReport {
    pub metrics: Metrics,
    /// Prompts with their scored completions and advantages, if any.
    pub rollouts: Vec<ScoredRollout>,
    /// Passes over the data so far.
    pub epoch: f64,
}

impl Stage {
    /// Hooks for further rewards.
    pub fn hooks(&self) -> Hooks {
        Hooks { warnings: self.warnings.clone(), ..Default::default() }
    }

    pub fn step(&mut self) -> Result<StepReport> {
        let (mut clock, mut metrics) = (Clock::new(&self.waits), Metrics::default());
        if self.generator.is_some() {
            self.gather_weights()?; //                                         where they are split over ranks
        }
        let next = self.next_experience(&mut clock, &mut metrics)?; //         prompt, rollout, reward
        self.release_cache(); //                                               where the recipe asks for it
        metrics.join(next.metrics);
        let (mut experience, mut rollouts, epoch) = (next.experience, next.rollouts, next.epoch);
        let tokens: usize = experience.sequences.iter().map(|s| s.ids.len()).sum();
        clock.waits_for("annotate");
        self.annotate(&mut experience)?; //                                    reference logp, values
        clock.lap("annotate", &mut metrics);
        clock.waits_for("train");
        let prepared = self.algo.prepare(&mut experience)?; //                 advantage
        metrics.join(prepared.metrics);
        show_advantages(&experience, &mut rollouts);
        let no_signal = self.skips_empty && prepared.no_signal;
        self.skip_or_restart(&mut experience, &rollouts, no_signal, &mut metrics)?;
        let plan = self.algo.updates();
        self.release_weights()?; //                                            training gathers layer by layer
        self.hold_reference()?; //                                             where every micro-batch reads it
        for (n, update) in updates(&experience, plan, self.recipe.seed, self.step).iter().enumerate() {
            let batches = update.micro_batches(&experience, self.recipe.train.micro_batch_tokens)?;
            balance(&batches, &mut metrics);
            if self.exceeds_skip_ratio(&batches)? {
                metrics.add("updates/skipped", 1.0);
                continue;
            }
            self.prepare()?; //                                                weights that ranks compute with together
            let ranks = self.ranks.clone();
            let teams = Teams::of(&ranks, &self.policy.model);
            if let Some(region) = plan.trust_region {
                self.updating = true;
                metrics.join(trust_region::update(self, &batches, region)?); // all the rest
                self.updating = false;
                continue;
            }
            self.weigh_balance(batches.iter().map(|batch| batch.sequences.len()).sum());
            let mut parts = LossParts::default();
            for (i, batch) in batches.iter().enumerate() {
                if teams.owns(i) {
                    teams.in_step(|| self.learn(batch, n == 0, &mut parts))?; // loss, gradients
                }
                self.add_round(i, batches.len())?; //                          gradients of other ranks
            }
            let loss = parts.sum(&teams, &mut metrics)?;
            metrics.add("loss", loss);
            self.update(&mut metrics)?; //                                     weights
        }
        self.reference.iter().for_each(Frozen::park);
        clock.lap("train", &mut metrics);
        self.finish_step(tokens, clock.total(), &mut metrics);
        Ok(StepReport { metrics, rollouts, epoch })
    }

    /// A micro-batch of an update, from its tokens to its gradients.
    fn learn(&mut self, batch: &MicroBatch<'_>, first: bool, parts: &mut LossParts) -> Result<()> {
        let known = self.precompute(batch); //                                 gradients of the one-pass head
        let (stats, done) = self.forward(batch, known)?; //                    logp, entropy, value
        let mut seen = Metrics::default();
        if first {
            self.compare_logps(batch, &stats, &mut seen)?;
        }
        let loss = self.algo.loss(batch, &stats); //                           loss
        if !done {
            self.backward(batch, &loss.grads)?; //                             gradients
        }
        parts.add(seen, loss);
        Ok(())
    }

    /// After each round of micro-batches, one per rank, adds their gradients in order; after the last round every rank gets the
    /// sum.
    pub(crate) fn add_round(&mut self, batch: usize, batches: usize) -> Result<()> {
        let (last, ranks) = (batch + 1 == batches, &self.ranks.clone());
        let teams = Teams::of(ranks, &self.policy.model);
        if teams.ends_round(batch, batches) {
            if teams.sits_out(batch) {
                self.idle_round()?;
            }
            for trainer in std::iter::once(&mut self.policy).chain(&mut self.critic) {
                trainer.add_round(ranks)?;
                if last {
                    trainer.gather_gradient(ranks)?;
                }
            }
        }
        Ok(())
    }

    /// Frees the KV cache until the next rollout or evaluation (`rollout.release_cache`).
    fn release_cache(&mut self) {
        if let Some(generator) = self.generator.as_mut().filter(|_| self.recipe.rollout.release_cache) {
            generator.release();
        }
    }

    /// Keeps an offloaded teacher or reference on the device for all micro-batches of a step, if the algorithm needs the KL over the
    /// vocabulary.
    fn hold_reference(&self) -> Result<()> {
        let reads = self.algo.needs().full_kl;
        self.reference.iter().filter(|_| reads).try_for_each(Frozen::hold)
    }

    /// Joins the ranks of the run.
    pub fn join(&mut self, ranks: &Ranks) -> Result<()> {
        let layout = parallel::check(&self.recipe, ranks.size())?;
        ranks.connect(&self.policy.model.backend)?;
        self.ranks = ranks.clone();
        self.rewards = std::mem::take(&mut self.rewards).shared_by(ranks);
        if layout.splits() {
            for (number, trainer) in self.trainers_mut().enumerate() {
                if trainer.model.split_over().is_none() {
                    trainer.split(ranks, layout.ddp, number)?;
                }
            }
        }
        self.form_teams(&layout)
    }

    /// Drops experience without learning signal and warns; otherwise resets the weights if the algorithm restarts at every
    /// step.
    fn skip_or_restart(
        &mut self,
        experience: &mut Experience,
        rollouts: &[ScoredRollout],
        no_signal: bool,
        metrics: &mut Metrics,
    ) -> Result<()> {
        let empty = experience.sequences.is_empty() || no_signal;
        self.look_for_signal(rollouts, empty);
        if !empty {
            return self.restart();
        }
        metrics.add("updates/skipped", 1.0);
        if !experience.sequences.is_empty() {
            ["loss", "grad_norm"].iter().for_each(|name| metrics.add(name, 0.0));
        }
        experience.sequences.clear();
        Ok(())
    }

    /// Counts the step and its tokens.
    fn finish_step(&mut self, tokens: usize, seconds: f64, metrics: &mut Metrics) {
        self.num_tokens += tokens as u64;
        metrics.add("num_tokens", self.num_tokens as f64);
        metrics.add("timing/tokens_per_second", tokens as f64 / seconds.max(1e-9));
        metrics.add("step_time", seconds);
        if !self.ranks.is_alone() {
            let (seconds, bytes) = self.ranks.take_cost();
            metrics.add("timing/exchange", seconds);
            if let Some(seconds) = self.ranks.take_card_seconds() {
                metrics.add("timing/exchange_cards", seconds);
            }
            metrics.add("timing/exchange_mib", bytes as f64 / f64::from(1 << 20));
        }
        self.step += 1;
        self.health.look(self.step, metrics, &self.warnings);
        if self.step == self.schedules.0.total_steps && self.policy.model.version == 0 {
            let what = format!("none of the {} steps changed a weight", self.step);
            let fix = "see the earlier warnings, and rollouts/ for completions and rewards";
            self.warnings.raise("nothing-learned", what, fix);
        }
        if self.step == self.algo.updates().policy_frozen_steps && self.shares_trunk() {
            self.policy.optimizer.restart(); // the moments of the trunk are those of frozen weights
        }
    }

    /// Whether the critic is a head on the policy's trunk.
    fn shares_trunk(&self) -> bool {
        self.critic.is_none() && self.algo.needs().critic
    }

    /// Warns of rewards without learning signal.
    fn look_for_signal(&mut self, rollouts: &[ScoredRollout], empty: bool) {
        let max_new_tokens = self.recipe.rollout.max_new_tokens;
        let number = self.step + 1;
        let last = number == self.schedules.0.total_steps;
        let step = signal::StepSignal { number, rollouts, empty, last, max_new_tokens };
        self.signal.look(&step, &self.warnings);
    }

    /// Resets the weights to the stage's initial ones, for algorithms that fine-tune those at every step.
    fn restart(&mut self) -> Result<()> {
        match &self.reference {
            _ if !self.algo.updates().restart => Ok(()),
            Some(start) => start.with(|start| self.policy.restart_from(start)),
            None => self.policy.restart(),
        }
    }

    /// Statistics of every role, and whether backward is done too (with precomputed gradients).
    fn forward(
        &mut self,
        batch: &MicroBatch<'_>,
        known: Option<Precomputed>,
    ) -> Result<(ByRole<Stats>, bool)> {
        if let Some(known) = known
            && let Some(stats) = self.forward_backward(batch, &known)?
        {
            return Ok((stats, true));
        }
        Ok((self.forward_only(batch)?, false))
    }

    /// Statistics of every role.
    pub(crate) fn forward_only(&mut self, batch: &MicroBatch<'_>) -> Result<ByRole<Stats>> {
        let tokens = tokens(batch.sequences.iter().copied());
        let mut all = ByRole::default();
        self.policy.temperature = batch.temperature();
        let policy = match self.reference.as_ref().filter(|_| self.algo.needs().full_kl) {
            Some(teacher) => teacher.with(|teacher| self.policy.forward_against(&tokens, teacher))?,
            None => self.policy.forward(&tokens)?,
        };
        all.set(Role::Policy, policy);
        if let Some(critic) = &mut self.critic {
            all.set(Role::Critic, critic.forward(&tokens)?);
        }
        Ok(all)
    }

    pub(crate) fn backward(&mut self, batch: &MicroBatch<'_>, grads: &ByRole<StatGrads>) -> Result<()> {
        let tokens = tokens(batch.sequences.iter().copied());
        let missing = || Error::numerics("the loss gives no gradient for a model that is trained");
        let policy = grads.get(Role::Policy).ok_or_else(missing)?;
        if let Some(critic) = &mut self.critic {
            critic.backward(&tokens, grads.get(Role::Critic).ok_or_else(missing)?)?;
            // A frozen policy needs no gradient.
            if self.step < self.algo.updates().policy_frozen_steps {
                return Ok(());
            }
        }
        match self.reference.as_ref().filter(|_| self.algo.needs().full_kl) {
            Some(teacher) => teacher.with(|t| self.policy.backward_against(&tokens, policy, t))?,
            None => self.policy.backward(&tokens, policy)?,
        }
        Ok(())
    }

    fn update(&mut self, metrics: &mut Metrics) -> Result<()> {
        self.updating = true;
        let done = self.update_all(metrics);
        self.updating = false; // after an error the count of updates shows whether weights changed
        done
    }

    /// Measures the fraction of an adapter's change that remains after rounding to bf16; warns if it is small.
    fn look_at_rounding(&mut self, metrics: &mut Metrics) -> Result<()> {
        let Some(arrived) = self.policy.model.arrived()?.and_then(|a| a.fraction()) else { return Ok(()) };
        metrics.add("adapter/arrived", arrived);
        if arrived < 0.5 && self.step >= ROUNDING_STEPS {
            let what = format!(
                "{:.0} % of the adapter's change of the weights is left after rounding to bf16",
                100.0 * arrived
            );
            self.warnings.raise("adapter-rounding", what, "a larger optim.lr, or model.dtype = \"f32\"");
        }
        Ok(())
    }

    fn update_all(&mut self, metrics: &mut Metrics) -> Result<()> {
        let warmup = self.algo.updates().policy_frozen_steps;
        if self.step < warmup && self.shares_trunk() {
            // Only the value head of a critic on the policy's trunk is updated; the policy does not change.
            let report = self.policy.update_head(self.schedules.1.at(self.step))?;
            metrics.add("critic/grad_norm", report.grad_norm);
        } else if self.step >= warmup {
            let rate = self.schedules.0.at(self.step);
            let head_only = self.algo.updates().head_only_steps;
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
            self.look_at_rounding(metrics)?;
            self.look_at_experts(metrics)?;
        }
        if let Some(critic) = &mut self.critic {
            let report = critic.update(self.schedules.1.at(self.step))?;
            metrics.add("critic/grad_norm", report.grad_norm);
        }
        Ok(())
    }
    /// Compares the log-probabilities of trainer and generator for tokens sampled by this policy version. With an exact generator
    /// any difference is an error, because it would bias the gradient.
    pub(crate) fn compare_logps(
        &self,
        batch: &MicroBatch<'_>,
        stats: &ByRole<Stats>,
        metrics: &mut Metrics,
    ) -> Result<()> {
        let now = self.policy.model.version;
        let Some(policy) = stats.get(Role::Policy) else { return Ok(()) };
        let (mut worst, mut gaps, mut lags) = (0.0f64, Mean::default(), Mean::default());
        for (row, s) in batch.rows().filter(|(_, s)| !s.version.is_empty()) {
            for i in s.actions() {
                lags.add(now.saturating_sub(s.version[i]) as f64);
                if s.version[i] == now {
                    let gap = (policy.logp[row + i] - s.sampled_logp[i]).abs() as f64;
                    gaps.add(gap);
                    worst = worst.max(gap);
                }
            }
        }
        metrics.add_all("sampling/lag", lags);
        metrics.add_all("sampling/sampling_logp_difference/mean", gaps);
        if gaps != Mean::default() {
            metrics.add_max("sampling/sampling_logp_difference/max", worst);
        }
        if worst > 0.0 && self.generator.as_ref().is_some_and(|g| g.is_exact()) {
            return Err(Error::numerics(format!(
                "sampler and trainer log-probabilities differ by {worst} at the same policy version"
            ))
            .fix("run `ferrl bench --check` on this device, and report it; on a GPU `exact = false` continues regardless"));
        }
        Ok(())
    }
}

/// Losses and metrics of the micro-batches of an update.
#[derive(Default)]
pub(crate) struct LossParts(Vec<(f64, Metrics)>);

impl LossParts {
    /// Adds a micro-batch.
    pub fn add(&mut self, mut seen: Metrics, loss: Loss) {
        seen.join(loss.metrics);
        self.0.push((loss.value, seen));
    }

    /// The loss over the micro-batches of all ranks, in order; adds their metrics.
    pub fn sum(self, teams: &Teams<'_>, metrics: &mut Metrics) -> Result<f64> {
        let mut sum = 0.0;
        for (value, seen) in interleave(teams, self.0)? {
            sum += value;
            metrics.join(seen);
        }
        Ok(sum)
    }
}

/// Copies the first advantage of each completion, and of each turn of an episode, to its rollout, for the log.
fn show_advantages(experience: &Experience, rollouts: &mut [ScoredRollout]) {
    for s in &experience.sequences {
        if let Some(rollout) = rollouts.get_mut(s.trajectory) {
            rollout.credit(s);
        }
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
    /// Starts a phase.
    pub fn waits_for(&self, phase: &'static str) {
        (self.waits)(phase);
    }
    /// Ends the phase; returns its seconds.
    pub fn lap(&mut self, phase: &str, metrics: &mut Metrics) -> f64 {
        let seconds = self.last.elapsed().as_secs_f64();
        metrics.add(&format!("timing/{phase}"), seconds);
        self.last = Instant::now();
        seconds
    }
    fn total(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }
}
