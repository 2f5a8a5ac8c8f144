//! The interrupt flag of this process, raised by the command's signal handler.
//!
//! A run finishes its step and saves; waits for other processes (a reward in a Python worker, an HTTP request) check the flag and
//! end within a second with the error [`interrupted`].

use ferrl_engine::{Class, Error};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

static FLAG: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// The flag itself, for code that polls it; tests use a flag of their own.
pub fn handle() -> Arc<AtomicBool> {
    FLAG.clone()
}

/// Asks the process to stop.
pub fn request() {
    FLAG.store(true, Ordering::SeqCst);
}

/// Whether the process was asked to stop.
pub fn requested() -> bool {
    FLAG.load(Ordering::SeqCst)
}

/// The error of work that was given up because the process was asked to stop.
pub fn interrupted(what: &str) -> Error {
    Error::new(Class::Interrupted, format!("interrupted while {what}"))
}

/// Whether work failed because the process was asked to stop.
pub fn is_interruption(error: &Error) -> bool {
    error.class == Class::Interrupted
}
