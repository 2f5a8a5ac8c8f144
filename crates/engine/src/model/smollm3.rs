//! SmolLM 3: Llama with no RoPE (NoPE) in every fourth layer.

use serde_json::{Value, json};

use super::common::{Defaults, layer_types, llama_config, llama_json, typed_windows, window_size};
use super::config::LayerRope;
use super::fields::Fields;
use super::rope_json::RopeRules;
use super::{Architectures, Family};
use crate::Result;

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    model_type: "smollm3",
    architectures: Architectures {
        causal: "SmolLM3ForCausalLM",
        classifier: "SmolLM3ForSequenceClassification",
        base: "SmolLM3Model",
    },
    defaults: Defaults { kv_heads: Some(4), max_positions: 32_768, tied: true, ..Family::LLAMA.defaults },
    rope: RopeRules { theta: 2_000_000.0, by_layer: true, ..RopeRules::USUAL },
    read: |family, f| {
        let mut c = llama_config(family, f)?;
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.mlp_bias = f.flag("mlp_bias", false)?;
        c.layer_ropes = layer_ropes(f, c.layers)?;
        let slides = f.flag("use_sliding_window", false)?;
        let size = f.opt_size("sliding_window")?;
        if !slides
            && size.is_some()
            && typed_windows(f, c.layers, size, |_| false)?.iter().any(Option::is_some)
        {
            return Err(f
                .error(
                    "layer_types names layers with a window although use_sliding_window is false: \
                        transformers' attention kernels disagree on what that means",
                )
                .fix("set use_sliding_window to true, or sliding_window to null"));
        }
        let window = size.filter(|_| slides);
        // Without layer_types, the NoPE layers are the windowed ones.
        c.windows = typed_windows(f, c.layers, window, |l| c.layer_ropes[l] == LayerRope::None)?;
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        let mut put = |key: &str, value: Value| out.insert(key.into(), value);
        let rotates = |rope: &LayerRope| u8::from(*rope != LayerRope::None);
        put("attention_bias", json!(config.qkv_bias));
        put("mlp_bias", json!(config.mlp_bias));
        put("no_rope_layers", json!(config.layer_ropes.iter().map(rotates).collect::<Vec<_>>()));
        put("use_sliding_window", json!(window_size(config).is_some()));
        put("sliding_window", json!(window_size(config)));
        put("layer_types", json!(layer_types(config)));
        out
    },
    ..Family::LLAMA
};

/// `no_rope_layers` holds 1 for a layer with RoPE; without it, every `no_rope_layer_interval`-th layer has none.
fn layer_ropes(f: &Fields, layers: usize) -> Result<Vec<LayerRope>> {
    let of = |rotates: bool| if rotates { LayerRope::Global } else { LayerRope::None };
    let Some(list) = f.get("no_rope_layers") else {
        let interval = f.opt_size("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=layers).map(|l| of(!l.is_multiple_of(interval))).collect());
    };
    let flags: Option<Vec<u64>> = list.as_array().and_then(|l| l.iter().map(Value::as_u64).collect());
    match flags {
        Some(flags) if flags.len() >= layers && flags.iter().all(|x| *x < 2) => {
            Ok(flags[..layers].iter().map(|x| of(*x == 1)).collect())
        }
        _ => Err(f
            .error(format!("no_rope_layers must hold 0 or 1 for each of the {layers} layers, got {list}"))
            .fix("1 for a layer that rotates, 0 for one that does not")),
    }
}
