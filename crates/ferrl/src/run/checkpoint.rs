//! Checkpoints: all of a run's state in one directory, written atomically.
//!
//! ```text
//! checkpoints/step_N/
//!   manifest.json               sizes and checksums of all the rest
//!   model/                      the first role, as Hugging Face lays it out; others in model_<role>/
//!   state/<role>.safetensors    f32 masters, moments, average
//!   state/state.json            everything else
//! ```
//!
//! `step_N.tmp` is being written, `step_N.old` is being replaced, `step_N.del` is being removed.

use super::files::Files;
use super::manifest::{FilePart, Manifest, parts_of};
use super::resume::{names, plain_files, step_of};
use super::{shared, tensor_file};
use ferrl_engine::checkpoint::{
    SaveOptions, StorageFormat, base_of, save_adapter, save_model, write_without_tensors,
};
use ferrl_engine::train::ModelTrainer;
use ferrl_engine::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// What is kept, and how models are written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckpointOptions {
    /// How many of the latest to keep; at least one is.
    pub keep: usize,
    /// How many of the best to keep beside them.
    pub keep_best: usize,
    /// Number format of `model/`; as the model computes where not given.
    pub dtype: Option<StorageFormat>,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        CheckpointOptions { keep: 2, keep_best: 0, dtype: None }
    }
}

#[derive(Clone, Copy)]
pub struct TrainedModel<'a> {
    /// `policy`, `critic` and the like.
    pub name: &'a str,
    /// The model and its optimizer, between two updates.
    pub trainer: &'a ModelTrainer,
    /// The `config.json` it came with, whose fields are kept.
    pub config_json: Option<&'a Value>,
    /// A model directory whose tokenizer and other files come along.
    pub source: Option<&'a Path>,
}

/// What a checkpoint was measured by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The metric's name, such as `eval/pass@1`.
    pub metric: String,
    pub value: f64,
    /// Whether lower is better.
    pub lower: bool,
}

/// A checkpoint that was made.
#[derive(Clone, Debug)]
pub struct Saved {
    pub path: PathBuf,
    /// What went wrong afterwards, while old checkpoints were removed.
    pub problems: Vec<Error>,
}

#[derive(Clone, Debug)]
pub struct Checkpoints {
    dir: PathBuf,
    files: Files,
    options: CheckpointOptions,
}

impl Checkpoints {
    /// In a directory that exists.
    pub fn new(dir: &Path, files: &Files, options: CheckpointOptions) -> Checkpoints {
        Checkpoints { dir: dir.into(), files: files.clone(), options }
    }

