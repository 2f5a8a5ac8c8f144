//! Supervised Python workers: a user's functions in processes of their own, over JSON lines on pipes.
//!
//! A worker may crash, hang, print, fork or answer nonsense; the caller gets an answer or a [`Failure`] before
//! a deadline, and the worker is replaced.

mod call;
mod failure;
mod pipes;
mod process;

pub use failure::{Failure, FailureKind};
pub(crate) use process::{Process, Spawn};

use crate::interrupt;
use call::WorkerCall;
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Told each line a worker writes to stdout or stderr: the worker's label and the line.
pub type WorkerLog = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// What a call gave for one rollout: a finite number, `None` where the function gave none, or why nothing came.
pub type Answer = std::result::Result<Option<f64>, Box<Failure>>;

/// The arguments of a call: one value of each column for every rollout, and the state of the run for all.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    /// Lists of as many values as there are rollouts.
    pub columns: Map<String, Value>,
    /// TRL's `trainer_state`.
    pub state: Map<String, Value>,
    /// Whether the function may give a list for a rollout: the rewards of its steps, whose texts are the column `steps`.
    pub steps: bool,
}

impl Arguments {
    fn part(&self, range: &Range<usize>) -> Map<String, Value> {
        let cut = |v: &Value| match v {
            Value::Array(list) => Value::Array(list.get(range.clone()).unwrap_or_default().to_vec()),
            other => other.clone(),
        };
        self.columns.iter().map(|(name, values)| (name.clone(), cut(values))).collect()
    }
}

/// What a call gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Called {
    /// One answer per rollout, in their order.
    pub answers: Vec<Answer>,
    /// Rewards of the steps of each rollout, where the function gave a list.
    pub steps: Vec<Vec<f64>>,
    /// What the function logged for each rollout with `log_extra`.
    pub extra: Vec<Map<String, Value>>,
    /// What it logged with `log_metric`.
    pub metrics: Vec<(String, f64)>,
    /// Why the call failed for all rollouts at once, where it succeeded for each of them in parts.
    pub recovered: Option<Box<Failure>>,
}

#[derive(Clone)]
pub struct WorkerOptions {
    /// The user's file.
    pub file: PathBuf,
    /// The functions it must have.
    pub functions: Vec<String>,
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
    pub log: Option<WorkerLog>,
    /// Ends every wait when it is raised.
    pub interrupt: Arc<AtomicBool>,
}

const HOST: &str = include_str!("reward.py");

impl WorkerOptions {
    fn start(&self, label: &str) -> std::result::Result<Process, (FailureKind, Vec<String>)> {
        let spawn = Spawn {
            python: &self.python,
            script: HOST,
            request: json!({ "file": self.file.to_string_lossy(), "functions": self.functions }),
            start_timeout: self.start_timeout,
            max_line: self.max_line,
            memory: None,
            log: self.log.clone(),
            interrupt: self.interrupt.clone(),
        };
        Process::start(spawn, label)
    }

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
            interrupt: interrupt::handle(),
        }
    }
}

/// What has happened in a pool so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    pub calls: u64,
    /// Calls made again, for all or some of the rollouts of one that failed.
    pub retries: u64,
    /// Processes replaced.
    pub restarts: u64,
    /// Rollouts given up.
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
pub struct WorkerPool {
    options: WorkerOptions,
    slots: Vec<Mutex<WorkerSlot>>,
    next: AtomicUsize,
    counters: Counters,
}

struct WorkerSlot {
    label: String,
    process: Option<Process>,
}

/// What one try gave: an answer, or what went wrong and the worker's last words.
enum Tried {
    EvaluatedCompletion(Value),
    Failed(FailureKind, Vec<String>),
}

/// A call that failed is cut into this many parts, and each part that fails again, down to single rollouts.
const PARTS: usize = 8;
/// Number of consecutive lost processes or time-outs, without an answer in between, that end the retries of a call.
const PATIENCE: u32 = 3;
/// The retries of a call end after this multiple of the time-out.
const RETRY_TIMEOUTS: u32 = 20;

