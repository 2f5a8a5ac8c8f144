//! Qwen 2 and 2.5: Llama with a bias on query, key and value, and windows in the upper layers on request.

use serde_json::{Map, Value, json};

use super::common::{Defaults, layer_types, llama_config, llama_json, typed_windows, window_size};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Qwen2;

pub(super) const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(32),
    head_dim: None,
    max_positions: 32_768,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

impl Family for Qwen2 {
    fn name(&self) -> &'static str {
        "qwen2"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen2"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Qwen2ForCausalLM",
            classifier: "Qwen2ForSequenceClassification",
            base: "Qwen2Model",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        c.qkv_bias = true;
        c.windows = windows(&f, c.layers)?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "qwen2", self.architectures());
        put_windows(config, &mut out);
        out.into()
    }
}

/// Windows count only under `use_sliding_window`, and from layer `max_window_layers` on.
pub(super) fn windows(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>> {
    let size = if f.has("sliding_window") { f.opt_size("sliding_window")? } else { Some(4096) };
    let size = if f.flag("use_sliding_window", false)? { size } else { None };
    let first = match f.get("max_window_layers").and_then(Value::as_u64) {
        Some(n) => n as usize, // 0 is allowed: all layers slide
        None => f.opt_size("max_window_layers")?.unwrap_or(28),
    };
    typed_windows(f, layers, size, |layer| layer >= first)
}

/// Writes the same, for older and newer versions of transformers.
pub(super) fn put_windows(config: &Config, out: &mut Map<String, Value>) {
    let first = config.windows.iter().position(Option::is_some).unwrap_or(config.layers);
    out.insert("use_sliding_window".into(), json!(window_size(config).is_some()));
    out.insert("sliding_window".into(), json!(window_size(config)));
    out.insert("max_window_layers".into(), json!(first));
    out.insert("layer_types".into(), json!(layer_types(config)));
}
