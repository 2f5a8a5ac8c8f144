//! Data of a stage: its sources, generated tasks and number of steps.

use super::env::{OWN, encoding_of, own_task};
use crate::algo::{self, Feed};
use crate::data::hub::HubCache;
use crate::data::loader::MAX_EPOCHS;
use crate::data::{self, Dataset};
use crate::recipe::{DataSettings, Recipe};
use crate::source::{Mixture, MixturePart, ModelRoom, ReadingPurpose};
use crate::suite;
use crate::task::{self, ByTask, TASKS, Task, TaskExamples};
use crate::verify::Verifier;
use crate::warnings::Warnings;
use ferrl_engine::model::config::Position;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Training or held-out examples. The training source knows the rows of evaluations: [`Mixture::check`] checks both.
pub fn source(
    recipe: &Recipe,
    model: &Path,
    tokenizer: &Arc<Tokenizer>,
    feed: Feed,
    held_out: bool,
    warnings: &Warnings,
) -> Result<Mixture> {
    unused_options(recipe, warnings);
    let mut sources =
        Sources { recipe, model, tokenizer, warnings, room: room(recipe, model)?, read: HashMap::new() };
    let main = sources.mixture(feed, held_out)?;
    let (evaluates, mut others) = (recipe.eval.every > 0 || recipe.eval.at_start, Vec::new());
    if !held_out && evaluates {
        others.push(sources.mixture(feed, true)?);
        if !feed.sampled() && rewarded(recipe)? && !recipe.algorithm()?.needs().score {
            others.push(sources.mixture(Feed::Rollouts, true)?);
        }
    }
    main.with_held_out(others)
}

/// Limits of the model in a directory, and of the completions sampled from it.
pub(crate) fn room(recipe: &Recipe, model: &Path) -> Result<ModelRoom> {
    let config = crate::plan::read_config(model)?;
    let asks = algo::find(recipe.algorithm_name())?.feed.sampled();
    Ok(ModelRoom {
        context: config.max_context(),
        learned: config.position == Position::Learned,
        new_tokens: if asks { recipe.rollout.max_new_tokens } else { 0 },
        group: recipe.algorithm()?.needs().group,
    })
}

/// The sources of a recipe; files are read once.
struct Sources<'a> {
    recipe: &'a Recipe,
    model: &'a Path,
    tokenizer: &'a Arc<Tokenizer>,
    warnings: &'a Warnings,
    room: ModelRoom,
    read: HashMap<String, Arc<Dataset>>,
}

