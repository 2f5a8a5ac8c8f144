//! Episodes: the policy acts and its environment answers, until every episode is over.
//!
//! One loop over all episodes of a step (`play`): the generator decodes whatever is ready, and an episode whose environment
//! is at work holds up no other. A prompt without an environment is an episode of one turn. The random numbers of a token
//! depend on the seed, the step, the prompt, the sample, the turn and the token's index in it, never on the order in which
//! completions and environments return. A branch (`branch`) continues an episode from one of its turns, as often as wanted.

mod branch;
mod play;
mod threads;
mod tokens;

pub(crate) use branch::{Branch, Prefix, Reach};
pub(crate) use play::{EpisodeLoop, Plays, play};
pub(crate) use tokens::Episode;

use crate::data::Encoder;
use crate::env::{Environment, Lost};
use crate::source::Prompt;
use crate::task::Task;
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The episode that a prompt begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpisodeKey {
    /// The task that plays it.
    pub task: String,
    /// Its number there.
    pub index: u64,
    /// Whether it is one that evaluations play.
    pub held_out: bool,
}

/// Opens an episode for a row of the data.
pub trait RowEpisodes: Send + Sync {
    /// A fresh episode that begins with this prompt; `state` is its text as the model reads it. Where it is empty, the
    /// environment says what the episode begins with.
    fn open(&self, prompt: &Prompt, state: &str) -> Result<Box<dyn Environment>>;
}

/// The environments of a stage.
#[derive(Clone, Default)]
pub struct Environments {
    tasks: Vec<(String, Arc<dyn Task>)>,
    rows: Option<Arc<dyn RowEpisodes>>,
    /// Actions of an episode at most.
    max_turns: usize,
    /// Environments that may be at work at once, where they wait for something.
    concurrency: usize,
    /// How observations become tokens; as plain text where there is none.
    encoder: Option<Arc<Encoder>>,
}

/// Environments at work at once, where nothing else is said: as many threads wait.
pub const CONCURRENCY: usize = 256;

impl Environments {
    /// Of the tasks a stage names; episodes are cut off after `max_turns` actions.
    pub fn new(tasks: Vec<(String, Arc<dyn Task>)>, max_turns: usize) -> Self {
        Environments { tasks, max_turns, concurrency: CONCURRENCY, rows: None, encoder: None }
    }

    /// With an environment for prompts that are rows.
    pub fn with_rows(self, rows: Arc<dyn RowEpisodes>) -> Self {
        Environments { rows: Some(rows), ..self }
    }

    /// With this many at work at once.
    pub fn with_concurrency(self, concurrency: usize) -> Self {
        Environments { concurrency, ..self }
    }

    /// With prompts and observations in the model's chat template, where the recipe wants them there.
    pub fn with_encoder(self, encoder: Arc<Encoder>) -> Self {
        Environments { encoder: Some(encoder), ..self }
    }

    /// How conversations become tokens, where the recipe has them.
    pub fn encoder(&self) -> Option<&Encoder> {
        self.encoder.as_deref()
    }

    /// Whether a prompt begins an episode of several turns.
    pub fn plays(&self, prompt: &Prompt) -> bool {
        prompt.episode.is_some() || self.rows.is_some()
    }

    /// A fresh episode of a prompt, where it begins one.
    pub(crate) fn open(&self, prompt: &Prompt) -> Result<Option<Box<dyn Environment>>> {
        let Some(EpisodeKey { task, index, held_out }) = &prompt.episode else {
            let Some(rows) = &self.rows else { return Ok(None) };
            let state = match self.encoder.as_ref().filter(|_| !prompt.messages.is_empty()) {
                Some(encoder) => encoder.tokenizer().decode(&prompt.ids, false)?,
                None => prompt.text.clone(),
            };
            return rows.open(prompt, &state).map(Some);
        };
        let found = self.tasks.iter().find(|(name, _)| name == task);
        let episode = found.and_then(|(_, task)| task.episode(*index, *held_out));
        let missing = || Error::data(format!("task:{task} plays no episodes")).at(prompt.place.clone());
        episode.ok_or_else(missing).map(Some)
    }
}

/// How the time of a rollout went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeShares {
    /// Fraction in which a decode batch ran; less than 1 where the policy waited for environments.
    pub decoding: f64,
    /// Fraction that was neither decoding nor an environment's: text and tokens of turns, bookkeeping.
    pub overhead: f64,
}

/// One turn of an episode, for people.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnRecord {
    /// What the policy wrote.
    pub action: String,
    /// What the environment answered; empty after the last turn.
    pub observation: String,
    /// What the action earned.
    pub reward: f64,
    /// Tokens of the action.
    pub tokens: usize,
    /// Which training sequence of the trajectory the action is in.
    pub sequence: usize,
    /// Advantage of the action's first token; 0 before it is known.
    #[serde(default)]
    pub advantage: f32,
    /// Whether that is known.
    #[serde(skip)]
    pub(crate) credited: bool,
}

/// What an environment reported of an episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Played {
    /// In order.
    pub turns: Vec<TurnRecord>,
    /// How well it went, where the environment says so.
    pub score: Option<f64>,
    /// Whether it was cut off: by the limit of turns, by its length, or by the environment.
    pub truncated: bool,
    /// Whether that was because its next turn had no room in the model's context or in the cache.
    #[serde(default)]
    pub outgrown: bool,
    /// Calls of tools and how many of them failed, where the environment counts them (`tool_calls`, `tool_errors`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<(u64, u64)>,
    /// Why it has no end and no reward, where its environment failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<Box<Lost>>,
}

impl Played {
    /// Everything after the prompt.
    pub fn text(&self) -> String {
        let last = self.turns.len().saturating_sub(1);
        let turn = |(i, t): (usize, &TurnRecord)| match i == last {
            true => t.action.clone(),
            false => format!("{}{}", t.action, t.observation),
        };
        self.turns.iter().enumerate().map(turn).collect()
    }

    /// What the policy wrote, without what it read: rewards see nothing else.
    pub fn said(&self) -> String {
        self.turns.iter().map(|t| t.action.as_str()).collect()
    }

    /// Sum of the rewards of all turns.
    pub fn total_reward(&self) -> f64 {
        self.turns.iter().map(|t| t.reward).sum()
    }
}
