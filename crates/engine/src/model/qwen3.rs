//! Qwen 3 (dense): Qwen 2 without biases, with a QK norm per head.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json, put_upper_windows, upper_windows};
use super::config::QkNorm;
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    model_type: "qwen3",
    architectures: Architectures {
        causal: "Qwen3ForCausalLM",
        classifier: "Qwen3ForSequenceClassification",
        base: "Qwen3Model",
    },
    defaults: Defaults {
        kv_heads: Some(32),
        head_dim: Some(128),
        max_positions: 32_768,
        ..Family::LLAMA.defaults
    },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.qk_norm = Some(QkNorm::PerHead);
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.windows = upper_windows(f, c.layers)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        put_upper_windows(config, &mut out);
        out
    },
    ..Family::LLAMA
};
