//! GLM 4 (0414): pre- and post-norms of each block, RoPE on a part of each head in interleaved pairs, biases on q, k and v.
//!
//! The decoder rotates dimensions `i` and `i + half` together; the checkpoint pairs `2i` with `2i + 1`. Rows of the query and
//! key projections are permuted when read and permuted back when written
//! ([`RowOrder::Interleaved`](super::naming::RowOrder)): the same permutation of q and k leaves `q . k` unchanged.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json};
use super::naming::{LLAMA_NAMES, Naming, RowShare};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Family};

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnNorm, &[("input_layernorm", RowShare::All)]),
        (Slot::AttnPostNorm, &[("post_self_attn_layernorm", RowShare::All)]),
        (Slot::MlpNorm, &[("post_attention_layernorm", RowShare::All)]),
        (Slot::MlpPostNorm, &[("post_mlp_layernorm", RowShare::All)]),
        (
            Slot::Qkv,
            &[
                ("self_attn.q_proj", RowShare::InterleavedQuery),
                ("self_attn.k_proj", RowShare::InterleavedKey),
                ("self_attn.v_proj", RowShare::KeyOrValue),
            ],
        ),
        (Slot::AttnOut, &[("self_attn.o_proj", RowShare::All)]),
        (Slot::Up, &[("mlp.gate_up_proj", RowShare::All)]),
        (Slot::Down, &[("mlp.down_proj", RowShare::All)]),
    ],
    ..LLAMA_NAMES
};

pub(super) const FAMILY: Family = Family {
    name: "glm4",
    model_type: "glm4",
    architectures: Architectures {
        causal: "Glm4ForCausalLM",
        classifier: "Glm4ForSequenceClassification",
        base: "Glm4Model",
    },
    defaults: Defaults {
        kv_heads: Some(2),
        head_dim: Some(128),
        max_positions: 131_072,
        eps: 1.5625e-7,
        ..Family::LLAMA.defaults
    },
    rope: RopeRules { partial: Some(0.5), ..RopeRules::USUAL },
    names: NAMES,
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.post_norms = true;
        c.qkv_bias = f.flag("attention_bias", true)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        // The class's own default is 0.5.
        out.entry("partial_rotary_factor").or_insert(json!(1.0));
        out
    },
    ..Family::LLAMA
};
