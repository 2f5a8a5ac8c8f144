//! Partial rollouts: completions that continue in later steps.
//!
//! With `rollout.partial_tokens` a completion gets at most that many new tokens per step. Prompts with finished completions are
//! trained on; the others continue in the next step, with its weights. Each token keeps the policy version and log-probability of its
//! sampling. Limits are numbers of tokens, so that a run is the same on any number of ranks; unfinished completions are part of
//! checkpoints.

use crate::episode::{Episode, TimeShares};
use crate::place::{cost, place};
use crate::ranks::{Teams, gather};
use crate::rollout::{Actor, Sampled, sampled};
use crate::source::Prompt;
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A prompt with unfinished completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unfinished {
    pub prompt: Prompt,
    /// The step that drew it, part of the key of its random numbers.
    step: u64,
    samples: Vec<PartialCompletion>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct PartialCompletion {
    ids: Vec<u32>,
    logp: Vec<f32>,
    versions: Vec<u64>,
    /// How it ended, if it has.
    end: Option<CompletionEnd>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum CompletionEnd {
    Token(u32),
    Text(usize),
    Length,
}

impl PartialCompletion {
    /// Appends the next tokens; `most` is the maximum length.
    fn add(&mut self, c: Completion, most: usize) {
        self.ids.extend(c.ids);
        self.logp.extend(c.logp);
        self.versions.extend(c.versions);
        self.end = match c.stop {
            StopReason::Token(id) => Some(CompletionEnd::Token(id)),
            StopReason::String(i) => Some(CompletionEnd::Text(i)),
            StopReason::Length | StopReason::Cancelled => {
                (self.ids.len() >= most).then_some(CompletionEnd::Length)
            }
        };
    }

    /// Remaining tokens, in this step at most `piece`.
    fn left(&self, piece: usize, most: usize) -> usize {
        if self.end.is_some() { 0 } else { piece.min(most - self.ids.len()) }
    }

    fn completion(&self) -> Completion {
        let stop = match self.end {
            Some(CompletionEnd::Token(id)) => StopReason::Token(id),
            Some(CompletionEnd::Text(i)) => StopReason::String(i),
            Some(CompletionEnd::Length) | None => StopReason::Length,
        };
        Completion {
            ids: self.ids.clone(),
            logp: self.logp.clone(),
            sampled_logp: self.logp.clone(),
            top: Vec::new(),
            versions: self.versions.clone(),
            shared: 0,
            stop,
        }
    }
}

impl Unfinished {
    /// A prompt with `samples` completions to sample; an error if the generator has no room for whole ones.
    pub fn new(
        actor: &Actor<'_>,
        prompt: Prompt,
        params: &SamplingParams,
        samples: usize,
        step: u64,
    ) -> Result<Self> {
        if actor.environments.plays(&prompt) {
            return Err(Error::usage("episodes of several turns cannot be continued in a later step")
                .at("rollout.partial_tokens")
                .fix("rollout.partial_tokens = 0"));
        }
        let waits = Unfinished { prompt, step, samples: vec![PartialCompletion::default(); samples] };
        actor
            .generator
            .check(&GenerationRequest { params: params.clone(), ..waits.request(0, params, 0) })?;
        Ok(waits)
    }

    fn is_finished(&self) -> bool {
        self.samples.iter().all(|s| s.end.is_some())
    }

    /// Number of unfinished completions.
    pub fn open(&self) -> usize {
        self.samples.iter().filter(|s| s.end.is_none()).count()
    }

    fn stream(&self, sample: usize) -> [u32; 3] {
        [self.step as u32, self.prompt.index as u32, sample as u32]
    }

    /// The next tokens of a completion.
    fn request(&self, sample: usize, params: &SamplingParams, max_new_tokens: usize) -> GenerationRequest {
        let ids = &self.samples[sample].ids;
        let params = SamplingParams { max_new_tokens, sampled: ids.len(), ..params.clone() };
        GenerationRequest {
            prompt: [&self.prompt.ids[..], ids].concat(),
            params,
            stream: self.stream(sample),
        }
    }

    /// Cost of the next tokens: with new weights the prefill is repeated.
    fn cost(&self, piece: usize, most: usize) -> u64 {
        let open = self.samples.iter().filter(|s| s.end.is_none());
        open.map(|s| cost(1, self.prompt.ids.len() + s.ids.len(), s.left(piece, most))).sum()
    }
}

/// Continues every unfinished completion by at most `piece` tokens; each rank has some of the prompts.
pub fn advance(
    actor: &mut Actor<'_>,
    waiting: &mut [Unfinished],
    params: &SamplingParams,
    piece: usize,
) -> Result<()> {
    let (most, ranks) = (params.max_new_tokens, actor.ranks);
    let costs: Vec<u64> = waiting.iter().map(|w| w.cost(piece, most)).collect();
    let teams = Teams::of(ranks, actor.policy);
    let places = place(&costs, teams.count());
    let is_own = |i: &usize| teams.leads() && places[*i] == teams.index();
    let own: Vec<usize> = (0..waiting.len()).filter(is_own).collect();
    let (mut requests, mut of) = (Vec::new(), Vec::new());
    for &i in &own {
        for (k, sample) in waiting[i].samples.iter().enumerate().filter(|(_, s)| s.end.is_none()) {
            requests.push(waiting[i].request(k, params, sample.left(piece, most)));
            of.push((i, k));
        }
    }
    let completions = actor.led(|actor| actor.generator.generate(actor.policy, requests))?;
    for ((i, k), completion) in of.into_iter().zip(completions) {
        waiting[i].samples[k].add(completion, most);
    }
    if ranks.is_alone() {
        return Ok(());
    }
    let mine: Vec<(usize, &Vec<PartialCompletion>)> = own.iter().map(|&i| (i, &waiting[i].samples)).collect();
    let mine =
        serde_json::to_value(mine).map_err(|e| Error::rank(format!("completions cannot be sent: {e}")))?;
    for theirs in gather(ranks, mine)? {
        let theirs: Vec<(usize, Vec<PartialCompletion>)> = serde_json::from_value(theirs)
            .map_err(|e| Error::rank(format!("completions of a rank cannot be read: {e}")))?;
        for (i, samples) in theirs {
            let slot = waiting.get_mut(i).ok_or_else(|| Error::rank("ranks have other prompts in flight"))?;
            slot.samples = samples;
        }
    }
    Ok(())
}

/// Removes the finished prompts, in the order in which they were drawn.
pub fn take_finished(waiting: &mut Vec<Unfinished>) -> Vec<Unfinished> {
    let (done, rest) = std::mem::take(waiting).into_iter().partition(Unfinished::is_finished);
    *waiting = rest;
    done
}

/// Finished completions in the form of a rollout.
pub fn as_sampled(actor: &Actor<'_>, done: &[Unfinished], params: &SamplingParams) -> Result<Sampled> {
    let (mut episodes, shared) = (Vec::new(), Arc::new(params.clone()));
    for (group, waited) in done.iter().enumerate() {
        for (k, piece) in waited.samples.iter().enumerate() {
            let sampling = (&shared, waited.stream(k));
            let mut episode = Episode::new(group, &waited.prompt, None, sampling).numbered(episodes.len());
            let completion = piece.completion();
            episode.act(&completion);
            episode.completion = Some(completion);
            episodes.push(episode);
        }
    }
    sampled(actor, episodes, params, TimeShares::default())
}
