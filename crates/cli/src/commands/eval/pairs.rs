//! `ferrl eval --pairs`: accuracy of a reward model on pairs, by subset.

use super::{Args, find};
use crate::options::{key_values, open_model};
use crate::output::{print, warn};
use crate::progress::ProgressLine;
use ferrl::data::hub::HubCache;
use ferrl::data::overlap::{WORDS, between};
use ferrl::data::{DataSource, Dataset};
use ferrl::evaluate::pairs::{Accuracy, PairTable, compare, read};
use ferrl::recipe::{Recipe, RewardSettings};
use ferrl::reward::Rewards;
use ferrl::verify::Hooks;
use ferrl::warnings::Warnings;
use ferrl_engine::model::Head;
use ferrl_engine::{Error, Result, counted};
use serde_json::{Value, json};
use std::path::Path;

/// Scores every pair with the model and prints the accuracies.
pub fn run(args: &Args, source: &str) -> Result<()> {
    let found = find(&args.model)?;
    let dir = open_model(&found.model)?;
    let options = key_values("--judge", &args.judge)?;
    let model = Some(dir.path.display().to_string());
    let reward = RewardSettings { model, options, ..Default::default() };
    let scores = dir.config.head == Head::Score;
    reward.check_model(scores, "--judge ").map_err(|e| e.at(dir.path.display()))?;
    let data = Dataset::read(&DataSource::held_out(source)?, &HubCache::from_env())?;
    let mut pairs = read(&data)?;
    pairs.truncate(args.prompts.unwrap_or(usize::MAX));
    if pairs.is_empty() {
        return Err(Error::data("has no pairs").at(source));
    }
    let hooks = Hooks::default();
    if let Some(own) = &found.recipe {
        guard(own, &data, &hooks.warnings)?;
    }
    let mut recipe = Recipe { reward: vec![reward], ..Default::default() };
    args.set.compute(&mut recipe);
    recipe.seed = args.set.seed.unwrap_or(0);
    let backend = ferrl_kernels::open(args.set.device.as_deref().unwrap_or("auto"), args.set.threads)?;
    let rewards = Rewards::load(&recipe, recipe.dtype()?, &backend, &hooks)?;
    let progress = ProgressLine::new("comparing", pairs.len() as u64, "pairs");
    let right = compare(&rewards, &pairs, &mut |n| progress.add(n as u64))?;
    drop(progress);
    warn(&hooks.warnings);
    let table = PairTable::new(&pairs, &right);
    if args.json {
        let mut line = table.json();
        line.insert("model".into(), json!(found.model.display().to_string()));
        line.insert("pairs".into(), json!(pairs.len()));
        return print(&format!("{}\n", Value::Object(line)));
    }
    print(&shown(&table, &found.model, pairs.len()))
}

/// Warns of pairs that the model was trained on: RewardBench has been used as training data.
fn guard(own: &Path, test: &Dataset, warnings: &Warnings) -> Result<()> {
    let cache = HubCache::from_env();
    let stages = Recipe::load(own, &[])?.stages;
    let names = stages.iter().flat_map(|s| &s.recipe.data.train).filter(|n| !n.starts_with("task:"));
    // Training files may have been deleted since.
    let read = |name: &String| Dataset::read(&DataSource::parse(name).ok()?, &cache).ok();
    let train: Vec<Dataset> = names.filter_map(read).collect();
    let report = between(&train, std::slice::from_ref(test), WORDS)?;
    if let Some(first) = report.pairs.first() {
        let what = format!(
            "{} of {} pairs overlap with rows the model was trained on (first: {} and {})",
            report.met, report.test_rows, first.test, first.train
        );
        warnings.raise("overlapping-rows", what, "pairs that no stage of the run has seen");
    }
    Ok(())
}

fn shown(table: &PairTable, model: &Path, pairs: usize) -> String {
    let mut text = format!("{}: {}\n", model.display(), counted(pairs, "pair"));
    let mut lines = |title: &str, all: &[Accuracy]| {
        let width = all.iter().map(|a| a.name.chars().count()).max().unwrap_or(0);
        if !all.is_empty() {
            text += &format!("{title}\n");
        }
        for a in all {
            text += &format!("  {:<width$}  {:>5.1} %  of {}\n", a.name, 100.0 * a.accuracy, a.pairs);
        }
    };
    lines("by subset", &table.subsets);
    lines("by section of RewardBench", &table.sections);
    if let Some(score) = table.score() {
        text += &format!(
            "RewardBench score {:.1} %, the mean over {}\n",
            100.0 * score,
            counted(table.sections.len(), "section")
        );
    }
    let interval = table.interval.map_or(String::new(), |(low, high)| {
        format!(" (95 % interval {:.1} to {:.1})", 100.0 * low, 100.0 * high)
    });
    text + &format!("accuracy {:.1} %{interval}\n", 100.0 * table.all)
}
