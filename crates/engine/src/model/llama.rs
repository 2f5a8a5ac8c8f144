//! Llama 2, 3 and 3.x, and the models published under their name.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Llama;

const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["llama"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "LlamaForCausalLM",
            classifier: "LlamaForSequenceClassification",
            base: "LlamaModel",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.mlp_bias = f.flag("mlp_bias", false)?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "llama", self.architectures());
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        out.insert("mlp_bias".into(), json!(config.mlp_bias));
        out.into()
    }
}
