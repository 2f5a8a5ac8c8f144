//! The experience of a step: given sequences, given completions with rewards, or completions that are sampled and scored here.
//!
//! Collection may run ahead of training by `rollout.max_lag` steps; a step takes the oldest.

use crate::algo::Feed;
use crate::credit::StepCredit;
use crate::episode::TimeShares;
use crate::experience::{Experience, Metrics, Sequence};
use crate::partial::{self, Unfinished};
use crate::place::cost;
use crate::reward::{CompletionBatch, CompletionScores};
use crate::rollout::{self, Actor, RolloutCompletion, RolloutRequest, Sampled};
use crate::source::{Item, Prompt, RewardedGroup};
use crate::train::{Clock, Stage};
use crate::verify::Progress;
use ferrl_engine::generate::SamplingParams;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};

/// The experience of one step before `prepare`. Checkpoints store those sampled ahead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepExperience {
    /// The training sequences.
    pub experience: Experience,
    /// Prompts with their scored completions, if any.
    pub rollouts: Vec<ScoredRollout>,
    /// Metrics of rewards and completions.
    pub metrics: Metrics,
    /// Epochs when it was drawn.
    pub epoch: f64,
}

/// A completion of a step with its prompt, score and advantage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScoredRollout {
    pub prompt: Prompt,
    /// The completion.
    #[serde(alias = "answer")]
    pub completion: RolloutCompletion,
    #[serde(alias = "graded")]
    pub scores: CompletionScores,
    /// Advantage of its first token.
    pub advantage: f32,
    /// Sampling temperature; `None` if it was given.
    #[serde(default)]
    pub temperature: Option<f32>,
    /// Monte-Carlo values and advantages of its steps, if estimated.
    #[serde(default)]
    pub credit: Option<StepCredit>,
}

impl ScoredRollout {
    /// Stores the advantages of a training sequence: of its first action, and of each of its turns.
    pub(crate) fn credit(&mut self, s: &Sequence) {
        let first = |i: usize| s.advantage.get(i).copied().unwrap_or(0.0);
        let mut starts = s.actions().filter(|&i| i == 0 || !s.acts(i - 1)).map(first).peekable();
        match &mut self.completion.played {
            None => self.advantage = starts.next().unwrap_or(0.0),
            Some(played) => {
                let before = played.turns.iter().position(|t| !t.credited);
                for (turn, advantage) in played.turns.iter_mut().skip(before.unwrap_or(0)).zip(starts) {
                    (turn.advantage, turn.credited) = (advantage, true);
                }
                self.advantage = played.turns.first().map_or(0.0, |t| t.advantage);
            }
        }
    }
}

impl Stage {
    /// The experience of the next step; afterwards up to `max_lag` further ones are queued, none beyond the last step.
    pub(super) fn next_experience(
        &mut self,
        clock: &mut Clock,
        metrics: &mut Metrics,
    ) -> Result<StepExperience> {
        let (lag, last) = (self.recipe.rollout.max_lag, self.schedules.0.total_steps);
        let lag = if self.feed.sampled() { lag } else { 0 };
        loop {
            let number = self.step + self.ahead.len() as u64;
            if self.ahead.len() <= lag && (self.ahead.is_empty() || number < last) {
                let next = self.collect(number, clock, metrics)?;
                self.ahead.push_back(next);
            } else if let Some(first) = self.ahead.pop_front() {
                return Ok(first);
            }
        }
    }

