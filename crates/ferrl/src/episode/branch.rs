//! Branches: episodes that continue a prefix of another one.
//!
//! Environments are deterministic, so a prefix is stored as its actions: they are replayed in a fresh environment without the
//! policy, which then continues from there. Its KV cache still has the prefix. An environment that returns other observations in a
//! replay cannot be branched, which is an error.

use super::Episode;
use crate::rollout::cut_at_stop;
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;

/// Where a branch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// After the first observation.
    Start,
    /// At the end of a turn, or of a step within its action.
    Step,
    End,
}

/// A prefix of an episode, with all data to continue from it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prefix {
    /// The actions so far, with their texts for the environment.
    pub actions: Vec<(Completion, String)>,
    /// The incomplete action, if any.
    pub acting: Option<Completion>,
    /// Tokens that the next action continues, at the end of the last complete turn.
    pub context: Vec<u32>,
}

/// Task and progress of a branch.
pub(crate) struct Branch {
    pub reach: Reach,
    /// Its prefix at the start, later its current prefix.
    pub prefix: Prefix,
    /// Sampling parameters of the first action if they differ: for the rest of an action, to the end of a step.
    pub first: Option<SamplingParams>,
    /// First tokens of the episode, if they are not the prompt's.
    pub opening: Option<Vec<u32>>,
    /// Sampled tokens, and prompt tokens found in the cache.
    pub sampled: (u64, u64),
    /// Number of replayed actions.
    replayed: usize,
    /// Training sequence and position from which tokens are new; `None` during the replay.
    mark: Option<(usize, usize)>,
    /// Number of requested completions.
    requests: u32,
}

/// Part of a counter that separates random numbers of later turns from other uses.
const TURN: [u32; 2] = [0x7475_726e, 1];

impl Branch {
    pub fn new(prefix: Prefix, reach: Reach) -> Box<Self> {
        Box::new(Branch {
            reach,
            prefix,
            first: None,
            opening: None,
            sampled: (0, 0),
            replayed: 0,
            mark: None,
            requests: 0,
        })
    }

    /// The next request. The first one has the random numbers of the stream; those of later turns are derived from it.
    pub(super) fn request(
        &mut self,
        prompt: Vec<u32>,
        params: SamplingParams,
        [a, b, c]: [u32; 3],
    ) -> GenerationRequest {
        let turn = self.requests;
        self.requests += 1;
        let words = philox4x32([turn, a, TURN[0], TURN[1]], [b, c]);
        let stream = if turn == 0 { [a, b, c] } else { [a, words[0], words[1]] };
        GenerationRequest { prompt, params: self.first.take().unwrap_or(params), stream }
    }

    /// The next action to replay, if any.
    fn replay(&mut self) -> Option<(Completion, String)> {
        let next = self.prefix.actions.get(self.replayed)?.clone();
        self.replayed += 1;
        Some(next)
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.mark.is_none()
    }
}

/// A token that a branch added, for the tree of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NewToken {
    pub id: u32,
    /// Log-probability if it was sampled; `None` for observations.
    pub logp: Option<f32>,
    pub version: u64,
}

impl Episode {
    /// Makes the episode a branch.
    pub fn branching(mut self, branch: Box<Branch>) -> Self {
        if self.environment.is_none() {
            self.sequences[0].ids.clone_from(&branch.prefix.context);
        }
        self.branch = Some(branch);
        self
    }

    /// Sets the first tokens of the branch, after the environment has started.
    pub(super) fn open_branch(&mut self) {
        if let Some(opening) = self.branch.as_ref().and_then(|b| b.opening.clone()) {
            self.sequences[0].ids = opening;
        }
    }

    /// The next action to replay. After the last one, `None`, and the prefix is compared with the original.
    pub(super) fn replay(&mut self) -> Result<Option<(Completion, String)>> {
        let Some(branch) = self.branch.as_mut().filter(|b| b.is_replaying() && b.reach != Reach::Start)
        else {
            return Ok(None);
        };
        if let Some(next) = branch.replay() {
            return Ok(Some(next));
        }
        if self.environment.is_some() && self.sequences.last().is_some_and(|s| s.ids != branch.prefix.context)
        {
            return Err(self.plays_otherwise());
        }
        if let Some(acting) = branch.prefix.acting.clone() {
            self.act(&acting);
        }
        let mark = (self.sequences.len() - 1, self.context().len());
        if let Some(branch) = &mut self.branch {
            branch.mark = Some(mark);
        }
        Ok(None)
    }

    /// The error for an environment that cannot be branched.
    pub(super) fn plays_otherwise(&self) -> Error {
        let label = self.environment.as_ref().map_or_else(String::new, |e| e.label());
        Error::data("a replay of the same actions led to another state").at(label).fix(
            "an environment that depends on its seed and the actions alone: `ferrl env check` says what does not",
        )
    }

    /// Whether the branch has ended, between two turns.
    pub(super) fn has_reached(&self) -> bool {
        self.branch.as_ref().is_some_and(|b| match b.reach {
            Reach::Start => true,
            Reach::Step => !b.is_replaying(),
            Reach::End => false,
        })
    }

    /// What the policy added to an action that a branch continues, up to a stop string that both together hold.
    pub(super) fn cut(&self, mut c: Completion, tokenizer: &Tokenizer) -> Result<Completion> {
        if let Some(acting) = self.branch.as_ref().and_then(|b| b.prefix.acting.as_ref()) {
            cut_at_stop(&acting.ids, &mut c, self.own_stops(), tokenizer)?;
        }
        Ok(c)
    }

    /// The completion as a whole action; `None` if it only ends a step within the action.
    pub(super) fn action(&mut self, c: Completion) -> Option<Completion> {
        let (own_stops, longest) = (self.own_stops().len(), self.longest_action());
        let Some(branch) = &mut self.branch else { return Some(c) };
        let whole = match branch.prefix.acting.take() {
            None => c,
            Some(mut whole) => {
                whole.ids.extend(c.ids);
                whole.logp.extend(c.logp);
                whole.versions.extend(c.versions);
                whole.stop = c.stop;
                whole
            }
        };
        let ended = match whole.stop {
            StopReason::Token(_) => true,
            StopReason::String(i) => i < own_stops,
            StopReason::Length | StopReason::Cancelled => false,
        };
        if branch.reach == Reach::Step && !ended && whole.ids.len() < longest {
            branch.prefix.acting = Some(whole);
            return None;
        }
        Some(whole)
    }

    /// All tokens after the prefix, in order.
    pub fn new_tokens(&self) -> Vec<NewToken> {
        let Some((first, from)) = self.branch.as_ref().and_then(|b| b.mark) else { return Vec::new() };
        let mut all = Vec::new();
        for (n, s) in self.sequences.iter().enumerate().skip(first) {
            for i in if n == first { from } else { 0 }..s.ids.len() {
                let sampled = s.trained.get(i).copied().unwrap_or(false);
                let before = i.wrapping_sub(1);
                let version = s.version.get(before).copied().unwrap_or_default();
                let logp = sampled.then(|| s.sampled_logp[before]);
                all.push(NewToken { id: s.ids[i], logp, version });
            }
        }
        all
    }

    /// Its current prefix, for further branches.
    pub fn prefix(&self) -> Prefix {
        let Some(branch) = &self.branch else { return Prefix::default() };
        let mut prefix = branch.prefix.clone();
        let acting = prefix.acting.as_ref().map_or(0, |c| c.ids.len());
        prefix.context = self.context()[..self.context().len() - acting].to_vec();
        prefix
    }
}
