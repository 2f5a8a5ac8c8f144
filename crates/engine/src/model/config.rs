//! What a decoder is made of: every difference between the families, as plain options.

use super::param::Slot;
use crate::{Error, Result};

/// How a layer normalises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// RMS or mean-and-variance.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
}

/// The two normalisations in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / rms(x) * weight`
    Rms,
    /// `x / rms(x) * (1 + weight)`, the Gemma convention
    RmsPlusOne,
    /// `(x - mean) / std * weight + bias`
    Layer,
}

/// The feed-forward network of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FfnActivation {
    /// `down(silu(gate(x)) * up(x))`
    SiluGated,
    /// `down(gelu_tanh(gate(x)) * up(x))`
    GeluGated,
    /// `down(gelu_tanh(up(x)))`
    Gelu,
}

impl FfnActivation {
    /// Whether the network has a gate beside the up projection.
    pub fn is_gated(self) -> bool {
        self != FfnActivation::Gelu
    }
}

/// How a token knows where it stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Position {
    /// Queries and keys are rotated.
    Rotary(Rope),
    /// A learned vector per position is added to the embedding.
    Learned,
}

/// Rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// How many of the head's dimensions turn; the rest pass through.
    pub rotary_dim: usize,
    /// How the frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions divided by a factor.
    Linear {
        /// the divisor
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// divisor of the low frequencies
        factor: f64,
        /// below `original / low_freq_factor` turns: divided
        low_freq_factor: f64,
        /// above `original / high_freq_factor` turns: kept
        high_freq_factor: f64,
        /// context length of pre-training
        original: f64,
    },
    /// YaRN: a ramp between divided and kept frequencies, and a gain on the rotation.
    Yarn {
        /// divisor of the low frequencies
        factor: f64,
        /// start of the ramp in rotations
        beta_fast: f64,
        /// end of the ramp in rotations
        beta_slow: f64,
        /// context length of pre-training
        original: f64,
        /// gain on cos and sin
        attention_factor: f64,
        /// whether the ramp's ends are rounded to whole dimensions
        truncate: bool,
    },
    /// LongRoPE (Phi 3): a divisor for each frequency, and a gain on the rotation.
    PerDimension {
        /// divisors for contexts of up to `original` tokens, one for each pair of dimensions
        short: Vec<f64>,
        /// divisors for longer contexts
        long: Vec<f64>,
        /// context length of pre-training
        original: usize,
        /// gain on cos and sin
        attention_factor: f64,
    },
}

/// Over what queries and keys are normalised before rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself (Qwen 3, Gemma 3).
    PerHead,
    /// All heads of the queries together, and all heads of the keys (OLMo 2).
    Whole,
}

/// Which rotation a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerRope {
    /// That of [`ModelConfig::position`].
    Global,
    /// [`ModelConfig::local_rope`].
    Local,
    /// None (NoPE).
    None,
}

/// What sits on top of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Next-token logits (`*ForCausalLM`).
    Lm,
    /// One number per position (`*ForSequenceClassification` with one label, `score.weight`).
    Score,
    /// Next-token logits and one number per position (a policy with a value head on its trunk).
    LmAndValue,
}

impl Head {
    /// Whether there are next-token logits.
    pub fn has_lm(self) -> bool {
        self != Head::Score
    }
    /// Whether there is a number per position.
    pub fn has_value(self) -> bool {
        self != Head::Lm
    }
}

/// A mixture of experts: small feed-forward networks, of which a router chooses a few for each token.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Experts that a token is sent to.
    pub per_token: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Coefficient of the load-balance loss in pre-training (`router_aux_loss_coef`).
    pub balance: f32,
    /// Whether each layer has experts; the others have the dense network.
    pub sparse: Vec<bool>,
}

