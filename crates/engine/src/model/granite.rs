//! Granite 3: Llama with a factor on the embedding, on attention scores, on what is added to the residual stream, and a
//! divisor of the logits.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json, plain};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Tensor};
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Granite;

const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

impl Family for Granite {
    fn name(&self) -> &'static str {
        "granite"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["granite"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "GraniteForCausalLM",
            classifier: "GraniteForSequenceClassification",
            base: "GraniteModel",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.mlp_bias = f.flag("mlp_bias", false)?;
        let factor = |key: &str| Ok::<f32, crate::Error>(f.opt_positive(key)?.unwrap_or(1.0) as f32);
        c.embedding_scale = factor("embedding_multiplier")?;
        c.attention_scale = factor("attention_multiplier")?;
        c.residual_scale = factor("residual_multiplier")?;
        c.logits_divisor = factor("logits_scaling")?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        LLAMA_NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "granite", self.architectures());
        let mut put = |key: &str, value: Value| out.insert(key.into(), value);
        put("attention_bias", json!(config.qkv_bias));
        put("mlp_bias", json!(config.mlp_bias));
        put("embedding_multiplier", json!(plain(config.embedding_scale)));
        put("attention_multiplier", json!(plain(config.attention_scale)));
        put("residual_multiplier", json!(plain(config.residual_scale)));
        put("logits_scaling", json!(plain(config.logits_divisor)));
        out.into()
    }
}
