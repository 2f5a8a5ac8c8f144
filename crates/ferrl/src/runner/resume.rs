//! The state of a run, and which changes of its recipe allow it to resume.
//!
//! A stage that has started keeps its settings. Stages that have not started may change, a stage may get more steps as long as no
//! later one has started, and the settings of checkpoints may change at any time.

use super::finished;
use crate::recipe::{Recipe, Resolved, StageRecipe, changes_no_bit, differences};
use crate::run::newest::finished_stages;
use crate::run::{ResumePoint, RunFolder, latest};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::Path;

#[derive(Clone, Debug, Default)]
pub struct RunPosition {
    pub(super) found: ResumePoint,
    pub(super) state: Value,
    /// The stage of the last checkpoint.
    pub stage: usize,
    /// Steps of this stage; 0 without a checkpoint.
    pub step: u64,
    pub finished: bool,
}

impl RunPosition {
    pub fn of(folder: &RunFolder) -> Result<RunPosition> {
        let found = latest(&folder.checkpoints())?;
        if let (None, Some((path, problem))) = (&found.path, found.skipped.first()) {
            return Err(Error::data(format!("all checkpoints of this run are damaged: {problem}"))
                .at(path.display())
                .fix("restore one of them, or start a new run with --name"));
        }
        let Some(path) = &found.path else {
            // Without a checkpoint the run begins anew, over all that it wrote: never over a model that is finished.
            return match finished_stages(folder.path()).into_iter().max() {
                Some(stage) => Err(no_checkpoint_left(folder.path(), stage)),
                None => Ok(RunPosition { found, ..Default::default() }),
            };
        };
        let text = std::fs::read_to_string(path.join("state/state.json"))
            .map_err(|e| Error::data(format!("cannot read the state: {e}")).at(path.display()))?;
        let broken = |e| Error::data(format!("the state is broken: {e}")).at(path.display());
        let state = serde_json::from_str::<Value>(&text).map_err(broken)?["value"].take();
        let stage = state["stage"].as_u64().map_or(0, |s| s as usize);
        let step = state["step"].as_u64().unwrap_or(0);
        Ok(RunPosition { finished: finished(folder, stage), found, state, stage, step })
    }

    /// The first stage that is not finished.
    pub fn next(&self) -> usize {
        self.stage + usize::from(self.finished)
    }

    pub fn begun(&self) -> bool {
        self.step > 0 && !self.finished
    }
}

/// The refusal to resume a run of which only finished models are left.
fn no_checkpoint_left(run: &Path, stage: usize) -> Error {
    let model = run.join("stages").join(stage.to_string());
    let what = format!(
        "there is no checkpoint to resume from, and starting over would replace the finished model {} and the metrics",
        model.display()
    );
    Error::usage(what).at(run.join("checkpoints").display()).fix(format!(
        "put a checkpoint back, or start a new run with --name (model.path = \"{}\" goes on from the finished model)",
        model.display()
    ))
}

/// The recipe of a resumed run, and what changed in it.
pub struct Accepted {
    pub resolved: Resolved,
    /// Differences from the run's recipe, as text.
    pub changes: Vec<String>,
    /// Changed stages that have not started.
    pub(super) anew: Vec<usize>,
}

/// Checks the recipe `now` of a resumed run against the one it was started with. `allow` accepts changes of started stages.
pub fn accept(
    folder: &RunFolder,
    now: Resolved,
    position: &mut RunPosition,
    allow: bool,
) -> Result<Accepted> {
    let path = folder.path().join("recipe.toml").display().to_string();
    let saved = Recipe::parse(&folder.recipe()?, &path, &now.name, &[]).map_err(|e| {
        e.fix(format!(
            "restore it: `ferrl train RECIPE --dry-run > {path}` writes it from the recipe of the run"
        ))
    })?;
    let plain = |s: &StageRecipe| Recipe { threads: 0, name: None, ..s.recipe.clone() };
    let refuse = |what: String| {
        Err(Error::usage(format!("the recipe is not the one the run was started with: {what}"))
            .at(&path)
            .fix(
                "undo the change, start a new run with --name, or accept it with --allow-changed (not needed for \
                 stages that have not begun, more steps of the last stage, checkpoint.*, parallel.*, rollout.tp_size \
                 and memory settings)",
            ))
    };
    let (mut changes, mut anew) = (Vec::new(), Vec::new());
    for old in &saved.stages {
        let begun = position.step > 0 && old.index <= position.stage;
        let Some(new) = now.stages.get(old.index) else {
            if begun {
                return refuse(format!("stage {} has started and is missing", old.name));
            }
            changes.push(format!("stage {} was removed", old.name));
            continue;
        };
        for (key, was, is) in differences(&plain(old), &plain(new)) {
            let what = format!("{key} of stage {} was {was} and is {is}", old.name);
            let length = ["train.steps", "train.epochs"].contains(&key.as_str());
            let longer = length && old.index == position.stage;
            let free = key.starts_with("checkpoint.") || changes_no_bit((&key, &was, &is));
            if begun && !(longer || free || allow) {
                return refuse(what);
            }
            if begun && longer {
                position.finished = false;
            }
            if !begun && anew.last() != Some(&old.index) {
                anew.push(old.index);
            }
            changes.push(what);
        }
    }
    let more = now.stages.iter().skip(saved.stages.len());
    changes.extend(more.map(|s| format!("stage {} is new", s.name)));
    Ok(Accepted { resolved: now, changes, anew })
}
