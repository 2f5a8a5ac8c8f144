//! Rollouts: samples completions of prompts, with their log-probabilities.

use crate::episode::{self, Environments, Episode, Played, Plays, TimeShares};
use crate::experience::{Experience, Metrics, Sequence};
use crate::place::{cost, place};
use crate::ranks::{Teams, gather};
use crate::recipe::Rollout;
use crate::source::Prompt;
use ferrl_engine::generate::{Completion, Generator, SamplingParams, StopReason, Stops, dismiss};
use ferrl_engine::model::Model;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Ranks, cores};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

/// Tokens to decode per thread.
const THREAD_TOKENS: usize = 4096;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutCompletion {
    /// Index of the prompt.
    pub prompt: usize,
    /// Text up to the stop, without special tokens.
    pub text: String,
    pub tokens: usize,
    /// Whether it was truncated: by the length limit, or the limit of turns.
    pub truncated: bool,
    /// The turns, with an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub played: Option<Played>,
}

impl RolloutCompletion {
    /// The text that rewards score: the completion, or the actions of an episode without observations.
    pub fn scored_text(&self) -> Cow<'_, str> {
        match &self.played {
            Some(played) => played.actions().into(),
            None => self.text.as_str().into(),
        }
    }
}

/// A policy with its generator.
pub struct Actor<'a> {
    pub generator: &'a mut dyn Generator,
    pub policy: &'a Model,
    pub tokenizer: &'a Tokenizer,
    pub stops: &'a Stops,
    /// Environments of prompts with several turns.
    pub environments: &'a Environments,
    /// The ranks that share the prompts.
    pub ranks: &'a Ranks,
}

impl Actor<'_> {
    /// Samples with the ranks of this rank's group: the first runs `work`, the others take part in its computation and return the
    /// default.
    pub(crate) fn led<T: Default>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let Some(team) = self.policy.team().cloned() else { return work(self) };
        self.ranks.all_gather(&[])?; // an error before this reaches ranks that wait for all of them
        team.ranks().in_step(|| match team.ranks().rank() {
            0 => {
                let done = work(self)?;
                dismiss(self.policy).map(|()| done)
            }
            _ => self.generator.follow(self.policy).map(|()| T::default()),
        })
    }
}

/// Stop conditions of a recipe for the model in `dir`.
pub fn stops(dir: &Path, tokenizer: &Tokenizer, r: &Rollout) -> Stops {
    Stops::of_dir(dir, tokenizer).with_strings(&r.stop, r.include_stop)
}

/// Sampling parameters of a run.
pub fn params(r: &Rollout, stops: &Stops, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: r.temperature as f32,
        top_k: r.top_k,
        top_p: r.top_p as f32,
        max_new_tokens: r.max_new_tokens,
        stop_ids: stops.ids().to_vec(),
        stop_strings: stops.strings().to_vec(),
        seed,
        ..Default::default()
    }
}

#[derive(Default, Serialize, Deserialize)]
pub struct Sampled {
    /// Training sequences.
    pub experience: Experience,
    /// In the order of prompts and samples.
    pub completions: Vec<RolloutCompletion>,
    /// Fractions of time.
    pub time: TimeShares,
    /// Metrics of a search.
    pub metrics: Metrics,
}

/// A request for completions of each prompt.
#[derive(Clone, Copy)]
pub struct RolloutRequest<'a> {
    pub params: &'a SamplingParams,
    /// Completions per prompt.
    pub samples: usize,
    /// The step, part of the key of the random numbers.
    pub step: u64,
}

/// `samples` completions of each prompt, in the order of prompts and samples. Random numbers depend only on the seed, the step, the
/// prompt's number and the sample's, not on the rank: each rank samples for its part of the prompts, and all get all
/// completions.
pub fn sample(
    actor: &mut Actor<'_>,
    prompts: &mut [Prompt],
    params: &SamplingParams,
    samples: usize,
    step: u64,
) -> Result<Sampled> {
    let costs: Vec<u64> = prompts.iter().map(|p| cost(samples, p.ids.len(), params.max_new_tokens)).collect();
    sample_placed(actor, prompts, RolloutRequest { params, samples, step }, &costs)
}

