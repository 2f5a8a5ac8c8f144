//! Mistral: Llama with one sliding window for all layers, or none.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json, sliding_window, typed_windows, window_size};
use super::{Architectures, Family};

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    model_type: "mistral",
    architectures: Architectures {
        causal: "MistralForCausalLM",
        classifier: "MistralForSequenceClassification",
        base: "MistralModel",
    },
    defaults: Defaults { kv_heads: Some(8), max_positions: 131_072, ..Family::LLAMA.defaults },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        let window = sliding_window(f)?;
        c.windows = vec![window; c.layers];
        // transformers' Mistral ignores layer_types, so a conflicting one is ambiguous.
        if typed_windows(f, c.layers, window, |_| true)? != c.windows {
            return Err(f
                .error("layer_types mixes windows, which Mistral's class in transformers ignores")
                .fix("remove layer_types, or set sliding_window to null"));
        }
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("sliding_window".into(), json!(window_size(config)));
        out
    },
    ..Family::LLAMA
};
