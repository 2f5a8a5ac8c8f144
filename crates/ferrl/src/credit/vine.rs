//! Continuations of the states between steps, their rewards, and the advantages that follow.
//!
//! Every state is a prefix of tokens that were sampled; equal prefixes of a prompt are one state. A continuation may be as
//! long as what the completion had left, so its state is the one that the policy was in. Random numbers depend on the seed,
//! the step, the prompt, the sample, the state and the continuation's number alone.

use super::split::{self, Step};
use super::{Interval, Split, StepCredit, advantages, estimated_states, interval_width, mean};
use crate::algo::math::mean_std;
use crate::algo::no_step_values;
use crate::experience::{Experience, Metrics, Sequence};
use crate::ranks::{Teams, gather};
use crate::reward::{Completions, Graded, Rewards};
use crate::rollout::{Actor, RolloutCompletion, texts};
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use ferrl_kernels::philox::philox4x32;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Monte-Carlo values of the states between steps, for `advantage.baseline = "steps"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Vine {
    /// Continuations per state (K); with `interval` those at first. [1, 65536]
    pub samples: usize,
    /// States after the prompt whose value is estimated; later ones are back-filled. [0, 1048576]
    pub max_steps: usize,
    /// How a completion is split into steps.
    pub split: Split,
    /// Tokens of a step with `split = "tokens"`. [1, 1048576]
    pub step_tokens: usize,
    /// Add continuations while the 95 % confidence interval of a value is wider than this; unset samples `samples` of each
    /// state. (0, 4]
    pub interval: Option<f64>,
    /// Continuations added at a time with `interval`. [1, 65536]
    pub add: usize,
    /// Number of continuations from which on none are added with `interval`. [1, 65536]
    pub max_samples: usize,
}

impl Default for Vine {
    fn default() -> Self {
        Vine {
            samples: 9,
            max_steps: 25,
            split: Split::Gsm8k,
            step_tokens: 16,
            interval: None,
            add: 4,
            max_samples: 30,
        }
    }
}

impl Vine {
    fn interval(&self) -> Option<Interval> {
        let (start, add, max) = (self.samples, self.add, self.max_samples);
        self.interval.map(|threshold| Interval { start, add, max, threshold })
    }
}

/// What continuations are made and rewarded with.
pub(crate) struct Continuations<'a> {
    /// The policy that sampled the completions.
    pub actor: Actor<'a>,
    /// How the completions were sampled.
    pub params: SamplingParams,
    /// What rewards completions.
    pub rewards: &'a Rewards,
    /// The settings.
    pub vine: &'a Vine,
}

/// A prefix whose value is estimated.
struct State {
    /// Which of the prompts.
    prompt: usize,
    /// Tokens of prompt and prefix.
    ids: Vec<u32>,
    /// Tokens of the prefix.
    prefix: usize,
    /// Sample and state number of the first completion that passes it.
    noise: (u32, u32),
    /// Rewards of its continuations so far.
    rewards: Vec<f64>,
    /// Continuations so far, those whose reward was lost included.
    drawn: usize,
}

/// A completion with its steps and the states it passes.
struct Path {
    sequence: usize,
    prompt: usize,
    steps: Vec<Step>,
    states: Vec<usize>,
}

/// Fills the `credit` column of every completion; completions that cannot be split, or have a state that nobody could
/// reward, leave the experience. The credit of each completion, by its number.
pub(crate) fn credit(
    c: &mut Continuations<'_>,
    completions: Completions<'_>,
    graded: &[Graded],
    experience: &mut Experience,
    metrics: &mut Metrics,
) -> Result<Vec<Option<StepCredit>>> {
    let (mut states, paths) = find_states(c, completions.answers, experience)?;
    sample_all(c, completions, &mut states, metrics)?;
    let mut out = vec![None; completions.answers.len()];
    for path in paths {
        let s = &mut experience.sequences[path.sequence];
        let own: Vec<&State> = path.states.iter().map(|&i| &states[i]).collect();
        let Some(score) = graded[s.trajectory].reward.filter(|_| own.iter().all(|s| !s.rewards.is_empty()))
        else {
            continue;
        };
        let estimated: Vec<f64> = own.iter().map(|s| mean(&s.rewards)).collect();
        let (values, advantages) = advantages(path.steps.len(), score, &estimated);
        place(s, path.prompt, &path.steps, &advantages);
        metrics.add("credit/steps", path.steps.len() as f64);
        out[s.trajectory] = Some(StepCredit {
            steps: path.steps.into_iter().map(|s| s.text).collect(),
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
fn place(s: &mut Sequence, prompt: usize, steps: &[Step], advantages: &[f64]) {
    s.credit = vec![0.0; s.ids.len()];
    for i in s.actions().collect::<Vec<_>>() {
        let step = steps.partition_point(|step| step.end <= i + 1 - prompt);
        s.credit[i] = advantages[step.min(steps.len() - 1)] as f32;
    }
}

/// Every state whose value is wanted, once, and the completions that pass them.
fn find_states(
    c: &Continuations<'_>,
    answers: &[RolloutCompletion],
    experience: &Experience,
) -> Result<(Vec<State>, Vec<Path>)> {
    let (mut states, mut paths): (Vec<State>, Vec<Path>) = (Vec::new(), Vec::new());
    let mut known: HashMap<(usize, Vec<u32>), usize> = HashMap::new();
    for (sequence, s) in experience.sequences.iter().enumerate() {
        let answer = &answers[s.trajectory];
        if answer.played.is_some() {
            return Err(no_step_values(
                "the values of steps are estimated by continuing a completion, and an environment that has played a turn \
                 cannot be continued twice",
            ));
        }
        let prompt = s.trained.iter().position(|t| *t).unwrap_or(s.ids.len());
        let split = (c.vine.split, c.vine.step_tokens);
        let found = split::steps(split, &s.ids[prompt..], &answer.text, c.actor.tokenizer)?;
        let Some(steps) = found else { continue };
        let first = answers.iter().position(|a| a.prompt == answer.prompt).unwrap_or(s.trajectory);
        let sample = (s.trajectory - first) as u32;
        let ends = [0].into_iter().chain(steps.iter().map(|s| s.end));
        let own =
            ends.take(estimated_states(steps.len(), c.vine.max_steps)).enumerate().map(|(i, prefix)| {
                let ids = s.ids[..prompt + prefix].to_vec();
                *known.entry((answer.prompt, ids)).or_insert_with_key(|(_, ids)| {
                    let (noise, ids) = ((sample, i as u32), ids.clone());
                    let empty = (Vec::new(), 0);
                    states.push(State {
                        prompt: answer.prompt,
                        ids,
                        prefix,
                        noise,
                        rewards: empty.0,
                        drawn: empty.1,
                    });
                    states.len() - 1
                })
            });
        let own = own.collect();
        paths.push(Path { sequence, prompt, steps, states: own });
    }
    Ok((states, paths))
}

/// Continuations of all states, until each has as many as the settings want.
fn sample_all(
    c: &mut Continuations<'_>,
    completions: Completions<'_>,
    states: &mut [State],
    metrics: &mut Metrics,
) -> Result<()> {
    let interval = c.vine.interval();
    let mut open: Vec<usize> = (0..states.len()).collect();
    let (mut count, mut tokens) = (c.vine.samples, 0);
    while !open.is_empty() {
        tokens += sample_round(c, completions, states, (&open, count), metrics)?;
        let Some(interval) = interval else { break };
        open.retain(|&i| states[i].drawn < interval.max && interval.wants_more(&states[i].rewards));
        count = interval.add;
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

/// `count` more continuations of each open state; the number of their tokens.
fn sample_round(
    c: &mut Continuations<'_>,
    completions: Completions<'_>,
    states: &mut [State],
    (open, count): (&[usize], usize),
    metrics: &mut Metrics,
) -> Result<usize> {
    let of: Vec<usize> = open.iter().flat_map(|&i| std::iter::repeat_n(i, count)).collect();
    let share = Teams::of(c.actor.ranks, c.actor.policy).share(completions.prompts.len());
    let (mut requests, mut own) = (Vec::new(), Vec::new());
    for (place, &i) in of.iter().enumerate() {
        let (state, number) = (&states[i], completions.prompts[states[i].prompt].index);
        let seed = noise(c.params.seed, state.noise.1, state.drawn as u32);
        let left = c.params.max_new_tokens - state.prefix;
        let params = SamplingParams { seed, max_new_tokens: left, ..c.params.clone() };
        let stream = [completions.at.step as u32, number as u32, state.noise.0];
        // The rank that sampled a prompt's completions has their prefixes in its cache.
        if share.contains(&state.prompt) {
            requests.push(GenerationRequest { prompt: state.ids.clone(), params, stream });
            own.push(place);
        }
        states[i].drawn += 1;
    }
    let mut sampled = c.actor.led(|actor| actor.generator.generate(actor.policy, requests))?;
    for (&place, completion) in own.iter().zip(&mut sampled) {
        let state = &states[of[place]];
        let prefix = &state.ids[state.ids.len() - state.prefix..];
        join(prefix, completion, &c.params.stop_strings, c.actor.tokenizer)?;
    }
    let sampled = exchange(c.actor.ranks, of.len(), (own, sampled))?;
    let prefixes: usize = of.iter().map(|&i| states[i].prefix).sum();
    let tokens = sampled.iter().map(|c| c.ids.len()).sum::<usize>() - prefixes;
    for completion in &sampled {
        metrics.add("credit/clipped_ratio", f64::from(completion.stop == StopReason::Length));
    }
    let rewards = reward(c, completions, (states, &of), &sampled)?;
    of.iter().zip(rewards).for_each(|(&i, reward)| states[i].rewards.extend(reward));
    Ok(tokens)
}

/// The completions of all ranks, each at its place.
fn exchange(
    ranks: &Ranks,
    count: usize,
    (places, sampled): (Vec<usize>, Vec<Completion>),
) -> Result<Vec<Completion>> {
    if ranks.is_alone() {
        return Ok(sampled);
    }
    let stop = |stop: StopReason| match stop {
        StopReason::Token(id) => (0, id as usize),
        StopReason::String(i) => (1, i),
        StopReason::Length => (2, 0),
        StopReason::Cancelled => (3, 0),
    };
    let own: Vec<(usize, Vec<u32>, (u8, usize))> =
        places.into_iter().zip(sampled).map(|(place, c)| (place, c.ids, stop(c.stop))).collect();
    let mut all: Vec<Option<Completion>> = vec![None; count];
    for (place, ids, stop) in gather(ranks, own)?.into_iter().flatten() {
        let stop = match stop {
            (0, id) => StopReason::Token(id as u32),
            (1, i) => StopReason::String(i),
            (2, _) => StopReason::Length,
            _ => StopReason::Cancelled,
        };
        let (logp, sampled_logp, top, versions) = Default::default();
        all[place] = Some(Completion { ids, logp, sampled_logp, top, versions, stop, shared: 0 });
    }
    let missing = || Error::rank("a rank sampled other continuations than the rest expected");
    all.into_iter().map(|c| c.ok_or_else(missing)).collect()
}

/// A seed for the continuation of that number from a state.
fn noise(seed: u64, state: u32, number: u32) -> u64 {
    const VINE: [u32; 2] = [0x7669_6e65, 1];
    let [a, b, _, _] = philox4x32([state, number, VINE[0], VINE[1]], [seed as u32, (seed >> 32) as u32]);
    u64::from(a) | u64::from(b) << 32
}

/// Makes a continuation a whole completion: the prefix before it, cut where both together hold a stop string, which a
/// generator that saw the prefix as a prompt does not look for.
fn join(prefix: &[u32], c: &mut Completion, stops: &[String], tokenizer: &Tokenizer) -> Result<()> {
    let own = std::mem::replace(&mut c.ids, prefix.to_vec());
    let longest = stops.iter().map(String::len).max().unwrap_or(0);
    for (n, id) in own.into_iter().enumerate() {
        c.ids.push(id);
        if n < longest {
            let tail = &c.ids[c.ids.len().saturating_sub(longest + 4)..];
            let text = tokenizer.decode(tail, false)?;
            if let Some(stop) = stops.iter().position(|s| text.contains(s.as_str())) {
                c.stop = StopReason::String(stop);
                break;
            }
        }
    }
    Ok(())
}

/// The recipe's reward of each whole completion; none where it was lost.
fn reward(
    c: &Continuations<'_>,
    completions: Completions<'_>,
    (states, of): (&[State], &[usize]),
    sampled: &[Completion],
) -> Result<Vec<Option<f64>>> {
    let texts = texts(c.actor.tokenizer, c.actor.stops, sampled)?;
    let (mut answers, mut experience) = (Vec::with_capacity(of.len()), Experience::default());
    for (i, ((&state, completion), text)) in of.iter().zip(sampled).zip(texts).enumerate() {
        let state = &states[state];
        let (tokens, truncated) = (completion.ids.len(), completion.stop == StopReason::Length);
        answers.push(RolloutCompletion { prompt: state.prompt, text, tokens, truncated, played: None });
        let prompt = &state.ids[..state.ids.len() - state.prefix];
        let ids = [prompt, &completion.ids].concat();
        let trained = (0..ids.len()).map(|i| i >= prompt.len()).collect();
        let reward = vec![0.0; ids.len()];
        experience.sequences.push(Sequence { ids, trained, reward, trajectory: i, ..Default::default() });
    }
    let whole = Completions { answers: &answers, ..completions };
    let graded = c.rewards.score(whole, &mut experience, &mut Metrics::default())?;
    Ok(graded.into_iter().map(|g| g.reward).collect())
}
