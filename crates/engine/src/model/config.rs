//! What a decoder is made of: every difference between families is an option here.

use super::param::Slot;
use crate::{Error, Result};

/// Normalisation of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
}

/// RMSNorm, its Gemma variant, or LayerNorm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / rms(x) * weight`
    Rms,
    /// `x / rms(x) * (1 + weight)`, the Gemma convention
    RmsPlusOne,
    /// `(x - mean) / std * weight + bias`
    Layer,
}

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
    /// Whether the network has a gate projection.
    pub fn is_gated(self) -> bool {
        self != FfnActivation::Gelu
    }
}

/// Position encoding.
#[derive(Clone, Debug, PartialEq)]
pub enum Position {
    Rotary(Rope),
    /// A learned embedding per position.
    Learned,
}

/// Rotary position embedding (RoPE).
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, `theta^(-2i/d)`.
    pub theta: f64,
    /// Dimensions of a head that are rotated; the rest pass through.
    pub rotary_dim: usize,
    /// Context-extension scheme.
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Unscaled.
    None,
    /// Positions divided by a factor.
    Linear {
        /// the divisor
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high frequencies unchanged, interpolated between.
    Llama3 {
        /// divisor of the low frequencies
        factor: f64,
        /// wavelengths above `original / low_freq_factor`: divided
        low_freq_factor: f64,
        /// wavelengths below `original / high_freq_factor`: unchanged
        high_freq_factor: f64,
        /// context length of pre-training
        original: f64,
    },
    /// YaRN: interpolates between divided and unchanged frequencies, and scales cos and sin.
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
    /// LongRoPE (Phi 3): a divisor per frequency, and a factor on cos and sin.
    PerDimension {
        /// divisors for contexts of up to `original` tokens, one per pair of dimensions
        short: Vec<f64>,
        /// divisors for longer contexts
        long: Vec<f64>,
        /// context length of pre-training
        original: usize,
        /// gain on cos and sin
        attention_factor: f64,
    },
}

/// QK norm: what is normalised together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself (Qwen 3, Gemma 3).
    PerHead,
    /// All heads of the queries together, and all heads of the keys (OLMo 2).
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerRope {
    /// That of [`ModelConfig::position`].
    Global,
    /// [`ModelConfig::local_rope`].
    Local,
    /// None (NoPE).
    None,
}

/// Output head.
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

/// Mixture of experts (MoE).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Number of experts.
    pub count: usize,
    /// Experts per token (top-k).
    pub per_token: usize,
    /// Intermediate width of an expert.
    pub width: usize,
    /// Whether the top-k weights are normalised to sum to 1 (`norm_topk_prob`).
    pub normalized: bool,
    /// Coefficient of the load-balance loss in pre-training (`router_aux_loss_coef`).
    pub balance: f32,
    /// Whether each layer is MoE; the others are dense.
    pub sparse: Vec<bool>,
}

/// Architecture of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Name in the registry of families.
    pub family: &'static str,
    /// Vocabulary size (rows of the embedding).
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; independent of `hidden`.
    pub head_dim: usize,
    /// Intermediate width of the feed-forward network.
    pub ffn: usize,
    /// Experts that replace the feed-forward network of some layers.
    pub experts: Option<Experts>,
    /// `max_position_embeddings`; the size of the table of learned positions.
    pub max_positions: usize,
    /// Normalisation, the same for all norms of the residual stream.
    pub norm: NormConfig,
    /// Whether the inputs of attention and of the feed-forward network are normalised (all families but OLMo 2).
    pub pre_norms: bool,
    /// Whether their outputs are (Gemma 2, GLM 4, OLMo 2).
    pub post_norms: bool,
    /// Norm of queries and keys before RoPE.
    pub qk_norm: Option<QkNorm>,
    pub activation: FfnActivation,
    /// Bias on query, key and value projections.
    pub qkv_bias: bool,
    /// Bias on attention's output projection.
    pub out_bias: bool,
    /// Bias on the feed-forward projections.
    pub mlp_bias: bool,
    /// Position encoding.
    pub position: Position,
    /// RoPE of the layers marked [`LayerRope::Local`] (Gemma 3).
    pub local_rope: Option<Rope>,
    pub layer_ropes: Vec<LayerRope>,
    /// Scores are `q . k * attention_scale`.
    pub attention_scale: f32,
    /// `cap * tanh(score / cap)` on attention scores.
    pub attention_softcap: Option<f32>,
    /// `cap * tanh(logit / cap)` on the final logits.
    pub final_softcap: Option<f32>,
    /// Sliding window per layer: keys that a query attends to, itself included; `None` is full attention.
    pub windows: Vec<Option<usize>>,
    /// Factor on the embedding (Gemma: the square root of `hidden`).
    pub embedding_scale: f32,
    /// Factor on the outputs of attention and feed-forward network (Granite).
    pub residual_scale: f32,
    /// Divisor of the logits (Granite).
    pub logits_divisor: f32,
    /// Whether embedding and language-model head are tied.
    pub tied: bool,
    pub head: Head,
}

impl ModelConfig {
    /// Longest sequence the model was trained for, in tokens: `max_position_embeddings`, times the scaling factor of linear and
    /// YaRN RoPE. Longer sequences can still be computed with RoPE, out of distribution; learned positions end at
    /// [`ModelConfig::max_positions_hard`]. `None` if the configuration names no limit.
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
    /// Longest sequence that can be computed: the rows of the table of learned positions; `None` for RoPE.
    pub fn max_positions_hard(&self) -> Option<usize> {
        (self.position == Position::Learned).then_some(self.max_positions)
    }
    /// Refuses a token id that is not in the embedding table.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let Some(id) = ids.iter().find(|&&id| id as usize >= self.vocab) else { return Ok(()) };
        Err(Error::data(format!("token id {id} is not below the vocabulary's {}", self.vocab))
            .fix("use the tokenizer of this model"))
    }
    /// Refuses a sequence longer than the table of learned positions.
    pub fn check_length(&self, tokens: usize) -> Result<()> {
        let Some(most) = self.max_positions_hard().filter(|&most| tokens > most) else { return Ok(()) };
        Err(Error::data(format!("{tokens} tokens, the model has {most} learned positions"))
            .fix(format!("sequences of at most {most} tokens, prompt and completion together")))
    }
    /// Widths of the QK norms of queries and of keys, if any.
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
    /// The experts of an MoE layer; `None` for a dense one.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.sparse[layer])
    }
    /// Rows of the (fused gate and) up projection of an expert.
    pub fn expert_up_width(&self, experts: &Experts) -> usize {
        if self.activation.is_gated() { 2 * experts.width } else { experts.width }
    }
    /// Active weights per token: all but those of unselected experts.
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
