//! Work whose failure must not cost what was learned before it, panics included.

use ferrl_engine::Error;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why work ended early.
pub(super) enum Failed {
    /// As the work itself says.
    Error(Error),
    /// A bug: what the panic carried.
    Panic(Box<dyn Any + Send>),
}

/// What guarded work gives.
pub(super) type Guarded<T> = Result<T, Failed>;

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Failed::Error(error)
    }
}

impl Failed {
    /// In words.
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

/// Whether a panic, in whichever thread, will be caught so that a run can be saved: a panic hook should not end the process
/// then.
pub fn guarded() -> bool {
    GUARDED.load(Ordering::SeqCst) > 0
}

/// Does the work; returns a panic as a failure.
pub(super) fn guard<T>(work: impl FnOnce() -> ferrl_engine::Result<T>) -> Guarded<T> {
    GUARDED.fetch_add(1, Ordering::SeqCst);
    // What the work leaves half done is put back by its caller, or not used again.
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.fetch_sub(1, Ordering::SeqCst);
    match done {
        Ok(result) => result.map_err(Failed::Error),
        Err(payload) => Err(Failed::Panic(payload)),
    }
}
