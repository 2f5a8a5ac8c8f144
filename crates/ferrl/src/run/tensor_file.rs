//! The state of one trainer as a safetensors file: masters, moments and average, bit for bit.
//!
//! The manifest has a checksum for each tensor, or for each piece of it where ranks have written the file together.

use super::files::Files;
use super::manifest::{FilePart, hex};
use ferrl_engine::model::ParamShape;
use ferrl_engine::train::{ModelTrainer, StateKind};
use ferrl_engine::{Error, Result};
use ferrl_kernels::{Buffer, DType};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Numbers moved at once.
const CHUNK: usize = 1 << 16;

/// What the file of a trainer's state consists of; the same on all ranks that split the model.
pub(super) struct StateFile {
    /// Its first bytes.
    pub header: Vec<u8>,
    /// What follows.
    pub tensors: Vec<FileTensor>,
}

impl StateFile {
    pub fn of(trainer: &ModelTrainer) -> Self {
        let mut tensors = Vec::new();
        for (i, param) in trainer.model.params.iter().enumerate().filter(|(i, _)| trainer.is_stored(*i)) {
            let buffers = [Some(&param.master)].into_iter().chain(trainer.optimizer.buffers(i));
            for (kind, (name, buffer)) in names().zip(buffers).enumerate() {
                tensors.extend(buffer.map(|b| FileTensor {
                    name: format!("{name}.{}", param.shape.id),
                    shape: shape(kind, &param.shape),
                    place: (i, kind),
                    dtype: b.dtype(),
                }));
            }
        }
        let (mut fields, mut at) = (Map::new(), 0);
        for t in &tensors {
            let (end, dtype) = (at + t.bytes(), if t.dtype == DType::U8 { "U8" } else { "F32" });
            fields
                .insert(t.name.clone(), json!({"dtype": dtype, "shape": t.shape, "data_offsets": [at, end]}));
            at = end;
        }
        let mut text = Value::Object(fields).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.extend(text);
        StateFile { header, tensors }
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        (self.header.len() + self.tensors.iter().map(FileTensor::bytes).sum::<usize>()) as u64
    }
}

/// Writes all of a trainer's numbers; what the manifest says of the file.
pub(crate) fn write(files: &Files, path: &Path, trainer: &ModelTrainer) -> Result<Vec<FilePart>> {
    let StateFile { header, tensors } = StateFile::of(trainer);
    let fail = |e: &std::io::Error| super::files::error("cannot write", path, e);
    let mut out = BufWriter::with_capacity(1 << 20, files.create(path)?);
    out.write_all(&header).map_err(|e| fail(&e))?;
    let mut parts = vec![FilePart::of("header", &header)];
    let (mut numbers, mut bytes) = (vec![0.0; CHUNK], Vec::with_capacity(4 * CHUNK));
    let split = trainer.model.split_over().is_some();
    for t in &tensors {
        let (mut hash, buffer) = (Xxh3::new(), t.buffer(trainer));
        // What other ranks have parts of comes whole, anything else a chunk at a time.
        let whole = if split { trainer.state_tensor(t.place.0, t.place.1)? } else { None };
        for at in (0..t.len()).step_by(CHUNK) {
            let n = CHUNK.min(t.len() - at);
            match &whole {
                Some(whole) => numbers[..n].copy_from_slice(&whole[at..at + n]),
                None => trainer.model.backend.read(buffer, at, &mut numbers[..n])?,
            }
            bytes.clear();
            match t.dtype {
                DType::U8 => bytes.extend(numbers[..n].iter().map(|&x| x as u8)),
                _ => bytes.extend(numbers[..n].iter().flat_map(|x| x.to_le_bytes())),
            }
            hash.update(&bytes);
            out.write_all(&bytes).map_err(|e| fail(&e))?;
        }
        parts.push(FilePart { name: t.name.clone(), bytes: t.bytes() as u64, xxh3: hex(hash.digest128()) });
    }
    let file = out.into_inner().map_err(|e| fail(e.error()))?;
    file.sync()?;
    Ok(parts)
}

pub(super) struct FileTensor {
    pub name: String,
    shape: [usize; 2],
    /// Parameter and kind: 0 for the weights, then [`StateKind`].
    pub place: (usize, usize),
    pub dtype: DType,
}

impl FileTensor {
    fn len(&self) -> usize {
        self.shape[0] * self.shape[1]
    }
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }
    /// Where a trainer has its numbers, or this rank's.
    fn buffer<'a>(&self, trainer: &'a ModelTrainer) -> &'a Buffer {
        let (param, kind) = self.place;
        let master = &trainer.model.params[param].master;
        kind.checked_sub(1).and_then(|i| trainer.optimizer.buffers(param)[i]).unwrap_or(master)
    }
}

/// Names of the kinds of tensors of a parameter.
fn names() -> impl Iterator<Item = &'static str> {
    std::iter::once("master").chain(StateKind::ALL.map(StateKind::name))
}

/// The kind's shape: the parameter's, or one row where it has a number a block.
fn shape(kind: usize, of: &ParamShape) -> [usize; 2] {
    let len = kind.checked_sub(1).map_or(of.len(), |i| StateKind::ALL[i].range(&(0..of.len())).len());
    if len == of.len() { [of.rows, of.cols] } else { [1, len] }
}