/// The same, balanced over ranks by the predicted cost of each prompt.
pub fn sample_placed(
    actor: &mut Actor<'_>,
    prompts: &mut [Prompt],
    wanted: RolloutRequest<'_>,
    costs: &[u64],
) -> Result<Sampled> {
    let (ranks, samples) = (actor.ranks, wanted.samples);
    if ranks.is_alone() {
        return sample_here(actor, prompts, wanted);
    }
    let teams = Teams::of(ranks, actor.policy);
    let places = place(costs, teams.count());
    let is_own = |i: &usize| teams.leads() && places[*i] == teams.index();
    let own: Vec<usize> = (0..prompts.len()).filter(is_own).collect();
    let mut mine: Vec<Prompt> = own.iter().map(|&i| prompts[i].clone()).collect();
    let here = actor.led(|actor| sample_here(actor, &mut mine, wanted))?;
    let time = here.time;
    let count = prompts.len();
    let mut by_prompt: Vec<(Vec<Sequence>, Vec<RolloutCompletion>)> = vec![Default::default(); count];
    for (positions, theirs, sampled) in gather(ranks, (own, mine, here))? {
        let lost = || Error::rank("a rank has completed prompts that are not its own");
        let at = |local: usize| positions.get(local).copied().filter(|&i| i < count).ok_or_else(lost);
        for (local, prompt) in theirs.into_iter().enumerate() {
            prompts[at(local)?] = prompt; // an environment may have begun it
        }
        for s in sampled.experience.sequences {
            by_prompt[at(s.group)?].0.push(s);
        }
        for completion in sampled.completions {
            by_prompt[at(completion.prompt)?].1.push(completion);
        }
    }
    let mut all = Sampled { time, ..Default::default() };
    for (group, (sequences, completions)) in by_prompt.into_iter().enumerate() {
        if completions.len() != samples {
            return Err(Error::rank(format!(
                "prompt {group} has {} completions of {samples}",
                completions.len()
            )));
        }
        let first = all.completions.len();
        // Trajectories are numbered in the order of the prompts.
        let moved =
            |s: Sequence| Sequence { trajectory: first + s.trajectory - s.group * samples, group, ..s };
        all.experience.sequences.extend(sequences.into_iter().map(moved));
        all.completions.extend(completions.into_iter().map(|a| RolloutCompletion { prompt: group, ..a }));
    }
    Ok(all)
}

/// Gathers the samples of all ranks, each for its part of the prompts, in the order of the prompts.
pub(crate) fn gathered(
    ranks: &Ranks,
    prompts: &mut [Prompt],
    own: Range<usize>,
    sampled: Sampled,
) -> Result<Sampled> {
    if ranks.is_alone() {
        return Ok(sampled);
    }
    let mut all = Sampled { time: sampled.time, ..Default::default() };
    let mut first = 0;
    for (theirs, sampled) in gather(ranks, (prompts[own].to_vec(), sampled))? {
        all.experience.append(sampled.experience, first, all.completions.len());
        all.metrics.join(sampled.metrics);
        all.completions.extend(
            sampled.completions.into_iter().map(|a| RolloutCompletion { prompt: a.prompt + first, ..a }),
        );
        for prompt in theirs {
            prompts[first] = prompt; // an environment may have begun it
            first += 1;
        }
    }
    Ok(all)
}

/// The completions of this rank.
fn sample_here(actor: &mut Actor<'_>, prompts: &mut [Prompt], wanted: RolloutRequest<'_>) -> Result<Sampled> {
    let Plays { episodes, time } = episode::play(actor, prompts, wanted)?;
    sampled(actor, episodes, wanted.params, time)
}

