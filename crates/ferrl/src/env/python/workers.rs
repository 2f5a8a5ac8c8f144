//! Worker processes of Python environments, and their failures.

use super::{PythonEnv, WorkerSettings};
use crate::env::{Lost, Why};
use crate::interrupt;
use crate::worker::{FailureKind, Process, Spawn, no_such_file, python_path};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

const HOST: &str = include_str!("host.py");
/// Maximum size of a reply in bytes.
const MAX_LINE: usize = 16 << 20;
/// An async call is cancelled at the time-out. If its process does not respond even then, it is killed after this grace period.
const GRACE: Duration = Duration::from_secs(1);
/// The run stops after this many lost episodes if no turn has succeeded.
const HOPELESS: u64 = 16;

/// A pool of processes with the same environment, started on demand.
pub struct Workers {
    settings: WorkerSettings,
    /// Two processes per worker. When a process of the first half dies, all its calls fail, not only the one that caused it; each is
    /// retried in a process of the second half, which serves one call at a time.
    slots: Vec<EpisodeSlot>,
    ready: OnceLock<Value>,
    /// Lost episodes.
    lost: AtomicU64,
    /// Whether any turn has succeeded.
    answered: AtomicBool,
}

#[derive(Default)]
struct EpisodeSlot {
    process: Mutex<Option<RunningWorker>>,
    /// Held during a call, in processes that serve one at a time.
    turn: Mutex<()>,
}

pub(super) type RunningWorker = Arc<Process>;

pub(super) struct OpenEpisode {
    process: Weak<Process>,
    number: u64,
}

static OPENED: AtomicU64 = AtomicU64::new(0);

impl OpenEpisode {
    pub fn new(process: &RunningWorker) -> Self {
        OpenEpisode { process: Arc::downgrade(process), number: OPENED.fetch_add(1, Ordering::Relaxed) }
    }

    pub fn is_in(&self, process: &RunningWorker) -> bool {
        std::ptr::eq(self.process.as_ptr(), Arc::as_ptr(process))
    }

    /// Frees what it holds there.
    pub fn close(self) {
        if let Some(process) = self.process.upgrade() {
            process.tell(&json!({ "op": "close", "episode": self.number }));
        }
    }
}

pub(super) struct CallFailed {
    pub lost: Lost,
    /// Whether a retry in another process may succeed.
    pub retry: bool,
    /// The error that ends the run, if any.
    pub fatal: Option<Error>,
}

impl CallFailed {
    pub fn lost(lost: Lost) -> Box<Self> {
        Box::new(CallFailed { lost, retry: false, fatal: None })
    }

    fn fatal(error: Error) -> Box<Self> {
        Box::new(CallFailed { lost: Lost::new(Why::Exited, ""), retry: false, fatal: Some(error) })
    }
}

impl Workers {
    /// Starts no process yet.
    pub fn new(settings: WorkerSettings) -> Arc<Workers> {
        let slots = (0..2 * settings.workers.max(1)).map(|_| EpisodeSlot::default()).collect();
        let (ready, lost, answered) = Default::default();
        Arc::new(Workers { settings, slots, ready, lost, answered })
    }

    /// Starts the first process, so that an environment that cannot be loaded is an error at the start.
    pub fn check(&self) -> Result<()> {
        match self.process(0) {
            Ok(_) => Ok(()),
            Err(failed) => match failed.fatal {
                Some(error) => Err(error),
                None => Err(Error::from(failed.lost).at(self.name())),
            },
        }
    }

    /// Number of workers.
    pub(super) fn count(&self) -> usize {
        self.slots.len() / 2
    }

    pub fn name(&self) -> String {
        self.settings.what.name()
    }

    /// Whether it returns whole states instead of observations.
    pub(super) fn whole_states(&self) -> bool {
        self.ready.get().is_some_and(|ready| ready["kind"] == "state")
    }

    /// Counts a lost episode; returns the error that ends the run if all are lost.
    pub(super) fn count_lost(&self, lost: &Lost) -> Option<Error> {
        let all = 1 + self.lost.fetch_add(1, Ordering::Relaxed);
        let answered = self.answered.load(Ordering::Relaxed);
        (all >= HOPELESS && !answered).then(|| {
            let what = format!("{all} episodes were lost before any turn succeeded; the last");
            Error::from(lost.clone()).context(what).at(self.name())
        })
    }