/// Bytes of a number of that kind.
fn width(kind: usize, coded: bool) -> usize {
    kind.checked_sub(1).map_or(4, |i| StateKind::ALL[i].dtype(coded).size())
}

/// Whether a file's tensors are those of the trainer's model.
pub(crate) fn check(parts: &[FilePart], trainer: &ModelTrainer) -> Result<()> {
    let parts = &tensors(parts);
    let mut known = vec!["header".to_string()];
    for (i, param) in trainer.model.params.iter().enumerate().filter(|(i, _)| trainer.is_stored(*i)) {
        let (name, coded) = (param.shape.id, trainer.optimizer.is_coded(&trainer.model, i));
        if !parts.iter().any(|p| p.name == format!("master.{name}")) {
            return Err(other_model(format!("parameter {name:?} is not in the checkpoint")));
        }
        for (kind, prefix) in names().enumerate() {
            let (full, shape, width) =
                (format!("{prefix}.{name}"), shape(kind, &param.shape), width(kind, coded));
            let want = shape[0] * shape[1];
            if let Some(part) = parts.iter().find(|p| p.name == full && p.bytes != (want * width) as u64) {
                return Err(match part.bytes {
                    _ if [1, 4].map(|w| (want * w) as u64).contains(&part.bytes) => Error::data(format!(
                        "tensor {full:?} is stored in {} bytes a number, this run's optimizer has {width}",
                        part.bytes / want as u64
                    ))
                    .fix("the `optim.name` that the checkpoint was made with"),
                    bytes => other_model(format!(
                        "tensor {full:?} has {} numbers, the model's {name} has {want}",
                        bytes / width as u64
                    )),
                });
            }
            known.push(full);
        }
    }
    match parts.iter().find(|p| !known.contains(&p.name)) {
        None => Ok(()),
        Some(part) => Err(other_model(format!("tensor {:?} has no place in the model", part.name))),
    }
}

/// Tensors by name, with the bytes of all their pieces.
fn tensors(parts: &[FilePart]) -> Vec<FilePart> {
    let mut all: Vec<FilePart> = Vec::new();
    for part in parts {
        match all.last_mut().filter(|last| last.name == part.name) {
            Some(last) => last.bytes += part.bytes,
            None => all.push(part.clone()),
        }
    }
    all
}

fn other_model(what: String) -> Error {
    Error::data(what).fix("the checkpoint is of another model; resume with the recipe it was made with")
}

/// Puts the numbers of a file into the trainer, those of this rank where the model is split. Pieces that are read are checked once
/// more.
pub(crate) fn read(path: &Path, parts: &[FilePart], trainer: &mut ModelTrainer) -> Result<()> {
    let file = File::open(path).map_err(unreadable)?;
    let mut stored = StoredState { file, parts };
    let backend = trainer.model.backend.clone();
    for i in 0..trainer.model.params.len() {
        let param = &mut trainer.model.params[i];
        if let Some(values) = stored.numbers(&format!("master.{}", param.shape.id), 4, param.own.clone())? {
            backend.write(&mut param.master, 0, &values)?;
        }
        let (model, id) = (&trainer.model, trainer.model.params[i].shape.id);
        let coded = trainer.optimizer.is_coded(model, i);
        for kind in StateKind::ALL {
            let own = kind.range(&model.params[i].own);
            let values = stored.numbers(&format!("{}.{id}", kind.name()), kind.dtype(coded).size(), own)?;
            trainer.optimizer.put_own(model, i, kind, values.as_deref())?;
        }
    }
    Ok(())
}

fn unreadable(e: std::io::Error) -> Error {
    Error::data(format!("cannot be read: {e}"))
}

struct StoredState<'a> {
    file: File,
    parts: &'a [FilePart],
}

impl StoredState<'_> {
    /// Some numbers of a tensor, of `width` bytes each; none where the tensor is not there.
    fn numbers(&mut self, name: &str, width: usize, wanted: Range<usize>) -> Result<Option<Vec<f32>>> {
        let Some(first) = self.parts.iter().position(|p| p.name == name) else { return Ok(None) };
        let wanted = wanted.start * width..wanted.end * width;
        let mut start: u64 = self.parts[..first].iter().map(|p| p.bytes).sum();
        let (mut at, mut bytes) = (0, Vec::with_capacity(wanted.len()));
        for part in self.parts[first..].iter().take_while(|p| p.name == name) {
            let end = at + part.bytes as usize;
            let here = at.max(wanted.start)..end.min(wanted.end);
            if !here.is_empty() {
                bytes.extend_from_slice(&self.piece(part, start)?[here.start - at..here.end - at]);
            }
            (at, start) = (end, start + part.bytes);
        }
        if bytes.len() != wanted.len() {
            return Err(Error::data(format!("tensor {name:?} has {at} bytes, too few for this model")));
        }
        if width == 1 {
            return Ok(Some(bytes.into_iter().map(f32::from).collect()));
        }
        Ok(Some(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()))
    }

    /// The bytes of a part, as they were written.
    fn piece(&mut self, part: &FilePart, start: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; part.bytes as usize];
        self.file.seek(SeekFrom::Start(start)).map_err(unreadable)?;
        self.file.read_exact(&mut bytes).map_err(unreadable)?;
        if hex(xxh3_128(&bytes)) == part.xxh3 { Ok(bytes) } else { Err(part.damaged()) }
    }
}
