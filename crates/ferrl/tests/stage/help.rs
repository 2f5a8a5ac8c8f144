//! A small model with a tokenizer of single characters, and stages that train it.

use ferrl::recipe::Recipe;
use ferrl::run::{MetricsLog, RunFolder, StepRecord};
use ferrl::setup;
use ferrl::train::Stage;
use ferrl_engine::Result;
use ferrl_engine::checkpoint::{InitOptions, SaveOptions, StorageFormat, init_model};
use ferrl_engine::model::FAMILIES;
use ferrl_engine::tokenizer::train_chars;
use ferrl_kernels::Backend;
use std::path::Path;
use std::sync::Arc;

pub fn backend() -> Arc<dyn Backend> {
    ferrl_kernels::open("cpu", Some(1)).unwrap()
}

/// A random model of 2 layers in `dir/model`.
pub fn model(dir: &Path) -> String {
    model_of(dir, FAMILIES[0].name())
}

/// The same of a family.
pub fn model_of(dir: &Path, family: &str) -> String {
    model_with(dir, family, 64)
}

/// The same with so many positions.
pub fn model_with(dir: &Path, family: &str, positions: usize) -> String {
    let text: String = (' '..='~').chain(['\n']).collect();
    let specials = ["<pad>", "<eos>"].map(String::from);
    let tokenizer = train_chars([text].into_iter(), &specials).unwrap();
    let mut options = InitOptions::new(family);
    (options.vocab, options.hidden, options.layers) = (tokenizer.vocab_size(), 32, 2);
    let kv_heads = if family == "gpt2" { 2 } else { 1 };
    (options.heads, options.kv_heads, options.ffn) = (Some(2), Some(kv_heads), Some(48));
    (options.max_positions, options.seed, options.tied) = (positions, 3, Some(true));
    (options.eos, options.pad) = (tokenizer.eos().first().copied(), tokenizer.pad());
    let path = dir.join(if family == FAMILIES[0].name() { "model" } else { family });
    init_model(&path, &options, &SaveOptions { dtype: StorageFormat::F32, ..Default::default() }).unwrap();
    tokenizer.save(&path).unwrap();
    path.to_string_lossy().into()
}

pub fn write(dir: &Path, name: &str, rows: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, rows).unwrap();
    path.to_string_lossy().into()
}

/// A recipe's only stage, built as a run would build it.
pub fn stage(model: &str, recipe: &str) -> Result<Stage> {
    let text = format!("{recipe}\n[model]\npath = {model:?}\n");
    let resolved = Recipe::parse(&text, "recipe.toml", "test", &[])?;
    resolved.check(&["countdown", "length", "exact", "regex"])?;
    setup::stage(resolved.stages[0].recipe.clone(), backend(), Path::new(model))
}

pub fn fails(model: &str, recipe: &str) -> String {
    match stage(model, recipe) {
        Ok(mut stage) => stage.step().err().expect("the recipe must not work").to_string(),
        Err(e) => e.to_string(),
    }
}

/// Every weight of the policy.
pub fn weights(stage: &Stage) -> Vec<f32> {
    (0..stage.policy.model.params.len()).flat_map(|i| stage.policy.model.read(i).unwrap()).collect()
}

/// Runs a recipe in a folder, or goes on with it; stops after so many steps of this call.
pub fn run(runs: &Path, recipe: &str, resume: bool, stop_after: u64) -> Result<ferrl::runner::RunOutcome> {
    let resolved = Recipe::parse(recipe, "recipe.toml", "test", &[])?;
    resolved.check(&["countdown", "length", "exact", "regex"])?;
    let folder = match resume {
        true => RunFolder::open(&runs.join("test"))?,
        false => RunFolder::create(runs, "test", &resolved.toml)?,
    };
    ferrl::runner::run(&resolved, folder, backend(), &mut Steps { left: stop_after })
}

/// Looks on for so many steps.
struct Steps {
    left: u64,
}

impl ferrl::runner::RunWatch for Steps {
    fn step(&mut self, _stage: &str, _step: u64, _steps: u64, _record: &StepRecord) {
        self.left = self.left.saturating_sub(1);
    }
    fn interrupted(&self) -> bool {
        self.left == 0
    }
}

/// The lines of a run's metrics, without its times.
pub fn metrics(runs: &Path) -> Vec<StepRecord> {
    let mut all = MetricsLog::history(&runs.join("test/metrics.jsonl")).unwrap();
    for record in &mut all {
        record.seconds = 0.0;
        record.metrics.retain(|(name, _)| !name.contains("tim"));
    }
    all
}