    /// The experience of step `number`, with the current policy.
    fn collect(&mut self, number: u64, clock: &mut Clock, metrics: &mut Metrics) -> Result<StepExperience> {
        let (sampled, count) = (self.feed.sampled(), self.feed.per_step(&self.recipe));
        clock.waits_for("data");
        let before = self.source.cut();
        let (items, mut out, mut prompts) = (self.source.next(count)?, StepExperience::default(), Vec::new());
        out.epoch = self.source.epochs();
        for (i, item) in items.into_iter().enumerate() {
            match item {
                Item::Prompt(prompt) => prompts.push(prompt),
                Item::Sequences(sequences) => out.give(sequences, i),
                Item::Group(group) => out.grade(group, i, self.algo.needs().group, &self.tokenizer)?,
            }
        }
        clock.lap("data", metrics);
        if !sampled {
            let cut = (self.source.cut() - before) as f64;
            out.metrics.add("data/truncated", cut / out.experience.sequences.len().max(1) as f64);
        }
        if prompts.is_empty() {
            self.look_for_ends(&out);
            out.measure_lengths();
            return Ok(out);
        }
        // The last batch of an epoch is smaller.
        let (mut asked, count) = (prompts.len(), prompts.len());
        self.round(prompts, 0, number, &mut out, (clock, metrics))?;
        self.fill(count, number, &mut out, (clock, metrics))?;
        let refill = self.algo.updates().refill;
        for _ in 0..refill.map_or(0, |r| r.rounds) {
            let Some(more) = refill.and_then(|r| r.missing(&out.experience, count)) else { break };
            let ask = |item| if let Item::Prompt(prompt) = item { Some(prompt) } else { None };
            let prompts: Vec<Prompt> = self.source.next(more)?.into_iter().filter_map(ask).collect();
            let before = asked;
            asked += prompts.len();
            self.round(prompts, before, number, &mut out, (clock, metrics))?;
        }
        if let Some(refill) = refill {
            refill.cut(&mut out.experience, count);
        }
        out.measure_lengths();
        let tokens = out.rollouts.iter().map(|r| r.completion.tokens as f64).sum();
        out.metrics.add("completions/total_tokens", tokens);
        if self.recipe.rollout.partial_tokens > 0 {
            let open: usize = self.unfinished.iter().map(Unfinished::open).sum();
            out.metrics.add("completions/in_flight", open as f64);
        }
        out.metrics.add("rollouts/lost", out.rollouts.iter().filter(|r| r.scores.is_lost()).count() as f64);
        Ok(out)
    }

    /// Draws more prompts while completions in flight leave a step less than half of its completions, which happens in the first
    /// steps.
    fn fill(
        &mut self,
        count: usize,
        number: u64,
        out: &mut StepExperience,
        (clock, metrics): (&mut Clock, &mut Metrics),
    ) -> Result<()> {
        let samples = self.recipe.rollout.samples.max(1);
        let done = |out: &StepExperience| out.rollouts.len() / samples;
        while self.recipe.rollout.partial_tokens > 0 && done(out) < count.div_ceil(2) {
            let more = self.source.next(count)?;
            let prompts =
                more.into_iter().filter_map(|i| if let Item::Prompt(p) = i { Some(p) } else { None });
            self.round(prompts.collect(), done(out), number, out, (clock, metrics))?;
        }
        Ok(())
    }

    /// Warns of episodes truncated because their next turn did not fit.
    fn look_for_outgrown(&self, completions: &[RolloutCompletion]) {
        let outgrown = completions.iter().filter(|a| a.played.as_ref().is_some_and(|p| p.outgrown)).count();
        if outgrown > 0 {
            let what = format!(
                "{outgrown} of {} episodes of step {} were cut off: their next turn does not fit into the model's context or the \
                 KV cache",
                completions.len(),
                self.step + 1
            );
            let fix = "a smaller rollout.max_turns or rollout.max_new_tokens, a larger rollout.cache_mib, or a model with a longer context";
            self.warnings.raise("outgrown-episodes", what, fix);
        }
    }

    /// Warns of demonstrations without a stop token at their end: the model would not learn to stop.
    fn look_for_ends(&self, given: &StepExperience) {
        if self.feed != Feed::Demonstrations {
            return;
        }
        let cut = self.recipe.data.max_length;
        let whole: Vec<&Sequence> = given.experience.sequences.iter().filter(|s| s.ids.len() < cut).collect();
        let ends = |s: &&&Sequence| {
            let last = s.ids.last().zip(s.trained.last());
            last.is_some_and(|(id, trained)| *trained && self.stops.ids().contains(id))
        };
        let without = whole.len() - whole.iter().filter(ends).count();
        if without > 0 {
            let names: Vec<String> =
                self.stops.ids().iter().filter_map(|&id| self.tokenizer.token(id)).collect();
            let what = format!(
                "{without} of {} examples of step {} end without a stop token ({}): the model does not learn to stop",
                whole.len(),
                self.step + 1,
                names.join(", ")
            );
            let fix = "a chat template that ends the assistant's turn with a special token, inside its generation block";
            self.warnings.raise("untrained-stop", what, fix);
        }
    }

