//! Finds and loads the checkpoint to resume from.

use super::files::error;
use super::manifest::{FilePart, Manifest};
use super::tensor_file;
use ferrl_engine::train::ModelTrainer;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, Default)]
pub struct ResumePoint {
    /// The newest undamaged one.
    pub path: Option<PathBuf>,
    /// Newer, damaged ones with the reason.
    pub skipped: Vec<(PathBuf, Error)>,
}

/// The newest undamaged checkpoint of a folder.
pub fn latest(dir: &Path) -> Result<ResumePoint> {
    let mut steps: Vec<(u64, bool)> = Vec::new();
    for name in names(dir)? {
        let stem = name.strip_suffix(".old");
        steps.extend(step_of(stem.unwrap_or(&name)).map(|step| (step, stem.is_none())));
    }
    steps.sort_unstable();
    let mut found = ResumePoint::default();
    for (step, in_place) in steps.into_iter().rev() {
        let path = dir.join(format!("step_{step}{}", if in_place { "" } else { ".old" }));
        match Manifest::read(&path).and_then(|m| m.verify(&path)) {
            Ok(()) => {
                found.path = Some(path);
                break;
            }
            Err(e) => found.skipped.push((path, e)),
        }
    }
    Ok(found)
}

/// Verifies every byte of a checkpoint, then loads it into the trainers; returns its `value`. If the verification fails, the
/// trainers are not changed. Generators must invalidate their caches afterwards.
pub fn load(path: &Path, roles: &mut [(&str, &mut ModelTrainer)]) -> Result<Value> {
    let manifest = Manifest::read(path)?;
    // Of ranks that read their own part, the first checks all the rest.
    let split = |t: &ModelTrainer| t.model.split_over().is_some_and(|split| split.ranks().rank() > 0);
    if !roles.iter().any(|(_, trainer)| split(trainer)) {
        manifest.verify(path)?;
    }
    let at = path.join("state/state.json");
    let bytes = fs::read(&at).map_err(|e| error("cannot read", &at, &e))?;
    let mut state: Value =
        serde_json::from_slice(&bytes).map_err(|e| Error::data(format!("not JSON: {e}")).at(at.display()))?;
    let saved: Vec<String> =
        state["roles"].as_object().map(|r| r.keys().cloned().collect()).unwrap_or_default();
    let asked: Vec<&str> = roles.iter().map(|r| r.0).collect();
    if saved.len() != asked.len() || saved.iter().any(|s| !asked.contains(&s.as_str())) {
        return Err(Error::data(format!("holds the roles {saved:?}, the run has {asked:?}"))
            .at(path.display())
            .fix("resume with the recipe the checkpoint was made with"));
    }
    let file = |name: &str| format!("state/{name}.safetensors");
    let parts = |name: &str| -> Result<&[FilePart]> {
        let missing = || Error::data(format!("lists no {}", file(name))).at(path.display());
        Ok(manifest.files.get(&file(name)).ok_or_else(missing)?)
    };
    for (name, trainer) in roles.iter() {
        tensor_file::check(parts(name)?, trainer).map_err(|e| e.at(path.join(file(name)).display()))?;
    }
    for (name, trainer) in roles.iter_mut() {
        let at = path.join(file(name));
        tensor_file::read(&at, parts(name)?, trainer).map_err(|e| e.at(at.display()))?;
        trainer.zero_grads();
        trainer.model.refresh()?;
        let count = |key: &str| state["roles"][*name][key].as_u64().unwrap_or(0);
        (trainer.optimizer.steps, trainer.model.version) = (count("steps"), count("version"));
    }
    Ok(state["value"].take())
}

/// `N` of `step_N`.
pub(super) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step_")?;
    let step = digits.parse().ok()?;
    (format!("{step}") == digits).then_some(step)
}

/// The names in a directory, sorted.
pub(super) fn names(dir: &Path) -> Result<Vec<String>> {
    let fail = |e: std::io::Error| error("cannot read", dir, &e);
    let mut out = Vec::new();
    for entry in fs::read_dir(dir).map_err(fail)? {
        out.push(entry.map_err(fail)?.file_name().to_string_lossy().into_owned());
    }
    out.sort_unstable();
    Ok(out)
}

/// The names of the files in a directory.
pub(super) fn plain_files(dir: &Path) -> Result<Vec<String>> {
    Ok(names(dir)?.into_iter().filter(|name| dir.join(name).is_file()).collect())
}
