//! Qwen 3 MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen 3 with mixtures of experts.

use serde_json::json;

use super::common::{Defaults, llama_config, llama_json, plain, sliding_window, window_size};
use super::config::{Experts, QkNorm};
use super::fields::Fields;
use super::{Architectures, Family};
use crate::Result;

/// Names of the field for the number of experts, across versions of transformers.
const COUNT: [&str; 2] = ["num_experts", "num_local_experts"];

/// Largest supported number of experts.
const MOST: usize = 4096;

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    model_type: "qwen3_moe",
    architectures: Architectures {
        causal: "Qwen3MoeForCausalLM",
        classifier: "Qwen3MoeForSequenceClassification",
        base: "Qwen3MoeModel",
    },
    defaults: Defaults { kv_heads: Some(4), max_positions: 32_768, ..Family::LLAMA.defaults },
    has_experts: true,
    read: |family, all| {
        // The rest is read as a dense model, whose reader refuses expert fields.
        let mut dense = all.all().clone();
        COUNT.iter().for_each(|key| drop(dense.remove(*key)));
        dense.entry("intermediate_size").or_insert(json!(6144));
        let dense = dense.into();
        let f = &Fields::new(&dense)?;
        let mut c = llama_config(family, f)?;
        c.qk_norm = Some(QkNorm::PerHead);
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.windows = vec![window(f)?; c.layers];
        c.experts = Some(experts(all, c.layers)?);
        Ok(c)
    },
    write: |family, config| {
        let mut out = llama_json(family, config);
        out.insert("attention_bias".into(), json!(config.qkv_bias));
        out.insert("use_sliding_window".into(), json!(window_size(config).is_some()));
        out.insert("sliding_window".into(), json!(window_size(config)));
        if let Some(experts) = &config.experts {
            let dense = (0..config.layers).filter(|&l| !experts.sparse[l]).collect::<Vec<_>>();
            let fields = [
                ("num_experts", json!(experts.count)),
                ("num_experts_per_tok", json!(experts.per_token)),
                ("moe_intermediate_size", json!(experts.width)),
                ("norm_topk_prob", json!(experts.normalized)),
                ("router_aux_loss_coef", json!(plain(experts.balance))),
                ("decoder_sparse_step", json!(1)),
                ("mlp_only_layers", json!(dense)),
            ];
            out.extend(fields.map(|(key, value)| (key.to_string(), value)));
        }
        out
    },
    ..Family::LLAMA
};

/// The experts, and which layers are MoE.
fn experts(f: &Fields, layers: usize) -> Result<Experts> {
    let count = match COUNT.iter().any(|key| f.has(key)) {
        true => f.size(&COUNT)?,
        false => 128,
    };
    let per_token = f.opt_size("num_experts_per_tok")?.unwrap_or(8);
    if per_token > count || count > MOST {
        return Err(f
            .error(format!("num_experts_per_tok is {per_token} and num_experts {count}"))
            .fix(format!("at most as many experts for a token as there are, and at most {MOST}")));
    }
    let step = f.opt_size("decoder_sparse_step")?.unwrap_or(1);
    let dense = f.indices("mlp_only_layers", layers)?;
    let sparse = (0..layers).map(|l| !dense.contains(&l) && (l + 1).is_multiple_of(step)).collect();
    Ok(Experts {
        count,
        per_token,
        width: f.opt_size("moe_intermediate_size")?.unwrap_or(768),
        normalized: f.flag("norm_topk_prob", false)?,
        balance: f.opt_number("router_aux_loss_coef")?.unwrap_or(0.001) as f32,
        sparse,
    })
}

/// The sliding window, if `use_sliding_window` is set.
fn window(f: &Fields) -> Result<Option<usize>> {
    if f.flag("use_sliding_window", false)? { sliding_window(f) } else { Ok(None) }
}
