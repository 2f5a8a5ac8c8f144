//! How far training moved the weights.

use super::Table;
use ferrl_engine::Result;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use serde_json::json;
use std::path::{Path, PathBuf};

/// L2 distance of each stage's weights from those it started with, and relative to their norm.
pub(super) fn distance(run: &Path) -> Result<Option<Table>> {
    let start = run.join("start_0");
    let mut models: Vec<(String, PathBuf)> = Vec::new();
    if start.join("config.json").is_file() {
        models.push(("start".into(), start));
    }
    for stage in 0.. {
        let dir = run.join(format!("stages/{stage}"));
        if !dir.join("config.json").is_file() {
            break;
        }
        models.push((format!("stage {stage}"), dir));
    }
    let mut table = Table::of(&["from", "to", "distance", "relative"]);
    for pair in models.windows(2) {
        let (before, after) = (read(&pair[0].1)?, read(&pair[1].1)?);
        let same = before.len() == after.len() && before.iter().zip(&after).all(|(a, b)| a.len() == b.len());
        if !same {
            continue; // a stage with another head, or from another model
        }
        let (mut moved, mut norm) = (0.0f64, 0.0f64);
        for (a, b) in before.iter().flatten().zip(after.iter().flatten()) {
            moved += (f64::from(*b) - f64::from(*a)).powi(2);
            norm += f64::from(*a).powi(2);
        }
        let relative = moved.sqrt() / norm.sqrt().max(f64::MIN_POSITIVE);
        table.rows.push(vec![json!(pair[0].0), json!(pair[1].0), json!(moved.sqrt()), json!(relative)]);
    }
    Ok((!table.rows.is_empty()).then_some(table))
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