impl Sources<'_> {
    fn mixture(&mut self, feed: Feed, held_out: bool) -> Result<Mixture> {
        let recipe = self.recipe;
        let (own, split) = (held_out && !recipe.eval.data.is_empty(), recipe.eval.split);
        let (key, names) =
            if own { ("eval.data", &recipe.eval.data) } else { ("data.train", &recipe.data.train) };
        let weights: &[f64] = if own { &[] } else { &recipe.data.weights };
        if !weights.is_empty() && weights.len() != names.len() {
            let what = format!("{} weights for {} sources", weights.len(), names.len());
            return Err(Error::usage(what)
                .at("data.weights")
                .fix(format!("one weight for each entry of {key}")));
        }
        let has_task = names.iter().any(|n| task_name(n).is_some());
        let graded = |name: &str| suite::named(name).is_some_and(|s| s.verifier().is_some());
        let brings = has_task || names.iter().any(|n| graded(n));
        let mut parts = Vec::new();
        for (i, name) in names.iter().enumerate() {
            // Tasks and suites have verifiers; other rows need rewards of the recipe.
            let unrewarded = brings && !graded(name) && feed.sampled() && recipe.reward.is_empty();
            let weight = weights.get(i).copied().unwrap_or(1.0);
            if let Some(name) = task_name(name) {
                let task = build(recipe, name)?;
                let examples = TaskExamples::new(name, task, self.tokenizer.clone(), feed, held_out)?;
                parts.push(MixturePart::Task(Box::new(examples), weight));
                continue;
            }
            // In mixed data only tasks have a held-out part and rewards of their own.
            let none_held_out = has_task && !own && split == 0.0;
            let only_asked = algo::find(recipe.algorithm_name())?.feed.sampled();
            if held_out && (none_held_out || unrewarded) && !(own && only_asked) {
                continue;
            }
            if unrewarded && (held_out || !recipe.algorithm()?.needs().rewardless) {
                return Err(nothing_rewards(name, key, own));
            }
            parts.push(MixturePart::of(self.dataset(name, own)?, weight));
        }
        let asks = feed.sampled();
        // Evaluations use every row once.
        let data = DataSettings { replacement: recipe.data.replacement && !held_out, ..recipe.data.clone() };
        Mixture::new(
            parts,
            &ReadingPurpose {
                data: &data,
                model: self.model,
                tokenizer: self.tokenizer,
                feed,
                seed: recipe.seed,
                encoding: encoding_of(recipe)?,
                split: (split > 0.0 && !own).then_some((split, held_out)),
                room: ModelRoom {
                    new_tokens: if asks { recipe.rollout.max_new_tokens } else { 0 },
                    ..self.room
                },
                warnings: self.warnings,
            },
        )
    }

    fn dataset(&mut self, name: &str, held_out: bool) -> Result<Arc<Dataset>> {
        // Only suites have test rows under the same name.
        let key = format!("{}{name}", if held_out && suite::named(name).is_some() { "eval " } else { "" });
        if let Some(dataset) = self.read.get(&key) {
            return Ok(dataset.clone());
        }
        let source = if held_out { data::DataSource::held_out(name) } else { data::DataSource::parse(name) };
        let dataset = Arc::new(Dataset::read(&source?, &HubCache::from_env())?);
        if dataset.left_out > 0 {
            let all = dataset.left_out + dataset.len();
            let what = format!("{} of {all} rows of {name} have tests that cannot be run", dataset.left_out);
            self.warnings.raise("ungradable-rows", what, "nothing; they are left out and do not count");
        }
        self.read.insert(key, dataset.clone());
        Ok(dataset)
    }
}

/// The name of the generated task that an entry of `data.train` is.
pub(super) fn task_name(source: &str) -> Option<&str> {
    source.strip_prefix("task:")
}

/// Every generated task a stage's data names, each once.
pub fn tasks(recipe: &Recipe) -> Result<Vec<(String, Arc<dyn Task>)>> {
    let mut names: Vec<&str> = Vec::new();
    for (key, list) in [("data.train", &recipe.data.train), ("eval.data", &recipe.eval.data)] {
        let mut own: Vec<&str> = Vec::new();
        for name in list.iter().filter_map(|s| task_name(s)) {
            if own.contains(&name) {
                return Err(Error::usage(format!(
                    "task:{name} is listed twice: both would have the same examples"
                ))
                .at(key)
                .fix("list it once; data.weights sets how often it is drawn"));
            }
            own.push(name);
        }
        names.extend(own);
    }
    names.sort_unstable();
    names.dedup();
    names.into_iter().map(|name| Ok((name.to_string(), build(recipe, name)?))).collect()
}

/// The first generated task of `data.train`.
pub fn task(recipe: &Recipe) -> Result<Option<Arc<dyn Task>>> {
    let name = recipe.data.train.iter().find_map(|s| task_name(s));
    name.map(|name| build(recipe, name)).transpose()
}

/// The verifier of the generated tasks and suites of a recipe, if any.
pub fn task_verifier(recipe: &Recipe) -> Result<Option<Box<dyn Verifier>>> {
    let suites = suites(recipe).into_iter().filter_map(|s| Some((s.name.to_string(), s.verifier()?)));
    let suites = suites.map(|(name, verifier)| Ok((name, verifier?))).collect::<Result<Vec<_>>>()?;
    ByTask::of(&tasks(recipe)?, suites)
}

