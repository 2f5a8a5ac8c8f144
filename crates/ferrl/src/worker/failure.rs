//! What can go wrong with a worker process, and how it is told.

use ferrl_engine::{Class, Error};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// What went wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// The process ended: its exit status.
    Exited(String),
    /// No answer before the deadline.
    TimedOut(Duration),
    /// An answer that is none: its beginning.
    Garbage(String),
    /// A line longer than this many bytes.
    TooLong(usize),
    /// The function raised: its traceback.
    Raised(String),
    /// A reward that is NaN or infinite.
    NonFinite(String),
    /// The function does not keep to its contract: a list of the wrong length or of other things than numbers.
    Contract {
        /// What came.
        got: String,
        /// What should have come.
        expected: String,
    },
    /// The process could not be started.
    Start(String),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Exited(status) => write!(f, "the worker ended ({status})"),
            Kind::TimedOut(limit) => write!(f, "no answer within {:.1} s", limit.as_secs_f64()),
            Kind::Garbage(text) => write!(f, "the worker answered garbage: {text:?}"),
            Kind::TooLong(limit) => write!(f, "the worker answered with a line of over {limit} bytes"),
            Kind::Raised(trace) => write!(f, "it raised {}", trace.trim_end().lines().last().unwrap_or("")),
            Kind::NonFinite(value) => write!(f, "it returned {value}"),
            Kind::Contract { got, expected } => write!(f, "got {got}, expected {expected}"),
            Kind::Start(why) => write!(f, "the worker did not start: {why}"),
        }
    }
}

/// A call that gave nothing, with all that is needed to find out why.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// What went wrong, the last time it was tried.
    pub kind: Kind,
    /// The function that was called.
    pub function: String,
    /// The file it is in.
    pub file: PathBuf,
    /// Which worker.
    pub worker: String,
    /// The rollouts that have no reward for it.
    pub ids: Vec<u64>,
    /// How often it was tried.
    pub attempts: u32,
    /// From the first try to giving up.
    pub waited: Duration,
    /// The last lines the worker wrote to stderr.
    pub stderr: Vec<String>,
}

impl Failure {
    /// Whether the user's function is wrong as written, so that the run should end.
    pub fn is_contract(&self) -> bool {
        matches!(self.kind, Kind::Contract { .. })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { kind, function, worker, attempts, .. } = self;
        write!(f, "function {function:?} in worker {worker}: {kind}; rollouts ")?;
        for (i, id) in self.ids.iter().take(8).enumerate() {
            write!(f, "{}{id}", if i > 0 { ", " } else { "" })?;
        }
        if self.ids.len() > 8 {
            write!(f, " and {} more", self.ids.len() - 8)?;
        }
        let tries = if *attempts == 1 { "1 try".to_string() } else { format!("{attempts} tries") };
        write!(f, "; {tries}, waited {:.1} s", self.waited.as_secs_f64())?;
        if let Kind::Raised(trace) = kind {
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

impl From<Box<Failure>> for Error {
    fn from(failure: Box<Failure>) -> Error {
        let (class, fix) = match &failure.kind {
            Kind::Contract { .. } => (Class::Usage, "return one number or None for each completion"),
            Kind::TimedOut(_) => (Class::Device, "make the function faster or raise timeout"),
            Kind::NonFinite(_) => (Class::Device, "return None where there is no reward"),
            _ => (
                Class::Device,
                "the sample is left out; call the function by hand on this rollout to find out why",
            ),
        };
        Error::new(class, failure.to_string()).at(failure.file.display()).fix(fix)
    }
}
