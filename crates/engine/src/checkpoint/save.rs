//! Writes a model directory that transformers loads, atomically.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::format::StorageFormat;
use super::io_error;
use super::write::write_weights;
use crate::model::{Family, Head, ModelConfig, ParamShape, family};
use crate::{Class, Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct SaveOptions<'a> {
    /// Number format of the weights.
    pub dtype: StorageFormat,
    /// Maximum size of a file (a larger single tensor gets its own).
    pub max_shard_bytes: u64,
    /// A model directory from which tokenizer, chat template and generation settings are copied.
    pub source: Option<&'a Path>,
    /// Whether a model already in the directory is replaced. Other files are kept.
    pub overwrite: bool,
    /// Once raised, the save removes what it has written and ends with [`Class::Interrupted`]; `dir` is as it was before.
    pub stop: Option<&'a AtomicBool>,
}

impl SaveOptions<'_> {
    /// The error of a save that was told to stop.
    pub(super) fn stopped(&self) -> Result<()> {
        match self.stop.is_some_and(|stop| stop.load(Ordering::SeqCst)) {
            true => Err(Error::new(Class::Interrupted, "interrupted; nothing was written")),
            false => Ok(()),
        }
    }
}

impl Default for SaveOptions<'_> {
    fn default() -> Self {
        SaveOptions {
            dtype: StorageFormat::Bf16,
            max_shard_bytes: 5_000_000_000,
            source: None,
            overwrite: false,
            stop: None,
        }
    }
}

/// Non-weight files of a model.
const COMPANIONS: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Writes `dir` through a temporary sibling directory, so that it appears complete or not at all.
///
/// `config_json` is the model's original `config.json`, whose fields are kept. `params` returns one fused parameter after the
/// other; only one is in memory at a time.
pub fn save_model(
    dir: &Path,
    config: &ModelConfig,
    config_json: Option<&Value>,
    options: &SaveOptions,
    params: &mut dyn FnMut(&ParamShape) -> Result<Vec<f32>>,
) -> Result<()> {
    save_dir(dir, options, |aside| {
        let family = write_beside(aside, config, config_json, options)?;
        write_weights(aside, family, config, options, params)?;
        sync_dir(aside)
    })
}

/// Writes a directory through a temporary sibling, which `write` fills.
pub(super) fn save_dir(
    dir: &Path,
    options: &SaveOptions,
    write: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    if dir.is_file() {
        return Err(Error::usage("is a file, expected a directory to write").at(dir.display()));
    }
    let occupied = fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    if occupied && !options.overwrite {
        return Err(Error::usage("already exists and is not empty")
            .at(dir.display())
            .fix("choose another directory or remove this one"));
    }
    // A symlink is kept: its target is replaced.
    let real = if occupied { fs::canonicalize(dir) } else { Ok(dir.to_path_buf()) };
    let dir = &real.map_err(|e| io_error("cannot read", dir, &e))?;
    let temporary = sibling(dir, "tmp")?;
    let result = write(&temporary).and_then(|()| options.stopped()).and_then(|()| {
        if !occupied {
            return rename(&temporary, dir);
        }
        let old = sibling(dir, "old")?;
        rename(dir, &old)?;
        rename(&temporary, dir).inspect_err(|_| drop(fs::rename(&old, dir)))?;
        keep_others(&old, dir)?;
        fs::remove_dir_all(&old).map_err(|e| io_error("cannot remove the replaced model", &old, &e))
    });
    if result.is_err() {
        let _ = fs::remove_dir_all(&temporary); // the earlier error is reported
        return result.map_err(|e| if e.class == Class::Interrupted { e.at(dir.display()) } else { e });
    }
    if let Some(parent) = dir.parent().filter(|p| !p.as_os_str().is_empty()) {
        sync_dir(parent)?;
    }
    Ok(())
}

/// Moves non-model files (notes, data, a tokenizer that the new model lacks) from the replaced directory to the new one.
fn keep_others(old: &Path, new: &Path) -> Result<()> {
    let fail = |e: std::io::Error| io_error("cannot read the replaced directory", old, &e);
    for entry in fs::read_dir(old).map_err(fail)? {
        let name = entry.map_err(fail)?.file_name();
        let text = name.to_string_lossy();
        let weights = text.starts_with("model") && text.ends_with(".safetensors");
        let adapter = [super::peft::CONFIG, super::peft::WEIGHTS].contains(&&*text);
        let model = weights || adapter || matches!(&*text, "config.json" | "model.safetensors.index.json");
        if !model && fs::symlink_metadata(new.join(&name)).is_err() {
            fs::rename(old.join(&name), new.join(&name)).map_err(fail)?;
        }
    }
    Ok(())
}

/// Writes everything but the weights.
pub(super) fn write_beside(
    dir: &Path,
    config: &ModelConfig,
    config_json: Option<&Value>,
    options: &SaveOptions,
) -> Result<&'static Family> {
    let _ = fs::remove_dir_all(dir); // left by a crashed process with the same id
    fs::create_dir_all(dir).map_err(|e| io_error("cannot create the directory", dir, &e))?;
    let family = family(config.family)?;
    write_json(&dir.join("config.json"), &updated_config(family, config, config_json, options.dtype))?;
    if let Some(source) = options.source {
        for name in COMPANIONS.iter().filter(|name| source.join(name).is_file()) {
            copy(&source.join(name), &dir.join(name))?;
        }
    }
    Ok(family)
}

/// The original fields with those that saving changes: architecture, dtype, tied embeddings, one label for a score head.
fn updated_config(
    family: &Family,
    config: &ModelConfig,
    original: Option<&Value>,
    dtype: StorageFormat,
) -> Value {
    let mut out = match original.and_then(Value::as_object) {
        Some(fields) => fields.clone(),
        None => family.to_json(config).as_object().cloned().unwrap_or_default(),
    };
    out.insert("architectures".into(), json!([family.architectures().for_head(config.head)]));
    let newer = out.contains_key("dtype");
    if newer {
        out.insert("dtype".into(), json!(dtype.torch_name()));
    }
    if !newer || out.contains_key("torch_dtype") {
        out.insert("torch_dtype".into(), json!(dtype.torch_name()));
    }
    out.insert("tie_word_embeddings".into(), json!(config.tied));
    if config.head == Head::Score {
        out.insert("id2label".into(), json!({"0": "LABEL_0"}));
        out.insert("label2id".into(), json!({"LABEL_0": 0}));
        out.insert("num_labels".into(), json!(1));
        out.remove("problem_type"); // "single_label_classification" would not load with one label
    }
    Value::Object(out)
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let fail = |e: std::io::Error| io_error("cannot write", path, &e);
    let mut file = File::create(path).map_err(fail)?;
    file.write_all(format!("{value:#}\n").as_bytes()).map_err(fail)?;
    file.sync_all().map_err(fail)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map_err(|e| io_error("cannot copy", from, &e))?;
    let file = File::open(to).map_err(|e| io_error("cannot open", to, &e))?;
    file.sync_all().map_err(|e| io_error("cannot finish writing", to, &e))
}

/// The path `.name.<pid>.<kind>` next to `name`.
fn sibling(dir: &Path, kind: &str) -> Result<PathBuf> {
    let Some(name) = dir.file_name() else {
        return Err(Error::usage("not a directory that can be written").at(dir.display()));
    };
    Ok(dir.with_file_name(format!(".{}.{}.{kind}", name.to_string_lossy(), std::process::id())))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| io_error("cannot put the finished directory in place", to, &e))
}

/// A rename is durable once its directory is synced.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| io_error("cannot sync", dir, &e))
}
