//! Episodes of several turns: a step is a turn, and the state before it is restored by replaying the earlier actions in a fresh
//! environment.

use super::vine::{Continuations, Continued, VineState, noise};
use crate::episode::{Branch, Episode, EpisodeLoop, Played, Prefix, Reach};
use crate::experience::Sequence;
use crate::reward::CompletionBatch;
use crate::rollout::{Actor, RolloutCompletion};
use ferrl_engine::generate::{Completion, SamplingParams, StopReason};
use ferrl_engine::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// One turn of an episode as it was sampled.
pub(super) struct PlayedTurn {
    /// Training sequence of the episode, and the tokens of the action there.
    pub sequence: usize,
    pub tokens: Range<usize>,
    /// The state before it.
    pub state: Prefix,
}

/// The turns of an episode, from its training sequences.
pub(super) fn turns(sequences: &[&Sequence], played: &Played, stop_ids: &[u32]) -> Result<Vec<PlayedTurn>> {
    let wrong = || Error::data("the turns of an episode do not fit its tokens");
    let (mut read, mut actions, mut out) = (vec![0; sequences.len()], Vec::new(), Vec::new());
    for turn in &played.turns {
        let s = sequences.get(turn.sequence).ok_or_else(wrong)?;
        let from = read[turn.sequence];
        let start = from + s.trained.iter().skip(from).position(|t| *t).ok_or_else(wrong)?;
        let (tokens, before) = (start..start + turn.tokens, start - 1..start - 1 + turn.tokens);
        let ids = s.ids.get(tokens.clone()).ok_or_else(wrong)?.to_vec();
        read[turn.sequence] = tokens.end;
        let stop = match ids.last() {
            Some(last) if stop_ids.contains(last) => StopReason::Token(*last),
            _ => StopReason::Length,
        };
        let (logp, versions) = (s.sampled_logp[before.clone()].to_vec(), s.version[before].to_vec());
        let (sampled_logp, top) = Default::default();
        let action = Completion { ids, logp, sampled_logp, top, versions, shared: 0, stop };
        let state = Prefix { actions: actions.clone(), acting: None, context: s.ids[..start].to_vec() };
        out.push(PlayedTurn { sequence: turn.sequence, tokens, state });
        actions.push((action, turn.action.clone()));
    }
    Ok(out)
}

/// What tells the states of a prompt apart: the actions that led there.
pub(super) fn key(state: &Prefix) -> Vec<u32> {
    let action = |(c, _): &(Completion, String)| c.ids.iter().copied().chain([u32::MAX]).collect::<Vec<_>>();
    [u32::MAX].into_iter().chain(state.actions.iter().flat_map(action)).collect()
}

/// Plays on from states to the ends of their episodes: each state with its place and the number of its continuation.
pub(super) fn play_on(
    c: (&mut Actor<'_>, &SamplingParams),
    batch: CompletionBatch<'_>,
    wanted: &[(usize, &VineState, u32)],
) -> Result<Vec<Continued>> {
    let (actor, params) = c;
    let mut episodes = EpisodeLoop::new(actor, batch.prompts);
    let played = begin_and_play(&mut episodes, params, batch, wanted);
    episodes.end();
    let completion = |(&(place, state, _), e): (&(usize, &VineState, u32), Episode)| {
        let tokens = e.branch.as_ref().map_or(0, |b| b.sampled.0) as usize;
        let played = e.played.unwrap_or_default();
        let (text, truncated) = (played.text(), played.truncated);
        let completion = RolloutCompletion {
            prompt: state.prompt,
            text,
            tokens: e.tokens,
            truncated,
            played: Some(played),
        };
        Continued { place, completion, ids: Vec::new(), tokens }
    };
    Ok(wanted.iter().zip(played?).map(completion).collect())
}

fn begin_and_play(
    episodes: &mut EpisodeLoop<'_, '_>,
    params: &SamplingParams,
    batch: CompletionBatch<'_>,
    wanted: &[(usize, &VineState, u32)],
) -> Result<Vec<Episode>> {
    for &(_, state, number) in wanted {
        let Some(prefix) = &state.played else { continue };
        let prompt = &batch.prompts[state.prompt];
        let seed = noise(params.seed, state.noise.1, number);
        let params = Arc::new(SamplingParams { seed, ..params.clone() });
        let stream = [batch.at.step as u32, prompt.index as u32, state.noise.0];
        let environment = episodes.actor.environments.open(prompt)?;
        let episode = Episode::new(state.prompt, prompt, environment, (&params, stream));
        episodes.begin(episode.branching(Branch::new(prefix.clone(), Reach::End)))?;
    }
    episodes.rest()
}

impl Continuations<'_> {
    /// Where the turns of an episode begin: training sequence, and the first token of the action there.
    pub(crate) fn turn_starts(
        &self,
        sequences: &[&Sequence],
        played: &Played,
    ) -> Result<Vec<(usize, usize)>> {
        Ok(self.turns_of(sequences, played)?.into_iter().map(|t| (t.sequence, t.tokens.start)).collect())
    }

    /// The turns of the episode of a trajectory.
    pub(super) fn turns_of(&self, sequences: &[&Sequence], played: &Played) -> Result<Vec<PlayedTurn>> {
        turns(sequences, played, &self.params.stop_ids)
    }
}
