//! Writes safetensors files, header first, then tensor by tensor, so that the model is never in memory twice.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::format::StorageFormat;
use super::io_error;
use super::save::{SaveOptions, write_json};
use crate::model::{Family, ModelConfig, ParamShape, StoredPart};
use crate::{Error, Result};

/// A file to write: name, header and number of tensors.
pub(super) struct WritePlan {
    pub file: String,
    pub header: Vec<u8>,
    pub count: usize,
}

/// Writes all tensors of a model, one parameter at a time, into as many files as needed.
pub(super) fn write_weights(
    dir: &Path,
    family: &Family,
    config: &ModelConfig,
    options: &SaveOptions,
    params: &mut dyn FnMut(&ParamShape) -> Result<Vec<f32>>,
) -> Result<()> {
    let tensors = family.tensors(config);
    let parts: Vec<&StoredPart> = tensors.iter().flat_map(|t| &t.parts).collect();
    let plans = plan(&parts, options);
    if plans.len() > 1 {
        write_index(dir, &parts, &plans, options.dtype)?;
    }
    let mut plans = plans.into_iter();
    let mut file: Option<Output> = None;
    for tensor in &tensors {
        options.stopped()?;
        let data = params(&tensor.param)?;
        if data.len() != tensor.param.len() {
            let (name, got, want) = (tensor.param.id, data.len(), tensor.param.len());
            return Err(Error::model(format!("parameter {name:?} has {got} numbers, expected {want}")));
        }
        let mut rest = data.as_slice();
        for part in &tensor.parts {
            let (mine, others) = rest.split_at(part.len());
            rest = others;
            let mut output = match file.take() {
                Some(output) => output,
                None => match plans.next() {
                    Some(plan) => Output::create(dir, plan)?,
                    None => return Err(Error::model("more tensors than planned")),
                },
            };
            output.tensor(part, mine, options.dtype)?;
            output.left -= 1;
            if output.left == 0 { output.finish()? } else { file = Some(output) }
        }
    }
    Ok(())
}

/// Writes tensors into one file; `data` gives each.
pub(super) fn write_file(
    dir: &Path,
    file: &str,
    parts: &[StoredPart],
    dtype: StorageFormat,
    mut data: impl FnMut(usize) -> Result<Vec<f32>>,
) -> Result<()> {
    let all: Vec<&StoredPart> = parts.iter().collect();
    let plan = WritePlan { file: file.into(), header: header(&all, dtype), count: parts.len() };
    let mut output = Output::create(dir, plan)?;
    for (i, part) in parts.iter().enumerate() {
        output.tensor(part, &data(i)?, dtype)?;
    }
    output.finish()
}

/// Assigns tensors to files and builds each header.
pub(super) fn plan(parts: &[&StoredPart], options: &SaveOptions) -> Vec<WritePlan> {
    let bytes = |p: &StoredPart| (p.len() * options.dtype.size()) as u64;
    let mut cuts: Vec<Vec<&StoredPart>> = Vec::new();
    let mut filled = u64::MAX;
    for part in parts {
        match cuts.last_mut().filter(|_| filled.saturating_add(bytes(part)) <= options.max_shard_bytes) {
            Some(cut) => {
                cut.push(part);
                filled += bytes(part);
            }
            None => {
                cuts.push(vec![part]);
                filled = bytes(part);
            }
        }
    }
    let total = cuts.len();
    let name = |i: usize| match total {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{total:05}.safetensors", i + 1),
    };
    let make = |(i, cut): (usize, &Vec<&StoredPart>)| WritePlan {
        file: name(i),
        header: header(cut, options.dtype),
        count: cut.len(),
    };
    cuts.iter().enumerate().map(make).collect()
}

/// A safetensors header: its length, then JSON, padded for alignment.
fn header(parts: &[&StoredPart], dtype: StorageFormat) -> Vec<u8> {
    let mut fields = Map::new();
    fields.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for part in parts {
        let end = at + part.len() * dtype.size();
        let info = json!({"dtype": dtype.stored_name(), "shape": part.shape, "data_offsets": [at, end]});
        fields.insert(part.name.clone(), info);
        at = end;
    }
    let mut text = Value::Object(fields).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out
}

pub(super) fn write_index(
    dir: &Path,
    parts: &[&StoredPart],
    plans: &[WritePlan],
    dtype: StorageFormat,
) -> Result<()> {
    let files = plans.iter().flat_map(|p| std::iter::repeat_n(p.file.as_str(), p.count));
    let map: Map<String, Value> = parts.iter().zip(files).map(|(p, f)| (p.name.clone(), json!(f))).collect();
    let total: usize = parts.iter().map(|p| p.len() * dtype.size()).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    write_json(&dir.join("model.safetensors.index.json"), &index)
}

/// Encodes a stored tensor in its stored order, in pieces.
pub(super) fn encoded(
    part: &StoredPart,
    data: &[f32],
    dtype: StorageFormat,
    each: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let reordered: Vec<f32>;
    let data = if part.is_rearranged() {
        reordered = (0..data.len()).map(|at| data[part.decoder_index(at)]).collect();
        &reordered
    } else {
        data
    };
    let mut buffer = Vec::new();
    for chunk in data.chunks(1 << 16) {
        buffer.clear();
        dtype.encode(chunk, &mut buffer).map_err(|e| e.at(&part.name))?;
        each(&buffer)?;
    }
    Ok(())
}

/// A safetensors file being written.
struct Output {
    path: PathBuf,
    file: BufWriter<File>,
    left: usize,
}

impl Output {
    fn create(dir: &Path, plan: WritePlan) -> Result<Output> {
        let path = dir.join(&plan.file);
        let file = File::create(&path).map_err(|e| io_error("cannot create the file", &path, &e))?;
        let mut output = Output { path, file: BufWriter::new(file), left: plan.count };
        output.bytes(&plan.header)?;
        Ok(output)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| io_error("cannot write", &self.path, &e))
    }

    fn tensor(&mut self, part: &StoredPart, data: &[f32], dtype: StorageFormat) -> Result<()> {
        encoded(part, data, dtype, &mut |chunk| self.bytes(chunk))
    }

    fn finish(self) -> Result<()> {
        let fail = |e: &std::io::Error| io_error("cannot finish writing", &self.path, e);
        let file = self.file.into_inner().map_err(|e| fail(e.error()))?;
        file.sync_all().map_err(|e| fail(&e))
    }
}
