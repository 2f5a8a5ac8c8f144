//! Llama 2, 3 and 3.x, and models published under their architecture.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json};
use super::naming::LLAMA_NAMES;
use super::rope_json::RopeRules;
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    model_type: "llama",
    architectures: Architectures {
        causal: "LlamaForCausalLM",
        classifier: "LlamaForSequenceClassification",
        base: "LlamaModel",
    },
    defaults: Defaults {
        kv_heads: None,
        head_dim: None,
        max_positions: 2048,
        eps: 1e-6,
        tied: false,
        activation_key: "hidden_act",
        activation: "silu",
    },
    rope: RopeRules::USUAL,
    names: LLAMA_NAMES,
    slides_by_default: false,
    has_experts: false,
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.mlp_bias = f.flag("mlp_bias", false)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        out.insert("mlp_bias".into(), json!(config.mlp_bias));
        out
    },
};
