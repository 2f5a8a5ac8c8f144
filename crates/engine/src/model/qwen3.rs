//! Qwen 3 (dense): Qwen 2 without biases, with a norm on every query and key head.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json, put_upper_windows, upper_windows};
use super::config::QkNorm;
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Qwen3;

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(32),
    head_dim: Some(128),
    max_positions: 32_768,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

impl Family for Qwen3 {
    fn name(&self) -> &'static str {
        "qwen3"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Qwen3ForCausalLM",
            classifier: "Qwen3ForSequenceClassification",
            base: "Qwen3Model",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        c.qk_norm = Some(QkNorm::PerHead);
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.windows = upper_windows(&f, c.layers)?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "qwen3", self.architectures());
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        put_upper_windows(config, &mut out);
        out.into()
    }
}
