//! OLMo 2: post-norms instead of pre-norms, and a QK norm over all heads together.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json};
use super::config::QkNorm;
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    model_type: "olmo2",
    architectures: Architectures {
        causal: "Olmo2ForCausalLM",
        classifier: "Olmo2ForSequenceClassification",
        base: "Olmo2Model",
    },
    defaults: Defaults { eps: 1e-5, ..Family::LLAMA.defaults },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        (c.pre_norms, c.post_norms, c.qk_norm) = (false, true, Some(QkNorm::Whole));
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        out
    },
    ..Family::LLAMA
};
