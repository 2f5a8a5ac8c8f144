//! What a verifier is made from: options, which its type reads, and what the run gives it.

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
    /// Its options.
    pub options: &'a Map<String, Value>,
    /// What the run gives a verifier with processes of its own.
    pub hooks: &'a Hooks,
}

impl Given<'_> {
    /// The options as their type; what the type does not allow is refused.
    pub fn read<T: DeserializeOwned + JsonSchema>(&self) -> Result<T> {
        read_settings(self.verifier, self.options)
    }
}

/// Where a verifier with processes of its own says things, and who may end its waits.
#[derive(Clone, Debug)]
pub struct Hooks {
    /// Takes what user code prints.
    pub warnings: Warnings,
    /// Ends waits when it is raised; the process's own unless a test gives another.
    pub interrupt: Arc<AtomicBool>,
}

impl Default for Hooks {
    fn default() -> Self {
        Hooks { warnings: Warnings::default(), interrupt: interrupt::handle() }
    }
}

impl Hooks {
    /// The receiver of each line that a worker prints.
    pub fn prints(&self) -> WorkerLog {
        let warnings = self.warnings.clone();
        Arc::new(move |worker, line| warnings.print(worker, line))
    }
}
