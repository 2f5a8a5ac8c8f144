//! Continuations of the states between steps, their rewards, and the resulting advantages.
//!
//! Every state is a prefix of sampled tokens; equal prefixes of a prompt are one state. Prefix and continuation share the maximum
//! length of a completion. In an episode every turn is a step (`episodes`). Random numbers depend only on the seed, the step, the
//! prompt, the sample, the state and the continuation's number.

use super::episodes::{self, PlayedTurn};
use super::split::{self, SolutionStep};
use super::{Interval, StepCredit, StepSplit, advantages, estimated_states, interval_width, mean};
use crate::algo::math::mean_std;
use crate::episode::Prefix;
use crate::experience::{Experience, Metrics, Sequence};
use crate::ranks::{Teams, gather};
use crate::reward::{CompletionBatch, CompletionScores, Rewards, ScoredPart};
use crate::rollout::{Actor, RolloutCompletion, cut_at_stop, texts};
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use ferrl_kernels::philox::philox4x32;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

with_defaults! {
/// Monte-Carlo values of the states between steps, for `advantage.baseline = "steps"`.
pub struct Vine {
    /// Continuations per state (K); with `interval` the initial number. [1, 65536]
    pub samples: usize = 9,
    /// Maximum number of states after the prompt whose value is estimated; later ones are back-filled. [0, 1048576]
    pub max_steps: usize = 25,
    /// How a completion is split into steps; in an episode every turn is a step.
    pub split: StepSplit = StepSplit::Gsm8k,
    /// Tokens per step with `split = "tokens"`. [1, 1048576]
    pub step_tokens: usize = 16,
    /// Add continuations while the 95 % confidence interval of a value is wider than this; unset samples `samples` per
    /// state. (0, 4]
    pub interval: Option<f64> = None,
    /// Continuations added at a time with `interval`. [1, 65536]
    pub add: usize = 4,
    /// Maximum number of continuations per state with `interval`. [1, 65536]
    pub max_samples: usize = 30,
}
}

impl Vine {
    fn interval(&self) -> Option<Interval> {
        let (start, add, max) = (self.samples, self.add, self.max_samples);
        self.interval.map(|threshold| Interval { start, add, max, threshold })
    }
}

/// Policy, sampling parameters and rewards of continuations.
pub(crate) struct Continuations<'a> {
    /// The policy that sampled the completions.
    pub actor: Actor<'a>,
    pub params: SamplingParams,
    pub rewards: &'a Rewards,
    pub vine: &'a Vine,
}

/// A prefix whose value is estimated.
#[derive(Default)]
pub(super) struct VineState {
    /// Index of the prompt.
    pub prompt: usize,
    /// Tokens of prompt and prefix.
    ids: Vec<u32>,
    /// Tokens of the prefix.
    prefix: usize,
    /// The actions that lead an episode to this state.
    pub played: Option<Prefix>,
    /// Sample and state number of the first completion with this state.
    pub noise: (u32, u32),
    /// Rewards of its continuations so far.
    rewards: Vec<f64>,
    /// Number of continuations so far, with those whose reward was lost.
    drawn: usize,
}

/// A completion or an episode with its steps and states.
struct VinePath {
    trajectory: usize,
    steps: Vec<String>,
    states: Vec<usize>,
    tokens: TokenOwner,
}

/// Tokens of the steps.
enum TokenOwner {
    /// Sequence, tokens of its prompt, and the ends of the steps of its completion.
    Steps(usize, usize, Vec<SolutionStep>),
    /// Of these sequences: the actions of the turns.
    Turns(Vec<usize>, Vec<PlayedTurn>),
}

/// A continuation: its place among all of a round, what it became, and the tokens that were sampled for it.
#[derive(Serialize, Deserialize)]
pub(super) struct Continued {
    pub place: usize,
    pub completion: RolloutCompletion,
    /// Of the whole completion; none of an episode.
    pub ids: Vec<u32>,
    pub tokens: usize,
}

