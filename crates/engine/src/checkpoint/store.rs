//! Memory-mapped safetensors files, looked up by tensor name.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::path::{Component, Path};

use ferrl_kernels::mmap::{Mapped, map_file};
use safetensors::tensor::Metadata;
use safetensors::{SafeTensorError, SafeTensors, tensor::TensorInfo};
use serde_json::Value;

use super::io_error;
use crate::model::wrapper;
use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a model directory.
pub(super) struct Store {
    shards: Vec<Shard>,
    /// File of each tensor; ordered, so that error messages are deterministic.
    places: BTreeMap<String, usize>,
    /// Whether this is a multimodal checkpoint of which the text part is looked up.
    wrapped: bool,
}

struct Shard {
    file: String,
    bytes: Mapped,
    data_start: usize,
    header: Metadata,
}

impl Store {
    /// Maps `model.safetensors`, or the files that its index names.
    pub(super) fn open(dir: &Path) -> Result<Store> {
        if dir.join(SINGLE).exists() {
            return Self::open_file(dir, SINGLE);
        }
        if dir.join(INDEX).exists() {
            return Self::open_shards(dir);
        }
        Err(no_weights(dir))
    }

    pub(super) fn open_file(dir: &Path, file: &str) -> Result<Store> {
        let shard = Shard::open(dir, file)?;
        let places = shard.header.offset_keys().into_iter().map(|name| (name, 0)).collect();
        Ok(Store { shards: vec![shard], places, wrapped: false })
    }

    fn open_shards(dir: &Path) -> Result<Store> {
        let index = read_json(&dir.join(INDEX))?;
        let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
            return Err(Error::model("weight_map is missing").at(dir.join(INDEX).display()));
        };
        let (mut shards, mut numbers, mut places) = (Vec::<Shard>::new(), HashMap::new(), BTreeMap::new());
        for (name, file) in map {
            let file = bare_file_name(name, file).map_err(|e| e.at(dir.join(INDEX).display()))?;
            let number = match numbers.get(file) {
                Some(number) => *number,
                None => {
                    if !dir.join(file).exists() {
                        let e =
                            Error::model(format!("shard {file} is missing")).at(dir.join(INDEX).display());
                        return Err(e.fix("download it into the model directory"));
                    }
                    shards.push(Shard::open(dir, file)?);
                    numbers.insert(file, shards.len() - 1);
                    shards.len() - 1
                }
            };
            if shards[number].header.info(name).is_none() {
                return Err(Error::model(format!(
                    "tensor {name:?} is not in {file}, where the index says it is"
                ))
                .at(dir.join(INDEX).display())
                .fix("download the index and its shards again"));
            }
            places.insert(name.clone(), number);
        }
        Ok(Store { shards, places, wrapped: false })
    }

    /// Restricts lookup to the text part of a multimodal checkpoint.
    pub(super) fn text_part(self) -> Store {
        Store { wrapped: true, ..self }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str).filter(|name| !self.wrapped || wrapper::is_text(name))
    }

    /// The stored name of a tensor. Headless architectures omit the `model.` prefix.
    pub(super) fn find<'a>(&'a self, name: &str) -> Option<&'a str> {
        let bare = ["model.", "transformer."].iter().find_map(|p| name.strip_prefix(p));
        let found = |n: &str| self.places.get_key_value(n).map(|(key, _)| key.as_str());
        if self.wrapped {
            let other = wrapper::stored_names(name).into_iter().find_map(|n| found(&n));
            return other.or_else(|| found(name));
        }
        found(name).or_else(|| bare.and_then(found))
    }

    /// File, metadata and bytes of a stored tensor.
    pub(super) fn get(&self, stored: &str) -> Option<(&str, &TensorInfo, &[u8])> {
        let shard = &self.shards[*self.places.get(stored)?];
        let info = shard.header.info(stored)?;
        let (from, to) = info.data_offsets;
        let bytes = shard.bytes.as_ref().get(shard.data_start + from..shard.data_start + to)?;
        Some((&shard.file, info, bytes))
    }
}

impl Shard {
    fn open(dir: &Path, file: &str) -> Result<Shard> {
        let bytes = map_file(&dir.join(file))?;
        let broken = |what: String| {
            Error::model(what)
                .at(dir.join(file).display())
                .fix("the file is damaged or incomplete; download it again")
        };
        let data = bytes.as_ref();
        if data.starts_with(b"version https://git-lfs") {
            let e = Error::model("is a Git LFS pointer, not the weights").at(dir.join(file).display());
            return Err(e.fix("run `git lfs pull` in the model directory"));
        }
        // Also checks that the tensors fill the file exactly.
        let (length, header) = SafeTensors::read_metadata(data).map_err(|e| match e {
            SafeTensorError::MetadataIncompleteBuffer => {
                broken(format!("the file's {} bytes are not as many as its header says", data.len()))
            }
            e => broken(format!("not a readable safetensors file: {e}")),
        })?;
        let data_start = length + 8;
        Ok(Shard { file: file.into(), bytes, data_start, header })
    }
}

pub(super) fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(|e| io_error("cannot read the file", path, &e))?;
    serde_json::from_slice(&text).map_err(|e| Error::model(format!("not valid JSON: {e}")).at(path.display()))
}

/// The index was downloaded, too: refuses file names that lead out of the directory.
fn bare_file_name<'a>(tensor: &str, value: &'a Value) -> Result<&'a str> {
    let bare = value.as_str().filter(|name| {
        let mut parts = Path::new(name).components();
        let only = matches!((parts.next(), parts.next()), (Some(Component::Normal(n)), None) if n == OsStr::new(name));
        only && !name.contains(['/', '\\']) && name.ends_with(".safetensors")
    });
    bare.ok_or_else(|| {
        Error::model(format!(
            "weight_map sends {tensor:?} to {value}, expected the bare name of a .safetensors file"
        ))
        .fix("do not use this model unless you trust its source; its index points elsewhere")
    })
}

fn no_weights(dir: &Path) -> Error {
    let has = |name: &str| dir.join(name).exists();
    let shown = dir.display();
    let e = |what: &str| Error::model(what).at(shown.to_string());
    if has("pytorch_model.bin") || has("pytorch_model.bin.index.json") {
        return e(
            "only pickled weights (pytorch_model.bin), which Ferrl does not open: a pickle can run any code",
        )
        .fix(format!(
            "convert it where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('{shown}').save_pretrained('{shown}-safetensors')\""
        ));
    }
    if has("adapter_model.safetensors") {
        return e("an adapter without its adapter_config.json").fix("copy that file too");
    }
    e("no model.safetensors and no model.safetensors.index.json")
        .fix("download the weights into this directory")
}
