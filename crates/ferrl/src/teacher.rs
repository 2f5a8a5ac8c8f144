//! The teacher model of distillation.

use crate::recipe::Recipe;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::train::comparable;
use ferrl_engine::{Error, Result};
use std::path::Path;

pub fn load(recipe: &Recipe, student: &Model) -> Result<Model> {
    let path = recipe.teacher.path.as_deref().ok_or_else(|| {
        Error::usage(format!("{} needs a teacher", recipe.algorithm_name()))
            .at("teacher.path")
            .fix("teacher.path = \"directory\"")
    })?;
    let options = Options { dtype: student.dtype, training: false, context: student.context() };
    let teacher = Model::load(student.backend.clone(), &ModelDir::open(Path::new(path))?, options)?;
    comparable(student, &teacher).map_err(|e| e.at("teacher.path"))?;
    Ok(teacher)
}