/// Fills the `credit` column of every completion; removes completions that cannot be split or have a state without a value. Returns
/// the credit of each completion, by its number.
pub(crate) fn credit(
    c: &mut Continuations<'_>,
    batch: CompletionBatch<'_>,
    scores: &[CompletionScores],
    experience: &mut Experience,
    metrics: &mut Metrics,
) -> Result<Vec<Option<StepCredit>>> {
    let (mut states, paths) = find_states(c, batch.completions, experience)?;
    sample_all(c, batch, &mut states, metrics)?;
    let mut out = vec![None; batch.completions.len()];
    for path in paths {
        let own: Vec<&VineState> = path.states.iter().map(|&i| &states[i]).collect();
        let known = own.iter().all(|s| !s.rewards.is_empty());
        let Some(score) = scores[path.trajectory].reward.filter(|_| known) else { continue };
        let estimated: Vec<f64> = own.iter().map(|s| mean(&s.rewards)).collect();
        let (values, advantages) = advantages(path.steps.len(), score, &estimated);
        match &path.tokens {
            TokenOwner::Steps(sequence, prompt, steps) => {
                place(&mut experience.sequences[*sequence], *prompt, steps, &advantages);
            }
            TokenOwner::Turns(sequences, turns) => place_turns(experience, sequences, turns, &advantages),
        }
        metrics.add("credit/steps", path.steps.len() as f64);
        out[path.trajectory] = Some(StepCredit {
            steps: path.steps,
            score,
            rollouts: own.iter().map(|s| s.rewards.clone()).collect(),
            max_steps: c.vine.max_steps,
            values,
            advantages,
        });
    }
    let before = experience.sequences.len();
    experience.sequences.retain(|s| !s.credit.is_empty());
    metrics.add("credit/dropped", 1.0 - experience.sequences.len() as f64 / before.max(1) as f64);
    Ok(out)
}

/// Writes the advantage of each step to its tokens.
fn place(s: &mut Sequence, prompt: usize, steps: &[SolutionStep], advantages: &[f64]) {
    s.credit = vec![0.0; s.ids.len()];
    for i in s.actions().collect::<Vec<_>>() {
        let step = steps.partition_point(|step| step.end <= i + 1 - prompt);
        s.credit[i] = advantages[step.min(steps.len() - 1)] as f32;
    }
}

/// Writes the advantage of each turn to the tokens of its action.
fn place_turns(e: &mut Experience, sequences: &[usize], turns: &[PlayedTurn], advantages: &[f64]) {
    for &s in sequences {
        e.sequences[s].credit = vec![0.0; e.sequences[s].ids.len()];
    }
    for (turn, &advantage) in turns.iter().zip(advantages) {
        let credit = &mut e.sequences[sequences[turn.sequence]].credit;
        turn.tokens.clone().for_each(|i| credit[i - 1] = advantage as f32);
    }
}

/// The distinct states to estimate, and the completions with their states.
fn find_states(
    c: &Continuations<'_>,
    completions: &[RolloutCompletion],
    experience: &Experience,
) -> Result<(Vec<VineState>, Vec<VinePath>)> {
    let mut found = VineStates::default();
    for (sequence, s) in experience.sequences.iter().enumerate() {
        let completion = &completions[s.trajectory];
        let first = completions.iter().position(|a| a.prompt == completion.prompt).unwrap_or(s.trajectory);
        let sample = (s.trajectory - first) as u32;
        if let Some(played) = &completion.played {
            let same = |&i: &usize| experience.sequences[i].trajectory == s.trajectory;
            let own: Vec<usize> = (0..experience.sequences.len()).filter(same).collect();
            if own.first() == Some(&sequence) {
                let sequences: Vec<&Sequence> = own.iter().map(|&i| &experience.sequences[i]).collect();
                let turns = c.turns_of(&sequences, played)?;
                let count = estimated_states(turns.len(), c.vine.max_steps);
                let states = turns[..count].iter().map(|t| (Vec::new(), 0, Some(t.state.clone())));
                let states = found.states(completion.prompt, sample, states);
                let steps = played.turns.iter().map(|t| t.action.clone()).collect();
                let (trajectory, tokens) = (s.trajectory, TokenOwner::Turns(own, turns));
                found.paths.push(VinePath { trajectory, steps, states, tokens });
            }
            continue;
        }
        let prompt = s.trained.iter().position(|t| *t).unwrap_or(s.ids.len());
        let split = (c.vine.split, c.vine.step_tokens);
        let Some(steps) = split::steps(split, &s.ids[prompt..], &completion.text, c.actor.tokenizer)? else {
            continue;
        };
        let ends = [0].into_iter().chain(steps.iter().map(|s| s.end));
        let ends = ends.take(estimated_states(steps.len(), c.vine.max_steps));
        let states = ends.map(|prefix| (s.ids[..prompt + prefix].to_vec(), prefix, None));
        let states = found.states(completion.prompt, sample, states);
        let texts = steps.iter().map(|s| s.text.clone()).collect();
        let (trajectory, tokens) = (s.trajectory, TokenOwner::Steps(sequence, prompt, steps));
        found.paths.push(VinePath { trajectory, steps: texts, states, tokens });
    }
    Ok((found.states, found.paths))
}

