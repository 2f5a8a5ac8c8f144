//! Gemma 3 (text): Gemma 2 with QK norm instead of soft caps, five windowed layers per full layer, and a separate RoPE for
//! windowed layers.

use serde_json::{Value, json};

use super::common::{Defaults, gemma_config, gemma_json, sliding_window, typed_windows};
use super::config::{LayerRope, QkNorm, Rope, RopeScaling};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Naming, RowShare};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Family};
use crate::Result;

/// Default `rope_theta` of windowed layers.
const LOCAL_THETA: f64 = 10_000.0;

pub(super) const FAMILY: Family = Family {
    name: "gemma3",
    model_type: "gemma3_text",
    architectures: Architectures {
        causal: "Gemma3ForCausalLM",
        classifier: "Gemma3TextForSequenceClassification",
        base: "Gemma3TextModel",
    },
    defaults: Defaults {
        kv_heads: Some(4),
        head_dim: Some(256),
        max_positions: 131_072,
        tied: true,
        activation_key: "hidden_activation", // `hidden_act` may stand beside it and is not read
        activation: "gelu_pytorch_tanh",
        ..Family::LLAMA.defaults
    },
    rope: RopeRules { theta: 1_000_000.0, by_layer_type: true, ..RopeRules::USUAL },
    names: Naming {
        slots: &[(Slot::MlpNorm, &[("pre_feedforward_layernorm", RowShare::All)])],
        ..LLAMA_NAMES
    },
    slides_by_default: true,
    read: |family, f| {
        let json = with_defaults(f);
        let f = &Fields::new(&json)?;
        // transformers' Gemma 3 ignores the field, so one that is set has no agreed meaning.
        if f.is_active("attn_logit_softcapping") {
            return Err(f
                .error("attn_logit_softcapping is set, which Gemma 3's class in transformers ignores")
                .fix("set attn_logit_softcapping to null: Gemma 3 has norms on queries and keys instead"));
        }
        let mut c = gemma_config(family, f)?;
        c.qk_norm = Some(QkNorm::PerHead);
        c.final_softcap = f.opt_positive("final_logit_softcapping")?.map(|x| x as f32);
        let pattern = f.opt_size("sliding_window_pattern")?.unwrap_or(6);
        let slides = |layer: usize| !(layer + 1).is_multiple_of(pattern);
        c.windows = typed_windows(f, c.layers, sliding_window(f)?, slides)?;
        let local = local_layers(f, c.layers, slides)?;
        let rope = |local: bool| if local { LayerRope::Local } else { LayerRope::Global };
        c.layer_ropes = local.into_iter().map(rope).collect();
        c.local_rope = Some(local_rope(f, c.head_dim)?);
        Ok(c)
    },
    write: |family, config| {
        let mut out = gemma_json(family, config);
        if let Some(rope) = &config.local_rope {
            out.insert("rope_local_base_freq".into(), json!(rope.theta));
        }
        out
    },
    ..Family::LLAMA
};

/// Fills in fields that the published 4B, 12B and 27B leave to transformers' defaults.
fn with_defaults(f: &Fields) -> Value {
    let mut all = f.all().clone();
    all.entry("num_attention_heads").or_insert(json!(8));
    all.entry("vocab_size").or_insert(json!(262_208));
    all.into()
}

/// Layers that use the local RoPE: those that `layer_types` calls sliding, even if their window is unbounded.
fn local_layers(f: &Fields, layers: usize, slides: impl Fn(usize) -> bool) -> Result<Vec<bool>> {
    let unbounded = typed_windows(f, layers, Some(1), slides)?;
    Ok(unbounded.iter().map(Option::is_some).collect())
}

/// RoPE of windowed layers: `rope_local_base_freq`, or the `sliding_attention` entry of `rope_parameters`.
fn local_rope(f: &Fields, head_dim: usize) -> Result<Rope> {
    let place = "config.json: rope_parameters.sliding_attention";
    let dict = match f.object("rope_parameters", "config.json: rope_parameters")? {
        Some(both) => both.object("sliding_attention", place)?,
        None => None,
    };
    let kind = dict.map(|d| d.text("rope_type")).transpose()?.flatten().unwrap_or("default");
    if kind != "default" {
        return Err(f
            .error(format!(
                "rope_parameters.sliding_attention has rope_type {kind:?}, which is not supported"
            ))
            .fix("windowed layers rotate unscaled: rope_type \"default\""));
    }
    let theta = match dict.map(|d| d.opt_positive("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => f.opt_positive("rope_local_base_freq")?.unwrap_or(LOCAL_THETA),
    };
    Ok(Rope { theta, rotary_dim: head_dim, scaling: RopeScaling::None })
}
