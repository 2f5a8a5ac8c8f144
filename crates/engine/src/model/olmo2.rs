//! OLMo 2: norms after attention and after the network instead of before them, and a norm over all queries and all keys.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json};
use super::config::QkNorm;
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, LLAMA_QKV, LLAMA_UP, Naming, Rows, Tensor};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Olmo2;

const DEFAULTS: Defaults = Defaults {
    kv_heads: None,
    head_dim: None,
    max_positions: 2048,
    eps: 1e-5,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnPostNorm, &[("post_attention_layernorm", Rows::All)]),
        (Slot::MlpPostNorm, &[("post_feedforward_layernorm", Rows::All)]),
        (Slot::QNorm, &[("self_attn.q_norm", Rows::All)]),
        (Slot::KNorm, &[("self_attn.k_norm", Rows::All)]),
        LLAMA_QKV,
        (Slot::AttnOut, &[("self_attn.o_proj", Rows::All)]),
        LLAMA_UP,
        (Slot::Down, &[("mlp.down_proj", Rows::All)]),
    ],
    ..LLAMA_NAMES
};

impl Family for Olmo2 {
    fn name(&self) -> &'static str {
        "olmo2"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["olmo2"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Olmo2ForCausalLM",
            classifier: "Olmo2ForSequenceClassification",
            base: "Olmo2Model",
        }
    }
    fn config(&self, json: &Value) -> Result<Config> {
        let f = Fields::new(json)?;
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        (c.pre_norms, c.post_norms, c.qk_norm) = (false, true, Some(QkNorm::Whole));
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "olmo2", self.architectures());
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        out.into()
    }
}