impl WorkerPool {
    /// Starts the workers; a file that cannot be loaded or lacks a function is an error.
    pub fn start(mut options: WorkerOptions) -> Result<WorkerPool> {
        let place = options.file.display().to_string();
        options.file = std::path::absolute(&options.file).unwrap_or(options.file);
        if !options.file.is_file() {
            return Err(no_such_file(&options.file).at(place));
        }
        python_path(&options.file)?;
        let stem = options.file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let labels: Vec<String> = (0..options.workers.max(1)).map(|i| format!("{stem}-{i}")).collect();
        let started: Vec<_> = std::thread::scope(|scope| {
            let options = &options;
            let threads: Vec<_> =
                labels.iter().map(|label| scope.spawn(move || options.start(label))).collect();
            threads.into_iter().map(|t| t.join()).collect()
        });
        let mut slots = Vec::new();
        for (label, process) in labels.into_iter().zip(started) {
            let process = process.map_err(|_| Error::usage("starting a worker failed").at(&place))?;
            let process = process.map_err(|(kind, stderr)| start_error(kind, &stderr).at(&place))?;
            slots.push(Mutex::new(WorkerSlot { label, process: Some(process) }));
        }
        Ok(WorkerPool { options, slots, next: AtomicUsize::new(0), counters: Counters::default() })
    }

    pub fn workers(&self) -> usize {
        self.slots.len()
    }

    pub fn file(&self) -> &Path {
        &self.options.file
    }

    pub fn counts(&self) -> PoolCounts {
        let read = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let Counters { calls, retries, restarts, failures, stale } = &self.counters;
        PoolCounts {
            calls: read(calls),
            retries: read(retries),
            restarts: read(restarts),
            failures: read(failures),
            stale: read(stale),
        }
    }

    /// Calls a function for the rollouts `ids`. What fails for all of them at once is tried again for parts of them, down to
    /// single ones, in a new process if the old one is not to be trusted: one bad completion costs its own reward.
    pub fn call(&self, function: &str, ids: &[u64], arguments: &Arguments) -> Called {
        let slot = self.free_slot();
        let blank = Called {
            answers: vec![Ok(None); ids.len()],
            steps: vec![Vec::new(); ids.len()],
            extra: vec![Map::new(); ids.len()],
            metrics: Vec::new(),
            recovered: None,
        };
        let mut call = WorkerCall {
            pool: self,
            slot,
            function,
            ids,
            arguments,
            began: Instant::now(),
            costly: 0,
            retrying: false,
            out: blank,
        };
        call.whole();
        call.out
    }

