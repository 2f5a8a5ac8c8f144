//! The options of a verifier: a table whose keys are known and typed.

use crate::interrupt;
use crate::warnings::Warnings;
use crate::worker::Log;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// One option of a verifier.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Its key.
    pub name: &'static str,
    /// Its default as written in a recipe; empty when it must be given.
    pub default: &'static str,
    /// What it does.
    pub about: &'static str,
}

/// A table in which every key is known.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    verifier: &'static str,
    table: &'a Map<String, Value>,
    hooks: &'a Hooks,
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
    pub fn prints(&self) -> Log {
        let warnings = self.warnings.clone();
        Arc::new(move |worker, line| warnings.print(worker, line))
    }
}

impl<'a> Options<'a> {
    /// The table, if `settings` has all its keys.
    pub fn checked(
        verifier: &'static str,
        settings: &[Setting],
        table: &'a Map<String, Value>,
        hooks: &'a Hooks,
    ) -> Result<Self> {
        for key in table.keys() {
            let names = settings.iter().map(|s| s.name);
            if names.clone().any(|n| n == key) {
                continue;
            }
            let all = names.clone().collect::<Vec<_>>().join(", ");
            let error = Error::usage(format!("unknown option {key:?}, expected one of {all}")).at(verifier);
            return Err(match nearest(key, names) {
                Some(near) => error.fix(format!("did you mean {near:?}?")),
                None => error,
            });
        }
        Ok(Options { verifier, table, hooks })
    }

    /// What the run gives a verifier with processes of its own.
    pub fn hooks(&self) -> &'a Hooks {
        self.hooks
    }

    fn wrong(&self, key: &str, expected: &str, got: &Value) -> Error {
        Error::usage(format!("{key} must be {expected}, got {got}")).at(self.verifier)
    }

    /// Whether the key was given.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// A text.
    pub fn text(&self, key: &str, default: &str) -> Result<String> {
        match self.table.get(key) {
            None => Ok(default.to_string()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Err(self.wrong(key, "a text", other)),
        }
    }

    /// A text that has no default.
    pub fn required_text(&self, key: &str) -> Result<String> {
        if !self.has(key) {
            return Err(Error::usage(format!("option {key:?} is missing")).at(self.verifier));
        }
        self.text(key, "")
    }

    /// One of several words, as what it stands for.
    pub fn choice<T: Copy>(&self, key: &str, default: T, choices: &[(&str, T)]) -> Result<T> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        if let Some((_, choice)) = choices.iter().find(|(name, _)| value.as_str() == Some(name)) {
            return Ok(*choice);
        }
        let names: Vec<&str> = choices.iter().map(|(n, _)| *n).collect();
        let error = self.wrong(key, &format!("one of {}", names.join(", ")), value);
        Err(match value.as_str().and_then(|v| nearest(v, names)) {
            Some(near) => error.fix(format!("{key} = {near:?}")),
            None => error,
        })
    }

    /// Yes or no.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.table.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// A finite number of at least `least`.
    pub fn number(&self, key: &str, default: f64, least: f64) -> Result<f64> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        match value.as_f64().filter(|n| n.is_finite() && *n >= least) {
            Some(number) => Ok(number),
            None if least == f64::NEG_INFINITY => Err(self.wrong(key, "a number", value)),
            None => Err(self.wrong(key, &format!("a number of at least {least}"), value)),
        }
    }

    /// A number within a range.
    pub fn between(&self, key: &str, default: f64, range: std::ops::RangeInclusive<f64>) -> Result<f64> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        let expected = format!("a number from {} to {}", range.start(), range.end());
        value.as_f64().filter(|n| range.contains(n)).ok_or_else(|| self.wrong(key, &expected, value))
    }

    /// A whole number within a range.
    pub fn size(&self, key: &str, default: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        value.as_u64().filter(|n| range.contains(n)).ok_or_else(|| self.wrong(key, &expected, value))
    }

    /// A whole number of at least `least`.
    pub fn count(&self, key: &str, default: u64, least: u64) -> Result<u64> {
        let Some(value) = self.table.get(key) else { return Ok(default) };
        value
            .as_u64()
            .filter(|n| *n >= least)
            .ok_or_else(|| self.wrong(key, &format!("a whole number of at least {least}"), value))
    }

    /// One text or a list of texts.
    pub fn texts(&self, key: &str, default: &[&str]) -> Result<Vec<String>> {
        match self.table.get(key) {
            None => Ok(default.iter().map(|t| t.to_string()).collect()),
            Some(Value::String(text)) => Ok(vec![text.clone()]),
            Some(value) => value
                .as_array()
                .and_then(|a| a.iter().map(|v| v.as_str().map(String::from)).collect())
                .ok_or_else(|| self.wrong(key, "a text or a list of texts", value)),
        }
    }

    /// A table, or whatever else stands under the key; none where nothing does.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.table.get(key)
    }

    /// A list of finite numbers.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        value
            .as_array()
            .and_then(|a| a.iter().map(|v| v.as_f64().filter(|n| n.is_finite())).collect())
            .map(Some)
            .ok_or_else(|| self.wrong(key, "a list of numbers", value))
    }
}
