//! Environments in Python: RL2's `step`, classes with gymnasium's methods, GEM, reasoning-gym.
//!
//! They run in supervised processes. With an async `step` a process serves many episodes concurrently, otherwise one call at a time.
//! A failed call is retried once, in another process in which the episode is replayed up to that turn. If that fails, the episode is
//! lost and the run continues.

mod workers;

pub use workers::Workers;

use super::{Environment, EpisodeEnd, Fault, Lost, Next, Result, Turn, Why, episode_seed};
use crate::episode::RowEpisodes;
use crate::source::Prompt;
use crate::verify::Hooks;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Clone, Debug, PartialEq)]
pub enum PythonEnv {
    /// A Python file, optionally with a class.
    File(PathBuf, Option<String>),
    /// An environment of GEM, by its name there.
    Gem(String),
    /// A task of reasoning-gym.
    ReasoningGym(String),
}

impl PythonEnv {
    /// A file, or `FILE.py:CLASS`.
    pub fn file(path: &str) -> Self {
        match path.rsplit_once(':').filter(|(file, _)| file.ends_with(".py")) {
            Some((file, class)) => PythonEnv::File(file.into(), Some(class.into())),
            None => PythonEnv::File(path.into(), None),
        }
    }

    /// For messages.
    pub fn name(&self) -> String {
        match self {
            PythonEnv::File(path, class) => {
                let class = class.as_ref().map_or_else(String::new, |class| format!(":{class}"));
                format!("{}{class}", path.display())
            }
            PythonEnv::Gem(name) => format!("gem:{name}"),
            PythonEnv::ReasoningGym(name) => format!("reasoning_gym:{name}"),
        }
    }
}

#[derive(Clone)]
pub struct WorkerSettings {
    pub what: PythonEnv,
    /// Arguments for it.
    pub options: Map<String, Value>,
    /// Number of processes.
    pub workers: usize,
    /// Maximum time of a call.
    pub timeout: Duration,
    /// Maximum time of loading.
    pub start_timeout: Duration,
    /// Maximum memory of a process in bytes.
    pub memory: u64,
    pub python: String,
    /// Log and interrupt.
    pub hooks: Hooks,
}

#[derive(Clone, Debug, Default)]
pub struct EpisodeStart {
    pub seed: u64,
    /// Number and columns of the data row, if the episode starts from one.
    pub row: Option<(u64, Map<String, Value>)>,
    /// The initial text; if empty, the environment's first observation.
    pub state: String,
    /// For messages.
    pub name: String,
}

pub struct WorkerEpisode {
    workers: Arc<Workers>,
    start: Arc<EpisodeStart>,
    /// Index of its worker.
    slot: usize,
    /// Its process and its number there.
    open: Option<workers::OpenEpisode>,
    /// Actions so far with their results, for a replay in another process.
    history: Vec<(String, Value)>,
}

/// Numbers of episodes in all processes.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

impl WorkerEpisode {
    pub fn new(workers: Arc<Workers>, start: EpisodeStart) -> Self {
        let slot = NUMBERS.fetch_add(1, Ordering::Relaxed) as usize % workers.count();
        WorkerEpisode { workers, start: Arc::new(start), slot, open: None, history: Vec::new() }
    }

    /// The request that starts it.
    fn opening(&self) -> Value {
        let EpisodeStart { seed, row, state, .. } = &*self.start;
        let (number, row) = row.as_ref().map_or((None, None), |(number, row)| (Some(*number), Some(row)));
        json!({ "op": "open", "seed": seed, "row": row, "number": number, "state": state })
    }

    /// Makes a call, retried once if it fails.
    fn call(&mut self, request: Value, field: &str) -> Result<Value> {
        let began = Instant::now();
        let mut failed = match self.attempt(&request, field) {
            Ok(answer) => return Ok(answer),
            Err(failed) => failed,
        };
        self.close();
        if failed.retry {
            self.slot = self.workers.count() + self.slot % self.workers.count(); // a process for retries
            match self.attempt(&request, field) {
                Ok(answer) => return Ok(answer),
                Err(again) => failed = again,
            }
            self.close();
        }
        if let Some(fatal) = failed.fatal {
            return Err(Fault::Fatal(fatal));
        }
        let lost = Lost { seconds: began.elapsed().as_secs_f64(), ..failed.lost };
        match self.workers.count_lost(&lost) {
            Some(error) => Err(Fault::Fatal(error)),
            None => Err(Fault::Lost(Box::new(lost))),
        }
    }

