//! Qwen 2 and 2.5: Llama with biases on q, k and v, and optional sliding windows in the upper layers.

use super::common::{Defaults, llama_config, llama_json, put_upper_windows, upper_windows};
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    model_type: "qwen2",
    architectures: Architectures {
        causal: "Qwen2ForCausalLM",
        classifier: "Qwen2ForSequenceClassification",
        base: "Qwen2Model",
    },
    defaults: Defaults { kv_heads: Some(32), max_positions: 32_768, ..Family::LLAMA.defaults },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.qkv_bias = true;
        c.windows = upper_windows(f, c.layers)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        put_upper_windows(config, &mut out);
        out
    },
    ..Family::LLAMA
};