/// Finished episodes as training sequences and texts.
pub(crate) fn sampled(
    actor: &Actor<'_>,
    mut episodes: Vec<Episode>,
    params: &SamplingParams,
    time: TimeShares,
) -> Result<Sampled> {
    let completions: Vec<Completion> = episodes.iter_mut().filter_map(|e| e.completion.take()).collect();
    let mut texts = texts(actor.tokenizer, actor.stops, &completions)?.into_iter();
    let (mut experience, mut completions) = (Experience::default(), Vec::new());
    for Episode { prompt, sequences, tokens, stop, played, .. } in episodes {
        let truncated = played.as_ref().map_or(stop == StopReason::Length, |p| p.truncated);
        let text = match &played {
            Some(played) => played.text(),
            None => texts.next().unwrap_or_default(),
        };
        let bootstrap = played.is_some() && truncated;
        experience.sequences.extend(sequences.into_iter().map(|s| Sequence {
            trajectory_tokens: tokens,
            truncated,
            bootstrap,
            temperature: Some(params.divisor()),
            ..s
        }));
        completions.push(RolloutCompletion { prompt, text, tokens, truncated, played });
    }
    Ok(Sampled { experience, completions, time, metrics: Metrics::default() })
}

/// Where tokens that were sampled behind a prefix complete a stop string that begins in the prefix: how many of them stay, and
/// which string it is. The generator reads a prefix as a prompt, and does not look for stop strings there.
pub(crate) fn stop_across(
    prefix: &[u32],
    own: &[u32],
    stops: &[String],
    tokenizer: &Tokenizer,
) -> Result<Option<(usize, usize)>> {
    let longest = stops.iter().map(String::len).max().unwrap_or(0);
    // As many tokens as a stop string has bytes hold it, and a few more where characters span tokens.
    let from = prefix.len() - prefix.len().min(longest + 4);
    let mut tail = prefix[from..].to_vec();
    for (n, &id) in own.iter().enumerate().take(if prefix.is_empty() { 0 } else { longest }) {
        tail.push(id);
        let text = tokenizer.decode(&tail[tail.len().saturating_sub(longest + 4)..], false)?;
        if let Some(stop) = stops.iter().position(|s| text.contains(s.as_str())) {
            return Ok(Some((n + 1, stop)));
        }
    }
    Ok(None)
}

/// Cuts a completion of a prefix where both together hold a stop string.
pub(crate) fn cut_at_stop(
    prefix: &[u32],
    c: &mut Completion,
    stops: &[String],
    tokenizer: &Tokenizer,
) -> Result<()> {
    if let Some((kept, stop)) = stop_across(prefix, &c.ids, stops, tokenizer)? {
        c.ids.truncate(kept);
        c.logp.truncate(kept);
        c.sampled_logp.truncate(kept);
        c.top.truncate(kept);
        c.versions.truncate(kept);
        c.stop = StopReason::String(stop);
    }
    Ok(())
}

/// Decodes the text of each completion, with several threads for many tokens, since the device is idle meanwhile.
pub fn texts(tokenizer: &Tokenizer, stops: &Stops, completions: &[Completion]) -> Result<Vec<String>> {
    let decode = |c: &Completion| stops.text(tokenizer, c);
    let tokens: usize = completions.iter().map(|c| c.ids.len()).sum();
    let threads = cores().min(tokens / THREAD_TOKENS);
    if threads < 2 {
        return completions.iter().map(decode).collect();
    }
    std::thread::scope(|scope| {
        let parts = completions.chunks(completions.len().div_ceil(threads));
        let running: Vec<_> = parts
            .map(|part| scope.spawn(move || part.iter().map(decode).collect::<Result<Vec<_>>>()))
            .collect();
        let mut all = Vec::with_capacity(completions.len());
        for part in running {
            all.extend(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}
