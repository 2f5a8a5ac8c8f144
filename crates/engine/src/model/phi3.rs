//! Phi 3, 3.5 and 4 (mini, medium): Llama with fused projections in the files, LongRoPE, partial rotation.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json, window_size};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, Naming, Rows, Tensor};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Phi3;

const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    max_positions: 4096,
    eps: 1e-5,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

const ROPE: RopeRules =
    RopeRules { original: Some(4096), partial: Some(1.0), longrope_aliases: true, ..RopeRules::USUAL };

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnNorm, &[("input_layernorm", Rows::All)]),
        (Slot::MlpNorm, &[("post_attention_layernorm", Rows::All)]),
        (Slot::Qkv, &[("self_attn.qkv_proj", Rows::All)]),
        (Slot::AttnOut, &[("self_attn.o_proj", Rows::All)]),
        (Slot::Up, &[("mlp.gate_up_proj", Rows::All)]),
        (Slot::Down, &[("mlp.down_proj", Rows::All)]),
    ],
    ..LLAMA_NAMES
};

impl Family for Phi3 {
    fn name(&self) -> &'static str {
        "phi3"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["phi3"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Phi3ForCausalLM",
            classifier: "Phi3ForSequenceClassification",
            base: "Phi3Model",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &ROPE)?;
        c.windows = vec![f.opt_size("sliding_window")?; c.layers];
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "phi3", self.architectures());
        out.entry("original_max_position_embeddings").or_insert(json!(config.max_positions));
        out.insert("sliding_window".into(), json!(window_size(config)));
        out.into()
    }
}
