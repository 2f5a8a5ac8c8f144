//! Gemma 2: norms on both sides of each block with weights around zero, soft caps, every other layer
//! windowed, a scaled embedding.

use serde_json::{Value, json};

use super::common::{
    Defaults, activation_name, inverse_square, layer_types, llama_config, llama_json, plain, typed_windows,
};
use super::config::NormKind;
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Naming, RowShare};
use super::param::Slot;
use super::{Architectures, Family, common};
use crate::Result;

pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    model_type: "gemma2",
    architectures: Architectures {
        causal: "Gemma2ForCausalLM",
        classifier: "Gemma2ForSequenceClassification",
        base: "Gemma2Model",
    },
    defaults: Defaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 8192,
        tied: true,
        activation_keys: &["hidden_activation", "hidden_act"],
        activation: "gelu_pytorch_tanh",
        ..Family::LLAMA.defaults
    },
    names: Naming {
        slots: &[(Slot::MlpNorm, &[("pre_feedforward_layernorm", RowShare::All)])],
        ..LLAMA_NAMES
    },
    slides_by_default: true,
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.norm.kind = NormKind::RmsPlusOne;
        c.post_norms = true;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.attention_scale = (1.0 / f.opt_positive("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt()) as f32;
        c.attention_softcap = softcap(f, "attn_logit_softcapping", 50.0)?;
        c.final_softcap = softcap(f, "final_logit_softcapping", 30.0)?;
        c.embedding_scale = (c.hidden as f64).sqrt() as f32;
        let window = if f.has("sliding_window") { f.opt_size("sliding_window")? } else { Some(4096) };
        c.windows = typed_windows(f, c.layers, window, |layer| layer % 2 == 0)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        let mut put = |key: &str, value: Value| out.insert(key.into(), value);
        put("hidden_activation", json!(activation_name(config.activation)));
        put("attention_bias", json!(config.qkv_bias));
        put("query_pre_attn_scalar", inverse_square(config.attention_scale));
        put("attn_logit_softcapping", json!(config.attention_softcap.map(plain)));
        put("final_logit_softcapping", json!(config.final_softcap.map(plain)));
        // The class builds its sliding mask even where no layer slides, so the field is never null.
        put("sliding_window", json!(common::window_size(config).unwrap_or(4096)));
        put("layer_types", json!(layer_types(config)));
        out
    },
    ..Family::LLAMA
};

/// Null switches a cap off; absence means the default.
fn softcap(f: &Fields, key: &str, default: f64) -> Result<Option<f32>> {
    let cap = if f.has(key) { f.opt_positive(key)? } else { Some(default) };
    Ok(cap.map(|x| x as f32))
}