    /// Appends scored completions of prompts to the experience, after `before` prompts and their completions.
    fn round(
        &mut self,
        mut prompts: Vec<Prompt>,
        before: usize,
        number: u64,
        out: &mut StepExperience,
        (clock, metrics): (&mut Clock, &mut Metrics),
    ) -> Result<()> {
        let r = &self.recipe.rollout;
        let (params, samples) = (rollout::params(r, &self.stops, self.recipe.seed), r.samples);
        clock.waits_for("rollout");
        let Sampled { mut experience, completions, time, metrics: searched } = match r.partial_tokens {
            0 => self.sample(&mut prompts, &params, samples, number)?,
            piece => self.sample_partly(&mut prompts, &params, (samples, piece), number)?,
        };
        out.metrics.join(searched);
        let seconds = clock.lap("rollout", metrics);
        let tokens: usize = completions.iter().map(|a| a.tokens).sum();
        metrics.add("timing/rollout_tokens_per_second", tokens as f64 / seconds.max(1e-9));
        if completions.is_empty() {
            return Ok(()); // all are in flight
        }
        out.measure_episodes(&completions, time);
        self.look_for_outgrown(&completions);
        // Every rank has all of them; what was printed on other ranks comes to the first.
        let logged = completions.iter().filter(|_| self.ranks.rank() == 0);
        let lost: Vec<_> = logged.filter_map(|a| a.played.as_ref()?.lost.as_ref()).collect();
        for lost in &lost {
            self.warnings.print("env", &format!("lost episode: {lost}"));
        }
        if let Some(first) = lost.first() {
            let what = format!(
                "{} of {} episodes of step {} were lost and are left out of the update, as later ones will be (metric \
                 episodes/lost): {first}",
                lost.len(),
                completions.len(),
                number + 1
            );
            self.warnings.raise("lost-episodes", what, first.why.fix());
        }
        clock.waits_for("reward");
        let at = Progress { step: number, steps: self.schedules.0.total_steps, epoch: out.epoch };
        let batch = CompletionBatch { prompts: &prompts, completions: &completions, at };
        let scores = self.rewards.score(batch, &mut experience, &mut out.metrics)?;
        clock.lap("reward", metrics);
        let credits = self.credit(batch, &scores, &mut experience, (&mut out.metrics, clock, metrics))?;
        out.experience.append(experience, before, out.rollouts.len());
        let shown = |((completion, scores), credit): ((RolloutCompletion, CompletionScores), _)| {
            let prompt = prompts[completion.prompt].clone();
            let temperature = Some(params.divisor());
            ScoredRollout { prompt, completion, scores, advantage: 0.0, temperature, credit }
        };
        out.rollouts.extend(completions.into_iter().zip(scores).zip(credits).map(shown));
        Ok(())
    }

    /// Adds prompts to those in flight, continues every completion by at most `piece` tokens, and leaves in `prompts` those with
    /// finished completions.
    fn sample_partly(
        &mut self,
        prompts: &mut Vec<Prompt>,
        params: &SamplingParams,
        (samples, piece): (usize, usize),
        step: u64,
    ) -> Result<Sampled> {
        let mut waiting = std::mem::take(&mut self.unfinished);
        let generator = &mut **self.generator.as_mut().expect("a stage with rollouts has a generator");
        let (policy, tokenizer, stops) = (&self.policy.model, &*self.tokenizer, &self.stops);
        let (environments, ranks) = (&self.environments, &self.ranks);
        let mut actor = Actor { generator, policy, tokenizer, stops, environments, ranks };
        let too_small = |e: Error| crate::setup::too_small(e, &self.recipe.rollout);
        for prompt in prompts.drain(..) {
            waiting.push(Unfinished::new(&actor, prompt, params, samples, step).map_err(too_small)?);
        }
        partial::advance(&mut actor, &mut waiting, params, piece).map_err(too_small)?;
        let done = partial::take_finished(&mut waiting);
        let sampled = partial::as_sampled(&actor, &done, params)?;
        self.unfinished = waiting;
        prompts.extend(done.into_iter().map(|d| d.prompt));
        Ok(sampled)
    }

