//! A request to stop that whatever waits long can see: a reward function that hangs must not hold up Ctrl-C.

use ferrl_engine::{Class, Error};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A shared handle. Whoever builds a stage makes one; whoever runs it says which flag it follows.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<OnceLock<Arc<AtomicBool>>>);

impl Interrupt {
    /// From now on the request is this flag; the first one given stays.
    pub fn follow(&self, flag: Arc<AtomicBool>) {
        let _ = self.0.set(flag);
    }

    /// Whether the user asked to stop.
    pub fn is_set(&self) -> bool {
        self.0.get().is_some_and(|flag| flag.load(Ordering::SeqCst))
    }

    /// The error of a call that was given up because of it.
    pub fn error(waited_for: &str) -> Error {
        Error::new(Class::Interrupted, format!("interrupted while waiting for {waited_for}"))
            .fix("resume the run with --resume")
    }
}
