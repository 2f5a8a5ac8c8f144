//! Lost episodes: their environment failed, and the run continues without them.

use ferrl_engine::{Class, Error};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Result of starting or stepping an environment.
pub type Result<T> = std::result::Result<T, Fault>;

/// Why an environment failed.
#[derive(Clone, Debug)]
pub enum Fault {
    /// This episode cannot continue; the others can.
    Lost(Box<Lost>),
    /// It is busy with another episode; the call may be repeated.
    Busy,
    /// The run cannot continue.
    Fatal(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Fatal(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Lost(lost) => (*lost).into(),
            Fault::Busy => Error::device("the environment plays another episode"),
            Fault::Fatal(error) => error,
        }
    }
}

/// An episode that was given up because of its environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lost {
    pub why: Why,
    pub message: String,
    /// Seconds from the first attempt to giving up.
    pub seconds: f64,
    /// The last lines its process wrote to stderr.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
}

/// How an environment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// Its code raised.
    Raised,
    /// No answer in time.
    Hung,
    /// Its process ended, or its server cannot be reached.
    Exited,
    /// Its reply was not a valid turn.
    Schema,
    /// Its reply or memory exceeded the limit.
    Size,
}

impl Why {
    /// What to do about it.
    pub(crate) fn fix(self) -> &'static str {
        match self {
            Why::Raised => "correct the environment; the traceback says where",
            Why::Hung => "make it faster, or raise env.timeout",
            Why::Exited => "run `ferrl env check` on it to see why it ends",
            Why::Schema => "`ferrl env check` shows what its replies lack",
            Why::Size => "shorter states, or a larger env.memory_mib",
        }
    }
}

impl Lost {
    /// A lost episode with this message alone.
    pub fn new(why: Why, message: impl Into<String>) -> Self {
        Lost { why, message: message.into(), seconds: 0.0, stderr: Vec::new() }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (after {:.1} s)", self.message, self.seconds)?;
        if !self.stderr.is_empty() {
            write!(f, "\n  last lines of its stderr:")?;
        }
        self.stderr.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

impl From<Lost> for Error {
    fn from(lost: Lost) -> Self {
        let class = match lost.why {
            Why::Raised | Why::Schema => Class::Usage,
            Why::Hung | Why::Exited | Why::Size => Class::Device,
        };
        let fix = lost.why.fix();
        Error::new(class, lost.to_string()).fix(fix)
    }
}
