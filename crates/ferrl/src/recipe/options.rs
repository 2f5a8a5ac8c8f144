//! Checks options of tasks and verifiers by building them, so that an error has a line of the recipe.

use super::StageRecipe;
use crate::setup;
use crate::verify::{self, VERIFIERS};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

/// Errors of the options of a stage's tasks and verifiers, each with the key to blame.
pub(super) fn problems(stage: &StageRecipe) -> Vec<(String, Error)> {
    let recipe = &stage.recipe;
    let mut found = Vec::new();
    let tasks = |options: &Map<String, Value>| {
        let mut recipe = recipe.clone();
        recipe.data.task = options.clone();
        setup::tasks(&recipe).map(|_| ())
    };
    if let Err(error) = tasks(&recipe.data.task) {
        let key = blame(&recipe.data.task, &error, &tasks);
        // Without options the error is about the task itself.
        let key = key.map_or_else(|| "data.train".into(), |key| format!("data.task.{key}"));
        found.push((key, error));
    }
    for (i, reward) in recipe.reward.iter().enumerate() {
        // Checking options does not start a Python function.
        let Some(name) = reward.verifier.as_ref().filter(|n| VERIFIERS.iter().any(|v| v.name == **n)) else {
            continue;
        };
        if name == "python" {
            continue;
        }
        let build = |options: &Map<String, Value>| verify::build(name, options).map(|_| ());
        if let Err(error) = build(&reward.options) {
            let key = blame(&reward.options, &error, &build);
            let key =
                key.map_or_else(|| format!("reward.{i}.options"), |key| format!("reward.{i}.options.{key}"));
            found.push((key, error));
        }
    }
    found
}

/// The option whose removal changes the error.
fn blame(
    options: &Map<String, Value>,
    error: &Error,
    build: &dyn Fn(&Map<String, Value>) -> Result<()>,
) -> Option<String> {
    options
        .keys()
        .find(|key| {
            let mut less = options.clone();
            less.shift_remove(*key);
            build(&less).err().is_none_or(|e| e != *error)
        })
        .cloned()
}
