//! Opens and checks a model directory, and reads its parameters one at a time.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ferrl_kernels::{Backend, Buffer};
use serde_json::Value;

use super::format::StorageFormat;
use super::init::{InitOptions, init_param};
use super::nf4;
use super::peft::AdapterDir;
use super::store::{Store, read_json};
use crate::model::wrapper::ties_head;
use crate::model::{Family, Head, ModelConfig, ParamShape, Slot, StoredPart, Tensor, family_of, text_config};
use crate::{Error, Result, nearest};

pub(crate) enum ParamValues<'a> {
    /// Decoded.
    F32(Vec<f32>),
    /// Stored bf16 bytes, part by part.
    Bf16(Vec<&'a [u8]>),
}

impl ParamValues<'_> {
    /// Writes them to a buffer of the same length.
    pub(crate) fn write(&self, backend: &dyn Backend, to: &mut Buffer) -> Result<()> {
        let parts = match self {
            ParamValues::F32(values) => return backend.write(to, 0, values),
            ParamValues::Bf16(parts) => parts,
        };
        let mut at = 0;
        for part in parts {
            backend.write_bf16(to, at, part)?;
            at += part.len() / 2;
        }
        Ok(())
    }

    pub(crate) fn into_f32s(self) -> Vec<f32> {
        match self {
            ParamValues::F32(values) => values,
            ParamValues::Bf16(parts) => {
                let mut out = vec![0.0; parts.iter().map(|p| p.len() / 2).sum()];
                let mut rest = &mut out[..];
                for part in parts {
                    let (own, after) = rest.split_at_mut(part.len() / 2);
                    StorageFormat::Bf16.decode(part, own);
                    rest = after;
                }
                out
            }
        }
    }
}

/// A Hugging Face model directory whose files are complete and consistent with its `config.json`.
pub struct ModelDir {
    pub path: PathBuf,
    /// Its `config.json`; of a multimodal model, the text configuration.
    pub config_json: Value,
    pub config: ModelConfig,
    pub family: &'static Family,
    store: Store,
    /// Seed for the parameters of a requested head that the checkpoint lacks.
    new_head: Option<u64>,
    adapter: Option<AdapterDir>,
    /// The base model's directory, if this is an adapter.
    base: Option<PathBuf>,
}

