//! Parallel checkpoint writing: the layout of a model's files, so that each rank writes some tensors at their offsets. The files
//! are byte-identical to those of [`save_model`](super::save_model).

use super::save::{SaveOptions, save_dir, sync_dir, write_beside};
use super::write::{encoded, plan, write_index};
use crate::Result;
use crate::model::{Model, ModelConfig, Tensor, family};
use serde_json::Value;
use std::path::Path;

pub struct FileLayout<'a> {
    /// The files, in the order of their tensors.
    pub files: Vec<FileHead>,
    tensors: Vec<Tensor>,
    /// File index and offset of each stored tensor, by parameter.
    places: Vec<Vec<(usize, u64)>>,
    options: SaveOptions<'a>,
}

/// A file without its tensors' data.
pub struct FileHead {
    pub name: String,
    /// Safetensors header, with its length prefix.
    pub header: Vec<u8>,
    /// Total file size.
    pub bytes: u64,
}

pub struct StoredTensor {
    /// Index of its file.
    pub file: usize,
    /// Offset in the file.
    pub at: u64,
    pub name: String,
    pub bytes: Vec<u8>,
}

impl<'a> FileLayout<'a> {
    pub fn of(config: &ModelConfig, options: &SaveOptions<'a>) -> Result<Self> {
        let tensors = family(config.family)?.tensors(config);
        let parts: Vec<_> = tensors.iter().flat_map(|t| &t.parts).collect();
        let mut sizes = parts.iter().map(|part| (part.len() * options.dtype.size()) as u64);
        let (mut files, mut flat) = (Vec::new(), Vec::new());
        for (number, file) in plan(&parts, options).into_iter().enumerate() {
            let mut at = file.header.len() as u64;
            for size in sizes.by_ref().take(file.count) {
                flat.push((number, at));
                at += size;
            }
            files.push(FileHead { name: file.file, header: file.header, bytes: at });
        }
        let mut flat = flat.into_iter();
        let places = tensors.iter().map(|t| flat.by_ref().take(t.parts.len()).collect()).collect();
        Ok(FileLayout { files, tensors, places, options: *options })
    }

    /// Encodes the stored tensors of a parameter, one at a time.
    pub fn store(
        &self,
        param: usize,
        values: &[f32],
        mut each: impl FnMut(StoredTensor) -> Result<()>,
    ) -> Result<()> {
        let mut rest = values;
        for (part, &(file, at)) in self.tensors[param].parts.iter().zip(&self.places[param]) {
            let (own, after) = rest.split_at(part.len());
            let mut bytes = Vec::with_capacity(own.len() * self.options.dtype.size());
            encoded(part, own, self.options.dtype, &mut |chunk| {
                bytes.extend_from_slice(chunk);
                Ok(())
            })?;
            each(StoredTensor { file, at, name: part.name.clone(), bytes })?;
            rest = after;
        }
        Ok(())
    }
}

/// Writes everything of a model's directory but the tensors' data, into a new directory.
pub fn write_without_tensors(
    dir: &Path,
    model: &Model,
    json: Option<&Value>,
    options: &SaveOptions<'_>,
) -> Result<()> {
    let family = write_beside(dir, &model.config, json, options)?;
    let tensors = family.tensors(&model.config);
    let parts: Vec<_> = tensors.iter().flat_map(|t| &t.parts).collect();
    let plans = plan(&parts, options);
    if plans.len() > 1 {
        write_index(dir, &parts, &plans, options.dtype)?;
    }
    Ok(())
}

/// [`save_model`](super::save_model) with the tensors written by `write` into the temporary directory.
pub fn save_shared(
    dir: &Path,
    model: &Model,
    json: Option<&Value>,
    options: &SaveOptions<'_>,
    write: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    save_dir(dir, options, |aside| {
        write_without_tensors(aside, model, json, options)?;
        write(aside)?;
        sync_dir(aside)
    })
}