/// Every suite that a stage's data names, each once.
fn suites(recipe: &Recipe) -> Vec<&'static suite::Entry> {
    let mut all: Vec<_> =
        recipe.data.train.iter().chain(&recipe.eval.data).filter_map(|s| suite::named(s)).collect();
    all.sort_by_key(|s| s.name);
    all.dedup_by_key(|s| s.name);
    all
}

/// Whether completions can be rewarded: by the recipe, or by its tasks and suites.
pub fn rewarded(recipe: &Recipe) -> Result<bool> {
    let graded = || suites(recipe).iter().any(|s| s.verifier().is_some());
    Ok(!recipe.reward.is_empty() || graded() || !tasks(recipe)?.is_empty())
}

/// A task with its settings: all of `data.task`, or those under its name.
fn build(recipe: &Recipe, name: &str) -> Result<Arc<dyn Task>> {
    if name == OWN
        && let Some(task) = own_task(recipe)?
    {
        return Ok(task);
    }
    let entry = task::find(name)?;
    let options = &recipe.data.task;
    let table = |key: &str, value: &Value| TASKS.iter().any(|t| t.name == key) && value.is_object();
    let mut own: Map<String, Value> =
        options.iter().filter(|(k, v)| !table(k, v)).map(|(k, v)| (k.clone(), v.clone())).collect();
    let names: Vec<&str> =
        recipe.data.train.iter().chain(&recipe.eval.data).filter_map(|s| task_name(s)).collect();
    if let Some((key, other)) = own.keys().next().zip(names.iter().find(|n| **n != name)) {
        return Err(Error::usage(format!("{key:?} could be a setting of {name} or of {other}"))
            .at(format!("data.task.{key}"))
            .fix(format!("data.task.{name}.{key} = ..., or data.task.{other}.{key} = ...")));
    }
    own.extend(options.get(name).and_then(Value::as_object).cloned().unwrap_or_default());
    Ok(Arc::from((entry.build)(&own, recipe.seed)?))
}

/// Warns of settings of generated tasks that no source uses.
fn unused_options(recipe: &Recipe, warnings: &Warnings) {
    let names: Vec<&str> =
        recipe.data.train.iter().chain(&recipe.eval.data).filter_map(|s| task_name(s)).collect();
    let of_another = |key: &str, value: &Value| {
        value.is_object() && TASKS.iter().any(|t| t.name == key) && !names.contains(&key)
    };
    let unused = recipe.data.task.iter().filter(|(k, v)| names.is_empty() || of_another(k, v));
    let unused: Vec<&str> = unused.map(|(key, _)| key.as_str()).collect();
    if !unused.is_empty() {
        let what =
            format!("data.task ({}) is not used: data.train names no such generated task", unused.join(", "));
        warnings.raise("unused-task-options", what, "data.train = [\"task:NAME\"], or no data.task");
    }
}

pub fn total_steps(recipe: &Recipe, source: &Mixture, feed: Feed) -> Result<u64> {
    if let Some(steps) = recipe.train.steps {
        return Ok(steps);
    }
    let epochs = recipe.train.epochs;
    if !(epochs > 0.0 && epochs <= MAX_EPOCHS) {
        return Err(Error::usage(format!(
            "{epochs} epochs, expected a number above 0, at most {MAX_EPOCHS}"
        ))
        .at("train.epochs")
        .fix("train.epochs = 3"));
    }
    let per_step = feed.per_step(recipe);
    match source.batches(epochs, per_step) {
        Some(steps) => Ok(steps.max(1)),
        None => Err(Error::usage("a generated task has no end").at("train").fix("train.steps = 100")),
    }
}

/// Rows beside a generated task or a suite, in a recipe without rewards.
fn nothing_rewards(name: &str, key: &str, own: bool) -> Error {
    let otherwise = if own { "leave it out" } else { "train on them in separate stages" };
    let what = format!("generated tasks and suites have verifiers, but completions of {name} have no reward");
    Error::usage(what)
        .at(if own { key } else { "reward" })
        .fix(format!("add a [[reward]] that fits all of {key}, or {otherwise}"))
}
