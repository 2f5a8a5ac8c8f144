//! Mistral: Llama with one sliding window for all layers, or none.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json, typed_windows, window_size};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Mistral;

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(8),
    head_dim: None,
    max_positions: 131_072,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

impl Family for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["mistral"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "MistralForCausalLM",
            classifier: "MistralForSequenceClassification",
            base: "MistralModel",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        let window = if f.has("sliding_window") { f.opt_size("sliding_window")? } else { Some(4096) };
        c.windows = vec![window; c.layers];
        // transformers' Mistral ignores layer_types, so one that says otherwise has no agreed meaning.
        if typed_windows(&f, c.layers, window, |_| true)? != c.windows {
            return Err(f
                .error("layer_types mixes windows, which Mistral's class in transformers ignores")
                .fix("remove layer_types, or set sliding_window to null"));
        }
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "mistral", self.architectures());
        out.insert("sliding_window".into(), json!(window_size(config)));
        out.into()
    }
}
