//! Warnings: raised once, shown in the terminal, in log.jsonl and in the report.

use ferrl_kernels::lock;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// A warning: something that is probably a mistake.
#[derive(Clone, Debug, PartialEq)]
pub struct Warning {
    /// What kind it is, in kebab case: `truncated-rows`.
    pub name: &'static str,
    /// What was found, with numbers and the first place.
    pub message: String,
    /// What to do about it.
    pub fix: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  fix: {}", self.message, self.fix)
    }
}

/// A shared list of warnings. Whatever builds or runs a stage holds a clone and raises into it; the runner takes them out
/// and shows them.
#[derive(Clone, Debug, Default)]
pub struct Warnings(Arc<Mutex<WarningState>>);

#[derive(Debug, Default)]
struct WarningState {
    raised: HashSet<&'static str>,
    waiting: Vec<Warning>,
    printed: Vec<Printed>,
    /// Lines that were left out since the last ones were taken.
    dropped: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Printed {
    /// The worker that printed it, or the program itself.
    pub source: String,
    /// Without its end.
    pub line: String,
}

/// Lines kept until the next time they are taken, which is every step.
const MOST_LINES: usize = 1000;

impl Warnings {
    /// Adds a warning, unless one of this name was raised before.
    pub fn raise(&self, name: &'static str, message: impl Into<String>, fix: impl Into<String>) {
        let mut state = self.lock();
        if state.raised.insert(name) {
            state.waiting.push(Warning { name, message: message.into(), fix: fix.into() });
        }
    }

    /// Those raised since the last call, in their order.
    pub fn take(&self) -> Vec<Warning> {
        std::mem::take(&mut self.lock().waiting)
    }

    /// Adds a line that user code printed, for log.jsonl.
    pub fn print(&self, source: &str, line: &str) {
        let mut state = self.lock();
        match state.printed.len() < MOST_LINES {
            true => state.printed.push(Printed { source: source.into(), line: line.into() }),
            false => state.dropped += 1,
        }
    }

    /// The lines printed since the last call, in their order; of very many the first ones and a word on the rest.
    pub fn take_printed(&self) -> Vec<Printed> {
        let mut state = self.lock();
        let mut lines = std::mem::take(&mut state.printed);
        let dropped = std::mem::take(&mut state.dropped);
        if dropped > 0 {
            lines
                .push(Printed { source: "ferrl".into(), line: format!("{dropped} more lines are left out") });
        }
        lines
    }

    /// A thread that panicked while it held the list leaves a list that is whole.
    fn lock(&self) -> MutexGuard<'_, WarningState> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_raised_once_whoever_raises_it() {
        let warnings = Warnings::default();
        let other = warnings.clone();
        warnings.raise("truncated-rows", "3 of 10 rows are cut", "data.max_length = 512");
        other.raise("truncated-rows", "4 of 10 rows are cut", "data.max_length = 512");
        other.raise("equal-pairs", "1 of 10 pairs", "remove it");
        let names = |list: Vec<Warning>| list.into_iter().map(|w| w.name).collect::<Vec<_>>();
        assert_eq!(names(warnings.take()), ["truncated-rows", "equal-pairs"]);
        warnings.raise("equal-pairs", "1 of 10 pairs", "remove it");
        assert!(other.take().is_empty(), "what was shown is not shown again");
    }
}
