//! Rewards from a user's Python file: `reward(prompts, completions, **columns)`, as TRL calls it.

use super::{Entry, Options, Sample, Score, Setting, Verifier};
use crate::worker::{Answer, Pool, WorkerOptions};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Its place in the registry.
pub const ENTRY: Entry = Entry {
    name: "python",
    about: "functions of a Python file, in supervised worker processes",
    settings: &[
        Setting { name: "file", default: "", about: "the Python file" },
        Setting {
            name: "functions",
            default: "\"reward\"",
            about: "the functions to call, one name or a list",
        },
        Setting { name: "weights", default: "1 each", about: "what each function's reward is multiplied by" },
        Setting { name: "workers", default: "1", about: "how many processes" },
        Setting {
            name: "batch",
            default: "0",
            about: "samples per call; 0 shares a batch out among the workers",
        },
        Setting { name: "timeout", default: "30", about: "seconds a call may take" },
        Setting { name: "start_timeout", default: "120", about: "seconds that loading the file may take" },
        Setting { name: "python", default: "\"python3\"", about: "the Python to run it" },
    ],
    build: |options| Ok(Box::new(Python::new(options)?)),
};

/// The verifier.
pub struct Python {
    pool: Pool,
    functions: Vec<String>,
    weights: Vec<f64>,
    batch: usize,
}

impl Python {
    fn new(options: &Options<'_>) -> Result<Self> {
        let functions = options.texts("functions", &["reward"])?;
        let names: Vec<&str> = functions.iter().map(String::as_str).collect();
        let seconds = |key: &str, default: f64| {
            options.number(key, default, 0.001).map(|s| Duration::from_secs_f64(s.min(1e6)))
        };
        let workers = WorkerOptions {
            python: options.text("python", "python3")?,
            workers: options.count("workers", 1, 1)?.min(256) as usize,
            timeout: seconds("timeout", 30.0)?,
            start_timeout: seconds("start_timeout", 120.0)?,
            ..WorkerOptions::new(options.required_text("file")?, &names)
        };
        let weights = options.numbers("weights")?.unwrap_or_else(|| vec![1.0; functions.len()]);
        Python::with(workers, weights, options.count("batch", 0, 0)? as usize)
    }

    /// One over these workers, with a weight for each of their functions.
    pub fn with(workers: WorkerOptions, weights: Vec<f64>, batch: usize) -> Result<Self> {
        let functions = workers.functions.clone();
        if functions.is_empty() || weights.len() != functions.len() {
            let (w, f) = (weights.len(), functions.len());
            return Err(Error::usage(format!("got {w} weights for {f} functions")).at(ENTRY.name));
        }
        Ok(Python { pool: Pool::start(workers)?, functions, weights, batch })
    }

    /// The workers.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Every function's answer for every sample, function by function.
    fn answers(&self, samples: &[Sample<'_>]) -> Vec<Vec<Answer>> {
        let size = match self.batch {
            0 => samples.len().div_ceil(self.pool.workers()).max(1),
            size => size,
        };
        let parts: Vec<Range<usize>> =
            (0..samples.len()).step_by(size).map(|from| from..(from + size).min(samples.len())).collect();
        let jobs: Vec<(usize, Range<usize>)> =
            (0..self.functions.len()).flat_map(|f| parts.iter().map(move |p| (f, p.clone()))).collect();
        let empty = || (0..samples.len()).map(|_| Ok(None)).collect();
        let answers: Vec<Mutex<Vec<Answer>>> = self.functions.iter().map(|_| Mutex::new(empty())).collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.pool.workers().min(jobs.len()) {
                scope.spawn(|| {
                    while let Some((function, part)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let samples = &samples[part.clone()];
                        let ids: Vec<u64> = samples.iter().map(|s| s.id).collect();
                        let got = self.pool.call(&self.functions[*function], &ids, &arguments(samples));
                        let mut answers = answers[*function].lock().unwrap_or_else(|e| e.into_inner());
                        for (at, answer) in part.clone().zip(got) {
                            answers[at] = answer;
                        }
                    }
                });
            }
        });
        answers.into_iter().map(|a| a.into_inner().unwrap_or_else(|e| e.into_inner())).collect()
    }
}

/// TRL's keyword arguments: prompts, completions, and every column as a list.
fn arguments(samples: &[Sample<'_>]) -> Map<String, Value> {
    let mut arguments = Map::new();
    let list = |of: &dyn Fn(&Sample<'_>) -> Value| Value::Array(samples.iter().map(of).collect());
    for name in samples.iter().flat_map(|s| s.columns.keys()) {
        if !["prompt", "completion"].contains(&name.as_str()) && !arguments.contains_key(name) {
            let of = |s: &Sample<'_>| s.columns.get(name).cloned().unwrap_or(Value::Null);
            arguments.insert(name.clone(), list(&of));
        }
    }
    arguments.insert("prompts".into(), list(&|s| s.prompt.into()));
    arguments.insert("completions".into(), list(&|s| s.completion.into()));
    arguments
}

impl Verifier for Python {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn about(&self) -> &'static str {
        ENTRY.about
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        self.score_batch(std::slice::from_ref(sample)).pop().unwrap_or_else(|| Ok(Score::default()))
    }
    fn score_batch(&self, samples: &[Sample<'_>]) -> Vec<Result<Score>> {
        let mut answers = self.answers(samples);
        (0..samples.len())
            .map(|i| {
                let mut score = Score::default();
                for (f, name) in self.functions.iter().enumerate() {
                    // A function that gives no reward for a sample leaves it to the others.
                    if let Some(reward) = std::mem::replace(&mut answers[f][i], Ok(None))? {
                        score.reward += self.weights[f] * reward;
                        score.components.push((name.clone(), reward));
                    }
                }
                if score.components.is_empty() {
                    let names = self.functions.join(", ");
                    let what = format!("rollout {}: None from every function ({names})", samples[i].id);
                    return Err(Error::data(what)
                        .at(self.pool.file().display())
                        .fix("let at least one function give a number for every sample"));
                }
                Ok(score)
            })
            .collect()
    }
}
