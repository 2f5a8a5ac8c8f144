//! Adapters on disk in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

use super::format::StorageFormat;
use super::io_error;
use super::load::decode;
use super::peft_config::{self, PeftConfig};
use super::peft_stacks::{Router, Stack};
use super::save::{SaveOptions, save_dir, sync_dir, write_beside, write_json};
use super::store::{Store, read_json};
use super::write::write_file;
use crate::model::adapter::{
    AdapterOptions, BaseHome, LoraModule, SavedTensor, Values, lora_modules, saved_tensors,
};
use crate::model::wrapper::{module_prefix, own_name};
use crate::model::{Head, Model, ModelConfig, ParamShape, RowOrder, StoredPart};
use crate::{Error, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub(super) const CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// Written if the adapter was trained on an NF4-quantised copy of its base.
const BASE: &str = "adapter_base.json";
/// What helps where an adapter is more than is understood here.
pub(super) const MERGE: &str =
    "merge it into its base model with peft: merge_and_unload().save_pretrained(...)";
/// PEFT's prefix of module names.
pub(super) const PREFIX: &str = "base_model.model.";

pub struct AdapterDir {
    pub(super) path: PathBuf,
    pub options: AdapterOptions,
    pub(super) config: PeftConfig,
    pub(super) store: Store,
    /// Its tensors by the decoder's name of the module, without PEFT's prefix. Tensors of other parts of a multimodal model are
    /// left out.
    pub(super) index: BTreeMap<String, String>,
    saved: Vec<(ParamShape, SavedTensor)>,
    /// The experts of a layer as PEFT stacks them, by the name of the module that holds them.
    pub(super) stacks: BTreeMap<String, Vec<Stack>>,
    /// Adapted routers.
    pub(super) routers: Vec<Router>,
}

/// The directory of an adapter's base; `None` if the directory holds no adapter.
pub fn base_of(path: &Path) -> Result<Option<PathBuf>> {
    if !path.join(CONFIG).is_file() {
        return Ok(None);
    }
    locate(path, &peft_config::read(path, &read_json(&path.join(CONFIG))?)?.base).map(Some)
}

/// Where tokenizer and chat template are: in the directory itself, or in an adapter's base.
pub fn tokenizer_dir(path: &Path) -> PathBuf {
    let own = path.join("tokenizer.json").is_file();
    let base = if own { None } else { base_of(path).ok().flatten() };
    base.unwrap_or_else(|| path.to_path_buf())
}

/// Finds a base by its path, relative to the adapter's directory, or by its name in a parent directory (of a run folder that was
/// moved as a whole).
fn locate(adapter: &Path, base: &str) -> Result<PathBuf> {
    let name = Path::new(base).file_name().unwrap_or_default();
    let above = adapter.ancestors().skip(1).map(|dir| dir.join(name));
    let mut places = [PathBuf::from(base), adapter.join(base)].into_iter().chain(above);
    let there = |dir: &PathBuf| !base.is_empty() && dir.join("config.json").is_file();
    places.find(there).ok_or_else(|| {
        Error::model(format!("the adapter's base model {base:?} is not a directory on this machine"))
            .at(adapter.join(CONFIG).display())
            .fix("set base_model_name_or_path in that file to the directory of the base model")
    })
}

impl AdapterDir {
    /// Opens an adapter; [`AdapterDir::fit`] checks it against its base.
    pub(super) fn open(path: &Path) -> Result<AdapterDir> {
        let config = peft_config::read(path, &read_json(&path.join(CONFIG))?)?;
        if !path.join(WEIGHTS).is_file() {
            let pickled = path.join("adapter_model.bin").is_file();
            let fix = match pickled {
                true => {
                    "save it again with safe_serialization=True: a pickle can run any code and is not opened"
                }
                false => "copy that file too",
            };
            return Err(Error::model(format!("{WEIGHTS} is missing")).at(path.display()).fix(fix));
        }
        let store = Store::open_file(path, WEIGHTS)?;
        let mut options = config.options.clone();
        if path.join(BASE).is_file() {
            options.base = match read_json(&path.join(BASE))?["base"].as_str() {
                Some("nf4") => BaseHome::Nf4,
                other => {
                    return Err(Error::model(format!("base is {other:?}, expected \"nf4\""))
                        .at(path.join(BASE).display())
                        .fix("a newer version of Ferrl wrote it, or it was changed"));
                }
            };
        }
        let (index, stacks) = (BTreeMap::new(), BTreeMap::new());
        let (saved, routers, path) = (Vec::new(), Vec::new(), path.into());
        Ok(AdapterDir { path, options, config, store, index, saved, stacks, routers })
    }

    /// The directory of its base.
    pub(super) fn base(&self) -> Result<PathBuf> {
        locate(&self.path, &self.config.base)
    }

    /// The head among its tensors, if any.
    pub(super) fn head(&self) -> Option<Head> {
        let has = |name: &str| self.store.get(&format!("{PREFIX}{name}")).is_some();
        match (has("score.weight"), has("v_head.summary.weight")) {
            (true, _) => Some(Head::Score),
            (_, true) => Some(Head::LmAndValue),
            _ => None,
        }
    }

    /// Checks that exactly the expected tensors are present, in the right shapes.
    pub(super) fn fit(mut self, config: &ModelConfig, base: &Path) -> Result<AdapterDir> {
        let wrapped = module_prefix(&read_json(&base.join("config.json"))?).is_some();
        self.index = self.store.names().filter_map(|name| Some((own(name, wrapped)?, name.into()))).collect();
        self.name_modules(config, wrapped)?;
        self.name_saved();
        let path = self.path.clone();
        let there = |mut e: Error| {
            e.class = crate::Class::Model;
            e.at(path.display()).fix(MERGE)
        };
        // PEFT lists heads that the model may not have.
        let own = self.options.clone();
        let has = |name: &String| {
            let alone = AdapterOptions { modules_to_save: vec![name.clone()], ..own.clone() };
            saved_tensors(config, &alone).is_ok()
        };
        self.options.modules_to_save.retain(has);
        let modules = lora_modules(config, &self.options).map_err(there)?;
        let saved = saved_tensors(config, &self.options).map_err(there)?;
        let mut known = self.known_stacks();
        for part in modules.iter().filter(|m| self.stack_of(m).is_none()).flat_map(parts) {
            let (name, _, _) = self.find(&part)?;
            known.insert(name);
        }
        let params = config.params();
        let whole = self.options.modules_to_save.clone();
        let named = |tensor: &SavedTensor| {
            let module = tensor.name.trim_end_matches(".weight").trim_end_matches(".bias");
            whole.iter().any(|name| module.ends_with(name.as_str()))
        };
        let mut kept = Vec::new();
        for tensor in saved {
            match self.stored(&tensor) {
                Some(part) => {
                    let (name, _, _) = self.find(&part)?;
                    known.insert(name);
                    kept.push((params[tensor.param], tensor));
                }
                // A bias or head that PEFT did not write is unchanged from the base.
                None if !named(&tensor) => {}
                None => {
                    return Err(Error::model(format!("tensor {:?} is missing", format!("{PREFIX}{}", saved_name(&tensor))))
                        .at(self.path.join(WEIGHTS).display())
                        .fix("modules_to_save in adapter_config.json names it: copy the whole file, or leave it out there"));
                }
            }
        }
        if let Some(name) = self.index.values().find(|name| !known.contains(*name)) {
            return Err(Error::model(format!("tensor {name:?} has no place in this adapter"))
                .at(self.path.join(WEIGHTS).display())
                .fix("adapter_config.json and the weights do not belong together, or it is no plain LoRA of linear layers"));
        }
        self.saved = kept;
        Ok(self)
    }

    /// `A` and `B` of a module, in the model's layout.
    pub fn values(&self, module: &LoraModule) -> Result<Values> {
        if let Some((stack, expert)) = self.stack_of(module) {
            return self.unstacked(stack, expert, module);
        }
        let [a, b] = parts(module);
        Ok([self.read(&a)?, self.read(&b)?])
    }

    /// Replaces the base's values by those of tensors trained in full.
    pub(super) fn put_saved(&self, param: &ParamShape, values: &mut [f32]) -> Result<()> {
        for (_, tensor) in self.saved.iter().filter(|(of, _)| of.id == param.id) {
            let Some(part) = self.stored(tensor) else { continue };
            values[tensor.elements.clone()].copy_from_slice(&self.read(&part)?);
        }
        self.routers
            .iter()
            .filter(|router| router.param == param.id)
            .try_for_each(|r| self.add_router(r, values))
    }

    /// The tensor under its name in the file.
    fn stored(&self, tensor: &SavedTensor) -> Option<StoredPart> {
        let names = [saved_name(tensor), tensor.name.clone()];
        let name = names.into_iter().find(|name| self.index.contains_key(name))?;
        Some(StoredPart { name, ..tensor.stored.clone() })
    }

    pub(super) fn read(&self, part: &StoredPart) -> Result<Vec<f32>> {
        let (name, dtype, bytes) = self.find(part)?;
        let mut out = vec![0.0; part.len()];
        match decode(dtype, bytes, part, &mut out) {
            None => Ok(out),
            Some(at) => Err(Error::model(format!("tensor {name:?} holds a NaN or infinity at element {at}"))
                .at(self.path.join(WEIGHTS).display())
                .fix("the file is damaged, or was saved after training had diverged")),
        }
    }

    pub(super) fn find(&self, part: &StoredPart) -> Result<(String, StorageFormat, &[u8])> {
        let fail = |what: String| Error::model(what).at(self.path.join(WEIGHTS).display());
        let found = self.index.get(&part.name).and_then(|n| Some((n.clone(), self.store.get(n)?)));
        let Some((name, (_, info, bytes))) = found else {
            return Err(fail(format!("tensor {:?} is missing", format!("{PREFIX}{}", part.name)))
                .fix("adapter_config.json and the weights do not belong together"));
        };
        if info.shape != part.shape {
            let what = format!("tensor {name:?} has shape {:?}, expected {:?}", info.shape, part.shape);
            return Err(fail(what).fix("is base_model_name_or_path the model it was trained on?"));
        }
        let dtype = StorageFormat::of(info.dtype).ok_or_else(|| {
            fail(format!("tensor {name:?} is stored as {:?}", info.dtype))
                .fix("convert it to bfloat16, float16 or float32")
        })?;
        Ok((name, dtype, bytes))
    }
}

/// Stored `lora_A` and `lora_B` of a module.
fn parts(module: &LoraModule) -> [StoredPart; 2] {
    let part = |kind: &str, shape: Vec<usize>, transposed: bool, order: RowOrder| StoredPart {
        name: format!("{}.{kind}.weight", module.name),
        shape,
        transposed,
        order,
    };
    let LoraModule { r, rows, cols, order, .. } = *module;
    [part("lora_A", vec![r, cols], false, RowOrder::Same), part("lora_B", vec![rows, r], true, order)]
}

/// The name of a tensor trained in full, without PEFT's prefix. PEFT wraps adapted layers.
fn saved_name(tensor: &SavedTensor) -> String {
    match tensor.name.strip_suffix(".bias").filter(|_| tensor.of_adapted) {
        Some(module) => format!("{module}.base_layer.bias"),
        None => tensor.name.clone(),
    }
}

/// The decoder's name of a stored tensor; `None` outside the text part of a multimodal model. Older versions of PEFT put the
/// adapter's name into the tensor's.
fn own(stored: &str, wrapped: bool) -> Option<String> {
    let bare = stored.strip_prefix(PREFIX).unwrap_or(stored);
    let bare = bare.strip_suffix(".default.weight").map_or(bare.into(), |stem| format!("{stem}.weight"));
    if wrapped { own_name(&bare) } else { Some(bare) }
}

/// A module's or tensor's name in transformers; `prefix` is that of the text part of a multimodal model.
pub(super) fn stored_name(name: &str, prefix: Option<&str>) -> String {
    match (prefix, name.strip_prefix("model.")) {
        (Some(prefix), Some(rest)) => format!("{prefix}{rest}"),
        _ => name.to_string(),
    }
}

/// Writes a model's adapter with its tokenizer and settings, atomically: `dir` appears complete or not at all. `base` is the
/// directory of its base model.
pub fn save_adapter(
    dir: &Path,
    model: &Model,
    base: &Path,
    config_json: Option<&Value>,
    options: &SaveOptions<'_>,
) -> Result<()> {
    let Some(adapter) = model.adapter() else { return Err(Error::model("the model has no adapter")) };
    let base = std::fs::canonicalize(base).map_err(|e| io_error("cannot find the base model", base, &e))?;
    let options = &SaveOptions { dtype: StorageFormat::F32, ..*options };
    adapter.options.check_experts(&model.config)?;
    let prefix = module_prefix(&read_json(&base.join("config.json"))?);
    let settings = peft_config::write(model, adapter, &base, prefix)?;
    let stored = |part: StoredPart| {
        let name = format!("{PREFIX}{}", stored_name(&part.name, prefix));
        StoredPart { name, ..part }
    };
    save_dir(dir, options, |aside| {
        write_beside(aside, &model.config, config_json, options)?;
        write_json(&aside.join(CONFIG), &settings)?;
        if adapter.options.base == BaseHome::Nf4 {
            write_json(&aside.join(BASE), &json!({"base": "nf4"}))?;
        }
        let (mut list, mut data) = (Vec::new(), Vec::new());
        for (module, [a, b]) in adapter.places() {
            list.extend(parts(module).map(stored));
            data.extend([(a, None), (b, None)]);
        }
        for tensor in &adapter.saved {
            list.push(stored(StoredPart { name: saved_name(tensor), ..tensor.stored.clone() }));
            data.push((tensor.param, Some(tensor.elements.clone())));
        }
        write_file(aside, WEIGHTS, &list, options.dtype, |i| {
            let (param, range) = &data[i];
            let values = model.read(*param)?;
            Ok(range.as_ref().map_or_else(|| values.clone(), |r| values[r.clone()].to_vec()))
        })?;
        sync_dir(aside)
    })
}
