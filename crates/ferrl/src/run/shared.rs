//! Checkpoints that ranks write together: each writes what it owns of the state, and some tensors of the model, straight to their
//! places in the files. The bytes are those that one process would write. Rank 0 then has every checksum, and nothing of the others'
//! numbers has gone through it.

use super::files::{Files, error};
use super::manifest::{FilePart, hex};
use super::tensor_file::{FileTensor, StateFile};
use crate::ranks::gather;
use ferrl_engine::checkpoint::{FileLayout, SaveOptions, StorageFormat};
use ferrl_engine::model::Model;
use ferrl_engine::train::{ModelTrainer, StateKind};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{DType, Ranks};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes that a rank has written.
#[derive(Serialize, Deserialize)]
struct Written {
    /// The file, below the checkpoint.
    file: String,
    /// Where they begin.
    at: u64,
    part: FilePart,
}

/// What the manifest says of files, by their names.
pub(crate) type FileParts = BTreeMap<String, Vec<FilePart>>;

/// Whether the ranks of a run write this trainer's state together.
pub(crate) fn is_shared(trainer: &ModelTrainer) -> bool {
    trainer.model.split_over().is_some() && trainer.model.adapter().is_none()
}

/// The folder of a role's model in a checkpoint.
pub(crate) fn folder(index: usize, role: &str) -> String {
    if index == 0 { "model".to_string() } else { format!("model_{role}") }
}

/// Writes this rank's part of state and models of all roles. All ranks call it together; rank 0 has made the folders. What the
/// manifest says of these files comes back, on every rank.
pub(crate) fn write(
    files: &Files,
    dir: &Path,
    roles: &[(&str, &ModelTrainer)],
    dtype: Option<StorageFormat>,
) -> Result<FileParts> {
    let mut all = FileParts::new();
    for (i, (name, trainer)) in roles.iter().enumerate() {
        let file = format!("state/{name}.safetensors");
        all.insert(file.clone(), write_state(files, &dir.join(&file), trainer)?);
        let dtype = dtype.unwrap_or(trainer.model.dtype.into());
        let folder = folder(i, name);
        for (file, parts) in write_model(files, &dir.join(&folder), &trainer.model, dtype)? {
            all.insert(format!("{folder}/{file}"), parts);
        }
    }
    Ok(all)
}

/// The ranks that a model is split over.
fn ranks_of(model: &Model) -> Result<&Ranks> {
    let split = model.split_over().ok_or_else(|| Error::rank("a model that is not split over ranks"))?;
    Ok(split.ranks())
}

