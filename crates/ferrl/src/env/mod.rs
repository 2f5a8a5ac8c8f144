//! Environments: tasks with several turns. One value plays one episode: an observation, an action of the policy, the next
//! observation, until the episode ends.
//!
//! A built-in one is a file of this folder and a line of the registry of tasks ([`crate::task::TASKS`]): generated data is a task,
//! and a task of several turns has episodes. A prompt with a reward is an episode of one turn.

mod check;
pub(crate) mod game;
mod lost;
mod numbered;
mod one_turn;
pub mod openenv;
pub mod python;
pub(crate) mod tabular;
pub mod tools;
pub(crate) mod trading;

pub use check::{Violation, check};
pub use lost::{Fault, Lost, Result, Why};
pub use numbered::Numbered;

use crate::task::{self, Task, TaskExample};
use crate::verify;
use ferrl_engine::Error;
use ferrl_kernels::philox::philox4x32;
use serde_json::{Map, Value};

/// An episode played as a demonstration: its prompt, and every action with the observation after it.
fn demonstrate<E: Environment>(
    episode: &mut E,
    columns: Map<String, Value>,
    mut next_action: impl FnMut(&mut E) -> Option<String>,
) -> std::result::Result<TaskExample, Error> {
    let (prompt, mut turns) = (episode.start()?, Vec::new());
    while let Some(action) = next_action(episode) {
        let turn = episode.step(&action)?;
        let (Next::Observation(shown) | Next::State(shown)) = turn.next;
        turns.push((action, shown));
        if turn.end.is_some() {
            break;
        }
    }
    Ok(TaskExample { prompt, columns, turns, ..Default::default() })
}

/// One episode: started once, then stepped until a turn ends it. With the same seed and actions the observations are the same,
/// whatever else runs in the process.
pub trait Environment: Send {
    /// The first observation.
    fn start(&mut self) -> Result<String>;
    /// The result of an action.
    fn step(&mut self, action: &str) -> Result<Turn>;
    /// Whether it waits for another process or machine: it then runs on a separate thread, while the policy decodes for other
    /// episodes.
    fn waits(&self) -> bool {
        false
    }
    /// Name and episode, for messages.
    fn label(&self) -> String {
        "environment".into()
    }
    /// A legal action of a random player, if the environment knows the legal actions.
    fn random_action(&mut self) -> Option<String> {
        None
    }
}

/// The result of an action.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Turn {
    /// The next input of the policy.
    pub next: Next,
    /// Reward of the action, on its last token.
    pub reward: f64,
    /// Logged only: score of the episode, usually 1 for success. The last one of an episode counts.
    pub score: Option<f64>,
    /// Whether the episode is over.
    pub end: Option<EpisodeEnd>,
    /// Results of tools, if the observation consists of them: in a conversation each is a message with the role `tool`.
    pub results: Vec<String>,
    /// Additional information to log with the turn.
    pub extra: Map<String, Value>,
}

/// The next input of the policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// New text after everything so far. In a conversation it is the next message of the user.
    Observation(String),
    /// The whole text before the next action. If it starts with the text so far, the turn joins the same training sequence;
    /// otherwise it starts a new one.
    State(String),
}

impl Default for Next {
    fn default() -> Self {
        Next::Observation(String::new())
    }
}

/// Why an episode is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EpisodeEnd {
    /// Terminated by the rules (gymnasium's `terminated`).
    Terminated,
    /// Truncated: it could have continued (gymnasium's `truncated`).
    Truncated,
    /// Terminated by its own limit of turns: GEM's games set both flags.
    Limit,
}

/// Purpose of random numbers; part of their counter.
const ENVIRONMENT: u32 = 0x656e_7669;

/// The seed of an episode in another process: below 2^31, as Python packages require.
fn episode_seed(seed: u64, index: u64, held_out: bool) -> u64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let drawn = philox4x32([index as u32, (index >> 32) as u32, u32::from(held_out), ENVIRONMENT], key);
    u64::from(drawn[0] >> 1)
}

/// Episode `index` of a built-in environment.
pub fn open(
    name: &str,
    options: &Map<String, Value>,
    seed: u64,
    index: u64,
) -> ferrl_engine::Result<Box<dyn Environment>> {
    let task = (task::find(name)?.build)(options, seed)?;
    if let Some(episode) = task.episode(index, false) {
        return Ok(episode);
    }
    one_turn(name, &*task, task.example(index, false)?)
}

/// The episode of a row of data, for built-in environments that read rows.
pub fn open_row(
    name: &str,
    options: &Map<String, Value>,
    seed: u64,
    row: &Map<String, Value>,
) -> ferrl_engine::Result<Box<dyn Environment>> {
    let task = (task::find(name)?.build)(options, seed)?;
    let none = || Error::usage(format!("{name} makes its own episodes and reads no row")).at("--row");
    let example = task.of_row(row).ok_or_else(none)?.map_err(|e| e.at("--row"))?;
    one_turn(name, &*task, example)
}

fn one_turn(name: &str, task: &dyn Task, example: TaskExample) -> ferrl_engine::Result<Box<dyn Environment>> {
    let none = || Error::usage(format!("{name} has neither turns nor a verifier"));
    let (verifier, settings) = task.reward().ok_or_else(none)?;
    let verifier = verify::build(verifier, &settings)?;
    Ok(Box::new(one_turn::OneTurn { example, verifier }))
}
