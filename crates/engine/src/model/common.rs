//! What the families share: the fields of Llama's `config.json`, windows, activations, checks.

use serde_json::{Map, Value, json};

use super::config::{FfnActivation, LayerRope, ModelConfig, NormConfig, NormKind, Position};
use super::fields::Fields;
use super::{Family, head_of, rope_json};
use crate::{Error, Result};

/// transformers' defaults for fields that a family's `config.json` leaves out.
pub(crate) struct Defaults {
    /// `None`: same as the number of query heads.
    pub(crate) kv_heads: Option<usize>,
    /// `None`: `hidden / heads`.
    pub(crate) head_dim: Option<usize>,
    pub(crate) max_positions: usize,
    pub(crate) eps: f64,
    pub(crate) tied: bool,
    pub(crate) activation_key: &'static str,
    pub(crate) activation: &'static str,
}

/// Fields that change the computation in ways the decoder does not implement.
const REFUSED: [&str; 11] = [
    "quantization_config",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "per_layer_config",
    "use_bidirectional_attention",
    "is_encoder_decoder",
    "add_cross_attention",
    "scale_attn_by_inverse_layer_idx",
    "text_config",
    "vision_config",
];

/// Refuses configurations that use any of [`REFUSED`].
pub(crate) fn refuse_unsupported(f: &Fields) -> Result<()> {
    f.refuse(&REFUSED)
}

/// Reads the fields that Llama and its descendants share. Families adjust the result.
pub(crate) fn llama_config(family: &Family, f: &Fields) -> Result<ModelConfig> {
    let defaults = &family.defaults;
    refuse_unsupported(f)?;
    if !family.rope.by_layer {
        f.refuse(&["no_rope_layers"])?;
    }
    let hidden = f.size(&["hidden_size"])?;
    let layers = f.size(&["num_hidden_layers"])?;
    let heads = f.size(&["num_attention_heads"])?;
    let kv_heads = match f.opt_size("num_key_value_heads")? {
        Some(n) => n,
        None if f.has("num_key_value_heads") => heads,
        None => defaults.kv_heads.unwrap_or(heads),
    };
    let head_dim = match f.opt_size("head_dim")? {
        Some(n) => n,
        None if f.has("head_dim") => hidden / heads,
        None => defaults.head_dim.unwrap_or(hidden / heads),
    };
    let max_positions = f.opt_size("max_position_embeddings")?.unwrap_or(defaults.max_positions);
    let eps = f.opt_positive("rms_norm_eps")?.unwrap_or(defaults.eps) as f32;
    let config = ModelConfig {
        family: family.name,
        vocab: f.size(&["vocab_size"])?,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn: f.size(&["intermediate_size"])?,
        experts: None,
        max_positions,
        norm: NormConfig { kind: NormKind::Rms, eps },
        pre_norms: true,
        post_norms: false,
        qk_norm: None,
        activation: gated_activation(f, defaults)?,
        qkv_bias: false,
        out_bias: false,
        mlp_bias: false,
        position: Position::Rotary(rope_json::read(f, head_dim, max_positions, &family.rope)?),
        local_rope: None,
        layer_ropes: vec![LayerRope::Global; layers],
        attention_scale: (1.0 / (head_dim as f64).sqrt()) as f32,
        attention_softcap: None,
        final_softcap: None,
        windows: vec![None; layers],
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits_divisor: 1.0,
        tied: f.flag("tie_word_embeddings", defaults.tied)?,
        head: head_of(f, family.architectures)?,
    };
    check(&config)?;
    Ok(config)
}

fn gated_activation(f: &Fields, defaults: &Defaults) -> Result<FfnActivation> {
    let key = defaults.activation_key;
    match f.text(key)?.unwrap_or(defaults.activation) {
        "silu" | "swish" => Ok(FfnActivation::SiluGated),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(FfnActivation::GeluGated),
        other => Err(f
            .error(format!("{key} {other:?} is not supported"))
            .fix("supported are silu and gelu_pytorch_tanh")),
    }
}

