//! Episodes: actions of the policy and observations of the environment, until every episode has ended.
//!
//! One loop runs all episodes of a step (`play`): the generator decodes whatever is ready, and no episode waits for the environment
//! of another. A prompt without an environment is an episode of one turn. The random numbers of a token depend on the seed, the
//! step, the prompt, the sample, the turn and the token's index in it, never on the order in which completions and environments
//! return. A branch (`branch`) continues an episode from one of its turns.

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

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpisodeKey {
    pub task: String,
    /// Its number there.
    pub index: u64,
    /// Whether it is held out for evaluations.
    pub held_out: bool,
}

/// Opens an episode for a row of the data.
pub trait RowEpisodes: Send + Sync {
    /// A new episode of this prompt; `state` is its text for the model. If it is empty, the environment returns the first
    /// observation.
    fn open(&self, prompt: &Prompt, state: &str) -> Result<Box<dyn Environment>>;
}

#[derive(Clone, Default)]
pub struct Environments {
    tasks: Vec<(String, Arc<dyn Task>)>,
    rows: Option<Arc<dyn RowEpisodes>>,
    max_turns: usize,
    /// Maximum number of concurrent environments that wait for other processes.
    concurrency: usize,
    /// Encoder of observations; without it they are plain text.
    encoder: Option<Arc<Encoder>>,
}

/// Default number of concurrent environments, each with a waiting thread.
pub const CONCURRENCY: usize = 256;

impl Environments {
    /// The environments of a stage's tasks; episodes are truncated after `max_turns` actions.
    pub fn new(tasks: Vec<(String, Arc<dyn Task>)>, max_turns: usize) -> Self {
        Environments { tasks, max_turns, concurrency: CONCURRENCY, rows: None, encoder: None }
    }

    /// Sets an environment for prompts from rows.
    pub fn with_rows(self, rows: Arc<dyn RowEpisodes>) -> Self {
        Environments { rows: Some(rows), ..self }
    }

    pub fn with_concurrency(self, concurrency: usize) -> Self {
        Environments { concurrency, ..self }
    }

    /// Sets the encoder, for prompts and observations in the model's chat template.
    pub fn with_encoder(self, encoder: Arc<Encoder>) -> Self {
        Environments { encoder: Some(encoder), ..self }
    }

    pub fn encoder(&self) -> Option<&Encoder> {
        self.encoder.as_deref()
    }

    /// Whether a prompt has an episode of several turns.
    pub fn plays(&self, prompt: &Prompt) -> bool {
        prompt.episode.is_some() || self.rows.is_some()
    }

    /// A new episode of a prompt, if it has one.
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

/// Fractions of the time of a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeShares {
    /// Fraction in which a decode batch ran; below 1 if the policy waited for environments.
    pub decoding: f64,
    /// Fraction spent neither in decoding nor in environments: tokenization of turns, bookkeeping.
    pub overhead: f64,
}

/// One turn of an episode, for logs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TurnRecord {
    pub action: String,
    /// The observation after it; empty after the last turn.
    pub observation: String,
    pub reward: f64,
    /// Tokens of the action.
    pub tokens: usize,
    /// Index of the action's training sequence in the trajectory.
    pub sequence: usize,
    /// Advantage of the action's first token; 0 before it is known.
    #[serde(default)]
    pub advantage: f32,
    /// Whether the advantage is known.
    #[serde(skip)]
    pub(crate) credited: bool,
}

/// A played episode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Played {
    /// In order.
    pub turns: Vec<TurnRecord>,
    /// Its score, if the environment reports one.
    pub score: Option<f64>,
    /// Whether it was truncated: by the limit of turns, by its length, or by the environment.
    pub truncated: bool,
    /// Whether it was truncated because its next turn did not fit into the model's context or the cache.
    #[serde(default)]
    pub outgrown: bool,
    /// Numbers of tool calls and of failed ones, if the environment reports them (`tool_calls`, `tool_errors`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<(u64, u64)>,
    /// Why it was lost, if its environment failed.
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

    /// The text of all actions without observations: what rewards score.
    pub fn actions(&self) -> String {
        self.turns.iter().map(|t| t.action.as_str()).collect()
    }

    pub fn total_reward(&self) -> f64 {
        self.turns.iter().map(|t| t.reward).sum()
    }
}
