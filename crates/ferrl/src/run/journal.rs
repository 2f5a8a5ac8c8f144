//! `log.jsonl`: what happened to a run, in words, one object a line.
//!
//! Every line has `time` (seconds since 1970), `level` (`info`, `warning`, `error`) and `message`; what happened has an `event`
//! (`start`, `resume`, `stage`, `evaluation`, `checkpoint`, `print`, `end`) with fields of its own, a warning has its `name` and a `fix`.
//! The file grows over all resumptions. A line that cannot be written never ends a run.

use super::files::error;
use super::folder::{RunFolder, unix_seconds};
use crate::data::lines::json_lines;
use crate::warnings::{Printed, Warning};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use serde_json::{Map, Value, json};
use std::path::Path;

const NAME: &str = "log.jsonl";

impl RunFolder {
    /// Adds a line: a level such as `info`, and a message.
    pub fn log(&self, level: &str, message: &str) -> Result<()> {
        self.line(json!({ "level": level, "message": message }))
    }

    /// The same, ignoring errors: for callers whose own work matters more.
    pub fn note(&self, level: &str, message: &str) {
        self.keep(self.log(level, message));
    }

    /// Something that happened, with fields of its own.
    pub fn event(&self, event: &str, message: &str, fields: Value) {
        let mut line = json!({ "level": "info", "event": event, "message": message });
        for (key, value) in fields.as_object().into_iter().flatten() {
            line[key] = value.clone();
        }
        self.keep(self.line(line));
    }

    /// A warning, from which the report takes it.
    pub fn note_warning(&self, warning: &Warning) {
        let Warning { name, message, fix } = warning;
        self.keep(self.line(json!({ "level": "warning", "name": name, "message": message, "fix": fix })));
    }

    /// A line that user code printed.
    pub fn note_printed(&self, printed: &Printed) {
        let Printed { source, line } = printed;
        let fields = json!({ "level": "info", "event": "print", "source": source, "message": line });
        self.keep(self.line(fields));
    }

    /// Why the last line that failed could not be written, once.
    pub fn take_unlogged(&self) -> Option<Error> {
        lock(&self.unlogged).take()
    }

    fn keep(&self, written: Result<()>) {
        if let Err(e) = written {
            *lock(&self.unlogged) = Some(e);
        }
    }

    fn line(&self, fields: Value) -> Result<()> {
        if self.is_guest() {
            return Ok(());
        }
        let mut line = Map::from_iter([("time".to_string(), json!(unix_seconds()))]);
        line.extend(fields.as_object().cloned().unwrap_or_default());
        let line = format!("{}\n", Value::Object(line));
        self.files().append(&self.path().join(NAME))?.put(crate::secrets::redact(&line).as_bytes())
    }
}

/// The lines of a run's log; what is torn or no object is left out.
pub fn read(run: &Path) -> Result<Vec<Value>> {
    let path = run.join(NAME);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(error("cannot read", &path, &e)),
    };
    Ok(json_lines(&bytes, NAME).filter_map(|(_, line)| line.ok()).filter(Value::is_object).collect())
}