/// Checks that the sizes fit together.
pub(crate) fn check(c: &ModelConfig) -> Result<()> {
    let refused = |what: String| Error::model(what).at("config.json");
    let fail = |what: String| Err(refused(what));
    if !c.heads.is_multiple_of(c.kv_heads) {
        return fail(format!(
            "num_attention_heads ({}) must be a multiple of num_key_value_heads ({})",
            c.heads, c.kv_heads
        ));
    }
    if c.head_dim == 0 {
        return fail(format!("hidden_size ({}) is smaller than num_attention_heads ({})", c.hidden, c.heads));
    }
    if let Position::Rotary(rope) = &c.position
        && (rope.rotary_dim == 0 || !rope.rotary_dim.is_multiple_of(2))
    {
        let what = format!(
            "RoPE rotates {} of the {} dimensions of a head, which must be even and above 0",
            rope.rotary_dim, c.head_dim
        );
        return Err(refused(what).fix("choose hidden size and heads such that hidden / heads is even"));
    }
    if c.layers > 100_000 {
        return fail(format!("num_hidden_layers ({}) is beyond any real model", c.layers));
    }
    let largest = [c.vocab, c.qkv_width(), c.up_width(), c.max_positions].into_iter().max().unwrap_or(0);
    match largest.checked_mul(c.hidden.max(c.ffn)) {
        Some(n) if n <= 1 << 44 => Ok(()),
        _ => fail("the sizes make a parameter too large for any machine".into()),
    }
}

/// Attention window per layer, from `layer_types`.
pub(crate) fn typed_windows(
    f: &Fields,
    layers: usize,
    window: Option<usize>,
    slides_by_default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let Some(types) = f.texts("layer_types")? else {
        return Ok((0..layers).map(|l| window.filter(|_| slides_by_default(l))).collect());
    };
    if types.len() != layers {
        let what = format!("layer_types has {} entries, expected num_hidden_layers ({layers})", types.len());
        return Err(f.error(what));
    }
    let one = |kind: &&str| match *kind {
        "sliding_attention" => Ok(window),
        "full_attention" => Ok(None),
        other => Err(f
            .error(format!("layer_types names {other:?}, which is not supported"))
            .fix("supported are full_attention and sliding_attention")),
    };
    types.iter().map(one).collect()
}

/// `layer_types` for the windows of a config.
pub(crate) fn layer_types(config: &ModelConfig) -> Vec<&'static str> {
    let name = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
    config.windows.iter().map(name).collect()
}

/// The size of the sliding window, which all windowed layers share.
pub(crate) fn window_size(config: &ModelConfig) -> Option<usize> {
    config.windows.iter().flatten().next().copied()
}

/// `sliding_window`: null is no window, absence is transformers' default.
pub(crate) fn sliding_window(f: &Fields) -> Result<Option<usize>> {
    if f.has("sliding_window") { f.opt_size("sliding_window") } else { Ok(Some(4096)) }
}

