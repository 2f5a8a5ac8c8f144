//! What a run needs of the disk: its checkpoints and the models its stages leave.
//!
//! A checkpoint is written whole before an older one is removed, so one more than is kept lies on the disk for a while.

use crate::plan::memory::{moment_bytes, weights};
use crate::recipe::Recipe;
use ferrl_engine::checkpoint::StorageFormat;
use ferrl_engine::model::ModelConfig;
use ferrl_engine::model::adapter::adapter_weights;
use ferrl_engine::{Error, Result};
use ferrl_kernels::DType;
use std::path::Path;

/// Bytes of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub checkpoint: u64,
    /// Checkpoints on the disk at once: the retained ones and the one being written.
    pub copies: usize,
    /// The model that the stage leaves in `stages/`.
    pub model: u64,
}

impl Disk {
    /// Of a stage that trains `config`, and a critic on its own weights beside it.
    pub fn of(recipe: &Recipe, config: &ModelConfig, critic: Option<&ModelConfig>) -> Disk {
        // Another name than those of the compute types is refused with the recipe.
        let own = StorageFormat::from(recipe.dtype().unwrap_or(DType::F32));
        let optim = &recipe.optim;
        let state = 4 * (1 + usize::from(optim.ema.is_some()));
        // An adapter's base stays where it is; what is trained is written in f32.
        let adapter = recipe.adapter.as_ref().and_then(|a| a.options().ok());
        let stored = |c: &ModelConfig| match &adapter {
            Some(options) => adapter_weights(c, options).map_or(0, |(_, trained)| trained),
            None => weights(c),
        };
        let own = if adapter.is_some() { StorageFormat::F32 } else { own };
        let models = || std::iter::once(config).chain(critic);
        let (count, moments): (usize, usize) =
            (models().map(stored).sum(), models().map(|c| moment_bytes(recipe, c)).sum());
        let c = &recipe.checkpoint;
        Disk {
            checkpoint: (count * (state + own.size()) + moments) as u64,
            copies: c.keep.max(1) + c.keep_best + 1,
            model: (4 * stored(config)) as u64,
        }
    }

    /// Bytes at the peak of a run of these stages: their checkpoints share the places, their models stay.
    pub fn total(stages: &[Disk]) -> u64 {
        let checkpoints = stages.iter().map(|s| s.checkpoint * s.copies as u64).max();
        checkpoints.unwrap_or(0) + stages.iter().map(|s| s.model).sum::<u64>()
    }
}

/// Refuses a run whose checkpoints and models do not fit on the disk of its folder. What the folder holds already counts as
/// free: new checkpoints take the place of old ones.
pub fn ensure(stages: &[Disk], run: &Path) -> Result<()> {
    let Some(free) = free(run) else { return Ok(()) };
    let (needed, there) = (Disk::total(stages), held(&run.join("checkpoints")));
    let Some(largest) = stages.iter().max_by_key(|s| s.checkpoint).filter(|_| needed > free + there) else {
        return Ok(());
    };
    let (copies, each) = (largest.copies, size(largest.checkpoint));
    let models: u64 = stages.iter().map(|s| s.model).sum();
    Err(Error::resource(format!(
        "the run needs {} of disk: {copies} checkpoints of {each} ({} kept and one being written) and models of {}; \
         {} is free",
        size(needed),
        copies - 1,
        size(models),
        size(free + there)
    ))
    .at(run.display())
    .fix(match copies > 2 {
        true => "checkpoint.keep = 1, model.dtype = \"bf16\", or --runs DIR on a larger disk",
        false => "model.dtype = \"bf16\", or --runs DIR on a larger disk",
    }))
}

/// Bytes of all files in a folder.
fn held(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes = |e: std::fs::DirEntry| match e.metadata() {
        Ok(m) if m.is_dir() => held(&e.path()),
        Ok(m) => m.len(),
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    let kib = bytes as f64 / 1024.0;
    match kib {
        _ if kib < 1024.0 => format!("{kib:.0} KiB"),
        _ if kib < 1024.0 * 1024.0 => format!("{:.1} MiB", kib / 1024.0),
        _ => format!("{:.1} GiB", kib / 1024.0 / 1024.0),
    }
}

/// Bytes that a user may still write on the disk of `path`, which need not exist yet; `None` where the system does not say.
pub fn free(path: &Path) -> Option<u64> {
    let there = path.ancestors().find(|p| p.exists()).filter(|p| !p.as_os_str().is_empty());
    free_at(there.unwrap_or(Path::new(".")))
}

#[cfg(unix)]
fn free_at(path: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(path).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
fn free_at(_path: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_share_their_places_and_models_stay() {
        let stage = |checkpoint, copies, model| Disk { checkpoint, copies, model };
        assert_eq!(Disk::total(&[]), 0);
        assert_eq!(Disk::total(&[stage(100, 3, 7), stage(80, 2, 7)]), 300 + 14);
    }

    #[test]
    fn the_disk_of_a_folder_that_is_not_there_yet_is_that_of_the_folder_above() {
        if let Some(free) = free(Path::new("no/such/folder")) {
            assert!(free > 0);
        }
    }
}
