//! Every recipe of the repository takes three steps of each of its stages, made small. What they write is what the
//! registry lists.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::metrics::{EVALUATED, Metric, SAMPLED, STEP};
use ferrl::algo::{ALGORITHMS, Entry, Feed, find};
use ferrl::recipe::{Recipe, Resolved};
use ferrl::run::{RunFolder, StepRecord};
use ferrl::runner::{self, RunWatch};
use ferrl::verify::VERIFIERS;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn recipes() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.retain(|p| p.extension().is_some_and(|e| e == "toml"));
    all.sort();
    all
}

fn load(path: &Path) -> Resolved {
    let resolved = Recipe::load(path, &[]).unwrap();
    let verifiers: Vec<&str> = VERIFIERS.iter().map(|v| v.name).collect();
    resolved.check(&verifiers).unwrap();
    resolved
}

#[derive(Default)]
struct Quiet {
    losses: Vec<f64>,
    stages: usize,
    notes: Vec<String>,
    /// Stages and the metrics they wrote.
    written: BTreeSet<(String, String)>,
}

impl RunWatch for Quiet {
    fn stage(&mut self, _name: &str, steps: u64) {
        assert_eq!(steps, 3);
        self.stages += 1;
    }
    fn step(&mut self, stage: &str, _step: u64, _steps: u64, record: &StepRecord) {
        // A step in which no answer was right makes no update, and has no loss.
        self.losses.extend(record.get("loss"));
        self.written.extend(record.metrics.iter().map(|(name, _)| (stage.to_string(), name.clone())));
    }
    fn note(&mut self, text: &str) {
        self.notes.push(text.to_string());
    }
}

/// The same stages with a tiny model, few examples and short answers.
fn small(resolved: &mut Resolved) {
    for stage in &mut resolved.stages {
        let r = &mut stage.recipe;
        if let Some(init) = &mut r.model.init {
            (init.hidden, init.layers, init.ffn) = (16, 1, Some(32));
            (init.heads, init.kv_heads) = (Some(2), Some(2));
        }
        (r.train.steps, r.train.batch) = (Some(3), 4);
        (r.rollout.prompts, r.rollout.samples, r.rollout.max_new_tokens) = (2, 2, 6);
        if r.checkpoint.use_best {
            (r.eval.every, r.checkpoint.every) = (1, 1);
        }
        (r.rollout.cache_mib, r.eval.prompts) = (4, r.eval.prompts.min(2));
        if r.eval.temperature != Some(0.0) {
            r.eval.samples = 2;
        }
    }
}

/// Where the registry's lists explain what a stage of this algorithm wrote.
fn explained(entry: &Entry, name: &str) -> Option<&'static Metric> {
    let held_out = |pattern: &str| EVALUATED.iter().find(|m| m.name == pattern);
    if let Some(rest) = name.strip_prefix("eval_start/") {
        return explained(entry, &format!("eval/{rest}")).and(held_out("eval_start/METRIC"));
    }
    let own = || entry.metrics.iter().copied().flatten();
    let answers = matches!(entry.feed, Feed::Rollouts | Feed::Weighted);
    let evaluated = EVALUATED.iter().filter(|m| !m.name.ends_with("METRIC"));
    let lists = || own().chain(STEP).chain(SAMPLED.iter().filter(|_| answers)).chain(evaluated.clone());
    lists().find(|m| m.name == name).or_else(|| lists().find(|m| m.covers(name))).or_else(|| {
        let rest = name.strip_prefix("eval/")?;
        own().find(|m| m.covers(rest)).and(held_out("eval/METRIC"))
    })
}

/// What only runs in trouble write: without a gradient, or with a reward that fails. And what an adapter's update writes: three
/// steps of a tiny policy earn no reward, so there is none (`small_changes_that_rounding_swallows_are_counted` has its numbers).
/// And what only several ranks write (the tests of `exchange.rs` compare it with the plan).
const RARE: &[&str] = &["updates/skipped", "eval/lost", "adapter/arrived", "timing/exchange_mib"];

#[test]
fn every_recipe_takes_three_steps() {
    let backend = ferrl_kernels::open("cpu", Some(2)).unwrap();
    let mut shown: BTreeSet<&str> = BTreeSet::new();
    for path in recipes() {
        let mut resolved = load(&path);
        small(&mut resolved);
        let runs = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(runs.path(), &resolved.name, &resolved.toml).unwrap();
        let mut watch = Quiet::default();
        let outcome = runner::run(&resolved, folder, backend.clone(), &mut watch)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let adapter = resolved.stages.last().unwrap().recipe.adapter.is_some();
        let file = if adapter { "adapter_model.safetensors" } else { "model.safetensors" };
        assert!(outcome.model.unwrap().join(file).exists(), "{}", path.display());
        let chooses = resolved.stages.iter().any(|s| s.recipe.checkpoint.use_best);
        let chose = watch.notes.iter().any(|n| n.contains("the result is step"));
        assert_eq!(chooses, chose, "{}: {:?}", path.display(), watch.notes);
        assert_eq!(watch.stages, resolved.stages.len());
        assert!(watch.losses.len() >= 3, "{}: {:?}", path.display(), watch.losses);
        assert!(watch.losses.iter().all(|l| l.is_finite()), "{}", path.display());
        for (stage, name) in &watch.written {
            let stage = resolved.stages.iter().find(|s| &s.name == stage).unwrap();
            let entry = find(stage.recipe.algorithm_name()).unwrap();
            let metric = explained(entry, name);
            shown.insert(metric.unwrap_or_else(|| panic!("{}: {name} is not listed", entry.name)).name);
        }
    }
    for m in [STEP, SAMPLED, EVALUATED].concat().iter().filter(|m| !RARE.contains(&m.name)) {
        assert!(shown.contains(m.name), "{} is listed and never written", m.name);
    }
}

#[test]
fn every_offline_algorithm_has_a_recipe_of_its_name() {
    let mut shown: BTreeSet<String> = BTreeSet::new();
    for path in recipes() {
        let last = load(&path).stages.pop().unwrap().recipe;
        if path.file_stem().unwrap().to_string_lossy() == last.algorithm_name() {
            shown.insert(last.algorithm_name().to_string());
        }
    }
    for entry in ALGORITHMS.iter().filter(|e| !e.feed.sampled()) {
        assert!(shown.contains(entry.name), "no recipes/{}.toml", entry.name);
    }
}
