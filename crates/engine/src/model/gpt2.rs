//! GPT-2: learned positions, LayerNorm with biases, an ungated network, matrices stored as `[in, out]`.

use serde_json::{Value, json};

use super::common::{activation_name, check, plain, refuse_unsupported, start_json};
use super::config::{FfnActivation, LayerRope, NormConfig, NormKind, Position};
use super::fields::Fields;
use super::naming::{Naming, RowShare};
use super::param::Slot;
use super::{Architectures, Family, ModelConfig, head_of};
use crate::Result;

const NAMES: Naming = Naming {
    prefix: "transformer.",
    embed: "wte",
    position: "wpe",
    layers: "h",
    final_norm: "ln_f",
    transposed: true,
    slots: &[
        (Slot::AttnNorm, &[("ln_1", RowShare::All)]),
        (Slot::MlpNorm, &[("ln_2", RowShare::All)]),
        (Slot::Qkv, &[("attn.c_attn", RowShare::All)]),
        (Slot::AttnOut, &[("attn.c_proj", RowShare::All)]),
        (Slot::Up, &[("mlp.c_fc", RowShare::All)]),
        (Slot::Down, &[("mlp.c_proj", RowShare::All)]),
    ],
};

pub(super) const FAMILY: Family = Family {
    name: "gpt2",
    model_type: "gpt2",
    architectures: Architectures {
        causal: "GPT2LMHeadModel",
        classifier: "GPT2ForSequenceClassification",
        base: "GPT2Model",
    },
    names: NAMES,
    read: |family, f| {
        refuse_unsupported(f)?;
        let hidden = f.size(&["n_embd", "hidden_size"])?;
        let layers = f.size(&["n_layer", "num_hidden_layers"])?;
        let heads = f.size(&["n_head", "num_attention_heads"])?;
        let head_dim = hidden / heads;
        if head_dim * heads != hidden {
            return Err(f.error(format!("n_embd ({hidden}) must be a multiple of n_head ({heads})")));
        }
        for (key, only) in [("num_key_value_heads", heads), ("head_dim", head_dim)] {
            if let Some(n) = f.opt_size(key)?.filter(|n| *n != only) {
                return Err(f.error(format!("{key} is {n}, expected {only}: GPT-2 supports no other")));
            }
        }
        let scaled = f.flag("scale_attn_weights", true)?;
        let config = ModelConfig {
            family: family.name,
            vocab: f.size(&["vocab_size"])?,
            hidden,
            layers,
            heads,
            kv_heads: heads,
            head_dim,
            ffn: f.opt_size("n_inner")?.unwrap_or(4 * hidden),
            experts: None,
            max_positions: f.size(&["n_positions", "max_position_embeddings"])?,
            norm: NormConfig {
                kind: NormKind::Layer,
                eps: f.opt_positive("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
            },
            pre_norms: true,
            post_norms: false,
            qk_norm: None,
            activation: activation(f)?,
            qkv_bias: true,
            out_bias: true,
            mlp_bias: true,
            position: Position::Learned,
            local_rope: None,
            layer_ropes: vec![LayerRope::None; layers],
            attention_scale: if scaled { (1.0 / (head_dim as f64).sqrt()) as f32 } else { 1.0 },
            attention_softcap: None,
            final_softcap: None,
            windows: vec![None; layers],
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logits_divisor: 1.0,
            tied: f.flag("tie_word_embeddings", true)?,
            head: head_of(f, family.architectures)?,
        };
        check(&config)?;
        Ok(config)
    },
    write: |family, config| {
        let mut out = start_json(family, config);
        let mut put = |key: &str, value: Value| out.insert(key.into(), value);
        put("vocab_size", json!(config.vocab));
        put("n_embd", json!(config.hidden));
        put("n_layer", json!(config.layers));
        put("n_head", json!(config.heads));
        put("n_inner", json!(config.ffn));
        put("n_positions", json!(config.max_positions));
        put("activation_function", json!(activation_name(config.activation)));
        put("layer_norm_epsilon", json!(plain(config.norm.eps)));
        put("scale_attn_weights", json!(config.attention_scale != 1.0 || config.head_dim == 1));
        for dropout in ["attn_pdrop", "embd_pdrop", "resid_pdrop"] {
            put(dropout, json!(0.0));
        }
        out
    },
    ..Family::LLAMA
};

fn activation(f: &Fields) -> Result<FfnActivation> {
    match f.text("activation_function")?.unwrap_or("gelu_new") {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(FfnActivation::Gelu),
        other => Err(f
            .error(format!("activation_function {other:?} is not supported"))
            .fix("supported are gelu_new and gelu_pytorch_tanh")),
    }
}
