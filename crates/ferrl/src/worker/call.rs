//! One call of a function for some rollouts, and what is done again where it failed.

use super::{
    Arguments, Called, Failure, FailureKind, PARTS, PATIENCE, RETRY_TIMEOUTS, Tried, WorkerPool, WorkerSlot,
};
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Instant;

pub(super) struct WorkerCall<'a> {
    pub pool: &'a WorkerPool,
    pub slot: MutexGuard<'a, WorkerSlot>,
    pub function: &'a str,
    pub ids: &'a [u64],
    pub arguments: &'a Arguments,
    pub began: Instant,
    /// Processes and time-outs lost since something was answered.
    pub costly: u32,
    pub retrying: bool,
    pub out: Called,
}

impl WorkerCall<'_> {
    /// All rollouts at once, and again in parts what failed.
    pub fn whole(&mut self) {
        let failed = self.attempt(0..self.ids.len(), 1);
        self.retrying = true;
        let whole = failed.iter().any(|part| part.len() > 1);
        let first = whole.then(|| self.out.answers[0].clone().err()).flatten();
        for part in failed {
            self.again(part, 2);
        }
        self.out.recovered = first.filter(|_| self.out.answers.iter().all(|answer| answer.is_ok()));
    }

    /// What failed in an attempt, in parts; a single rollout once more as it is.
    fn again(&mut self, range: Range<usize>, attempt: u32) {
        let size = range.len().div_ceil(PARTS).max(1);
        for start in range.clone().step_by(size) {
            if self.over() {
                return;
            }
            let part = start..(start + size).min(range.end);
            for failed in self.attempt(part.clone(), attempt) {
                if part.len() > 1 {
                    self.again(failed, attempt + 1);
                }
            }
        }
    }

    /// Whether to give up what has not been answered: its last failure stands.
    fn over(&self) -> bool {
        let options = &self.pool.options;
        self.costly >= PATIENCE
            || self.began.elapsed() > RETRY_TIMEOUTS * options.timeout
            || options.interrupt.load(Ordering::SeqCst)
    }

    /// One try for a range of rollouts; the ranges that are worth another.
    fn attempt(&mut self, range: Range<usize>, attempt: u32) -> Vec<Range<usize>> {
        if range.is_empty() {
            return Vec::new();
        }
        let counters = &self.pool.counters;
        let made = if self.retrying { &counters.retries } else { &counters.calls };
        made.fetch_add(1, Ordering::Relaxed);
        let request = json!({
            "function": self.function, "count": range.len(), "arguments": self.arguments.part(&range),
            "state": self.arguments.state, "steps": self.arguments.steps,
        });
        match self.pool.attempt(&mut self.slot, &request, range.len()) {
            Tried::EvaluatedCompletion(answer) => {
                self.costly = 0;
                self.take(&answer, range, attempt)
            }
            Tried::Failed(kind, stderr) => {
                self.costly += u32::from(kind.is_costly());
                let again = !kind.is_final();
                let failure = Box::new(self.failure(kind, range.clone(), attempt, stderr));
                for i in range.clone() {
                    self.fail(i, failure.clone());
                }
                again.then_some(range).into_iter().collect()
            }
        }
    }

    /// Puts the numbers of an answer in their places; the rollouts that got none are worth another try.
    fn take(&mut self, answer: &Value, range: Range<usize>, attempt: u32) -> Vec<Range<usize>> {
        let mut again = Vec::new();
        let tail = self.slot.process.as_ref().map(|p| p.tail()).unwrap_or_default();
        for (i, reward) in range.clone().zip(answer["rewards"].as_array().into_iter().flatten()) {
            let kind = match reward {
                Value::String(text) => FailureKind::NonFinite(text.clone()),
                Value::Number(n) if !n.as_f64().is_some_and(|n| (n as f32).is_finite()) => {
                    FailureKind::NonFinite(n.as_f64().map_or(n.to_string(), |n| format!("{n:e}")))
                }
                Value::Object(bad) => FailureKind::Contract {
                    got: bad.get("bad").and_then(Value::as_str).unwrap_or_default().into(),
                    expected: "a number or None for each completion".into(),
                },
                // The sum of numbers that are finite in the answer may be none all the same.
                Value::Array(steps) => {
                    let steps: Vec<f64> = steps.iter().filter_map(Value::as_f64).collect();
                    let sum: f64 = steps.iter().sum();
                    if (sum as f32).is_finite() {
                        self.answer(i, Some(sum));
                        self.out.steps[i] = steps;
                        continue;
                    }
                    FailureKind::NonFinite(format!("{sum:e}"))
                }
                number => {
                    self.answer(i, number.as_f64());
                    continue;
                }
            };
            let failure = Box::new(self.failure(kind, i..i + 1, attempt, tail.clone()));
            self.fail(i, failure);
            again.push(i..i + 1);
        }
        for (column, values) in answer["extra"].as_object().into_iter().flatten() {
            for (i, value) in range.clone().zip(values.as_array().into_iter().flatten()) {
                self.out.extra[i].insert(column.clone(), value.clone());
            }
        }
        for (name, values) in answer["metrics"].as_object().into_iter().flatten() {
            let values = values.as_array().into_iter().flatten().filter_map(Value::as_f64);
            self.out.metrics.extend(values.map(|v| (name.clone(), v)));
        }
        again
    }

    fn answer(&mut self, i: usize, reward: Option<f64>) {
        if self.out.answers[i].is_err() {
            self.pool.counters.failures.fetch_sub(1, Ordering::Relaxed);
        }
        self.out.answers[i] = Ok(reward);
    }

    fn fail(&mut self, i: usize, failure: Box<Failure>) {
        if self.out.answers[i].is_ok() {
            self.pool.counters.failures.fetch_add(1, Ordering::Relaxed);
        }
        self.out.answers[i] = Err(failure);
    }

    fn failure(&self, kind: FailureKind, range: Range<usize>, attempts: u32, stderr: Vec<String>) -> Failure {
        Failure {
            kind,
            function: self.function.to_string(),
            file: self.pool.options.file.clone(),
            worker: self.slot.label.clone(),
            ids: self.ids[range].to_vec(),
            attempts,
            waited: self.began.elapsed(),
            stderr,
        }
    }
}