    /// Whether a function can be called with arguments of these names; it is not called. The names of its arguments that would
    /// stay `None`, their default.
    pub fn bind<'a>(&self, function: &str, names: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
        let arguments: Map<String, Value> = names.map(|name| (name.to_string(), Value::Null)).collect();
        let request = json!({ "function": function, "bind": true, "count": 0, "arguments": arguments });
        match self.attempt(&mut self.free_slot(), &request, 0) {
            Tried::EvaluatedCompletion(answer) => {
                let absent = answer["absent"].as_array().into_iter().flatten();
                Ok(absent.filter_map(Value::as_str).map(String::from).collect())
            }
            Tried::Failed(FailureKind::Interrupted, _) => {
                Err(interrupt::interrupted("checking reward functions"))
            }
            Tried::Failed(kind, _) => {
                let error = kind.error(kind.to_string()).at(self.file().display());
                Err(match kind {
                    FailureKind::Signature { .. } => error.fix(
                        "name only arguments that are there, as in def reward(prompts, completions, **columns); \
                         a row without a value for a column has null",
                    ),
                    _ => error,
                })
            }
        }
    }

    /// One try in one worker, which is replaced if it broke.
    fn attempt(&self, slot: &mut WorkerSlot, request: &Value, count: usize) -> Tried {
        let process = match slot.process.take() {
            Some(process) => process,
            None => match self.options.start(&slot.label) {
                Ok(process) => process,
                Err((kind, stderr)) => return Tried::Failed(kind, stderr),
            },
        };
        let answer = process.ask(request.clone(), self.options.timeout);
        self.counters.stale.fetch_add(process.new_stale(), Ordering::Relaxed);
        let kind = match answer {
            Ok(answer) => match check_answer(&answer, count) {
                Ok(()) => {
                    slot.process = Some(process);
                    return Tried::EvaluatedCompletion(answer);
                }
                // The function raised or broke its contract in a process that is sound.
                Err(
                    kind @ (FailureKind::Raised { .. }
                    | FailureKind::Contract { .. }
                    | FailureKind::Signature { .. }),
                ) => {
                    let stderr = process.tail();
                    slot.process = Some(process);
                    return Tried::Failed(kind, stderr);
                }
                Err(kind) => kind,
            },
            Err(kind) => kind,
        };
        let (status, stderr) = process.end();
        if kind == FailureKind::Interrupted {
            return Tried::Failed(kind, stderr);
        }
        self.counters.restarts.fetch_add(1, Ordering::Relaxed);
        // At once, so that the worker is back before it is needed; if that fails, the next try says why.
        slot.process = self.options.start(&slot.label).ok();
        Tried::Failed(kind.with_status(status), stderr)
    }

    /// An idle worker, or else the next in turn; each is held for a bounded time.
    fn free_slot(&self) -> MutexGuard<'_, WorkerSlot> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.slots.len();
        let free = (0..self.slots.len()).find_map(|i| {
            let slot = &self.slots[(first + i) % self.slots.len()];
            slot.try_lock().ok()
        });
        free.unwrap_or_else(|| lock(&self.slots[first]))
    }
}

/// Whether an answer holds rewards for that many rollouts.
fn check_answer(answer: &Value, count: usize) -> std::result::Result<(), FailureKind> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    if let Some(raised) = answer["raised"].as_object() {
        let field = |name: &str| raised.get(name).map(text).unwrap_or_default();
        return Err(FailureKind::Raised { trace: field("trace"), place: field("place") });
    }
    if let Some([got, expected]) = answer["contract"].as_array().map(Vec::as_slice) {
        return Err(FailureKind::Contract { got: text(got), expected: text(expected) });
    }
    if let Some([problem, given]) = answer["signature"].as_array().map(Vec::as_slice) {
        return Err(FailureKind::Signature { problem: text(problem), given: text(given) });
    }
    let steps = |r: &Value| r.as_array().is_some_and(|steps| steps.iter().all(Value::is_number));
    let fits = |r: &Value| r.is_null() || r.is_number() || r.is_string() || r.is_object() || steps(r);
    match answer["rewards"].as_array() {
        Some(rewards) if rewards.len() == count && rewards.iter().all(fits) => Ok(()),
        _ => Err(FailureKind::Garbage(answer.to_string().chars().take(80).collect())),
    }
}

/// The path of a Python file as its process gets it.
pub(crate) fn python_path(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| {
        Error::usage("the path of a Python file is not UTF-8 text")
            .at(path.display())
            .fix("rename the file or its folder")
    })
}

/// A Python file that is not there; the fix names the nearest one.
pub(crate) fn no_such_file(path: &Path) -> Error {
    let near = crate::data::nearest_path(path, |name| name.ends_with(".py"));
    Error::usage("there is no such file").fix(match near {
        Some(near) => format!("did you mean {}?", near.display()),
        None => "check the path, which counts from the folder where the command runs".into(),
    })
}

fn start_error(kind: FailureKind, stderr: &[String]) -> Error {
    if kind == FailureKind::Interrupted {
        return interrupt::interrupted("starting reward workers");
    }
    kind.not_started(stderr)
}