    /// One attempt: in its process, or in a new one after a replay.
    fn attempt(
        &mut self,
        request: &Value,
        field: &str,
    ) -> std::result::Result<Value, Box<workers::CallFailed>> {
        let workers = self.workers.clone();
        let one = workers.turn(self.slot);
        let process = workers.process(self.slot)?;
        if self.open.as_ref().is_none_or(|open| !open.is_in(&process)) {
            self.open = Some(workers::OpenEpisode::new(&process));
            let begins = request["op"] == "open";
            if !begins {
                self.replay(&process)?;
            }
        }
        let Some(open) = &self.open else { unreachable!("opened above") };
        let answer = workers.ask(self.slot, &process, open, request, field);
        drop(one);
        answer
    }

    /// Replays the episode so far in another process.
    fn replay(&self, process: &workers::RunningWorker) -> std::result::Result<(), Box<workers::CallFailed>> {
        let Some(open) = &self.open else { return Ok(()) };
        self.workers.ask(self.slot, process, open, &self.opening(), "state")?;
        for (action, before) in &self.history {
            let request = json!({ "op": "step", "action": action });
            let turn = self.workers.ask(self.slot, process, open, &request, "turn")?;
            if turn["next"] != before["next"] || turn["reward"] != before["reward"] {
                let what = "replayed in a new process it returned other results: it does not depend on its seed alone";
                return Err(workers::CallFailed::lost(Lost::new(Why::Schema, what)));
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            open.close();
        }
    }
}

impl Drop for WorkerEpisode {
    fn drop(&mut self) {
        self.close();
    }
}

impl Environment for WorkerEpisode {
    fn start(&mut self) -> Result<String> {
        let state = self.call(self.opening(), "state")?;
        let text = state.as_str().unwrap_or_default();
        Ok(if self.workers.whole_states() { text.to_string() } else { format!("{text}\n") })
    }

    fn step(&mut self, action: &str) -> Result<Turn> {
        let answer = self.call(json!({ "op": "step", "action": action }), "turn")?;
        self.history.push((action.to_string(), answer.clone()));
        let text = answer["next"].as_str().unwrap_or_default().to_string();
        let next = match self.workers.whole_states() {
            true => Next::State(text),
            false => Next::Observation(format!("\n{text}\n")),
        };
        let end = match (answer["terminated"] == true, answer["truncated"] == true) {
            (true, true) => Some(EpisodeEnd::Limit),
            (true, false) => Some(EpisodeEnd::Terminated),
            (false, true) => Some(EpisodeEnd::Truncated),
            (false, false) => None,
        };
        Ok(Turn {
            next,
            reward: answer["reward"].as_f64().unwrap_or(f64::NAN),
            score: answer["score"].as_f64(),
            end,
            extra: answer["extra"].as_object().cloned().unwrap_or_default(),
            ..Default::default()
        })
    }

    fn waits(&self) -> bool {
        true
    }

    fn label(&self) -> String {
        format!("{}, {}", self.workers.name(), self.start.name)
    }
}

/// Episodes that start from a row of data.
pub struct OfRows {
    workers: Arc<Workers>,
    seed: u64,
}

impl OfRows {
    pub fn new(workers: Arc<Workers>, seed: u64) -> Self {
        OfRows { workers, seed }
    }
}

impl RowEpisodes for OfRows {
    fn open(&self, prompt: &Prompt, state: &str) -> ferrl_engine::Result<Box<dyn Environment>> {
        let mut row = prompt.columns.clone();
        match prompt.messages.is_empty() {
            true if prompt.text.is_empty() => {}
            true => drop(row.entry("prompt").or_insert(prompt.text.as_str().into())),
            false => drop(row.entry("messages").or_insert(prompt.messages.clone().into())),
        }
        let start = EpisodeStart {
            seed: episode_seed(self.seed, prompt.index, false),
            row: Some((prompt.index, row)),
            state: state.to_string(),
            name: if prompt.place.is_empty() {
                format!("prompt {}", prompt.index)
            } else {
                prompt.place.clone()
            },
        };
        Ok(Box::new(WorkerEpisode::new(self.workers.clone(), start)))
    }
}
