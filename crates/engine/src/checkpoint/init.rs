//! New models: from sizes to `config.json` and random weights, which are a function of the seed on any machine.

use ferrl_kernels::cores;
use std::path::Path;

use ferrl_kernels::philox::{name_words, normals, philox4x32};
use serde_json::{Value, json};

use super::save::{SaveOptions, save_model};
use crate::model::config::NormKind;
use crate::model::{FAMILIES, Head, ModelConfig, ParamKind, ParamShape, family};
use crate::{Class, Error, Result};

/// Sizes of a new model. `None` chooses the default given.
#[derive(Clone, Debug)]
pub struct InitOptions {
    pub family: String,
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: usize,
    /// Query heads; default `hidden / 64`.
    pub heads: Option<usize>,
    /// Key and value heads; default the number of query heads.
    pub kv_heads: Option<usize>,
    /// Width of a head; default `hidden / heads`.
    pub head_dim: Option<usize>,
    /// Intermediate width of the feed-forward network; default `4 * hidden`.
    pub ffn: Option<usize>,
    /// Experts per layer, for MoE families; default 8.
    pub experts: Option<usize>,
    /// Experts per token; default 2.
    pub experts_per_token: Option<usize>,
    /// Intermediate width of an expert; default `ffn / experts_per_token`.
    pub expert_ffn: Option<usize>,
    /// Whether embedding and head are tied; default as usual in the family.
    pub tied: Option<bool>,
    /// Longest sequence.
    pub max_positions: usize,
    /// `rope_theta`; default 10000.
    pub rope_theta: Option<f64>,
    /// Sliding window, for families that have one.
    pub window: Option<usize>,
    pub head: Head,
    /// BOS token, written to `config.json`.
    pub bos: Option<u32>,
    /// EOS token, written to `config.json`.
    pub eos: Option<u32>,
    /// Padding token, written to `config.json`.
    pub pad: Option<u32>,
    pub seed: u64,
    /// Standard deviation of the weights.
    pub std: f32,
    /// Whether projections into the residual stream are divided by the square root of twice the layers (GPT-2).
    pub scale_residual: bool,
}

impl InitOptions {
    /// A small model of a family.
    pub fn new(family: impl Into<String>) -> Self {
        InitOptions {
            family: family.into(),
            vocab: 32_000,
            hidden: 256,
            layers: 4,
            heads: None,
            kv_heads: None,
            head_dim: None,
            ffn: None,
            experts: None,
            experts_per_token: None,
            expert_ffn: None,
            tied: None,
            max_positions: 2048,
            rope_theta: None,
            window: None,
            head: Head::Lm,
            bos: None,
            eos: None,
            pad: None,
            seed: 0,
            std: 0.02,
            scale_residual: false,
        }
    }

    /// The architecture and `config.json`, or an error if the options are inconsistent.
    pub fn build(&self) -> Result<(ModelConfig, Value)> {
        self.check()?;
        let family = family(&self.family)?;
        let mut asked = self.asked();
        if family.has_experts() {
            self.ask_experts(&mut asked);
        } else if self.experts.or(self.experts_per_token).or(self.expert_ffn).is_some() {
            return Err(Error::usage(format!("the family {} has no experts", self.family))
                .fix(format!("a family that has them: {}", with_experts().join(", "))));
        }
        if self.window.is_some() || !family.slides_by_default() {
            asked["sliding_window"] = json!(self.window);
        }
        // The family's reader fills in the defaults.
        let mut config = family.config(&asked).map_err(|mut e| {
            e.class = Class::Usage;
            e
        })?;
        config.head = self.head;
        if self.window.is_some() && config.windows.iter().all(Option::is_none) {
            return Err(Error::usage(format!("the family {} has no sliding window", self.family)));
        }
        let mut json = family.to_json(&config);
        json["initializer_range"] = json!(f64::from(self.std));
        for (name, id) in self.special_tokens() {
            json[format!("{name}_token_id")] = json!(id);
        }
        Ok((config, json))
    }

    fn heads(&self) -> usize {
        self.heads.unwrap_or((self.hidden / 64).max(1))
    }