/// States so far, by prompt and what led there, and the completions that pass them.
#[derive(Default)]
struct VineStates {
    states: Vec<VineState>,
    known: HashMap<(usize, Vec<u32>), usize>,
    paths: Vec<VinePath>,
}

impl VineStates {
    /// The numbers of the states that a sample of a prompt passes: tokens with the length of the prefix, or how an episode comes
    /// there.
    fn states(
        &mut self,
        prompt: usize,
        sample: u32,
        passed: impl Iterator<Item = (Vec<u32>, usize, Option<Prefix>)>,
    ) -> Vec<usize> {
        let mut own = Vec::new();
        for (i, (ids, prefix, played)) in passed.enumerate() {
            let key = played.as_ref().map_or_else(|| ids.clone(), episodes::key);
            let states = &mut self.states;
            own.push(*self.known.entry((prompt, key)).or_insert_with(|| {
                let noise = (sample, i as u32);
                states.push(VineState { prompt, ids, prefix, played, noise, ..Default::default() });
                states.len() - 1
            }));
        }
        own
    }
}

/// Samples continuations of all states until each has the number of the settings.
fn sample_all(
    c: &mut Continuations<'_>,
    batch: CompletionBatch<'_>,
    states: &mut [VineState],
    metrics: &mut Metrics,
) -> Result<()> {
    let interval = c.vine.interval();
    let mut open: Vec<usize> = (0..states.len()).collect();
    let (mut count, mut tokens, mut failure) = (c.vine.samples, 0, None);
    while !open.is_empty() {
        let round = sample_round(c, batch, states, (&open, count), metrics)?;
        tokens += round.0;
        failure = failure.or(round.1);
        let Some(interval) = interval else { break };
        open.retain(|&i| states[i].drawn < interval.max && interval.wants_more(&states[i].rewards));
        count = interval.add;
    }
    if let Some(failure) = failure.filter(|_| states.iter().all(|s| s.rewards.is_empty())) {
        return Err(failure.context("no continuation got a reward"));
    }
    for state in states.iter().filter(|s| !s.rewards.is_empty()) {
        metrics.add("credit/value", mean(&state.rewards));
        metrics.add("credit/reward_std", mean_std(&state.rewards).1);
        metrics.add("credit/rollouts", state.drawn as f64);
        metrics.add("credit/interval", interval_width(&state.rewards));
    }
    metrics.add("credit/states", states.len() as f64);
    metrics.add("credit/tokens", tokens as f64);
    Ok(())
}

/// Samples `count` more continuations of each open state; returns the number of their tokens, and why the first one without a
/// reward has none.
fn sample_round(
    c: &mut Continuations<'_>,
    batch: CompletionBatch<'_>,
    states: &mut [VineState],
    (open, count): (&[usize], usize),
    metrics: &mut Metrics,
) -> Result<(usize, Option<Error>)> {
    let of: Vec<usize> = open.iter().flat_map(|&i| std::iter::repeat_n(i, count)).collect();
    let share = Teams::of(c.actor.ranks, c.actor.policy).share(batch.prompts.len());
    // The rank that sampled a prompt's completions has their prefixes in its cache.
    let mut own: Vec<(usize, usize, u32)> = Vec::new();
    for (place, &i) in of.iter().enumerate() {
        if share.contains(&states[i].prompt) {
            own.push((place, i, states[i].drawn as u32));
        }
        states[i].drawn += 1;
    }
    let own: Vec<(usize, &VineState, u32)> =
        own.iter().map(|&(place, i, n)| (place, &states[i], n)).collect();
    let (plays, plain): (Vec<_>, Vec<_>) = own.into_iter().partition(|(_, s, _)| s.played.is_some());
    let params = c.params.clone();
    let sampled = c.actor.led(|actor| {
        let mut all = complete(actor, &params, batch, &plain)?;
        all.extend(episodes::play_on((actor, &params), batch, &plays)?);
        Ok(all)
    })?;
    let sampled = exchange(c.actor.ranks, of.len(), sampled)?;
    for continued in &sampled {
        metrics.add("credit/clipped_ratio", f64::from(continued.completion.truncated));
    }
    let tokens = sampled.iter().map(|c| c.tokens).sum();
    let (mut first, scores) = (None, reward(c, batch, (states, &of), sampled)?);
    for (&i, (scores, failure)) in of.iter().zip(scores) {
        states[i].rewards.extend(scores.reward);
        first = first.or(failure);
    }
    Ok((tokens, first))
}

