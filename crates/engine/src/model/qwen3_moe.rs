//! Qwen 3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B): Qwen 3 whose feed-forward networks are mixtures of experts.

use serde_json::{Value, json};

use super::common::{Defaults, llama_config, llama_json, plain, window_size};
use super::config::{Experts, QkNorm};
use super::fields::Fields;
use super::naming::{LLAMA_NAMES, LLAMA_QKV, LLAMA_UP, Naming, Rows, Tensor};
use super::param::Slot;
use super::rope_json::RopeRules;
use super::{Architectures, Config, Family};
use crate::Result;

pub(super) struct Qwen3Moe;

const DEFAULTS: Defaults = Defaults {
    kv_heads: Some(4),
    head_dim: None,
    max_positions: 32_768,
    eps: 1e-6,
    tied: false,
    activation_keys: &["hidden_act"],
    activation: "silu",
};

const NAMES: Naming = Naming {
    slots: &[
        (Slot::AttnNorm, &[("input_layernorm", Rows::All)]),
        (Slot::MlpNorm, &[("post_attention_layernorm", Rows::All)]),
        (Slot::QNorm, &[("self_attn.q_norm", Rows::All)]),
        (Slot::KNorm, &[("self_attn.k_norm", Rows::All)]),
        LLAMA_QKV,
        (Slot::AttnOut, &[("self_attn.o_proj", Rows::All)]),
        LLAMA_UP,
        (Slot::Down, &[("mlp.down_proj", Rows::All)]),
        (Slot::Router, &[("mlp.gate", Rows::All)]),
        (
            Slot::ExpertUp(0),
            &[("mlp.experts.{expert}.gate_proj", Rows::Half), ("mlp.experts.{expert}.up_proj", Rows::Half)],
        ),
        (Slot::ExpertDown(0), &[("mlp.experts.{expert}.down_proj", Rows::All)]),
    ],
    ..LLAMA_NAMES
};

/// The names that the number of experts has had.
const COUNT: [&str; 2] = ["num_experts", "num_local_experts"];

/// The largest number of experts.
const MOST: usize = 4096;

impl Qwen3Moe {
    fn experts(&self, f: &Fields, layers: usize) -> Result<Experts> {
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
}

/// That of every layer, under `use_sliding_window`.
fn window(f: &Fields) -> Result<Option<usize>> {
    if !f.flag("use_sliding_window", false)? {
        return Ok(None);
    }
    if f.has("sliding_window") { f.opt_size("sliding_window") } else { Ok(Some(4096)) }
}

impl Family for Qwen3Moe {
    fn name(&self) -> &'static str {
        "qwen3_moe"
    }
    fn model_types(&self) -> &'static [&'static str] {
        &["qwen3_moe"]
    }
    fn architectures(&self) -> Architectures {
        Architectures {
            causal: "Qwen3MoeForCausalLM",
            classifier: "Qwen3MoeForSequenceClassification",
            base: "Qwen3MoeModel",
        }
    }
    fn has_experts(&self) -> bool {
        true
    }
    fn config(&self, json: &Value) -> Result<Config> {
        // The rest is a dense model, whose reader refuses experts.
        let mut dense = json.clone();
        if let Some(map) = dense.as_object_mut() {
            COUNT.iter().for_each(|key| drop(map.remove(*key)));
            map.entry("intermediate_size").or_insert(json!(6144));
        }
        let (f, all) = (Fields::new(&dense)?, Fields::new(json)?);
        let mut c = llama_config(self.name(), &f, self.architectures(), &DEFAULTS, &RopeRules::USUAL)?;
        c.qk_norm = Some(QkNorm::PerHead);
        c.qkv_bias = f.flag("attention_bias", false)?;
        c.out_bias = c.qkv_bias;
        c.windows = vec![window(&f)?; c.layers];
        c.experts = Some(self.experts(&all, c.layers)?);
        Ok(c)
    }
    fn tensors(&self, config: &Config) -> Vec<Tensor> {
        NAMES.tensors(config)
    }
    fn to_json(&self, config: &Config) -> Value {
        let mut out = llama_json(config, "qwen3_moe", self.architectures());
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
        out.into()
    }
}