fn write_state(files: &Files, path: &Path, trainer: &ModelTrainer) -> Result<Vec<FilePart>> {
    let (model, state) = (&trainer.model, StateFile::of(trainer));
    let ranks = ranks_of(model)?;
    if ranks.rank() == 0 {
        begin(files, path, &state.header, state.bytes())?;
    }
    ranks.all_gather(&[])?; // the file is there
    let mut out = Places::open(files, path, "")?;
    let mut start = state.header.len() as u64;
    for t in &state.tensors {
        let numbers = own_numbers(trainer, t);
        let first_copy = model.split_over().is_some_and(|split| ranks.rank() < split.shards());
        if first_copy && !numbers.is_empty() {
            let values = trainer.own_state(t.place.0, t.place.1)?.unwrap_or_default();
            let bytes: Vec<u8> = match t.dtype {
                DType::U8 => values.iter().map(|&x| x as u8).collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            out.put(start + (numbers.start * t.dtype.size()) as u64, &t.name, &bytes)?;
        }
        start += t.bytes() as u64;
    }
    let mut written = gather(ranks, out.finish()?)?.into_iter().flatten().collect::<Vec<_>>();
    merge(&mut written, path, &state.header, state.bytes())
}

/// The numbers of a tensor that this rank owns.
fn own_numbers(trainer: &ModelTrainer, t: &FileTensor) -> std::ops::Range<usize> {
    let own = trainer.model.params[t.place.0].own.clone();
    t.place.1.checked_sub(1).map_or(own.clone(), |kind| StateKind::ALL[kind].range(&own))
}

/// Writes this rank's tensors of a model into a folder that has everything else. All ranks call it together; what the manifest
/// says of the files comes back.
pub(crate) fn write_model(
    files: &Files,
    dir: &Path,
    model: &Model,
    dtype: StorageFormat,
) -> Result<FileParts> {
    let ranks = ranks_of(model)?;
    let layout = FileLayout::of(&model.config, &SaveOptions { dtype, ..Default::default() })?;
    if ranks.rank() == 0 {
        for file in &layout.files {
            begin(files, &dir.join(&file.name), &file.header, file.bytes)?;
        }
    }
    ranks.all_gather(&[])?; // the files are there
    let open =
        |file: &ferrl_engine::checkpoint::FileHead| Places::open(files, &dir.join(&file.name), &file.name);
    let mut outs = layout.files.iter().map(open).collect::<Result<Vec<_>>>()?;
    model.hand_out(|param, values| {
        layout.store(param, &values, |t| outs[t.file].put(t.at, &t.name, &t.bytes))
    })?;
    let own = outs.into_iter().map(Places::finish).collect::<Result<Vec<_>>>()?;
    let written: Vec<Written> =
        gather(ranks, own.into_iter().flatten().collect::<Vec<_>>())?.into_iter().flatten().collect();
    let mut all = FileParts::new();
    let mut by_file: BTreeMap<String, Vec<Written>> = BTreeMap::new();
    written.into_iter().for_each(|w| by_file.entry(w.file.clone()).or_default().push(w));
    for file in &layout.files {
        let mut written = by_file.remove(&file.name).unwrap_or_default();
        all.insert(file.name.clone(), merge(&mut written, &dir.join(&file.name), &file.header, file.bytes)?);
    }
    Ok(all)
}

/// A file of its final length, with its header.
fn begin(files: &Files, path: &Path, header: &[u8], bytes: u64) -> Result<()> {
    let mut file = files.create(path)?;
    file.put(header)?;
    file.sync()?;
    files.truncate(path, bytes)
}

/// All of a file's parts, in order; they must cover it.
fn merge(written: &mut [Written], path: &Path, header: &[u8], bytes: u64) -> Result<Vec<FilePart>> {
    written.sort_by_key(|w| w.at);
    let (mut parts, mut at) = (vec![FilePart::of("header", header)], header.len() as u64);
    for w in written.iter() {
        if w.at != at {
            break;
        }
        at += w.part.bytes;
        parts.push(w.part.clone());
    }
    if at != bytes || parts.len() != written.len() + 1 {
        return Err(Error::rank("the ranks have not written every byte of the file").at(path.display()));
    }
    Ok(parts)
}

/// A file that several ranks write at places of their own.
struct Places {
    out: File,
    path: std::path::PathBuf,
    files: Files,
    name: String,
    written: Vec<Written>,
}

impl Places {
    fn open(files: &Files, path: &Path, name: &str) -> Result<Self> {
        files.point(path)?;
        let out = OpenOptions::new().write(true).open(path);
        let out = out.map_err(|e| error("cannot open for writing", path, &e))?;
        Ok(Places { out, path: path.into(), files: files.clone(), name: name.into(), written: Vec::new() })
    }

    fn put(&mut self, at: u64, name: &str, bytes: &[u8]) -> Result<()> {
        self.files.point(&self.path)?;
        let done = self.out.seek(SeekFrom::Start(at)).and_then(|_| self.out.write_all(bytes));
        done.map_err(|e| error("cannot write", &self.path, &e))?;
        let xxh3 = hex(xxh3_128(bytes));
        let part = FilePart { name: name.into(), bytes: bytes.len() as u64, xxh3 };
        self.written.push(Written { file: self.name.clone(), at, part });
        Ok(())
    }

    fn finish(self) -> Result<Vec<Written>> {
        let done = if self.written.is_empty() { Ok(()) } else { self.out.sync_all() };
        done.map_err(|e| error("cannot finish writing", &self.path, &e))?;
        Ok(self.written)
    }
}