/// A decoder, option by option.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name in the registry of families.
    pub family: &'static str,
    /// Tokens the model knows.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; independent of `hidden`.
    pub head_dim: usize,
    /// Inner width of the feed-forward network.
    pub ffn: usize,
    /// Experts in the place of the feed-forward network of some layers.
    pub experts: Option<Experts>,
    /// Longest sequence the model was made for; the size of the table where positions are learned.
    pub max_positions: usize,
    /// How every norm of the model normalises; there is one at the end.
    pub norm: NormConfig,
    /// Whether the inputs of attention and of the feed-forward network are normalised (all but OLMo 2).
    pub pre_norms: bool,
    /// Whether their outputs are (Gemma 2, GLM 4, OLMo 2).
    pub post_norms: bool,
    /// Whether queries and keys are normalised before rotation.
    pub qk_norm: Option<QkNorm>,
    /// The feed-forward network.
    pub activation: FfnActivation,
    /// Bias on query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on attention's output projection.
    pub out_bias: bool,
    /// Bias on the feed-forward projections.
    pub mlp_bias: bool,
    /// How a token knows where it stands.
    pub position: Position,
    /// The rotation of the layers that [`ModelConfig::layer_ropes`] names local (Gemma 3).
    pub local_rope: Option<Rope>,
    /// Which rotation each layer has, where positions are rotary.
    pub layer_ropes: Vec<LayerRope>,
    /// Scores are `q . k * attention_scale`.
    pub attention_scale: f32,
    /// `cap * tanh(score / cap)` on attention scores.
    pub attention_softcap: Option<f32>,
    /// `cap * tanh(logit / cap)` on the final logits.
    pub final_softcap: Option<f32>,
    /// Keys a query sees, counting itself, for each layer; `None` sees all.
    pub windows: Vec<Option<usize>>,
    /// Factor on the embedding (Gemma: the square root of `hidden`).
    pub embedding_scale: f32,
    /// Factor on what attention and the network add to the residual stream (Granite).
    pub residual_scale: f32,
    /// Divisor of the logits (Granite).
    pub logits_divisor: f32,
    /// Whether the logits use the embedding table.
    pub tied: bool,
    /// What sits on top.
    pub head: Head,
}

impl ModelConfig {
    /// Longest sequence the model was trained for, in tokens: `max_position_embeddings`, times the factor by which linear
    /// and YaRN scaling stretch it. Beyond it RoPE still computes, outside of what it learned; learned positions end
    /// ([`ModelConfig::max_positions_hard`]). `None` where the configuration names no limit.
    pub fn max_context(&self) -> Option<usize> {
        let stretched = match &self.position {
            Position::Learned => 0.0,
            Position::Rotary(rope) => match rope.scaling {
                RopeScaling::Linear { factor } => self.max_positions as f64 * factor,
                RopeScaling::Yarn { factor, original, .. } => original * factor,
                _ => 0.0,
            },
        };
        Some(self.max_positions.max(stretched as usize)).filter(|&n| n > 0)
    }
    /// Longest sequence that can be computed at all: the rows of the table of learned positions; `None` under RoPE.
    pub fn max_positions_hard(&self) -> Option<usize> {
        (self.position == Position::Learned).then_some(self.max_positions)
    }
    /// Refuses a token id that is not in the embedding table.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) else { return Ok(()) };
        Err(Error::data(format!("token id {id} is not below the vocabulary's {}", self.vocab))
            .fix("use the tokenizer of this model"))
    }
    /// Refuses a sequence that is longer than the table of learned positions.
    pub fn check_length(&self, tokens: usize) -> Result<()> {
        let Some(most) = self.max_positions_hard().filter(|&most| tokens > most) else { return Ok(()) };
        Err(Error::data(format!("{tokens} tokens, the model has {most} learned positions"))
            .fix(format!("sequences of at most {most} tokens, prompt and completion together")))
    }
    /// Widths of the norms of queries and of keys, where they are normalised.
    pub fn qk_norm_widths(&self) -> Option<(usize, usize)> {
        let whole = |heads| heads * self.head_dim;
        self.qk_norm.map(|norm| match norm {
            QkNorm::PerHead => (self.head_dim, self.head_dim),
            QkNorm::Whole => (whole(self.heads), whole(self.kv_heads)),
        })
    }
    /// Rows of the fused query-key-value projection.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// Width of attention's output before its projection.
    pub fn attention_width(&self) -> usize {
        self.heads * self.head_dim
    }
    /// The experts of a layer, where it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.sparse[layer])
    }
    /// Rows of the (fused gate and) up projection of an expert.
    pub fn expert_up_width(&self, experts: &Experts) -> usize {
        if self.activation.is_gated() { 2 * experts.width } else { experts.width }
    }
    /// Weights that a token's forward pass reads: all but those of the experts it is not sent to.
    pub fn active_weights(&self) -> usize {
        let (all, idle) = self.params().iter().fold((0, 0), |(all, idle), p| match p.id.slot {
            Slot::ExpertUp(_) | Slot::ExpertDown(_) => (all, idle + p.len()),
            _ => (all + p.len(), idle),
        });
        let Some(experts) = &self.experts else { return all };
        all + idle / experts.count * experts.per_token
    }
    /// Rows of the (fused gate and) up projection.
    pub fn up_width(&self) -> usize {
        if self.activation.is_gated() { 2 * self.ffn } else { self.ffn }
    }
}
