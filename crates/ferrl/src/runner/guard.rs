//! Catches errors and panics of work, so that the run can be saved.

use ferrl_engine::Error;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) enum Failed {
    Error(Error),
    /// A bug: the payload of the panic.
    Panic(Box<dyn Any + Send>),
}

/// Result of guarded work.
pub(super) type Guarded<T> = Result<T, Failed>;

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed::Error(error)
    }
}

impl Failed {
    pub fn text(&self) -> String {
        match self {
            Failed::Error(e) => e.to_string(),
            Failed::Panic(payload) => {
                let text = payload.downcast_ref::<&str>().copied();
                let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
                format!("a bug in ferrl: {}", text.unwrap_or("panic"))
            }
        }
    }
}

static GUARDED: AtomicUsize = AtomicUsize::new(0);

/// Whether a panic of any thread will be caught to save the run: a panic hook should not end the process then.
pub fn guarded() -> bool {
    GUARDED.load(Ordering::SeqCst) > 0
}

/// Runs the work; returns a panic as a failure.
pub(super) fn guard<T>(work: impl FnOnce() -> ferrl_engine::Result<T>) -> Guarded<T> {
    GUARDED.fetch_add(1, Ordering::SeqCst);
    // State left half changed is restored by the caller, or not used again.
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.fetch_sub(1, Ordering::SeqCst);
    match done {
        Ok(result) => result.map_err(Failed::Error),
        Err(payload) => Err(Failed::Panic(payload)),
    }
}
