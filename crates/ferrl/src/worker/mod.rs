//! Supervised Python workers: a user's functions in processes of their own, over JSON lines on pipes.
//!
//! A worker may crash, hang, print, fork or answer nonsense; the caller gets an answer or a [`Failure`] before
//! a deadline, and the worker is replaced.

mod failure;
mod pipes;
mod process;

pub use failure::{Failure, Kind};

use ferrl_engine::{Error, Result};
use process::Process;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Told each line a worker writes to stdout or stderr: the worker's label and the line.
pub type Log = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// What a call gave for one rollout: a finite number, `None` where the function gave none, or why nothing came.
pub type Answer = std::result::Result<Option<f64>, Box<Failure>>;

/// How workers are run.
#[derive(Clone)]
pub struct WorkerOptions {
    /// The user's file.
    pub file: PathBuf,
    /// The functions it must have.
    pub functions: Vec<String>,
    /// The Python to run it.
    pub python: String,
    /// How many processes.
    pub workers: usize,
    /// The longest a call may take.
    pub timeout: Duration,
    /// The longest that loading the file may take.
    pub start_timeout: Duration,
    /// The longest answer in bytes.
    pub max_line: usize,
    /// Who wants to see what the workers print.
    pub log: Option<Log>,
}

impl WorkerOptions {
    /// The defaults for a file and functions of it.
    pub fn new(file: impl Into<PathBuf>, functions: &[&str]) -> Self {
        WorkerOptions {
            file: file.into(),
            functions: functions.iter().map(|f| f.to_string()).collect(),
            python: "python3".into(),
            workers: 1,
            timeout: Duration::from_secs(30),
            start_timeout: Duration::from_secs(120),
            max_line: 16 << 20,
            log: None,
        }
    }
}

/// What has happened in a pool so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Calls made.
    pub calls: u64,
    /// Calls made a second time.
    pub retries: u64,
    /// Processes replaced.
    pub restarts: u64,
    /// Calls given up.
    pub failures: u64,
    /// Answers that came too late or twice, and were not used.
    pub stale: u64,
}

#[derive(Default)]
struct Counters {
    calls: AtomicU64,
    retries: AtomicU64,
    restarts: AtomicU64,
    failures: AtomicU64,
    stale: AtomicU64,
}

/// A few workers that hold the same file.
pub struct Pool {
    options: WorkerOptions,
    slots: Vec<Mutex<Slot>>,
    next: AtomicUsize,
    counters: Counters,
}

struct Slot {
    label: String,
    process: Option<Process>,
}

/// What one try gave: an answer, or what went wrong and the worker's last words.
enum Tried {
    Rewards(Vec<Value>),
    Failed(Kind, Vec<String>),
}

impl Pool {
    /// Starts the workers; a file that cannot be loaded or lacks a function is an error.
    pub fn start(mut options: WorkerOptions) -> Result<Pool> {
        let place = options.file.display().to_string();
        options.file = std::path::absolute(&options.file).unwrap_or(options.file);
        if !options.file.is_file() {
            return Err(Error::usage("there is no such file").at(place));
        }
        let stem = options.file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let labels: Vec<String> = (0..options.workers.max(1)).map(|i| format!("{stem}-{i}")).collect();
        let started: Vec<_> = std::thread::scope(|scope| {
            let options = &options;
            let threads: Vec<_> =
                labels.iter().map(|label| scope.spawn(move || Process::start(options, label))).collect();
            threads.into_iter().map(|t| t.join()).collect()
        });
        let mut slots = Vec::new();
        for (label, process) in labels.into_iter().zip(started) {
            let process = process.map_err(|_| Error::usage("starting a worker failed").at(&place))?;
            let process = process.map_err(|(kind, stderr)| start_error(kind, &stderr).at(&place))?;
            slots.push(Mutex::new(Slot { label, process: Some(process) }));
        }
        Ok(Pool { options, slots, next: AtomicUsize::new(0), counters: Counters::default() })
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.slots.len()
    }

    /// The user's file.
    pub fn file(&self) -> &Path {
        &self.options.file
    }

    /// What has happened so far.
    pub fn counts(&self) -> Counts {
        let read = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let Counters { calls, retries, restarts, failures, stale } = &self.counters;
        Counts {
            calls: read(calls),
            retries: read(retries),
            restarts: read(restarts),
            failures: read(failures),
            stale: read(stale),
        }
    }