impl std::fmt::Debug for ModelDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelDir")
            .field("path", &self.path)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl ModelDir {
    /// Opens a directory and checks presence, shape and dtype of every tensor; [`ModelDir::load`] reads the weights. A language
    /// model with `v_head.summary.*` tensors has a value head.
    pub fn open(path: &Path) -> Result<ModelDir> {
        let place = path.display();
        if let Some(error) = super::foreign(path) {
            return Err(error);
        }
        if !path.is_dir() {
            return Err(Error::model("no such directory")
                .at(place)
                .fix("give the directory that holds config.json"));
        }
        if path.join(super::peft::CONFIG).is_file() {
            return ModelDir::open_adapter(path);
        }
        if !path.join("config.json").exists() {
            return Err(Error::model("config.json is missing")
                .at(place)
                .fix("give the directory that holds config.json, model.safetensors and tokenizer.json"));
        }
        let mut config_json = read_json(&path.join("config.json"))?;
        let text = text_config(&config_json).map_err(|e| e.at(path.display()))?;
        let wrapped = text.is_some();
        let ties = wrapped && ties_head(&config_json);
        config_json = text.unwrap_or(config_json);
        if nf4::is_quantised(&config_json).map_err(|e| e.at(path.display()))?
            && let Some(fields) = config_json.as_object_mut()
        {
            fields.remove("quantization_config"); // concerns the storage only; models are saved without it
        }
        let family = family_of(&config_json).map_err(|e| e.at(path.display()))?;
        let mut config = family.config(&config_json).map_err(|e| e.at(path.display()))?;
        let store = Store::open(path)?;
        let store = if wrapped { store.text_part() } else { store };
        if ties && store.find("lm_head.weight").is_none() {
            config.tied = true;
            config_json["tie_word_embeddings"] = true.into();
        }
        if config.head == Head::Lm && store.find("v_head.summary.weight").is_some() {
            config.head = Head::LmAndValue;
        }
        let dir = ModelDir {
            path: path.into(),
            config_json,
            config,
            family,
            store,
            new_head: None,
            adapter: None,
            base: None,
        };
        dir.check()?;
        Ok(dir)
    }

    /// The same trunk with another head, such as a score or value head. Missing parameters of the head are initialised from
    /// `seed`.
    pub fn with_head(mut self, head: Head, seed: u64) -> Result<ModelDir> {
        self.config.head = head;
        self.new_head = Some(seed);
        self.check()?;
        Ok(self)
    }

    /// Calls `each` with every parameter in the order of [`ModelConfig::params`], fused and in `f32`. Only one is in memory at a
    /// time.
    pub fn load(&self, mut each: impl FnMut(&ParamShape, Vec<f32>) -> Result<()>) -> Result<()> {
        self.family
            .tensors(&self.config)
            .iter()
            .try_for_each(|tensor| each(&tensor.param, self.read(tensor)?))
    }

    /// The same, with undecoded bf16 where all of a parameter is stored so.
    pub(crate) fn load_stored(
        &self,
        mut each: impl FnMut(&ParamShape, ParamValues<'_>) -> Result<()>,
    ) -> Result<()> {
        for tensor in self.family.tensors(&self.config) {
            let numbers = match self.halves(&tensor)? {
                Some(parts) => ParamValues::Bf16(parts),
                None => ParamValues::F32(self.read(&tensor)?),
            };
            each(&tensor.param, numbers)?;
        }
        Ok(())
    }

    /// Calls `each` with a range of every parameter, given by index and length: what a rank owns. Other pages of the files are
    /// not read, except for tensors stored in another element order.
    pub(crate) fn load_ranges(
        &self,
        range: impl Fn(usize, usize) -> Range<usize>,
        mut each: impl FnMut(&ParamShape, Range<usize>, Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        for (i, tensor) in self.family.tensors(&self.config).iter().enumerate() {
            let range = range(i, tensor.param.len());
            each(&tensor.param, range.clone(), self.read_range(tensor, &range)?)?;
        }
        Ok(())
    }

    fn read_range(&self, tensor: &Tensor, range: &Range<usize>) -> Result<Vec<f32>> {
        if self.adapter.is_some() || self.seed_if_new(tensor).is_some() {
            return Ok(self.read(tensor)?[range.clone()].to_vec());
        }
        let (mut out, mut start) = (vec![0.0; range.len()], 0);
        for part in &tensor.parts {
            let here = start.max(range.start)..(start + part.len()).min(range.end);
            if !here.is_empty() {
                let own = &mut out[here.start - range.start..here.end - range.start];
                self.read_within(part, &tensor.param, here.start - start, own)?;
            }
            start += part.len();
        }
        Ok(out)
    }

    /// Elements of a part from `from` on, in the decoder's order.
    fn read_within(&self, part: &StoredPart, param: &ParamShape, from: usize, out: &mut [f32]) -> Result<()> {
        let (dtype, bytes) = self.part(part, param)?;
        if part.is_rearranged() || self.quantised(part)?.is_some() {
            let mut whole = vec![0.0; part.len()];
            self.read_part(part, param, &mut whole)?;
            out.copy_from_slice(&whole[from..from + out.len()]);
            return Ok(());
        }
        let bytes = &bytes[from * dtype.size()..(from + out.len()) * dtype.size()];
        dtype.decode(bytes, out).map_or(Ok(()), |at| Err(self.not_finite(part, from + at)))
    }

    /// The stored bytes of a parameter whose parts are all bf16 in the decoder's order.
    fn halves(&self, tensor: &Tensor) -> Result<Option<Vec<&[u8]>>> {
        if self.adapter.is_some() || self.seed_if_new(tensor).is_some() {
            return Ok(None);
        }
        let mut parts = Vec::new();
        for part in &tensor.parts {
            if self.quantised(part)?.is_some() {
                return Ok(None);
            }
            match self.part(part, &tensor.param)? {
                (StorageFormat::Bf16, bytes) if !part.is_rearranged() => parts.push(bytes),
                _ => return Ok(None),
            }
        }
        for (part, bytes) in tensor.parts.iter().zip(&parts) {
            if let Some(at) = super::format::first_non_finite(bytes) {
                return Err(self.not_finite(part, at));
            }
        }
        Ok(Some(parts))
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let mut out = match self.seed_if_new(tensor) {
            Some(seed) => {
                let options = InitOptions { seed, ..InitOptions::new(self.family.name()) };
                init_param(&self.config, &options, &tensor.param)
            }
            None => self.read_parts(tensor)?,
        };
        // A head that the base lacks belongs to the adapter.
        if let Some(adapter) = &self.adapter {
            adapter.put_saved(&tensor.param, &mut out)?;
        }
        Ok(out)
    }

    fn read_parts(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let mut out = vec![0.0; tensor.param.len()];
        let mut rest = &mut out[..];
        for part in &tensor.parts {
            let (own, after) = rest.split_at_mut(part.len());
            rest = after;
            self.read_part(part, &tensor.param, own)?;
        }
        Ok(out)
    }

    /// All elements of a part, in the decoder's order.
    pub(super) fn read_part(&self, part: &StoredPart, param: &ParamShape, out: &mut [f32]) -> Result<()> {
        if let Some(quantised) = self.quantised(part)? {
            let (values, layout) = (quantised.values(), nf4::layout(part));
            values.into_iter().enumerate().for_each(|(at, x)| out[layout.decoder_index(at)] = x);
            return Ok(());
        }
        let (dtype, bytes) = self.part(part, param)?;
        decode(dtype, bytes, part, out).map_or(Ok(()), |at| Err(self.not_finite(part, at)))
    }

    /// The part as a bitsandbytes NF4 tensor, if it is one.
    pub(super) fn quantised(&self, part: &StoredPart) -> Result<Option<nf4::Nf4Tensor<'_>>> {
        let found = self.store.find(&part.name).map(|name| self.store.nf4(name));
        found.transpose().map(Option::flatten).map_err(|e| e.at(self.path.display()))
    }

    /// Whether bf16 represents the first numbers of the first linear layer, as it then most likely does all of them.
    pub fn fits_bf16(&self) -> Result<bool> {
        let tensors = self.family.tensors(&self.config);
        let linear = tensors.iter().find(|t| t.param.id.slot.is_linear());
        let Some((tensor, part)) = linear.and_then(|t| Some((t, t.parts.first()?))) else { return Ok(true) };
        let mut values = vec![0.0; part.len().min(4096)];
        self.read_within(part, &tensor.param, 0, &mut values)?;
        Ok(values.iter().all(|x| x.to_bits() & 0xFFFF == 0))
    }

    /// The adapter in the directory, if any; [`ModelDir::load`] then reads its base.
    pub fn adapter(&self) -> Option<&AdapterDir> {
        self.adapter.as_ref()
    }

    /// The directory of the full model: this one, or the adapter's base.
    pub fn base(&self) -> &Path {
        self.base.as_deref().unwrap_or(&self.path)
    }

    fn open_adapter(path: &Path) -> Result<ModelDir> {
        let adapter = AdapterDir::open(path)?;
        let base = adapter.base()?;
        let mut dir = ModelDir::open(&base)?;
        if let (Some(_), at) = (&dir.adapter, path.display()) {
            return Err(Error::model("the base of this adapter is an adapter itself")
                .at(at)
                .fix(format!("merge that one first: ferrl export {} --merge --out DIR", base.display())));
        }
        if let Some(head) = adapter.head() {
            dir = dir.with_head(head, 0)?;
        }
        let adapter = adapter.fit(&dir.config, &base)?;
        (dir.path, dir.base, dir.adapter) = (path.into(), Some(base), Some(adapter));
        Ok(dir)
    }

    /// The error for a NaN or infinity in a weight.
    fn not_finite(&self, part: &StoredPart, at: usize) -> Error {
        let found = self.store.find(&part.name).and_then(|name| self.store.get(name));
        let file = found.map_or_else(|| self.path.clone(), |(file, _, _)| self.path.join(file));
        let width = part.shape.last().copied().unwrap_or(1).max(1);
        let place = if part.shape.len() > 1 { vec![at / width, at % width] } else { vec![at] };
        Error::model(format!("tensor {:?} holds a NaN or infinity at {place:?}", part.name))
            .at(file.display())
            .fix("the file is damaged, or was saved after training had diverged; use another copy of the model")
    }

    /// The seed for a value or score parameter that the checkpoint lacks.
    fn seed_if_new(&self, tensor: &Tensor) -> Option<u64> {
        let absent = |p: &StoredPart| self.store.find(&p.name).is_none();
        self.new_head.filter(|_| tensor.param.id.slot == Slot::Value && tensor.parts.iter().all(absent))
    }

    /// All checks that do not read the weights.
    fn check(&self) -> Result<()> {
        let mut used = HashSet::new();
        for tensor in self.family.tensors(&self.config) {
            if self.seed_if_new(&tensor).is_some() {
                continue;
            }
            for part in &tensor.parts {
                self.part(part, &tensor.param)?;
                used.extend(self.store.find(&part.name));
            }
        }
        self.check_tied()?;
        match self.store.names().find(|name| !used.contains(name) && !is_harmless(name) && !nf4::is_part(name)) {
            None => Ok(()),
            Some(name) => Err(Error::model(format!("tensor {name:?} has no place in this model"))
                .at(self.path.display())
                .fix("config.json and the weights do not belong together (a bias field set to false?); fix config.json")),
        }
    }

    /// Format and bytes of a part, if its shape matches the config; no bytes for a quantised one.
    fn part(&self, part: &StoredPart, param: &ParamShape) -> Result<(StorageFormat, &[u8])> {
        let found = self.store.find(&part.name).and_then(|name| self.store.get(name));
        let Some((file, info, bytes)) = found else {
            return Err(self.missing(part, param));
        };
        let fail = |what: String| Error::model(what).at(self.path.join(file).display());
        let quantised = self.quantised(part)?;
        let (shape, expected) = match &quantised {
            Some(q) => (&q.shape, nf4::layout(part).shape),
            None => (&info.shape, part.shape.clone()),
        };
        if *shape != expected {
            return Err(fail(format!("tensor {:?} has shape {shape:?}, expected {expected:?}", part.name))
                .fix(format!("check {} in config.json", shape_fields(param.id.slot))));
        }
        if quantised.is_some() {
            return Ok((StorageFormat::F32, &[]));
        }
        match StorageFormat::of(info.dtype) {
            Some(dtype) => Ok((dtype, bytes)),
            None => Err(fail(format!("tensor {:?} is stored as {:?}", part.name, info.dtype))
                .fix("convert the weights to bfloat16, float16 or float32")),
        }
    }

    /// The error for a missing tensor; names an unused tensor that may be a misspelling of it.
    fn missing(&self, part: &StoredPart, param: &ParamShape) -> Error {
        let e = Error::model(format!("tensor {:?} is missing", part.name)).at(self.path.display());
        if param.id.slot == Slot::Head {
            return e.fix("set tie_word_embeddings to true in config.json if the logits use the embedding");
        }
        let tensors = self.family.tensors(&self.config);
        let needed: HashSet<&str> =
            tensors.iter().flat_map(|t| &t.parts).filter_map(|p| self.store.find(&p.name)).collect();
        match nearest(&part.name, self.store.names().filter(|name| !needed.contains(name))) {
            Some(near) => e.fix(format!("the nearest tensor there is {near:?}")),
            None => {
                e.fix("config.json and the weights do not belong together, or the download is incomplete")
            }
        }
    }

    /// Refuses a tied model whose `lm_head.weight` differs from its embedding: then it is not tied. A copy is accepted.
    fn check_tied(&self) -> Result<()> {
        if !(self.config.tied && self.config.head.has_lm()) {
            return Ok(());
        }
        let tensors = self.family.tensors(&self.config);
        let embed = tensors.first().and_then(|t| t.parts.first()).and_then(|p| self.store.find(&p.name));
        let pair = (
            embed.and_then(|n| self.store.get(n)),
            self.store.find("lm_head.weight").and_then(|n| self.store.get(n)),
        );
        match pair {
            (Some((_, a, left)), Some((_, b, right))) if a.dtype == b.dtype && left != right => {
                Err(Error::model(
                    "lm_head.weight differs from the embedding although tie_word_embeddings is true",
                )
                .at(self.path.display())
                .fix("set tie_word_embeddings to false in config.json, or remove lm_head.weight"))
            }
            _ => Ok(()),
        }
    }
}

/// Decodes a stored tensor to the decoder's order; returns the index of the first NaN or infinity, if any.
pub(super) fn decode(
    dtype: StorageFormat,
    bytes: &[u8],
    part: &StoredPart,
    out: &mut [f32],
) -> Option<usize> {
    if !part.is_rearranged() {
        return dtype.decode(bytes, out);
    }
    let mut stored = vec![0.0; part.len()];
    let bad = dtype.decode(bytes, &mut stored);
    stored.into_iter().enumerate().for_each(|(at, x)| out[part.decoder_index(at)] = x);
    bad
}

/// Buffers that are not parameters, and heads that this use of the model does not need.
fn is_harmless(name: &str) -> bool {
    const BUFFERS: [&str; 3] = ["rotary_emb.inv_freq", "attn.bias", "attn.masked_bias"];
    let bare = name.strip_prefix("language_model.").unwrap_or(name);
    matches!(bare, "lm_head.weight" | "score.weight")
        || name.starts_with("v_head.")
        || BUFFERS.iter().any(|b| name.ends_with(b))
}

/// The fields of `config.json` that determine a parameter's shape.
fn shape_fields(slot: Slot) -> &'static str {
    match slot {
        Slot::Embed | Slot::Head => "vocab_size and hidden_size",
        Slot::Position => "n_positions and hidden_size",
        Slot::QNorm | Slot::KNorm => "head_dim, num_attention_heads and num_key_value_heads",
        Slot::Qkv | Slot::AttnOut => "hidden_size, num_attention_heads, num_key_value_heads and head_dim",
        Slot::Up | Slot::Down => "intermediate_size and hidden_size",
        Slot::Router => "num_experts and hidden_size",
        Slot::ExpertUp(_) | Slot::ExpertDown(_) => "moe_intermediate_size and hidden_size",
        Slot::Value => "hidden_size and num_labels",
        _ => "hidden_size",
    }
}