    /// The lock of a process that serves one call at a time.
    pub(super) fn turn(&self, slot: usize) -> Option<MutexGuard<'_, ()>> {
        let concurrent = self.ready.get().is_some_and(|ready| ready["concurrent"] == true);
        (!concurrent || slot >= self.count()).then(|| lock(&self.slots[slot].turn))
    }

    /// The process of a slot, started if needed.
    pub(super) fn process(&self, slot: usize) -> std::result::Result<RunningWorker, Box<CallFailed>> {
        let mut held = lock(&self.slots[slot].process);
        if let Some(process) = &*held {
            return Ok(process.clone());
        }
        let WorkerSettings { what, options, python, start_timeout, memory, hooks, .. } = &self.settings;
        let request = match what {
            PythonEnv::File(path, class) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                if !path.is_file() {
                    let error = no_such_file(&path).at(path.display());
                    return Err(CallFailed::fatal(error));
                }
                let path = python_path(&path).map_err(CallFailed::fatal)?;
                json!({ "kind": "file", "file": path, "name": class, "options": options })
            }
            PythonEnv::Gem(name) => json!({ "kind": "gem", "name": name, "options": options }),
            PythonEnv::ReasoningGym(name) => {
                json!({ "kind": "reasoning_gym", "name": name, "options": options })
            }
        };
        let spawn = Spawn {
            python,
            script: HOST,
            request,
            start_timeout: *start_timeout,
            max_line: MAX_LINE,
            memory: Some(*memory),
            log: Some(hooks.prints()),
            interrupt: hooks.interrupt.clone(),
        };
        match Process::start(spawn, &format!("env-{slot}")) {
            Ok(process) => {
                let _ = self.ready.set(process.ready.clone());
                Ok(held.insert(Arc::new(process)).clone())
            }
            Err((kind, stderr)) => Err(self.not_started(kind, stderr)),
        }
    }

    /// A process that never started at all is an error; one that does not restart is a lost episode.
    fn not_started(&self, kind: FailureKind, stderr: Vec<String>) -> Box<CallFailed> {
        if self.ready.get().is_some() && kind != FailureKind::Interrupted {
            return self.failed(kind, stderr);
        }
        let fatal = match &kind {
            FailureKind::Interrupted => interrupt::interrupted("starting environments"),
            _ => kind.not_started(&stderr).at(self.name()),
        };
        CallFailed::fatal(fatal)
    }

    /// One call; returns a field of its reply. A process in an unknown state is ended.
    pub(super) fn ask(
        &self,
        slot: usize,
        process: &RunningWorker,
        open: &OpenEpisode,
        request: &Value,
        field: &str,
    ) -> std::result::Result<Value, Box<CallFailed>> {
        let mut request = request.clone();
        request["episode"] = json!(open.number);
        request["timeout"] = json!(self.settings.timeout.as_secs_f64());
        let concurrent = self.ready.get().is_some_and(|ready| ready["concurrent"] == true);
        let timeout = self.settings.timeout + if concurrent { GRACE } else { Duration::ZERO };
        let kind = match process.ask(request, timeout) {
            // The call was cancelled; others in the process continue.
            Ok(answer) if answer["hung"] == true => {
                return Err(self.failed(FailureKind::TimedOut(self.settings.timeout), process.tail()));
            }
            Ok(mut answer) => match answer_kind(&answer) {
                None if !answer[field].is_null() => {
                    self.answered.fetch_or(field == "turn", Ordering::Relaxed);
                    return Ok(answer[field].take());
                }
                None => FailureKind::Garbage(answer.to_string().chars().take(80).collect()),
                // The environment raised; the process is intact.
                Some(kind) => return Err(self.failed(kind, process.tail())),
            },
            Err(kind) => kind,
        };
        let (status, stderr) = self.discard(slot, process);
        Err(self.failed(kind.with_status(status), stderr))
    }

    /// Ends a process; the next call to its slot starts another.
    fn discard(&self, slot: usize, process: &RunningWorker) -> (String, Vec<String>) {
        let mut held = lock(&self.slots[slot].process);
        if held.as_ref().is_some_and(|own| Arc::ptr_eq(own, process)) {
            *held = None;
        }
        drop(held);
        process.end()
    }

    fn failed(&self, kind: FailureKind, stderr: Vec<String>) -> Box<CallFailed> {
        let why = match &kind {
            FailureKind::Raised { .. } => Why::Raised,
            FailureKind::TimedOut(_) => Why::Hung,
            FailureKind::TooLong(_) | FailureKind::Memory { .. } => Why::Size,
            FailureKind::Garbage(_) | FailureKind::Schema(_) => Why::Schema,
            _ => Why::Exited,
        };
        let trace = if let FailureKind::Raised { trace, .. } = &kind { trace.trim_end() } else { "" };
        let stderr = trace.lines().map(String::from).chain(stderr).collect();
        let retry = !matches!(kind, FailureKind::Schema(_) | FailureKind::Interrupted);
        let lost = Lost { stderr, ..Lost::new(why, kind.to_string()) };
        let fatal =
            (kind == FailureKind::Interrupted).then(|| interrupt::interrupted("waiting for environments"));
        Box::new(CallFailed { lost, retry, fatal })
    }
}

/// The kind of failure that a reply reports.
fn answer_kind(answer: &Value) -> Option<FailureKind> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
    if let Some(raised) = answer["raised"].as_object() {
        let field = |name: &str| raised.get(name).map(text).unwrap_or_default();
        return Some(FailureKind::Raised { trace: field("trace"), place: field("place") });
    }
    answer["schema"].is_string().then(|| FailureKind::Schema(text(&answer["schema"])))
}
