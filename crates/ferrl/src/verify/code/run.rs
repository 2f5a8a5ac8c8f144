//! Runs a completion in the sandbox and compares the returned values in this process.

use super::cases::{TestCase, Tests};
use super::object::Object;
use crate::sandbox::{ProgramEnd, PythonSandbox, PythonTask, Ran};
use ferrl_engine::Result;
use serde_json::{Value, json};

/// Number of passed tests, and why not all passed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TestVerdict {
    pub(super) passed: usize,
    pub(super) cases: usize,
    pub(super) why: Option<String>,
}

/// Sandbox and tolerance of a test run.
pub(super) struct Bench<'a> {
    pub(super) python: &'a PythonSandbox,
    pub(super) tolerance: f64,
}

impl Bench<'_> {
    pub(super) fn judge(&self, code: &str, tests: &Tests) -> Result<TestVerdict> {
        match tests {
            Tests::Calls { entry, cases } => self.calls(code, entry, cases),
            Tests::Runs(runs) => self.runs(code, runs),
        }
    }

    fn calls(&self, code: &str, entry: &str, cases: &[TestCase]) -> Result<TestVerdict> {
        let call = |case: &TestCase| {
            let args: Vec<Value> = case.args.iter().map(Object::to_wire).collect();
            let kwargs: Vec<Value> = case.kwargs.iter().map(|(k, v)| json!([k, v.to_wire()])).collect();
            json!([args, kwargs])
        };
        let calls: Vec<Value> = cases.iter().map(call).collect();
        let work = json!({ "code": code, "entry": entry, "calls": calls }).to_string();
        let ran = self.python.run(PythonTask::Calls, &work, "")?;
        let mut verdict = TestVerdict { cases: cases.len(), ..Default::default() };
        let mut answered = 0;
        for line in ran.stdout.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
            match self.answer(line, cases, answered) {
                ProgramAnswer::Passed => verdict.passed += 1,
                ProgramAnswer::Wrong(why) => drop(verdict.why.get_or_insert(why)),
                ProgramAnswer::Refused(why) => {
                    return Ok(TestVerdict { passed: 0, cases: cases.len(), why: Some(why) });
                }
            }
            answered += 1;
        }
        if ran.end != ProgramEnd::Finished(0) || answered < cases.len() {
            let end = format!("case {answered}: {}", ending(&ran));
            verdict.why.get_or_insert(end);
        }
        Ok(verdict)
    }

    /// Parses a line of the channel. The program could write to the channel itself: each result counts once, in order, and a repeated
    /// one invalidates all, so that a program cannot send guesses.
    fn answer(&self, line: &[u8], cases: &[TestCase], answered: usize) -> ProgramAnswer {
        let garbage = || ProgramAnswer::Refused("the program sent something other than values".into());
        let Ok(said) = serde_json::from_slice::<Value>(line) else { return garbage() };
        if let Some(why) = said["load"].as_str() {
            return ProgramAnswer::Refused(why.to_string());
        }
        let Some(case) =
            said["case"].as_u64().filter(|i| *i == answered as u64).and_then(|_| cases.get(answered))
        else {
            return ProgramAnswer::Refused("the program sent values for cases that were not called".into());
        };
        if let Some(error) = said["error"].as_str() {
            return ProgramAnswer::Wrong(format!("case {answered}: {error}"));
        }
        match Object::from_wire(&said["value"]) {
            Some(got) if case.expect.accepts(&got, self.tolerance) => ProgramAnswer::Passed,
            Some(got) => {
                ProgramAnswer::Wrong(format!("case {answered}: got {got}, expected {}", case.expect.shown()))
            }
            None => garbage(),
        }
    }

    fn runs(&self, code: &str, runs: &[(String, String)]) -> Result<TestVerdict> {
        let mut verdict = TestVerdict { cases: runs.len(), ..Default::default() };
        for (i, (stdin, want)) in runs.iter().enumerate() {
            let ran = self.python.run(PythonTask::Program, code, stdin)?;
            let got = String::from_utf8_lossy(&ran.stdout);
            let right = lines(&got).eq(lines(want));
            match (&ran.end, right) {
                (ProgramEnd::Finished(0), true) => verdict.passed += 1,
                (ProgramEnd::Finished(0), false) => {
                    let wrong = format!("run {i}: stdout is {:?}, expected {:?}", short(&got), short(want));
                    verdict.why.get_or_insert(wrong);
                }
                (end, _) => {
                    let failed = format!("run {i}: {}", ending(&ran));
                    verdict.why.get_or_insert(failed);
                    // A program that times out or floods its output would do so in every run.
                    if !matches!(end, ProgramEnd::Finished(_)) {
                        break;
                    }
                }
            }
        }
        Ok(verdict)
    }
}

enum ProgramAnswer {
    Passed,
    Wrong(String),
    /// Invalidates all results.
    Refused(String),
}

/// How a run ended, with its last line of output.
fn ending(ran: &Ran) -> String {
    let errors = String::from_utf8_lossy(&ran.stderr);
    let last = errors.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    match (&ran.end, last) {
        (ProgramEnd::Finished(0), _) => "it ended before it returned a value".into(),
        (end @ (ProgramEnd::Finished(_) | ProgramEnd::Killed(_)), last) if !last.is_empty() => {
            format!("{end}: {}", short(last))
        }
        (end, _) => end.to_string(),
    }
}

/// Lines without trailing white space, and without trailing empty lines.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.trim_end().lines().map(str::trim_end)
}

fn short(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_string(),
    }
}
