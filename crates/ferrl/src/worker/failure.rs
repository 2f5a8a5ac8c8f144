//! Failures of a worker process and their error messages.

use ferrl_engine::{Class, Error};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug, PartialEq)]
pub enum FailureKind {
    /// The process ended: its exit status.
    Exited(String),
    /// No answer before the deadline.
    TimedOut(Duration),
    /// An answer that is none: its beginning.
    Garbage(String),
    /// A line longer than this many bytes.
    TooLong(usize),
    /// The process has more memory than it may.
    Memory {
        /// What it has, in bytes.
        size: u64,
        /// What it may have.
        limit: u64,
    },
    /// An environment's answer that is no turn: what is wrong with it.
    Schema(String),
    /// The function raised.
    Raised {
        /// Its traceback, from the user's file on.
        trace: String,
        /// `file:line` of the last frame in the user's file.
        place: String,
    },
    /// A reward that is NaN or infinite, as it is or as a number of 32 bits.
    NonFinite(String),
    /// The function does not keep to its contract: a list of the wrong length or of other things than numbers.
    Contract {
        /// What came.
        got: String,
        /// What should have come.
        expected: String,
    },
    /// The function cannot be called with the arguments there are.
    Signature {
        /// What Python says of it.
        problem: String,
        /// The names of the arguments.
        given: String,
    },
    /// The process could not be started.
    Start(String),
    Interrupted,
}

impl FailureKind {
    /// Whether the same call can never succeed.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, FailureKind::Signature { .. } | FailureKind::Interrupted)
    }

    /// Whether it cost a process or a whole time-out.
    pub(super) fn is_costly(&self) -> bool {
        !matches!(
            self,
            FailureKind::Raised { .. }
                | FailureKind::NonFinite(_)
                | FailureKind::Contract { .. }
                | FailureKind::Signature { .. }
        )
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Exited(status) => write!(f, "the worker ended ({status})"),
            FailureKind::TimedOut(limit) => write!(f, "no answer within {:.1} s", limit.as_secs_f64()),
            FailureKind::Garbage(text) => write!(f, "the worker's reply is not valid: {text:?}"),
            FailureKind::TooLong(limit) => write!(f, "the worker's reply exceeds {limit} bytes"),
            FailureKind::Memory { size, limit } => {
                write!(f, "its process has {} MiB of memory, {} MiB at most", size >> 20, limit >> 20)
            }
            FailureKind::Schema(what) => write!(f, "{what}"),
            FailureKind::Raised { trace, place } => {
                write!(f, "it raised {} ({place})", trace.trim_end().lines().last().unwrap_or(""))
            }
            FailureKind::NonFinite(value) if value.parse().is_ok_and(f64::is_finite) => {
                write!(f, "it returned {value}, which overflows f32, whose maximum is {:e}", f32::MAX)
            }
            FailureKind::NonFinite(value) => write!(f, "it returned {value}"),
            FailureKind::Contract { got, expected } => write!(f, "got {got}, expected {expected}"),
            FailureKind::Signature { problem, given } => write!(f, "{problem}; it is called with {given}"),
            FailureKind::Start(why) => write!(f, "the worker did not start: {why}"),
            FailureKind::Interrupted => write!(f, "interrupted"),
        }
    }
}

/// A call that gave nothing, with all that is needed to find out why.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// What went wrong, the last time it was tried.
    pub kind: FailureKind,
    pub function: String,
    pub file: PathBuf,
    pub worker: String,
    /// The rollouts that have no reward for it.
    pub ids: Vec<u64>,
    pub attempts: u32,
    /// From the first try to giving up.
    pub waited: Duration,
    /// The last lines the worker wrote to stderr.
    pub stderr: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { kind, function, worker, attempts, .. } = self;
        write!(
            f,
            "function {function:?} in worker {worker}: {kind}; rollout{} ",
            if self.ids.len() == 1 { "" } else { "s" }
        )?;
        for (i, id) in self.ids.iter().take(8).enumerate() {
            write!(f, "{}{id}", if i > 0 { ", " } else { "" })?;
        }
        if self.ids.len() > 8 {
            write!(f, " and {} more", self.ids.len() - 8)?;
        }
        let tries = if *attempts == 1 { "1 try".to_string() } else { format!("{attempts} tries") };
        write!(f, "; {tries} in {:.1} s", self.waited.as_secs_f64())?;
        if let FailureKind::Raised { trace, .. } = kind {
            write!(f, "\n  {}", trace.trim_end().replace('\n', "\n  "))?;
        }
        if !self.stderr.is_empty() {
            write!(f, "\n  last lines of its stderr:")?;
            for line in &self.stderr {
                write!(f, "\n  | {line}")?;
            }
        }
        Ok(())
    }
}

impl FailureKind {
    /// An error of its class that says `what`, with a way out.
    pub(super) fn error(&self, what: String) -> Error {
        let (class, fix) = match self {
            FailureKind::Contract { .. } => (Class::Usage, "return one number or None for each completion"),
            FailureKind::NonFinite(_) => {
                (Class::Usage, "return a finite number, or None for a completion without a reward")
            }
            FailureKind::Signature { .. } => (Class::Usage, "def reward(prompts, completions, **columns)"),
            FailureKind::Raised { .. } => (Class::Usage, "correct the function; the traceback says where"),
            FailureKind::TimedOut(_) => (Class::Device, "make the function faster or raise timeout"),
            FailureKind::Interrupted => (Class::Interrupted, "resume the run with --resume"),
            _ => (Class::Device, "call the function yourself on this completion to see why its process ends"),
        };
        Error::new(class, what).fix(fix)
    }
}

impl FailureKind {
    /// The error of a process that could not load what it is to run, with its last words.
    pub(crate) fn not_started(&self, stderr: &[String]) -> Error {
        let mut text = match self {
            FailureKind::TimedOut(_) => format!("{self} while the file was loaded (start_timeout)"),
            FailureKind::Start(_) => self.to_string(),
            other => format!("loading it failed: {other}"),
        };
        for line in stderr {
            text.push_str("\n  | ");
            text.push_str(line);
        }
        if let FailureKind::Start(why) = self
            && let Some((_, there)) = why.split_once(FUNCTIONS)
            && let Some(name) = there.split([',', ';']).next().filter(|name| *name != "none")
        {
            return Error::usage(text).fix(format!(
                "function = {name:?} in the recipe, FILE:{name} on the command line, or define it"
            ));
        }
        Error::usage(text).fix(match self {
            FailureKind::TimedOut(_) => "do what is slow within the function, or raise start_timeout",
            FailureKind::Start(why) if why.contains("ModuleNotFoundError") => {
                "install that module for this Python, or name another one with `python`"
            }
            FailureKind::Start(why) if why.contains("Traceback") => {
                "correct the file; the traceback says where"
            }
            FailureKind::Start(why) if why.starts_with(NO_PYTHON) => {
                "install Python 3, or name one with `python`"
            }
            FailureKind::Start(why) if why.contains("is not installed") => {
                "install it for that Python, or name another one with `python`"
            }
            FailureKind::Start(why) if why.contains(") failed: ") => "correct the name or its options",
            FailureKind::Start(_) => "define it in the file",
            _ => "run the file with python3 to see why its process ends",
        })
    }
}

/// What stands before the names of the functions that a file has.
pub(super) const FUNCTIONS: &str = "; its functions: ";

/// How the reason begins where there is no process at all.
pub(super) const NO_PYTHON: &str = "cannot run";

impl From<Box<Failure>> for Error {
    fn from(failure: Box<Failure>) -> Error {
        failure.kind.error(failure.to_string()).at(failure.file.display())
    }
}
