//! Evaluation on held-out prompts (accuracy, pass@k, majority vote, length) and held-out examples (loss, and for pairs accuracy
//! and margin).

pub mod calibration;
pub mod estimate;
pub mod likelihood;
pub mod pairs;
mod search;
mod summary;

pub use search::search;
pub use summary::{Figure, Summary};

use crate::batch::{Update, tokens};
use crate::experience::{ByRole, Metrics, Role};
use crate::ranks::{Teams, each};
use crate::recipe::Rollout;
use crate::reward::{CompletionBatch, CompletionScores, Rewards};
use crate::rollout::{self, Actor, RolloutCompletion, Sampled};
use crate::source::{Item, Mixture, Prompt};
use crate::train::Stage;
use crate::train::StepExperience;
use crate::verify::Progress;
use ferrl_engine::model::ModelConfig;
use ferrl_engine::train;
use ferrl_engine::{Error, Result};

#[derive(Default)]
pub struct Evaluation {
    /// Means by name, under `eval/`.
    pub metrics: Metrics,
    /// Every completion with its grade.
    pub completions: Vec<EvaluatedCompletion>,
}

/// A prompt, its completion, and the completion's rewards.
pub type EvaluatedCompletion = (Prompt, RolloutCompletion, CompletionScores);

/// Prompts that are checked at a time.
const AT_ONCE: usize = 256;

/// Checks that the next `prompts` prompts fit the model with `new_tokens` new tokens, and have the columns of the rewards. The error
/// names the first bad row. The position of the source is not changed.
pub fn check(
    source: &mut Mixture,
    rewards: &Rewards,
    config: &ModelConfig,
    (prompts, new_tokens): (usize, usize),
) -> Result<()> {
    let (start, mut left) = (source.state(), prompts);
    while left > 0 {
        let items = source.next(left.min(AT_ONCE))?;
        left = if items.is_empty() { 0 } else { left.saturating_sub(items.len()) };
        for prompt in items.into_iter().filter_map(question) {
            let place = match prompt.place.is_empty() {
                true => format!("question {}", prompt.index),
                false => prompt.place.clone(),
            };
            // The last token is sampled, but never an input.
            let (asked, new) = (prompt.ids.len(), new_tokens);
            if let Some(most) = config.max_positions_hard().filter(|most| asked + new > most + 1) {
                let what = format!(
                    "a prompt of {asked} tokens and rollout.max_new_tokens = {new}, but the model has learned \
                     positions for {most}"
                );
                return Err(Error::data(what).at(place).fix(format!(
                    "rollout.max_new_tokens = {}, or a shorter prompt",
                    (most + 1).saturating_sub(asked).max(1)
                )));
            }
            rewards.check(&prompt, &place)?;
        }
    }
    source.restore(&start)
}

/// What an item asks, where it asks something.
fn question(item: Item) -> Option<Prompt> {
    match item {
        Item::Prompt(prompt) => Some(prompt),
        Item::Group(group) => Some(group.prompt),
        Item::Sequences(_) => None,
    }
}

/// Samples `samples` completions of `prompts` held-out prompts at a temperature (0 is greedy) and scores them.
pub fn evaluate(
    actor: &mut Actor<'_>,
    source: &mut Mixture,
    rewards: &Rewards,
    settings: &Rollout,
    (prompts, samples, seed): (usize, usize, u64),
    at: Progress,
) -> Result<Evaluation> {
    let prompts = prompts.min(source.epoch().unwrap_or(usize::MAX));
    let mut prompts: Vec<Prompt> = source.next(prompts)?.into_iter().filter_map(question).collect();
    let params = rollout::params(settings, actor.stops, seed);
    let Sampled { mut experience, completions, .. } =
        rollout::sample(actor, &mut prompts, &params, samples, u32::MAX as u64)?;
    let batch = CompletionBatch { prompts: &prompts, completions: &completions, at };
    let scores = rewards.score(batch, &mut experience, &mut Metrics::default())?;
    let mut metrics = Metrics::default();
    let lost = scores.iter().filter(|g| g.is_lost()).count();
    if lost > 0 {
        metrics.add("eval/lost", lost as f64);
    }
    for (question, scores) in scores.chunks(samples).enumerate() {
        // Completions without a reward are neither right nor wrong.
        let scored: Vec<&CompletionScores> = scores.iter().filter(|g| !g.is_lost()).collect();
        if scored.is_empty() {
            continue;
        }
        let right = scored.iter().filter(|g| g.is_right()).count();
        let rewards: f64 = scored.iter().filter_map(|g| g.reward).sum();
        metrics.add("eval/pass@1", right as f64 / scored.len() as f64);
        metrics.add("eval/reward", rewards / scored.len() as f64);
        if samples > 1 && scored.len() == samples {
            metrics.add(&format!("eval/pass@{samples}"), f64::from(right > 0));
            let own = &completions[question * samples..(question + 1) * samples];
            metrics.add(&format!("eval/majority@{samples}"), f64::from(majority_is_right(own, scores)));
        }
    }
    for a in &completions {
        metrics.add("eval/mean_length", a.tokens as f64);
        metrics.add("eval/clipped_ratio", f64::from(a.truncated));
    }
    let completions: Vec<EvaluatedCompletion> =
        completions.into_iter().zip(scores).map(|(a, g)| (prompts[a.prompt].clone(), a, g)).collect();
    metrics.join(calibration::metrics(&completions));
    Ok(Evaluation { metrics, completions })
}

impl Stage {
    /// The loss on up to `count` held-out examples, without an update and without changing the algorithm's state.
    pub fn validate(&mut self, source: &mut Mixture, count: usize) -> Result<Metrics> {
        let items = source.next(count.min(source.epoch().unwrap_or(usize::MAX)))?;
        let mut given = StepExperience::default();
        for (i, item) in items.into_iter().enumerate() {
            if let Item::Sequences(sequences) = item {
                given.give(sequences, i);
            }
        }
        let mut e = given.experience;
        self.annotate(&mut e)?;
        self.gather_weights()?; // the reference has had their place
        let state = self.algo.state();
        let prepared = self.algo.prepare(&mut e);
        if !state.is_null() {
            self.algo.restore(&state)?;
        }
        let mut seen = prepared?.metrics;
        let mut loss = 0.0;
        let batches = Update::whole(&e).micro_batches(&e, self.recipe.train.micro_batch_tokens)?;
        let teams = Teams::of(&self.ranks, &self.policy.model);
        let parts = each(&teams, &batches, |batch| {
            let mut stats = ByRole::default();
            let tokens = tokens(batch.sequences.iter().copied());
            stats.set(Role::Policy, train::stats(&self.policy.model, &tokens, batch.temperature())?);
            let part = self.algo.loss(batch, &stats);
            Ok((part.value, part.metrics))
        })?;
        for (value, metrics) in parts {
            loss += value;
            seen.join(metrics);
        }
        let mut metrics = Metrics::default();
        metrics.add("eval/loss", loss);
        for (name, value) in seen.means() {
            match name {
                "rewards/accuracies" => metrics.add("eval/accuracy", value),
                "rewards/margins" => metrics.add("eval/margin", value),
                other => metrics.add(&format!("eval/{other}"), value),
            }
        }
        Ok(metrics)
    }
}

/// Whether the most frequent answer is right; ties go to the first.
fn majority_is_right(completions: &[RolloutCompletion], scores: &[CompletionScores]) -> bool {
    let winner = estimate::majority(completions.iter().map(|a| estimate::vote(&a.text)));
    winner.is_some_and(|first| scores[first].is_right())
}
