//! Distance between initial and final weights.

use super::Table;
use crate::data::hub::model_dir;
use crate::recipe::{Recipe, StageRecipe, in_run};
use ferrl_engine::Result;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use serde_json::json;
use std::path::{Path, PathBuf};

/// L2 distance of each stage's weights from those it started with, and relative to their norm.
pub(super) fn distance(run: &Path) -> Result<Option<Table>> {
    let file = run.join("recipe.toml");
    let stages = if file.is_file() { Recipe::load(&file, &[])?.stages } else { Vec::new() };
    let mut table = Table::of(&["from", "to", "distance", "relative"]);
    for (i, stage) in stages.iter().enumerate() {
        let (start, end) = (start(run, i, &stages), run.join(format!("stages/{i}")));
        let Some((name, start)) = start.filter(|_| is_model(&end)) else { continue };
        let (before, after) = (read(&start)?, read(&end)?);
        let same = before.len() == after.len() && before.iter().zip(&after).all(|(a, b)| a.len() == b.len());
        if !same {
            continue; // a stage with another head
        }
        let (mut moved, mut norm) = (0.0f64, 0.0f64);
        for (a, b) in before.iter().flatten().zip(after.iter().flatten()) {
            moved += (f64::from(*b) - f64::from(*a)).powi(2);
            norm += f64::from(*a).powi(2);
        }
        let relative = moved.sqrt() / norm.sqrt().max(f64::MIN_POSITIVE);
        table.rows.push(vec![json!(name), json!(stage.name), json!(moved.sqrt()), json!(relative)]);
    }
    Ok((!table.rows.is_empty()).then_some(table))
}

/// The initial model of a stage with a label: newly initialised weights, the model of its recipe, or the previous stage's result.
fn start(run: &Path, i: usize, stages: &[StageRecipe]) -> Option<(String, PathBuf)> {
    let fresh = ("start".to_string(), run.join(format!("start_{i}")));
    let found = match in_run(&stages[i].recipe, stages, run).model.path {
        _ if is_model(&fresh.1) => fresh,
        // A run's folder, or one in the Hugging Face cache.
        Some(path) => {
            let dir = model_dir(Path::new(&path)).ok()?;
            (path, dir)
        }
        None => {
            let before = i.checked_sub(1)?;
            (stages[before].name.clone(), run.join(format!("stages/{before}")))
        }
    };
    Some(found).filter(|(_, dir)| is_model(dir))
}

fn is_model(dir: &Path) -> bool {
    dir.join("config.json").is_file()
}

/// The weights of a model; of an adapter, those of its base with what it adds.
fn read(dir: &Path) -> Result<Vec<Vec<f32>>> {
    let (dir, mut all) = (ModelDir::open(dir)?, Vec::new());
    if dir.adapter().is_some() {
        let device = ferrl_kernels::open(ferrl_kernels::BACKENDS[0].name, None)?; // the one that is always there
        let model = Model::load(device, &dir, Options::default())?;
        return (0..model.params.len()).map(|i| model.read(i)).collect();
    }
    dir.load(|_, values| {
        all.push(values);
        Ok(())
    })?;
    Ok(all)
}
