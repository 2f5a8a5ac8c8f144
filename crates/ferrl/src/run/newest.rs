//! The newest model of a run.

use super::manifest::Manifest;
use super::resume::{names, step_of};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Newest {
    /// A Hugging Face directory.
    pub model: PathBuf,
    /// The stage it is of, from 0.
    pub stage: usize,
    /// The step of its checkpoint, counted over all stages; `None` for the result of a finished stage.
    pub step: Option<u64>,
}

/// The result of the last finished stage, or the newest checkpoint of a later stage. Checkpoints with a damaged model are
/// skipped. An error if there is neither.
pub fn newest_model(run: &Path) -> Result<Newest> {
    let finished = finished_stages(run).into_iter().max();
    let after = |stage: usize| finished.is_none_or(|last| stage > last);
    if let Some(newest) = newest_checkpoint(run)?.filter(|c| after(c.stage)) {
        return Ok(newest);
    }
    match finished {
        Some(stage) => Ok(Newest { model: run.join("stages").join(stage.to_string()), stage, step: None }),
        None => Err(Error::model(
            "this run has no model yet: no stage is finished and there is no checkpoint",
        )
        .at(run.display())
        .fix(
            "wait for its first checkpoint (checkpoint.minutes, checkpoint.every), or give a model directory",
        )),
    }
}

/// The stages whose model is in `stages/`.
pub(crate) fn finished_stages(run: &Path) -> Vec<usize> {
    let dir = run.join("stages");
    let all = names(&dir).unwrap_or_default();
    let whole = |name: &String| dir.join(name).join("config.json").is_file();
    all.into_iter().filter(whole).filter_map(|name| name.parse().ok()).collect()
}

fn newest_checkpoint(run: &Path) -> Result<Option<Newest>> {
    let dir = run.join("checkpoints");
    let mut steps: Vec<u64> = match dir.is_dir() {
        true => names(&dir)?.iter().filter_map(|name| step_of(name)).collect(),
        false => Vec::new(),
    };
    steps.sort_unstable();
    let found = steps.into_iter().rev().find_map(|step| {
        let path = dir.join(format!("step_{step}"));
        let manifest = Manifest::read(&path).ok()?;
        manifest.verify_below(&path, "model/").ok()?;
        manifest.verify_below(&path, "state/state.json").ok()?;
        let state = std::fs::read_to_string(path.join("state/state.json")).ok()?;
        let state: Value = serde_json::from_str(&state).ok()?;
        let stage = state["value"]["stage"].as_u64().unwrap_or(0) as usize;
        Some(Newest { model: path.join("model"), stage, step: Some(step) })
    });
    Ok(found)
}