    fn special_tokens(&self) -> [(&'static str, Option<u32>); 3] {
        [("bos", self.bos), ("eos", self.eos), ("pad", self.pad)]
    }

    /// Refuses impossible or inconsistent sizes.
    fn check(&self) -> Result<()> {
        let (hidden, heads) = (self.hidden, self.heads());
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", hidden),
            ("layers", self.layers),
            ("heads", heads),
            ("kv_heads", self.kv_heads.unwrap_or(1)),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("ffn", self.ffn.unwrap_or(1)),
            ("experts", self.experts.unwrap_or(1)),
            ("experts_per_token", self.experts_per_token.unwrap_or(1)),
            ("expert_ffn", self.expert_ffn.unwrap_or(1)),
            ("max_positions", self.max_positions),
            ("window", self.window.unwrap_or(1)),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::usage(format!("{name} must be at least 1, got 0")));
        }
        if !hidden.is_multiple_of(heads) {
            let what = format!("hidden ({hidden}) must be a multiple of heads ({heads})");
            return Err(Error::usage(what).fix(format!("try heads = {}", largest_divisor(hidden, heads))));
        }
        if !(self.std.is_finite() && self.std > 0.0) {
            return Err(Error::usage(format!("std must be above 0, got {}", self.std)));
        }
        for (name, id) in self.special_tokens() {
            if let Some(id) = id.filter(|id| *id as usize >= self.vocab) {
                let what = format!("{name} token {id} is outside the vocabulary of {}", self.vocab);
                return Err(Error::usage(what));
            }
        }
        Ok(())
    }

    /// MoE fields of the `config.json`.
    fn ask_experts(&self, asked: &mut Value) {
        let per_token = self.experts_per_token.unwrap_or(2);
        asked["num_experts"] = json!(self.experts.unwrap_or(8));
        asked["num_experts_per_tok"] = json!(per_token);
        asked["moe_intermediate_size"] = json!(self.expert_ffn.unwrap_or((self.ffn() / per_token).max(1)));
        asked["norm_topk_prob"] = json!(true);
    }

    fn ffn(&self) -> usize {
        self.ffn.unwrap_or(self.hidden.saturating_mul(4))
    }

    /// The options as fields of a `config.json`, under all families' names.
    fn asked(&self) -> Value {
        let heads = self.heads();
        let head_dim = self.head_dim.unwrap_or(self.hidden / heads);
        let ffn = self.ffn();
        let mut asked = json!({
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads.unwrap_or(heads),
            "head_dim": head_dim,
            "query_pre_attn_scalar": head_dim,
            "attention_multiplier": 1.0 / (head_dim as f64).sqrt(),
            "intermediate_size": ffn,
            "n_inner": ffn,
            "max_position_embeddings": self.max_positions,
            "original_max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta.unwrap_or(10_000.0),
            "use_sliding_window": self.window.is_some(),
            "max_window_layers": 0,
        });
        if let Some(tied) = self.tied {
            asked["tie_word_embeddings"] = json!(tied);
        }
        asked
    }
}

/// The initial value of a parameter: norms one, biases zero, the rest normal. A function of the seed, the name, and the index in
/// the parameter.
pub fn init_param(config: &ModelConfig, options: &InitOptions, param: &ParamShape) -> Vec<f32> {
    if param.id.kind == ParamKind::Bias {
        return vec![0.0; param.len()];
    }
    if param.id.slot.is_norm() {
        let one = if config.norm.kind == NormKind::RmsPlusOne { 0.0 } else { 1.0 };
        return vec![one; param.len()];
    }
    let scaled = options.scale_residual && param.id.slot.writes_residual();
    let scale = if scaled { (2.0 * config.layers as f32).sqrt() } else { 1.0 };
    let std = options.std / scale;
    let key = [options.seed as u32, (options.seed >> 32) as u32];
    let name = name_words(&param.name());
    let mut out = vec![0.0; param.len()];
    // A number depends only on its index, so any thread may draw it.
    let threads = cores();
    let part = param.len().div_ceil(threads).next_multiple_of(4).max(1 << 14);
    std::thread::scope(|scope| {
        for (i, values) in out.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                for (j, four) in values.chunks_mut(4).enumerate() {
                    let block = (i * part / 4 + j) as u64;
                    let words = philox4x32([block as u32, (block >> 32) as u32, name[0], name[1]], key);
                    four.iter_mut().zip(normals(words)).for_each(|(x, normal)| *x = normal * std);
                }
            });
        }
    });
    out
}

pub fn init_model(dir: &Path, options: &InitOptions, save: &SaveOptions) -> Result<ModelConfig> {
    let (config, json) = options.build()?;
    save_model(dir, &config, Some(&json), save, &mut |p| Ok(init_param(&config, options, p)))?;
    Ok(config)
}

fn with_experts() -> Vec<&'static str> {
    FAMILIES.iter().filter(|family| family.has_experts()).map(|family| family.name()).collect()
}

fn largest_divisor(of: usize, at_most: usize) -> usize {
    (1..=at_most.min(of)).rev().find(|n| of.is_multiple_of(*n)).unwrap_or(1)
}
