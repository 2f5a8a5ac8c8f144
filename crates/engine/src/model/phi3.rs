//! Phi 3, 3.5 and 4 (mini, medium): Llama with fused projections in the checkpoint, LongRoPE, partial RoPE.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json, window_size};
use super::naming::{LLAMA_NAMES, Naming, RowShare};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Family};

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnNorm, &[("input_layernorm", RowShare::All)]),
        (Slot::MlpNorm, &[("post_attention_layernorm", RowShare::All)]),
        (Slot::Qkv, &[("self_attn.qkv_proj", RowShare::All)]),
        (Slot::AttnOut, &[("self_attn.o_proj", RowShare::All)]),
        (Slot::Up, &[("mlp.gate_up_proj", RowShare::All)]),
        (Slot::Down, &[("mlp.down_proj", RowShare::All)]),
    ],
    ..LLAMA_NAMES
};

pub(super) const FAMILY: Family = Family {
    name: "phi3",
    model_type: "phi3",
    architectures: Architectures {
        causal: "Phi3ForCausalLM",
        classifier: "Phi3ForSequenceClassification",
        base: "Phi3Model",
    },
    defaults: Defaults { max_positions: 4096, eps: 1e-5, ..Family::LLAMA.defaults },
    rope: RopeRules { original: Some(4096), partial: Some(1.0), longrope_aliases: true, ..RopeRules::USUAL },
    names: NAMES,
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.windows = vec![f.opt_size("sliding_window")?; c.layers];
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.entry("original_max_position_embeddings").or_insert(json!(config.max_positions));
        out.insert("sliding_window".into(), json!(window_size(config)));
        out
    },
    ..Family::LLAMA
};
