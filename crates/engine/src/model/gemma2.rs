//! Gemma 2: pre- and post-norms of each block with weights `1 + w`, soft caps, a sliding window in every other layer, a
//! scaled embedding.

use super::common::{Defaults, gemma_config, gemma_json, sliding_window, typed_windows};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Naming, RowShare};
use super::param::Slot;
use super::{Architectures, Family};
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
        activation_key: "hidden_activation", // `hidden_act` may stand beside it and is not read
        activation: "gelu_pytorch_tanh",
        ..Family::LLAMA.defaults
    },
    names: Naming {
        slots: &[(Slot::MlpNorm, &[("pre_feedforward_layernorm", RowShare::All)])],
        ..LLAMA_NAMES
    },
    slides_by_default: true,
    read: |family, f| {
        let mut c = gemma_config(family, f)?;
        c.attention_softcap = softcap(f, "attn_logit_softcapping", 50.0)?;
        c.final_softcap = softcap(f, "final_logit_softcapping", 30.0)?;
        c.windows = typed_windows(f, c.layers, sliding_window(f)?, |layer| layer % 2 == 0)?;
        Ok(c)
    },
    write: gemma_json,
    ..Family::LLAMA
};

/// Null disables a cap; absence means the default.
fn softcap(f: &Fields, key: &str, default: f64) -> Result<Option<f32>> {
    let cap = if f.has(key) { f.opt_positive(key)? } else { Some(default) };
    Ok(cap.map(|x| x as f32))
}
