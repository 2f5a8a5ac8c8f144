//! Branches: an episode that continues a prefix of another one.
//!
//! An environment gives equal observations for equal actions, so a prefix is the actions that led to it: they are taken again in
//! a fresh environment, without the policy, and the policy goes on from there. Its KV cache still has the prefix. An
//! environment that answers otherwise the second time cannot be branched, and says so.

use super::Episode;
use crate::rollout::cut_at_stop;
use ferrl_engine::generate::{Completion, GenerationRequest, SamplingParams, StopReason};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;

/// How far a branch goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// To what the environment says first.
    Start,
    /// To the end of a turn, or of a step within its action.
    Step,
    /// To the end of the episode.
    End,
}

/// A prefix of an episode: everything that is needed to continue from it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prefix {
    /// The actions so far, with the text that the environment got.
    pub actions: Vec<(Completion, String)>,
    /// What there is of an action that is not complete.
    pub acting: Option<Completion>,
    /// Tokens that the next action continues, at the end of the last complete turn.
    pub context: Vec<u32>,
}

/// What a branch is to do, and how far it is.
pub(crate) struct Branch {
    /// How far it goes.
    pub reach: Reach,
    /// Where it begins, and from there on where it is.
    pub prefix: Prefix,
    /// How the first action is sampled, where that is not as all others: what is left of it, to the end of a step.
    pub first: Option<SamplingParams>,
    /// Tokens that the episode begins with, where they are not the prompt's.
    pub opening: Option<Vec<u32>>,
    /// Tokens sampled, and those of their prompts that the cache had.
    pub sampled: (u64, u64),
    /// Actions of the prefix that were taken again.
    replayed: usize,
    /// Training sequence and length there from which on everything is new; none before the prefix has been played again.
    mark: Option<(usize, usize)>,
    /// Completions asked for.
    requests: u32,
}

/// Part of a counter: keeps random numbers of later turns apart from other uses of the generator.
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

    /// The next completion. The first one has the random numbers of the stream; those of later turns follow from it.
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

    /// The next action of the prefix, while there is one that was not taken again.
    fn replay(&mut self) -> Option<(Completion, String)> {
        let next = self.prefix.actions.get(self.replayed)?.clone();
        self.replayed += 1;
        Some(next)
    }

    /// Whether the prefix is still being played again.
    pub(super) fn is_replaying(&self) -> bool {
        self.mark.is_none()
    }
}

/// A token that a branch added, for the tree of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NewToken {
    pub id: u32,
    /// Log-probability where the policy sampled it; none where the environment said it.
    pub logp: Option<f32>,
    pub version: u64,
}

impl Episode {
    /// The same as a branch.
    pub fn branching(mut self, branch: Box<Branch>) -> Self {
        if self.environment.is_none() {
            self.sequences[0].ids.clone_from(&branch.prefix.context);
        }
        self.branch = Some(branch);
        self
    }

    /// The tokens that the branch begins with, after the environment has begun.
    pub(super) fn open_branch(&mut self) {
        if let Some(opening) = self.branch.as_ref().and_then(|b| b.opening.clone()) {
            self.sequences[0].ids = opening;
        }
    }

    /// The next action to take again. None when the prefix is there, which is then checked against the one that was played first.
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
        Error::data("the same actions led to another state when they were taken again").at(label).fix(
            "an environment that depends on its seed and the actions alone: `ferrl env check` says what does not",
        )
    }

    /// Whether the branch has come as far as it goes, between two turns.
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

    /// A completion of the policy as a whole action; none where it only ends a step within one.
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

    /// Everything that came after the prefix, in order.
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

    /// Where it is now: what a further branch begins with.
    pub fn prefix(&self) -> Prefix {
        let Some(branch) = &self.branch else { return Prefix::default() };
        let mut prefix = branch.prefix.clone();
        let acting = prefix.acting.as_ref().map_or(0, |c| c.ids.len());
        prefix.context = self.context()[..self.context().len() - acting].to_vec();
        prefix
    }
}