/// Windows per layer: only with `use_sliding_window`, and from layer `max_window_layers` on.
pub(crate) fn upper_windows(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>> {
    let size = sliding_window(f)?;
    let size = if f.flag("use_sliding_window", false)? { size } else { None };
    let first = match f.get("max_window_layers").and_then(Value::as_u64) {
        Some(n) => n as usize, // 0 is allowed: all layers slide
        None => f.opt_size("max_window_layers")?.unwrap_or(28),
    };
    typed_windows(f, layers, size, |layer| layer >= first)
}

/// Inverse of [`upper_windows`], for older and newer versions of transformers.
pub(crate) fn put_upper_windows(config: &ModelConfig, out: &mut Map<String, Value>) {
    let first = config.windows.iter().position(Option::is_some).unwrap_or(config.layers);
    out.insert("use_sliding_window".into(), json!(window_size(config).is_some()));
    out.insert("sliding_window".into(), json!(window_size(config)));
    out.insert("max_window_layers".into(), json!(first));
    out.insert("layer_types".into(), json!(layer_types(config)));
}

/// What Gemma 2 and Gemma 3 share: norms around each block, biases, scales.
pub(crate) fn gemma_config(family: &Family, f: &Fields) -> Result<ModelConfig> {
    let mut c = llama_config(family, f)?;
    c.norm.kind = NormKind::RmsPlusOne;
    c.post_norms = true;
    c.qkv_bias = f.flag("attention_bias", false)?;
    c.out_bias = c.qkv_bias;
    c.attention_scale = (1.0 / f.opt_positive("query_pre_attn_scalar")?.unwrap_or(256.0).sqrt()) as f32;
    c.embedding_scale = (c.hidden as f64).sqrt() as f32;
    Ok(c)
}

/// Inverse of [`gemma_config`], with soft caps and windows.
pub(crate) fn gemma_json(family: &Family, config: &ModelConfig) -> Map<String, Value> {
    let mut out = llama_json(family, config);
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("hidden_activation", json!(activation_name(config.activation)));
    put("attention_bias", json!(config.qkv_bias));
    put("query_pre_attn_scalar", inverse_square(config.attention_scale));
    put("attn_logit_softcapping", json!(config.attention_softcap.map(plain)));
    put("final_logit_softcapping", json!(config.final_softcap.map(plain)));
    // The classes build a sliding mask even where no layer slides, so the field is never null.
    put("sliding_window", json!(window_size(config).unwrap_or(4096)));
    put("layer_types", json!(layer_types(config)));
    out
}

/// Inverse of [`llama_config`]. Families add their own fields.
pub(crate) fn llama_json(family: &Family, config: &ModelConfig) -> Map<String, Value> {
    let mut out = start_json(family, config);
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("vocab_size", json!(config.vocab));
    put("hidden_size", json!(config.hidden));
    put("intermediate_size", json!(config.ffn));
    put("num_hidden_layers", json!(config.layers));
    put("num_attention_heads", json!(config.heads));
    put("num_key_value_heads", json!(config.kv_heads));
    put("head_dim", json!(config.head_dim));
    put("hidden_act", json!(activation_name(config.activation)));
    put("max_position_embeddings", json!(config.max_positions));
    put("rms_norm_eps", json!(plain(config.norm.eps)));
    put("attention_dropout", json!(0.0));
    if let Position::Rotary(rope) = &config.position {
        rope_json::write(rope, config.head_dim, &mut out);
    }
    out
}

/// Fields that every family has. Special token ids are left out: some classes' defaults exceed small vocabularies.
pub(crate) fn start_json(family: &Family, config: &ModelConfig) -> Map<String, Value> {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("architectures", json!([family.architectures.for_head(config.head)]));
    put("model_type", json!(family.model_type));
    put("torch_dtype", json!("float32"));
    put("tie_word_embeddings", json!(config.tied));
    put("initializer_range", json!(0.02));
    put("use_cache", json!(true));
    for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        put(token, Value::Null);
    }
    if config.head == super::Head::Score {
        put("id2label", json!({"0": "LABEL_0"}));
        put("label2id", json!({"LABEL_0": 0}));
    }
    out
}

pub(crate) fn activation_name(activation: FfnActivation) -> &'static str {
    match activation {
        FfnActivation::SiluGated => "silu",
        FfnActivation::GeluGated => "gelu_pytorch_tanh",
        FfnActivation::Gelu => "gelu_new",
    }
}

/// The shortest decimal that parses to the same `f32`, so that 1e-6 is written as 1e-6.
pub(crate) fn plain(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// `1 / scale^2`, rounded to an integer if it is one up to f32 rounding.
pub(crate) fn inverse_square(scale: f32) -> Value {
    let x = 1.0 / (f64::from(scale) * f64::from(scale));
    if (x - x.round()).abs() < 1e-4 * x { json!(x.round() as u64) } else { json!(x) }
}