    /// Saves the roles and `value`, which holds whatever else the run needs to go on. After an error the earlier
    /// checkpoints are as they were.
    pub fn save(
        &self,
        step: u64,
        roles: &[TrainedModel<'_>],
        value: &Value,
        best: Option<Best>,
    ) -> Result<Saved> {
        let place = self.dir.join(format!("step_{step}"));
        let aside = self.aside(step);
        let old = self.dir.join(format!("step_{step}.old"));
        if !self.dir.is_dir() {
            self.files.create_dir_all(&self.dir)?; // somebody removed it
        }
        self.clean()?;
        let best = best.filter(|b| b.value.is_finite());
        let result = self.write(&aside, step, roles, value, best.clone()).and_then(|()| {
            if place.exists() {
                self.files.rename(&place, &old)?;
            }
            self.files.rename(&aside, &place)
        });
        if let Err(e) = result {
            let _ = self.clean(); // gives the space back if it can; the first error is the one to report
            return Err(e);
        }
        self.files.sync_dir(&self.dir)?;
        let kept = self.clean().and_then(|()| self.retain(best.as_ref()));
        Ok(Saved { path: place, problems: kept.err().into_iter().collect() })
    }

    fn write(
        &self,
        dir: &Path,
        step: u64,
        roles: &[TrainedModel<'_>],
        value: &Value,
        best: Option<Best>,
    ) -> Result<()> {
        let mut manifest = Manifest::new(step, best);
        let mut about = Map::new();
        let together = roles.iter().all(|role| shared::is_shared(role.trainer));
        self.files.create_dir(dir)?;
        self.files.create_dir(&dir.join("state"))?;
        for (i, role) in roles.iter().enumerate() {
            super::check_name(role.name)?;
            let (steps, version) = (role.trainer.optimizer.steps, role.trainer.model.version);
            let folder = shared::folder(i, role.name);
            if about
                .insert(role.name.into(), json!({"steps": steps, "version": version, "model": folder}))
                .is_some()
            {
                return Err(Error::usage(format!("two roles are named {:?}", role.name)));
            }
            match together {
                true => self.write_beside(&dir.join(&folder), role)?,
                false => {
                    let name = format!("state/{}.safetensors", role.name);
                    let parts = tensor_file::write(&self.files, &dir.join(&name), role.trainer)?;
                    manifest.files.insert(name, parts);
                    self.write_model(&dir.join(&folder), role)?;
                }
            }
            for file in plain_files(&dir.join(&folder))? {
                manifest.files.insert(format!("{folder}/{file}"), parts_of(&dir.join(&folder).join(&file))?);
            }
        }
        if together {
            let all: Vec<_> = roles.iter().map(|role| (role.name, role.trainer)).collect();
            manifest.files.extend(shared::write(&self.files, dir, &all, self.options.dtype)?);
            for (i, role) in roles.iter().enumerate() {
                self.files.sync_dir(&dir.join(shared::folder(i, role.name)))?;
            }
        }
        let state = format!("{:#}\n", json!({"step": step, "roles": about, "value": value}));
        let mut file = self.files.create(&dir.join("state/state.json"))?;
        file.put(state.as_bytes())?;
        file.sync()?;
        manifest.files.insert("state/state.json".into(), vec![FilePart::of("", state.as_bytes())]);
        self.files.sync_dir(&dir.join("state"))?;
        manifest.write(dir, &self.files)?;
        self.files.sync_dir(dir)
    }

    /// Where ranks write a checkpoint before it has its name.
    pub fn aside(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step_{step}.tmp"))
    }

    /// All of a model's directory but the tensors, which the ranks write together.
    fn write_beside(&self, dir: &Path, role: &TrainedModel<'_>) -> Result<()> {
        let model = &role.trainer.model;
        let dtype = self.options.dtype.unwrap_or(model.dtype.into());
        let options = SaveOptions { dtype, source: role.source, ..SaveOptions::default() };
        self.files.point(dir)?;
        write_without_tensors(dir, model, role.config_json, &options)
    }

    /// A directory that transformers loads, synced by the engine.
    fn write_model(&self, dir: &Path, role: &TrainedModel<'_>) -> Result<()> {
        let model = &role.trainer.model;
        let dtype = self.options.dtype.unwrap_or(model.dtype.into());
        let options = SaveOptions { dtype, source: role.source, ..SaveOptions::default() };
        if let (Some(_), Some(source)) = (model.adapter(), role.source) {
            self.files.point(dir)?;
            let base = base_of(source)?.unwrap_or_else(|| source.to_path_buf());
            return save_adapter(dir, model, &base, role.config_json, &options);
        }
        save_model(dir, &model.config, role.config_json, &options, &mut |shape| {
            self.files.point(dir)?;
            let param = model.find(shape.id);
            model.read(param.ok_or_else(|| Error::model(format!("parameter {:?} is missing", shape.name())))?)
        })
    }

    /// Removes what a process that was killed left: halves of checkpoints, and those that are no longer to be kept. `best`
    /// says by what they are rated.
    pub fn tidy(&self, best: Option<Best>) -> Result<()> {
        self.clean()?;
        self.retain(best.as_ref())
    }

    /// Removes what a save or removal left that was cut short.
    pub fn clean(&self) -> Result<()> {
        for name in names(&self.dir)? {
            let path = self.dir.join(&name);
            let Some((stem, kind)) = name.rsplit_once('.').filter(|(stem, _)| step_of(stem).is_some()) else {
                continue;
            };
            match kind {
                "tmp" | "del" => self.files.remove_dir_all(&path)?,
                // Replaced, or about to be when the process ended.
                "old" if self.dir.join(stem).exists() => self.discard(&path, stem)?,
                "old" => self.files.rename(&path, &self.dir.join(stem))?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes a checkpoint; half removed, it is not taken for one.
    fn discard(&self, path: &Path, stem: &str) -> Result<()> {
        let condemned = self.dir.join(format!("{stem}.del"));
        self.files.rename(path, &condemned)?;
        self.files.remove_dir_all(&condemned)
    }

    /// Removes checkpoints that are neither among the latest nor among the best.
    fn retain(&self, best: Option<&Best>) -> Result<()> {
        let mut all = self.list()?;
        all.reverse();
        let mut keep: Vec<u64> = all.iter().take(self.options.keep.max(1)).map(|c| c.0).collect();
        if let Some(best) = best {
            let mut rated: Vec<(f64, u64)> = all
                .iter()
                .filter_map(|(step, b)| Some((b.as_ref().filter(|b| b.metric == best.metric)?.value, *step)))
                .map(|(value, step)| (if best.lower { value } else { -value }, step))
                .collect();
            rated.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            keep.extend(rated.iter().take(self.options.keep_best).map(|r| r.1));
        } else if self.options.keep_best > 0 {
            keep.extend(all.iter().filter(|c| c.1.is_some()).map(|c| c.0)); // nothing to compare with
        }
        for (step, _) in all.iter().filter(|c| !keep.contains(&c.0)) {
            let stem = format!("step_{step}");
            self.discard(&self.dir.join(&stem), &stem)?;
        }
        Ok(())
    }

    /// Steps with a checkpoint whose manifest is whole, in order, and what each was measured by.
    pub fn list(&self) -> Result<Vec<(u64, Option<Best>)>> {
        let mut out = Vec::new();
        for step in names(&self.dir)?.iter().filter_map(|n| step_of(n)) {
            if let Ok(manifest) = Manifest::read(&self.dir.join(format!("step_{step}"))) {
                out.push((step, manifest.best));
            }
        }
        out.sort_by_key(|c| c.0);
        Ok(out)
    }
}
