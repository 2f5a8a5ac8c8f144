//! GLM 4 (0414): norms on both sides of each block, a part of each head rotated in neighbouring pairs, biases on queries,
//! keys and values.
//!
//! The decoder rotates dimension `i` with `i + half`, the files pair `2i` with `2i + 1`. Rows of the query and key
//! projections are put into the decoder's order when they are read, and back when they are written
//! ([`RowOrder::Interleaved`](super::naming::RowOrder)): queries and keys change in the same way, so their products are the same.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Naming, Rows, Tensor};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Glm4;

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(2),
    head_dim: Some(128),
    max_positions: 131_072,
    eps: 1.5625e-7,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

const ROPE: RopeRules = RopeRules { partial: Some(0.5), ..RopeRules::USUAL };

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnNorm, &[("input_layernorm", Rows::All)]),
        (Slot::AttnPostNorm, &[("post_self_attn_layernorm", Rows::All)]),
        (Slot::MlpNorm, &[("post_attention_layernorm", Rows::All)]),
        (Slot::MlpPostNorm, &[("post_mlp_layernorm", Rows::All)]),
        (
            Slot::Qkv,
            &[
                ("self_attn.q_proj", Rows::InterleavedQuery),
                ("self_attn.k_proj", Rows::InterleavedKey),
                ("self_attn.v_proj", Rows::KeyOrValue),
            ],
        ),
        (Slot::AttnOut, &[("self_attn.o_proj", Rows::All)]),
        (Slot::Up, &[("mlp.gate_up_proj", Rows::All)]),
        (Slot::Down, &[("mlp.down_proj", Rows::All)]),
    ],
    ..LLAMA_NAMES
};

impl Family for Glm4 {
    fn name(&self) -> &'static str {
        "glm4"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["glm4"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Glm4ForCausalLM",
            classifier: "Glm4ForSequenceClassification",
            base: "Glm4Model",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &ROPE)?;
        c.post_norms = true;
        c.qkv_bias = f.flag("attention_bias", true)?;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "glm4", self.architectures());
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        // Half is what a file without it means.
        out.entry("partial_rotary_factor").or_insert(json!(1.0));
        out.into()
    }
}
