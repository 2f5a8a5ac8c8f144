//! Qwen 2 and 2.5: Llama with a bias on query, key and value, and windows in the upper layers on request.

use serde_json::Value;

use super::common::{Defaults, llama_config, llama_json, put_upper_windows, upper_windows};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Qwen2;

const DEFAULTS: Defaults = Defaults {
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
        c.windows = upper_windows(&f, c.layers)?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "qwen2", self.architectures());
        put_upper_windows(config, &mut out);
        out.into()
    }
}