    /// Calls a function for the rollouts `ids` with keyword arguments, each a list of as many values.
    ///
    /// One answer per rollout, in their order. A call that fails is made once more, in a new process if the old one is not to be trusted.
    pub fn call(&self, function: &str, ids: &[u64], arguments: &Map<String, Value>) -> Vec<Answer> {
        let add = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let request = json!({"function": function, "count": ids.len(), "arguments": arguments});
        let began = Instant::now();
        let mut slot = self.free_slot();
        let fail = |slot: &Slot, kind: Kind, ids: &[u64], attempts: u32, stderr: Vec<String>| {
            Box::new(Failure {
                kind,
                function: function.to_string(),
                file: self.options.file.clone(),
                worker: slot.label.clone(),
                ids: ids.to_vec(),
                attempts,
                waited: began.elapsed(),
                stderr,
            })
        };
        let mut attempts = 0;
        loop {
            attempts += 1;
            add(if attempts == 1 { &self.counters.calls } else { &self.counters.retries });
            match self.attempt(&mut slot, &request, ids.len()) {
                Tried::Rewards(rewards) => {
                    let finite = rewards.iter().all(|r| !r.is_string());
                    if !finite && attempts == 1 {
                        continue;
                    }
                    if !finite {
                        add(&self.counters.failures);
                    }
                    let one = |(reward, id): (&Value, &u64)| match reward.as_str() {
                        None => Ok(reward.as_f64()),
                        Some(text) => {
                            let tail = slot.process.as_ref().map(Process::tail).unwrap_or_default();
                            Err(fail(&slot, Kind::NonFinite(text.into()), &[*id], attempts, tail))
                        }
                    };
                    return rewards.iter().zip(ids).map(one).collect();
                }
                Tried::Failed(kind, stderr) => {
                    let contract = matches!(kind, Kind::Contract { .. });
                    if attempts == 1 && !contract {
                        continue;
                    }
                    add(&self.counters.failures);
                    let failure = fail(&slot, kind, ids, attempts, stderr);
                    return vec![Err(failure); ids.len()];
                }
            }
        }
    }

    /// One try in one worker, which is replaced if it broke.
    fn attempt(&self, slot: &mut Slot, request: &Value, count: usize) -> Tried {
        let mut process = match slot.process.take() {
            Some(process) => process,
            None => match Process::start(&self.options, &slot.label) {
                Ok(process) => process,
                Err((kind, stderr)) => return Tried::Failed(kind, stderr),
            },
        };
        let stale = process.stale;
        let answer = process.ask(request.clone(), self.options.timeout);
        self.counters.stale.fetch_add(process.stale - stale, Ordering::Relaxed);
        let kind = match answer {
            Ok(answer) => match read_answer(&answer, count) {
                Ok(rewards) => {
                    slot.process = Some(process);
                    return Tried::Rewards(rewards);
                }
                // The function raised or broke its contract in a process that is sound.
                Err(kind @ (Kind::Raised(_) | Kind::Contract { .. })) => {
                    let stderr = process.tail();
                    slot.process = Some(process);
                    return Tried::Failed(kind, stderr);
                }
                Err(kind) => kind,
            },
            Err(kind) => kind,
        };
        let (status, stderr) = process.end();
        self.counters.restarts.fetch_add(1, Ordering::Relaxed);
        // At once, so that the worker is back before it is needed; if that fails, the next try says why.
        slot.process = Process::start(&self.options, &slot.label).ok();
        Tried::Failed(kind.with_status(status), stderr)
    }

    /// A worker nobody uses, or else the next in turn; each is held for a bounded time.
    fn free_slot(&self) -> MutexGuard<'_, Slot> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.slots.len();
        let free = (0..self.slots.len()).find_map(|i| {
            let slot = &self.slots[(first + i) % self.slots.len()];
            slot.try_lock().ok()
        });
        free.unwrap_or_else(|| self.slots[first].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn read_answer(answer: &Value, count: usize) -> std::result::Result<Vec<Value>, Kind> {
    if let Some(trace) = answer["raised"].as_str() {
        return Err(Kind::Raised(trace.into()));
    }
    if let Some([got, expected]) = answer["contract"].as_array().map(Vec::as_slice) {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
        return Err(Kind::Contract { got: text(got), expected: text(expected) });
    }
    let fits = |r: &Value| r.is_null() || r.is_number() || r.is_string();
    match answer["rewards"].as_array() {
        Some(rewards) if rewards.len() == count && rewards.iter().all(fits) => Ok(rewards.clone()),
        _ => Err(Kind::Garbage(answer.to_string().chars().take(80).collect())),
    }
}

fn start_error(kind: Kind, stderr: &[String]) -> Error {
    let mut text = kind.to_string();
    for line in stderr {
        text.push_str("\n  | ");
        text.push_str(line);
    }
    Error::usage(text)
}
