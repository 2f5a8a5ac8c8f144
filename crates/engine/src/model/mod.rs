//! Decoders: one implementation, many families.
//!
//! A family maps its `config.json` to a [`ModelConfig`] and names its tensors. A new family is one file and one line in
//! [`FAMILIES`].

pub mod adapter;
pub mod config;
pub mod decoder;
pub mod gradient;
pub mod heads;
pub mod rope;
pub mod serve;
pub mod shard;
pub mod tensor;
pub mod weights;

mod attention;
mod common;
mod context;
mod exchange;
mod experts;
mod ffn;
mod fields;
mod frozen;
mod layout;
mod linear;
mod naming;
mod norm;
mod param;
mod residual;
mod rope_json;
mod router;
pub(crate) mod vocab;
pub(crate) mod wrapper;
mod zigzag;

mod gemma2;
mod gemma3;
mod glm4;
mod gpt2;
mod granite;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod smollm3;

use serde_json::{Map, Value};

pub use config::{Head, ModelConfig};
pub use frozen::Frozen;
pub use naming::{RowOrder, StoredPart, Tensor};
pub use param::{ParamId, ParamKind, ParamShape, Slot};
pub use router::ExpertLoad;
pub use weights::{Model, Options};
pub use wrapper::text_config;

use crate::{Error, Result, nearest};
use fields::Fields;

pub const FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &mistral::FAMILY,
    &gemma2::FAMILY,
    &gemma3::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
    &smollm3::FAMILY,
    &granite::FAMILY,
    &glm4::FAMILY,
    &gpt2::FAMILY,
];

/// A family of decoders as published in Hugging Face directories.
pub struct Family {
    /// Name in [`FAMILIES`].
    name: &'static str,
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// Values of `architectures` in `config.json`.
    architectures: Architectures,
    defaults: common::Defaults,
    rope: rope_json::RopeRules,
    names: naming::Naming,
    /// Whether some layers have a sliding window by default.
    slides_by_default: bool,
    /// Whether its layers may be MoE.
    has_experts: bool,
    /// Reads the fields of a `config.json`.
    read: fn(&Family, &Fields) -> Result<ModelConfig>,
    /// Writes the fields of a `config.json`.
    write: fn(&Family, &ModelConfig) -> Map<String, Value>,
}

impl Family {
    /// The family that others override.
    const LLAMA: Family = llama::FAMILY;

    pub fn name(&self) -> &'static str {
        self.name
    }
    /// Values of `architectures` in `config.json`.
    pub fn architectures(&self) -> Architectures {
        self.architectures
    }
    /// Whether some layers have a sliding window by default.
    pub fn slides_by_default(&self) -> bool {
        self.slides_by_default
    }
    /// Whether its layers may be MoE.
    pub fn has_experts(&self) -> bool {
        self.has_experts
    }
    /// Reads a `config.json`; absent fields have transformers' defaults.
    pub fn config(&self, json: &Value) -> Result<ModelConfig> {
        (self.read)(self, &Fields::new(json)?)
    }
    /// The checkpoint tensors of each parameter, in the order of [`ModelConfig::params`].
    pub fn tensors(&self, config: &ModelConfig) -> Vec<Tensor> {
        self.names.tensors(config)
    }
    /// Writes a `config.json` that transformers loads, for a model without a source directory.
    pub fn to_json(&self, config: &ModelConfig) -> Value {
        (self.write)(self, config).into()
    }
}

/// The class names of a family in transformers.
#[derive(Clone, Copy, Debug)]
pub struct Architectures {
    /// Language model (next-token logits).
    pub causal: &'static str,
    /// Sequence classifier (a score at the last token).
    pub classifier: &'static str,
    /// No head; read as a language model with tied embeddings.
    pub base: &'static str,
}

impl Architectures {
    /// The class for this head. A value head is stored with the causal class.
    pub fn for_head(&self, head: Head) -> &'static str {
        match head {
            Head::Score => self.classifier,
            Head::Lm | Head::LmAndValue => self.causal,
        }
    }
}

pub fn family(name: &str) -> Result<&'static Family> {
    FAMILIES.iter().copied().find(|f| f.name() == name).ok_or_else(|| {
        let names = FAMILIES.iter().map(|f| f.name());
        unknown(Error::usage(format!("unknown model family {name:?}")), name, names)
    })
}

/// The family a `config.json` belongs to, by its `model_type`.
pub fn family_of(json: &Value) -> Result<&'static Family> {
    let f = Fields::new(json)?;
    let Some(kind) = f.text("model_type")? else {
        return Err(f
            .error("field model_type is missing")
            .fix("add the model_type under which transformers knows the model, such as \"llama\""));
    };
    FAMILIES.iter().copied().find(|family| family.model_type == kind).ok_or_else(|| {
        let names = FAMILIES.iter().map(|family| family.model_type);
        unknown(f.error(format!("model type {kind:?} is not supported")), kind, names)
    })
}

/// The output head, from `architectures` and the number of labels.
fn head_of(f: &Fields, names: Architectures) -> Result<Head> {
    let list = f.texts("architectures")?.unwrap_or_default();
    let Some(&class) = list.first() else { return Ok(Head::Lm) };
    if class == names.causal || class == names.base {
        return Ok(Head::Lm);
    }
    if class != names.classifier {
        let known = [names.causal, names.classifier, names.base];
        return Err(unknown(f.error(format!("architecture {class:?} is not supported")), class, known));
    }
    let labels = match f.get("id2label").and_then(Value::as_object) {
        Some(map) => map.len(),
        None => f.opt_size("num_labels")?.unwrap_or(2), // transformers' default
    };
    if labels != 1 {
        return Err(f
            .error(format!("num_labels is {labels}, expected 1: a score head gives one number per sequence"))
            .fix("use a model trained with num_labels = 1 (id2label with one entry)"));
    }
    Ok(Head::Score)
}

fn unknown(e: Error, name: &str, known: impl IntoIterator<Item = &'static str>) -> Error {
    let known: Vec<&str> = known.into_iter().collect();
    let near = nearest(name, known.iter().copied()).map_or(String::new(), |n| format!("nearest is {n:?}; "));
    e.fix(format!("{near}supported are {}", known.join(", ")))
}