    /// Samples completions from the current policy.
    pub fn sample(
        &mut self,
        prompts: &mut [Prompt],
        params: &SamplingParams,
        samples: usize,
        step: u64,
    ) -> Result<Sampled> {
        let generator = &mut **self.generator.as_mut().expect("a stage with rollouts has a generator");
        let (policy, tokenizer, stops) = (&self.policy.model, &*self.tokenizer, &self.stops);
        let (environments, ranks) = (&self.environments, &self.ranks);
        let mut actor = Actor { generator, policy, tokenizer, stops, environments, ranks };
        if let Some(searcher) = self.searcher.as_mut().filter(|_| self.recipe.search.train) {
            return searcher
                .sample(&mut actor, prompts, params, &self.rewards, step)
                .map_err(|e| crate::setup::too_small(e, &self.recipe.rollout));
        }
        let most = params.max_new_tokens;
        let predicted = |p: &Prompt| cost(samples, p.ids.len(), self.lengths.predict(&p.ids, most));
        let costs: Vec<u64> = prompts.iter().map(predicted).collect();
        let keys: Vec<Vec<u32>> = prompts.iter().map(|p| p.ids.clone()).collect();
        let wanted = RolloutRequest { params, samples, step };
        let sampled = rollout::sample_placed(&mut actor, prompts, wanted, &costs)
            .map_err(|e| crate::setup::too_small(e, &self.recipe.rollout))?;
        for (ids, completions) in keys.iter().zip(sampled.completions.chunks(samples.max(1))) {
            let tokens: usize = completions.iter().map(|a| a.tokens).sum();
            self.lengths.note(ids, tokens / completions.len().max(1));
        }
        Ok(sampled)
    }
}

impl StepExperience {
    /// Adds given sequences: a demonstration, or both completions of a pair.
    pub(crate) fn give(&mut self, sequences: Vec<Sequence>, group: usize) {
        for mut s in sequences {
            (s.trajectory, s.group) = (self.experience.sequences.len(), group);
            s.pair = s.pair.map(|_| group);
            s.trajectory_tokens = s.action_count();
            self.experience.sequences.push(s);
        }
    }

    /// Metrics of episodes.
    fn measure_episodes(&mut self, completions: &[RolloutCompletion], time: TimeShares) {
        let mut any = false;
        for played in completions.iter().filter_map(|a| a.played.as_ref()) {
            any = true;
            self.metrics.add("episodes/lost", f64::from(played.lost.is_some()));
            if played.lost.is_none() {
                self.metrics.add("episodes/mean_turns", played.turns.len() as f64);
                if let Some((calls, failed)) = played.tool_calls {
                    self.metrics.add("episodes/tool_calls", calls as f64);
                    self.metrics.add("episodes/failed_tool_calls", failed as f64);
                }
            }
        }
        if any {
            self.metrics.add("episodes/decoding", time.decoding);
            self.metrics.add("episodes/overhead", time.overhead);
        }
    }

    /// Metrics of lengths, with TRL's names.
    fn measure_lengths(&mut self) {
        let mut lengths = |name: &str, tokens: Vec<usize>| {
            let (Some(least), Some(most)) = (tokens.iter().min(), tokens.iter().max()) else { return };
            let mean = tokens.iter().sum::<usize>() as f64 / tokens.len() as f64;
            for (kind, value) in [("mean", mean), ("min", *least as f64), ("max", *most as f64)] {
                self.metrics.add(&format!("completions/{kind}_{name}"), value);
            }
        };
        let of = |keep: &dyn Fn(&RolloutCompletion) -> bool| -> Vec<usize> {
            self.rollouts.iter().map(|r| &r.completion).filter(|a| keep(a)).map(|a| a.tokens).collect()
        };
        lengths("length", of(&|_| true));
        lengths("terminated_length", of(&|a| !a.truncated));
        for r in &self.rollouts {
            self.metrics.add("completions/clipped_ratio", f64::from(r.completion.truncated));
        }
    }

    /// Given completions of a prompt with their rewards.
    fn grade(
        &mut self,
        given: RewardedGroup,
        group: usize,
        least: usize,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        if given.completions.len() < least {
            let n = given.completions.len();
            return Err(Error::data(format!("{n} completions, expected at least {least} to compare"))
                .at(given.place)
                .fix("give the prompt more completions, or leave the row out"));
        }
        for s in &given.completions {
            let said: Vec<u32> = s.actions().map(|i| s.ids[i + 1]).collect();
            let (tokens, truncated) = (said.len(), s.truncated);
            let text = tokenizer.decode(&said, true)?;
            let completion = RolloutCompletion { prompt: group, text, tokens, truncated, played: None };
            let (reward, components) = (s.total_reward(), s.components.clone());
            let scores = CompletionScores {
                reward: Some(reward),
                components,
                score: Some(reward),
                ..Default::default()
            };
            let prompt = given.prompt.clone();
            self.rollouts.push(ScoredRollout {
                prompt,
                completion,
                scores,
                advantage: 0.0,
                temperature: None,
                credit: None,
            });
        }
        self.give(given.completions, group);
        Ok(())
    }
}
