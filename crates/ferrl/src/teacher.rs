//! The model that is imitated.

use crate::recipe::Recipe;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::comparable;
use ferrl_engine::{Error, Result};
use std::path::Path;

/// A stage of the same recipe, in `teacher.path`.
const STAGE: &str = "stage:";

/// Loads the recipe's teacher for a student.
pub fn load(recipe: &Recipe, student: &Model) -> Result<Model> {
    let path = recipe.teacher.path.as_deref().ok_or_else(|| {
        Error::usage(format!("{} learns from a teacher, and there is none", recipe.algorithm_name()))
            .at("teacher.path")
            .fix("teacher.path = \"directory\"")
    })?;
    let options = Options { dtype: student.dtype, training: false, context: 0 };
    let teacher = Model::load(student.backend.clone(), &ModelDir::open(Path::new(path))?, options)?;
    comparable(student, &teacher).map_err(|e| e.at("teacher.path"))?;
    Ok(teacher)
}

/// The recipe of a stage with `stage:NAME` in `teacher.path` replaced by the directory where that stage left its model.
pub fn resolved(mut recipe: Recipe, earlier: &[String], stages: &Path) -> Result<Recipe> {
    if let Some(name) = recipe.teacher.path.as_deref().and_then(|p| p.strip_prefix(STAGE)) {
        let index = earlier.iter().position(|n| n == name).ok_or_else(|| {
            let there = if earlier.is_empty() { "none".to_string() } else { earlier.join(", ") };
            Error::usage(format!("no earlier stage is called {name:?}; there is {there}")).at("teacher.path")
        })?;
        recipe.teacher.path = Some(stages.join(index.to_string()).to_string_lossy().into_owned());
    }
    Ok(recipe)
}
