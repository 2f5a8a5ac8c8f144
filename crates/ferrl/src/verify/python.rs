//! Rewards from a user's Python file: `reward(prompts, completions, **columns)`, as TRL calls it.

use super::{Entry, Hooks, Outcome, Progress, Sample, Score, Verifier};
use crate::warnings::Warnings;
use crate::worker::{Arguments, Called, WorkerOptions, WorkerPool};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use schemars::schema_for;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub const ENTRY: Entry = Entry {
    name: "python",
    about: "functions of a Python file, in supervised worker processes",
    schema: || schema_for!(Options),
    build: |given| Ok(Box::new(Python::new(given.read()?, given.hooks)?)),
};

with_defaults! {
struct Options {
    /// The Python file.
    #[schemars(extend("required" = true))]
    file: String = String::new(),
    /// The function to call; "reward" by default.
    function: Option<String> = None,
    /// Several functions instead of one; their rewards are added.
    functions: Option<Vec<String>> = None,
    /// Weight of each function's reward; 1 by default.
    weights: Option<Vec<f64>> = None,
    /// Worker processes, each with a Python interpreter and the file's imports. [1, 256]
    workers: usize = 1,
    /// Completions per call; 0 divides a batch evenly among the workers.
    batch: usize = 0,
    /// Maximum seconds per call. [0.001, 1000000]
    timeout: f64 = 30.0,
    /// Maximum seconds to load the file. [0.001, 1000000]
    start_timeout: f64 = 120.0,
    /// The Python interpreter.
    python: String = "python3".into(),
}
}

pub struct Python {
    pool: WorkerPool,
    functions: Vec<String>,
    weights: Vec<f64>,
    batch: usize,
    metrics: Mutex<Vec<(String, f64)>>,
    warnings: Warnings,
    /// Arguments that every function may have.
    bound: Mutex<HashSet<Vec<String>>>,
}

impl Python {
    fn new(options: Options, hooks: &Hooks) -> Result<Self> {
        let functions = match (options.function, options.functions) {
            (Some(_), Some(_)) => {
                return Err(Error::usage("both function and functions are given")
                    .at(ENTRY.name)
                    .fix("functions = [\"first\", \"second\"]"));
            }
            (Some(one), None) => vec![one],
            (None, all) => all.unwrap_or_else(|| vec!["reward".into()]),
        };
        let names: Vec<&str> = functions.iter().map(String::as_str).collect();
        let workers = WorkerOptions {
            python: options.python,
            workers: options.workers,
            timeout: Duration::from_secs_f64(options.timeout),
            start_timeout: Duration::from_secs_f64(options.start_timeout),
            log: Some(hooks.prints()),
            interrupt: hooks.interrupt.clone(),
            ..WorkerOptions::new(options.file, &names)
        };
        let weights = options.weights.unwrap_or_else(|| vec![1.0; functions.len()]);
        Ok(Python { warnings: hooks.warnings.clone(), ..Python::with(workers, weights, options.batch)? })
    }

    /// A verifier with these workers and a weight for each of their functions.
    pub fn with(workers: WorkerOptions, weights: Vec<f64>, batch: usize) -> Result<Self> {
        let functions = workers.functions.clone();
        if functions.is_empty() || weights.len() != functions.len() {
            let (w, f) = (weights.len(), functions.len());
            return Err(Error::usage(format!("got {w} weights for {f} functions")).at(ENTRY.name));
        }
        let (metrics, warnings, bound) = Default::default();
        Ok(Python { pool: WorkerPool::start(workers)?, functions, weights, batch, metrics, warnings, bound })
    }

