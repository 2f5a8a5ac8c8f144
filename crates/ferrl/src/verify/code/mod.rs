//! Unit-tested code: runs the completion in a sandbox with the row's arguments or input, and compares what it returns outside of
//! the sandbox.

mod asserts;
mod cases;
mod compare;
mod literal;
mod object;
mod run;

use super::{Entry, Hooks, Outcome, Progress, Sample, Score, Verifier};
use crate::interrupt::is_interruption;
use crate::sandbox::{Limits, PythonSandbox, SandboxMode, SandboxOptions};
use ferrl_engine::Result;
use ferrl_kernels::{cores, lock};
use run::{Bench, TestVerdict};
use schemars::schema_for;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(super) const ENTRY: Entry = Entry {
    name: "code",
    about: "1 if Python code passes the tests of its row in a sandbox, otherwise 0",
    schema: || schema_for!(Options),
    build: |given| Ok(Box::new(Code::new(given.read()?, given.hooks)?)),
};

with_defaults! {
struct Options {
    /// Confinement: auto (every layer that the kernel supports), on (an error if a layer is missing), off (none).
    sandbox: SandboxMode = SandboxMode::Auto,
    /// Maximum seconds of a completion (of each run with io). [0.05, 86400]
    wall_s: f64 = Limits::default().wall_s,
    /// Maximum memory of the program and its child processes, in MiB. [32, 1048576]
    memory_mib: u64 = Limits::default().memory_mib,
    /// Maximum number of concurrent processes and threads. [1, 4096]
    processes: u64 = Limits::default().processes,
    /// Maximum size of the scratch folder in MiB. [1, 1048576]
    scratch_mib: u64 = Limits::default().scratch_mib,
    /// Maximum size of stdout and stderr together, in KiB. [1, 262144]
    output_kib: u64 = Limits::default().output_kib,
    /// The Python interpreter.
    python: String = "python3".into(),
    /// Relative tolerance of floats; whole numbers are always compared exactly. [0, 0.1]
    tolerance: f64 = 1e-9,
    /// Reward the fraction of passed cases instead of all or nothing.
    partial: bool = false,
}
}

/// The function that an assertion calls, if the assertion can be parsed.
pub fn called(assertion: &str) -> Option<String> {
    asserts::parse(assertion).ok().map(|(name, _)| name)
}

/// Maximum number of concurrent programs.
const MOST_AT_A_TIME: usize = 8;

pub struct Code {
    python: PythonSandbox,
    tolerance: f64,
    partial: bool,
}

impl Code {
    fn new(options: Options, hooks: &Hooks) -> Result<Self> {
        let Options { sandbox: mode, wall_s, memory_mib, processes, scratch_mib, output_kib, .. } = options;
        let limits = Limits { wall_s, memory_mib, processes, scratch_mib, output_kib, ..Default::default() };
        let confinement = SandboxOptions { mode, interrupt: hooks.interrupt.clone(), ..Default::default() };
        let python = PythonSandbox::start(&options.python, limits, confinement)?;
        if let (SandboxMode::Auto, Some((layer, _))) = (mode, python.report().hole()) {
            let message =
                format!("code of the model runs with less than full confinement: {}", python.report());
            let fix = format!("{} needs {}; sandbox = \"on\" refuses to run without", layer, layer.needs());
            hooks.warnings.raise("sandbox-layers", message, &fix);
        }
        Ok(Code { python, tolerance: options.tolerance, partial: options.partial })
    }

    fn judge(&self, sample: &Sample<'_>) -> Result<Score> {
        let tests = cases::of(sample)?;
        let code = extracted(sample.completion);
        let bench = Bench { python: &self.python, tolerance: self.tolerance };
        let TestVerdict { passed, cases, why } = match code.trim().is_empty() {
            true => {
                TestVerdict { passed: 0, cases: tests.count(), why: Some("there is no code in it".into()) }
            }
            false => bench.judge(code, &tests)?,
        };
        let fraction = passed as f64 / cases.max(1) as f64;
        let reward = if self.partial { fraction } else { fraction.floor() };
        Ok(Score {
            reward,
            components: vec![("passed".into(), passed as f64), ("cases".into(), cases as f64)],
            score: Some(fraction.floor()),
            found: Some(!code.trim().is_empty()),
            why,
            ..Default::default()
        })
    }

    /// A failure of the sandbox loses the completion; an unusable row or an interrupt ends the run.
    fn outcome(&self, sample: &Sample<'_>) -> Result<Outcome> {
        match self.judge(sample) {
            Ok(score) => Ok(Outcome::Scored(score)),
            Err(e) if e.class == ferrl_engine::Class::Device && !is_interruption(&e) => {
                Ok(Outcome::Lost(sample.error(e)))
            }
            Err(e) => Err(e),
        }
    }
}

/// The code in a completion: its last Python block, else its last block, else the whole completion.
pub fn extracted(completion: &str) -> &str {
    let block = |labels: &[&str]| {
        let (mut found, mut at) = (None, 0);
        while let Some(start) = completion[at..].find("```").map(|i| at + i + 3) {
            let line = completion[start..].find('\n').map_or(completion.len(), |i| start + i + 1);
            let label = completion[start..line].trim();
            // An unclosed block extends to the end.
            let end = completion[line..].find("```").map_or(completion.len(), |i| line + i);
            if labels.iter().any(|l| label.eq_ignore_ascii_case(l)) {
                found = Some(&completion[line..end]);
            }
            at = (end + 3).min(completion.len());
        }
        found
    };
    block(&["python", "py", "python3"]).or_else(|| block(&[""])).unwrap_or(completion)
}

impl Verifier for Code {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        self.judge(sample)
    }
    /// Scores concurrently: each program is a process.
    fn score_batch(&self, samples: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let threads = cores();
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(samples.len())));
        std::thread::scope(|scope| {
            for _ in 0..threads.min(MOST_AT_A_TIME).min(samples.len()) {
                scope.spawn(|| {
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let Some(sample) = samples.get(i) else { return };
                        let outcome = self.outcome(sample);
                        lock(&done).push((i, outcome));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
        done.sort_by_key(|(i, _)| *i);
        done.into_iter().map(|(_, outcome)| outcome).collect()
    }
    /// Checks that the row has tests; runs nothing.
    fn check(&self, sample: &Sample<'_>) -> Result<()> {
        cases::of(sample).map(|_| ())
    }
    fn extract(&self, completion: &str) -> Option<String> {
        Some(extracted(completion).to_string())
    }
    fn waits(&self) -> bool {
        true
    }
    fn summary(&self) -> Option<String> {
        Some(self.python.report().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_of_python_is_the_code() {
        for (completion, code) in [
            ("x = 1", "x = 1"),
            ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
            ("```python\nx = 1\n```\n```python\nx = 2\n```\n```\noutput\n```", "x = 2\n"),
            ("```\nx = 1\n```", "x = 1\n"),
            ("```bash\nls\n```\nno code", "```bash\nls\n```\nno code"),
            ("so:\n```py\nx = 1", "x = 1"),
            ("```python", ""),
            ("", ""),
        ] {
            assert_eq!(extracted(completion), code, "{completion:?}");
        }
    }
}
