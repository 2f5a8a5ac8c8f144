//! Granite 3: Llama with factors on the embedding, on attention scores and on residual additions, and a divisor of the
//! logits.

use serde_json::{Value, json};

use super::common::{llama_config, llama_json, plain};
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "granite",
    model_type: "granite",
    architectures: Architectures {
        causal: "GraniteForCausalLM",
        classifier: "GraniteForSequenceClassification",
        base: "GraniteModel",
    },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.mlp_bias = f.flag("mlp_bias", false)?;
        let factor = |key: &str| Ok::<f32, crate::Error>(f.opt_positive(key)?.unwrap_or(1.0) as f32);
        c.embedding_scale = factor("embedding_multiplier")?;
        c.attention_scale = factor("attention_multiplier")?;
        c.residual_scale = factor("residual_multiplier")?;
        c.logits_divisor = factor("logits_scaling")?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        let mut put = |key: &str, value: Value| out.insert(key.into(), value);
        put("attention_bias", json!(config.qkv_bias));
        put("mlp_bias", json!(config.mlp_bias));
        put("embedding_multiplier", json!(plain(config.embedding_scale)));
        put("attention_multiplier", json!(plain(config.attention_scale)));
        put("residual_multiplier", json!(plain(config.residual_scale)));
        put("logits_scaling", json!(plain(config.logits_divisor)));
        out
    },
    ..Family::LLAMA
};