    /// Calls every function with all samples; results by function.
    fn call(&self, samples: &[Sample<'_>], ends: Option<&[Vec<usize>]>, at: Progress) -> Vec<Called> {
        let size = match self.batch {
            0 => samples.len().div_ceil(self.pool.workers()).max(1),
            size => size,
        };
        let parts: Vec<Range<usize>> =
            (0..samples.len()).step_by(size).map(|from| from..(from + size).min(samples.len())).collect();
        let jobs: Vec<(usize, Range<usize>)> =
            (0..self.functions.len()).flat_map(|f| parts.iter().map(move |p| (f, p.clone()))).collect();
        let done: Mutex<Vec<(usize, Called)>> = Mutex::default();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.pool.workers().min(jobs.len()) {
                scope.spawn(|| {
                    loop {
                        let job = next.fetch_add(1, Ordering::Relaxed);
                        let Some((function, part)) = jobs.get(job) else { return };
                        let samples = &samples[part.clone()];
                        let ends = ends.map(|ends| &ends[part.clone()]);
                        let ids: Vec<u64> = samples.iter().map(|s| s.id).collect();
                        let called =
                            self.pool.call(&self.functions[*function], &ids, &arguments(samples, ends, at));
                        lock(&done).push((job, called));
                    }
                });
            }
        });
        let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
        done.sort_by_key(|(job, _)| *job);
        let mut all = vec![Called::default(); self.functions.len()];
        for (job, called) in done {
            let whole = &mut all[jobs[job].0];
            whole.answers.extend(called.answers);
            whole.steps.extend(called.steps);
            whole.extra.extend(called.extra);
            whole.metrics.extend(called.metrics);
            whole.recovered = whole.recovered.take().or(called.recovered);
        }
        all
    }
}

/// TRL's keyword arguments: prompts, completions, their tokens, every column as a list, and the trainer's state. A
/// conversation is a list of messages, and so is its completion. With process rewards also `steps`, the texts of each
/// completion's steps.
fn arguments(samples: &[Sample<'_>], ends: Option<&[Vec<usize>]>, at: Progress) -> Arguments {
    let mut columns = Map::new();
    let list = |of: &dyn Fn(&Sample<'_>) -> Value| Value::Array(samples.iter().map(of).collect());
    let truncated = |s: &Sample<'_>| s.truncated.into();
    columns.insert("truncated".into(), list(&truncated));
    for name in samples.iter().flat_map(|s| s.columns.names()) {
        if !OWN.contains(&name) {
            let of = |s: &Sample<'_>| s.columns.get(name).cloned().unwrap_or(Value::Null);
            columns.insert(name.into(), list(&of));
        }
    }
    let prompt = |s: &Sample<'_>| match s.messages.is_empty() {
        true => s.prompt.into(),
        false => s.messages.into(),
    };
    let completion = |s: &Sample<'_>| match s.messages.is_empty() {
        true => s.completion.into(),
        false => json!([{ "role": "assistant", "content": s.completion }]),
    };
    columns.insert("prompts".into(), list(&prompt));
    columns.insert("completions".into(), list(&completion));
    columns.insert("completion_ids".into(), list(&|s| s.ids.into()));
    if let Some(ends) = ends {
        let steps = samples.iter().zip(ends).map(|(s, ends)| texts(s.completion, ends)).collect();
        columns.insert("steps".into(), Value::Array(steps));
    }
    let state = json!({ "global_step": at.step, "max_steps": at.steps.max(1), "epoch": at.epoch });
    Arguments { columns, state: state.as_object().cloned().unwrap_or_default(), steps: ends.is_some() }
}

/// The parts of a text that end at these bytes.
fn texts(text: &str, ends: &[usize]) -> Value {
    let mut from = 0;
    let part = |&end: &usize| {
        let part = text.get(from..end).unwrap_or_default();
        from = end;
        part.into()
    };
    Value::Array(ends.iter().map(part).collect())
}

/// Argument names that columns cannot have.
const OWN: [&str; 5] = ["prompt", "completion", "prompts", "completions", "completion_ids"];

