//! The state of one trainer as a safetensors file: masters, moments and average, bit for bit.

use super::files::Files;
use super::manifest::{Part, hex};
use ferrl_engine::train::Trainer;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// What the state of a parameter consists of; the order of the optimizer's buffers.
const KINDS: [&str; 3] = ["first", "second", "average"];

/// Numbers moved at once.
const CHUNK: usize = 1 << 16;

/// Writes all of a trainer's numbers; what the manifest says of the file.
pub(crate) fn write(files: &Files, path: &Path, trainer: &Trainer) -> Result<Vec<Part>> {
    let mut tensors = Vec::new();
    for (i, param) in trainer.model.params.iter().enumerate().filter(|(i, _)| trainer.is_stored(*i)) {
        let buffers = [Some(&param.master)].into_iter().chain(trainer.optimizer.buffers(i));
        for (kind, (name, buffer)) in std::iter::once(&"master").chain(&KINDS).zip(buffers).enumerate() {
            tensors
                .extend(buffer.map(|b| (format!("{name}.{}", param.shape.id), &param.shape, (i, kind, b))));
        }
    }
    let (mut fields, mut at) = (Map::new(), 0);
    for (name, shape, _) in &tensors {
        let end = at + 4 * shape.len();
        let info = json!({"dtype": "F32", "shape": [shape.rows, shape.cols], "data_offsets": [at, end]});
        fields.insert(name.clone(), info);
        at = end;
    }
    let mut text = Value::Object(fields).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);

    let fail = |e: &std::io::Error| super::files::error("cannot write", path, e);
    let mut out = BufWriter::with_capacity(1 << 20, files.create(path)?);
    out.write_all(&header).map_err(|e| fail(&e))?;
    let mut parts = vec![Part::of("header", &header)];
    let (mut numbers, mut bytes) = (vec![0.0; CHUNK], Vec::with_capacity(4 * CHUNK));
    let split = trainer.model.split_over().is_some();
    for (name, shape, (param, kind, buffer)) in &tensors {
        let mut hash = Xxh3::new();
        // What other ranks have parts of comes whole, anything else a chunk at a time.
        let whole = if split { trainer.state_tensor(*param, *kind)? } else { None };
        for at in (0..shape.len()).step_by(CHUNK) {
            let n = CHUNK.min(shape.len() - at);
            match &whole {
                Some(whole) => numbers[..n].copy_from_slice(&whole[at..at + n]),
                None => trainer.model.backend.read(buffer, at, &mut numbers[..n])?,
            }
            bytes.clear();
            bytes.extend(numbers[..n].iter().flat_map(|x| x.to_le_bytes()));
            hash.update(&bytes);
            out.write_all(&bytes).map_err(|e| fail(&e))?;
        }
        let bytes = 4 * shape.len() as u64;
        parts.push(Part { name: name.clone(), bytes, xxh3: hex(hash.digest128()) });
    }
    let file = out.into_inner().map_err(|e| fail(e.error()))?;
    file.sync()?;
    Ok(parts)
}

/// Whether a file's tensors are those of the trainer's model.
pub(crate) fn check(parts: &[Part], trainer: &Trainer) -> Result<()> {
    let mut known = vec!["header".to_string()];
    for (_, param) in trainer.model.params.iter().enumerate().filter(|(i, _)| trainer.is_stored(*i)) {
        let (name, want) = (param.shape.id, 4 * param.shape.len() as u64);
        if !parts.iter().any(|p| p.name == format!("master.{name}")) {
            return Err(other_model(format!("parameter {name:?} is not in the checkpoint")));
        }
        for kind in ["master"].iter().chain(&KINDS) {
            let full = format!("{kind}.{name}");
            if let Some(part) = parts.iter().find(|p| p.name == full && p.bytes != want) {
                let (got, want) = (part.bytes / 4, param.shape.len());
                return Err(other_model(format!(
                    "tensor {full:?} has {got} numbers, the model's {name} has {want}"
                )));
            }
            known.push(full);
        }
    }
    match parts.iter().find(|p| !known.contains(&p.name)) {
        None => Ok(()),
        Some(part) => Err(other_model(format!("tensor {:?} has no place in the model", part.name))),
    }
}

fn other_model(what: String) -> Error {
    Error::data(what).fix("the checkpoint is of another model; resume with the recipe it was made with")
}

/// Puts the numbers of a file into the trainer, each tensor checked once more as it is read.
pub(crate) fn read(path: &Path, parts: &[Part], trainer: &mut Trainer) -> Result<()> {
    let fail = |e: std::io::Error| Error::data(format!("cannot be read: {e}"));
    let mut file = File::open(path).map_err(fail)?;
    let backend = trainer.model.backend.clone();
    let mut fetch = |name: &str| -> Result<Option<Vec<f32>>> {
        let Some(index) = parts.iter().position(|p| p.name == name) else { return Ok(None) };
        let start = parts[..index].iter().map(|p| p.bytes).sum();
        let mut bytes = vec![0; parts[index].bytes as usize];
        file.seek(SeekFrom::Start(start)).map_err(fail)?;
        file.read_exact(&mut bytes).map_err(fail)?;
        if hex(xxh3_128(&bytes)) != parts[index].xxh3 {
            return Err(parts[index].damaged());
        }
        let float = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(Some(bytes.chunks_exact(4).map(float).collect()))
    };
    for i in 0..trainer.model.params.len() {
        let param = &mut trainer.model.params[i];
        if let Some(values) = fetch(&format!("master.{}", param.shape.id))? {
            backend.write(&mut param.master, 0, &values[param.own.clone()])?;
        }
        for (kind, slot) in KINDS.iter().zip(trainer.optimizer.buffers_mut(i)) {
            *slot = match fetch(&format!("{kind}.{}", param.shape.id))? {
                None => None,
                Some(values) => {
                    let mut buffer = backend.alloc(param.master.dtype(), param.own.len())?;
                    backend.write(&mut buffer, 0, &values[param.own.clone()])?;
                    Some(buffer)
                }
            };
        }
    }
    Ok(())
}
