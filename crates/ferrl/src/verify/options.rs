//! What a verifier is built from: its options, and the run's hooks.

use crate::interrupt;
use crate::recipe::read_settings;
use crate::warnings::Warnings;
use crate::worker::WorkerLog;
use ferrl_engine::Result;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A verifier's options as a recipe writes them, and the run's hooks.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// The verifier's name, for messages.
    pub verifier: &'static str,
    pub options: &'a Map<String, Value>,
    /// The run's hooks, for verifiers with processes.
    pub hooks: &'a Hooks,
}

impl Given<'_> {
    /// The options as their type; other values are an error.
    pub fn read<T: DeserializeOwned + JsonSchema>(&self) -> Result<T> {
        read_settings(self.verifier, self.options)
    }
}

/// Log and interrupt of verifiers with processes.
#[derive(Clone, Debug)]
pub struct Hooks {
    /// Receives the output of user code.
    pub warnings: Warnings,
    /// Ends waits when raised; the process's flag, except in tests.
    pub interrupt: Arc<AtomicBool>,
}

impl Default for Hooks {
    fn default() -> Self {
        Hooks { warnings: Warnings::default(), interrupt: interrupt::handle() }
    }
}

impl Hooks {
    /// The receiver of a worker's output lines.
    pub fn prints(&self) -> WorkerLog {
        let warnings = self.warnings.clone();
        Arc::new(move |worker, line| warnings.print(worker, line))
    }
}