impl Verifier for Python {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn judges_truncated(&self) -> bool {
        true
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        match self.score_batch(std::slice::from_ref(sample), Progress::default())?.pop() {
            Some(Outcome::Scored(score)) => Ok(score),
            Some(Outcome::Lost(error)) => Err(error),
            Some(Outcome::Abstained) | None => {
                Err(Error::data(format!("None from every function ({})", self.functions.join(", ")))
                    .at(self.pool.file().display()))
            }
        }
    }
    fn score_batch(&self, samples: &[Sample<'_>], at: Progress) -> Result<Vec<Outcome>> {
        Ok(self.outcomes(samples, None, at))
    }
    fn scores_steps(&self) -> bool {
        true
    }
    /// Rewards of the functions; a number for a whole completion is the reward of its last step.
    fn score_steps(&self, samples: &[Sample<'_>], ends: &[Vec<usize>], at: Progress) -> Result<Vec<Outcome>> {
        Ok(self.outcomes(samples, Some(ends), at))
    }
    /// Checks the arguments of the functions against the columns of this row, without calling them.
    fn check(&self, sample: &Sample<'_>) -> Result<()> {
        let own = ["truncated", "prompts", "completions", "completion_ids", "steps"];
        let columns = sample.columns.names().into_iter().filter(|name| !OWN.contains(name));
        let mut names: Vec<String> = own.into_iter().chain(columns).map(String::from).collect();
        names.sort_unstable();
        let mut bound = lock(&self.bound);
        if !bound.contains(&names) {
            for function in &self.functions {
                let absent = self.pool.bind(function, names.iter().map(String::as_str));
                self.warn_of(&absent.map_err(|e| sample.error(e))?, function, sample);
            }
            bound.insert(names);
        }
        Ok(())
    }
    fn file(&self) -> Option<&Path> {
        Some(self.pool.file())
    }
    fn take_metrics(&self) -> Vec<(String, f64)> {
        std::mem::take(&mut *lock(&self.metrics))
    }
}

impl Python {
    /// A misspelt column whose argument has a default would make every reward what the function says of `None`.
    fn warn_of(&self, absent: &[String], function: &str, sample: &Sample<'_>) {
        if absent.is_empty() {
            return;
        }
        let (place, file) = (sample.place, self.pool.file().display());
        let message = format!(
            "{place}: {file}: {function} gets no {}: the row has no such column, and the default None stays",
            absent.join(", ")
        );
        let names: Vec<&str> =
            sample.columns.names().into_iter().filter(|name| !OWN.contains(name)).collect();
        let fix = format!("rename the argument; the row's columns: {}", names.join(", "));
        self.warnings.raise("absent-column", message, fix);
    }

    fn outcomes(&self, samples: &[Sample<'_>], ends: Option<&[Vec<usize>]>, at: Progress) -> Vec<Outcome> {
        let mut called = self.call(samples, ends, at);
        if let Some(failure) = called.iter_mut().find_map(|c| c.recovered.take()) {
            let message = format!(
                "{}: {}: it failed for {} completions at once, and succeeded for them in smaller parts: {}",
                self.pool.file().display(),
                failure.function,
                failure.ids.len(),
                failure.kind
            );
            let fix =
                "make it work for any number of completions: every such call is repeated, which takes time";
            self.warnings.raise("repeated-calls", message, fix);
        }
        let mut metrics = lock(&self.metrics);
        called.iter_mut().for_each(|c| metrics.append(&mut c.metrics));
        (0..samples.len()).map(|i| self.outcome(&mut called, i)).collect()
    }

    /// The sum of the functions' rewards of a sample. A function without a reward for it is left out; a failed one makes it
    /// lost.
    fn outcome(&self, called: &mut [Called], i: usize) -> Outcome {
        let mut score = Score::default();
        for ((name, weight), called) in self.functions.iter().zip(&self.weights).zip(called) {
            match std::mem::replace(&mut called.answers[i], Ok(None)) {
                Ok(Some(reward)) => {
                    score.reward += weight * reward;
                    score.components.push((name.clone(), reward));
                    let steps = &called.steps[i];
                    score.steps.resize(score.steps.len().max(steps.len()), 0.0);
                    score.steps.iter_mut().zip(steps).for_each(|(sum, step)| *sum += weight * step);
                }
                Ok(None) => {}
                Err(failure) => return Outcome::Lost(failure.into()),
            }
            score.extra.append(&mut called.extra[i]);
        }
        match score.components.is_empty() {
            true => Outcome::Abstained,
            false => Outcome::Scored(score),
        }
    }
}