/// Continuations of completions: each state with its place and the number of its continuation.
fn complete(
    actor: &mut Actor<'_>,
    params: &SamplingParams,
    batch: CompletionBatch<'_>,
    wanted: &[(usize, &VineState, u32)],
) -> Result<Vec<Continued>> {
    let request = |&(_, state, number): &(usize, &VineState, u32)| {
        let seed = noise(params.seed, state.noise.1, number);
        let left = params.max_new_tokens - state.prefix;
        let prompt = batch.prompts[state.prompt].index as u32;
        let stream = [batch.at.step as u32, prompt, state.noise.0];
        let params = SamplingParams { seed, max_new_tokens: left, ..params.clone() };
        GenerationRequest { prompt: state.ids.clone(), params, stream }
    };
    let requests = wanted.iter().map(request).collect();
    let mut sampled = actor.generator.generate(actor.policy, requests)?;
    for ((_, state, _), completion) in wanted.iter().zip(&mut sampled) {
        let prefix = &state.ids[state.ids.len() - state.prefix..];
        join(prefix, completion, &params.stop_strings, actor.tokenizer)?;
    }
    let texts = texts(actor.tokenizer, actor.stops, &sampled)?;
    let completion = |((&(place, state, _), c), text): ((&(usize, &VineState, u32), Completion), String)| {
        let (prompt, truncated) = (state.prompt, c.stop == StopReason::Length);
        let completion = RolloutCompletion { prompt, text, tokens: c.ids.len(), truncated, played: None };
        Continued { place, completion, tokens: c.ids.len() - state.prefix, ids: c.ids }
    };
    Ok(wanted.iter().zip(sampled).zip(texts).map(completion).collect())
}

/// The continuations of all ranks, each at its place.
fn exchange(ranks: &Ranks, count: usize, own: Vec<Continued>) -> Result<Vec<Continued>> {
    let everybody = if ranks.is_alone() { vec![own] } else { gather(ranks, own)? };
    let mut all: Vec<Option<Continued>> = std::iter::repeat_with(|| None).take(count).collect();
    let missing = || Error::rank("a rank sampled other continuations than the rest expected");
    for continued in everybody.into_iter().flatten() {
        let place = continued.place;
        *all.get_mut(place).ok_or_else(missing)? = Some(continued);
    }
    all.into_iter().map(|c| c.ok_or_else(missing)).collect()
}

/// A seed for the continuation of that number from a state.
pub(super) fn noise(seed: u64, state: u32, number: u32) -> u64 {
    const VINE: [u32; 2] = [0x7669_6e65, 1];
    let [a, b, _, _] = philox4x32([state, number, VINE[0], VINE[1]], [seed as u32, (seed >> 32) as u32]);
    u64::from(a) | u64::from(b) << 32
}

/// Makes a continuation a whole completion: the prefix before it, cut where both together hold a stop string.
fn join(prefix: &[u32], c: &mut Completion, stops: &[String], tokenizer: &Tokenizer) -> Result<()> {
    cut_at_stop(prefix, c, stops, tokenizer)?;
    c.ids.splice(0..0, prefix.iter().copied());
    Ok(())
}

/// The recipe's reward of each whole completion, or why it is lost.
fn reward(
    c: &Continuations<'_>,
    batch: CompletionBatch<'_>,
    (states, of): (&[VineState], &[usize]),
    sampled: Vec<Continued>,
) -> Result<Vec<ScoredPart>> {
    let (mut completions, mut experience) = (Vec::with_capacity(of.len()), Experience::default());
    for (i, (&state, continued)) in of.iter().zip(sampled).enumerate() {
        let state = &states[state];
        if state.played.is_none() {
            let prompt = &state.ids[..state.ids.len() - state.prefix];
            let ids = [prompt, &continued.ids].concat();
            let trained = (0..ids.len()).map(|i| i >= prompt.len()).collect();
            let reward = vec![0.0; ids.len()];
            experience.sequences.push(Sequence { ids, trained, reward, trajectory: i, ..Default::default() });
        }
        completions.push(continued.completion);
    }
    let whole = CompletionBatch { completions: &completions, ..batch };
    c.rewards.score_part(whole, &mut experience)
}
