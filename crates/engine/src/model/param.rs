//! The decoder's list of parameters, and how each is identified.

use super::config::{Head, ModelConfig, NormKind, Position};
use std::fmt;

/// Identifies a parameter. `Display` is its name in Ferrl's files and messages, the same for all families.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ParamId {
    /// Layer; `None` outside the layers.
    pub layer: Option<usize>,
    /// Module within the layer (or model).
    pub slot: Slot,
    pub kind: ParamKind,
}

/// A module with parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Slot {
    /// Token embedding.
    Embed,
    /// Learned position embedding.
    Position,
    /// Norm before attention.
    AttnNorm,
    /// Norm of attention's output.
    AttnPostNorm,
    /// Norm before the feed-forward network.
    MlpNorm,
    /// Norm of the network's output.
    MlpPostNorm,
    /// QK norm of queries, per head or over all heads.
    QNorm,
    /// QK norm of keys, per head or over all heads.
    KNorm,
    /// Fused query, key and value projection.
    Qkv,
    /// Attention's output projection.
    AttnOut,
    /// Fused gate and up projection (only up if not gated).
    Up,
    /// Down projection.
    Down,
    /// Router of a mixture of experts.
    Router,
    /// Fused gate and up projection of an expert.
    ExpertUp(u16),
    /// Down projection of an expert.
    ExpertDown(u16),
    /// Norm after the last layer.
    FinalNorm,
    /// Language-model head.
    Head,
    /// Value or score head.
    Value,
}

/// The parameters of one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// `W` of `W x + b`, the scale of a norm, or an embedding table.
    Weight,
    /// `b`.
    Bias,
    /// LoRA `A`, `[r, in]`; the index is that of the fused weight's tensor.
    LoraA(u8),
    /// LoRA `B`, stored transposed: `[r, out]`.
    LoraB(u8),
}

impl Slot {
    pub fn is_norm(self) -> bool {
        use Slot::*;
        matches!(self, AttnNorm | AttnPostNorm | MlpNorm | MlpPostNorm | QNorm | KNorm | FinalNorm)
    }

    /// Whether it is a linear layer that an adapter may target. (GEMMs also read tied embeddings and routers; see
    /// [`ModelConfig::is_multiplied`].)
    pub fn is_linear(self) -> bool {
        use Slot::*;
        matches!(self, Qkv | AttnOut | Up | Down | ExpertUp(_) | ExpertDown(_) | Head | Value)
    }

    /// The index of its expert.
    pub fn expert(self) -> Option<usize> {
        match self {
            Slot::ExpertUp(expert) | Slot::ExpertDown(expert) => Some(expert.into()),
            _ => None,
        }
    }

    /// Whether its GEMM is f32 whatever the compute type.
    pub fn is_f32(self) -> bool {
        self == Slot::Router
    }

    /// Whether it has one row per vocabulary token or per position.
    pub fn is_table(self) -> bool {
        matches!(self, Slot::Embed | Slot::Position | Slot::Head)
    }

    /// Whether it has one row per vocabulary token.
    pub fn is_vocabulary(self) -> bool {
        matches!(self, Slot::Embed | Slot::Head)
    }

    /// Whether its output is added to the residual stream.
    pub fn writes_residual(self) -> bool {
        matches!(self, Slot::AttnOut | Slot::Down | Slot::ExpertDown(_))
    }

    fn name(self) -> &'static str {
        match self {
            Slot::Embed => "embed",
            Slot::Position => "position",
            Slot::AttnNorm => "attn_norm",
            Slot::AttnPostNorm => "attn_post_norm",
            Slot::MlpNorm => "mlp_norm",
            Slot::MlpPostNorm => "mlp_post_norm",
            Slot::QNorm => "q_norm",
            Slot::KNorm => "k_norm",
            Slot::Qkv => "qkv",
            Slot::AttnOut => "attn_out",
            Slot::Up => "up",
            Slot::Down => "down",
            Slot::Router => "router",
            Slot::ExpertUp(_) => "up",
            Slot::ExpertDown(_) => "down",
            Slot::FinalNorm => "final_norm",
            Slot::Head => "head",
            Slot::Value => "value",
        }
    }
}

impl ParamId {
    /// A weight outside the layers.
    pub const fn model(slot: Slot) -> Self {
        ParamId { layer: None, slot, kind: ParamKind::Weight }
    }

    pub const fn layer(layer: usize, slot: Slot) -> Self {
        ParamId { layer: Some(layer), slot, kind: ParamKind::Weight }
    }

    /// The bias of the same module.
    pub const fn bias(self) -> Self {
        ParamId { kind: ParamKind::Bias, ..self }
    }

    /// Whether it is one-dimensional: a norm's scale, or a bias.
    pub fn is_vector(self) -> bool {
        self.kind == ParamKind::Bias || self.slot.is_norm()
    }

    pub fn is_adapter(self) -> bool {
        matches!(self.kind, ParamKind::LoraA(_) | ParamKind::LoraB(_))
    }
}

impl fmt::Display for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layers.{layer}.")?;
        }
        if let Some(expert) = self.slot.expert() {
            write!(f, "experts.{expert}.")?;
        }
        f.write_str(self.slot.name())?;
        match self.kind {
            ParamKind::LoraA(part) => write!(f, ".lora_a.{part}"),
            ParamKind::LoraB(part) => write!(f, ".lora_b.{part}"),
            _ if self.slot.is_table() => Ok(()),
            ParamKind::Weight => f.write_str(".weight"),
            ParamKind::Bias => f.write_str(".bias"),
        }
    }
}

/// The quoted name, for messages.
impl fmt::Debug for ParamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

/// A parameter as the decoder stores it: q, k and v fused in one matrix, gate and up in one, every linear layer `[out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamShape {
    pub id: ParamId,
    /// Output features, or 1 for a vector.
    pub rows: usize,
    /// Input features, or the length of a vector.
    pub cols: usize,
}

impl ParamShape {
    /// Its name, the same for all families.
    pub fn name(&self) -> String {
        self.id.to_string()
    }
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelConfig {
    /// Every parameter of the decoder, in the order of gradients and optimizer state.
    pub fn params(&self) -> Vec<ParamShape> {
        let mut list = List::default();
        let norm_bias = self.norm.kind == NormKind::Layer;
        list.push(ParamId::model(Slot::Embed), self.vocab, self.hidden);
        if self.position == Position::Learned {
            list.push(ParamId::model(Slot::Position), self.max_positions, self.hidden);
        }
        for l in 0..self.layers {
            let id = |slot| ParamId::layer(l, slot);
            for (before, after) in [(Slot::AttnNorm, Slot::AttnPostNorm), (Slot::MlpNorm, Slot::MlpPostNorm)]
            {
                if self.pre_norms {
                    list.norm(id(before), self.hidden, norm_bias);
                }
                if self.post_norms {
                    list.norm(id(after), self.hidden, norm_bias);
                }
            }
            if let Some((query, key)) = self.qk_norm_widths() {
                list.norm(id(Slot::QNorm), query, norm_bias);
                list.norm(id(Slot::KNorm), key, norm_bias);
            }
            list.linear(id(Slot::Qkv), self.qkv_width(), self.hidden, self.qkv_bias);
            list.linear(id(Slot::AttnOut), self.hidden, self.attention_width(), self.out_bias);
            let Some(experts) = self.experts_of(l) else {
                list.linear(id(Slot::Up), self.up_width(), self.hidden, self.mlp_bias);
                list.linear(id(Slot::Down), self.hidden, self.ffn, self.mlp_bias);
                continue;
            };
            list.linear(id(Slot::Router), experts.count, self.hidden, false);
            for e in 0..experts.count as u16 {
                list.linear(id(Slot::ExpertUp(e)), self.expert_up_width(experts), self.hidden, self.mlp_bias);
                list.linear(id(Slot::ExpertDown(e)), self.hidden, experts.width, self.mlp_bias);
            }
        }
        list.norm(ParamId::model(Slot::FinalNorm), self.hidden, norm_bias);
        if self.head.has_lm() && !self.tied {
            list.push(ParamId::model(Slot::Head), self.vocab, self.hidden);
        }
        if self.head.has_value() {
            list.linear(ParamId::model(Slot::Value), 1, self.hidden, self.head == Head::LmAndValue);
        }
        list.0
    }

    /// Whether a GEMM reads the parameter: linear layers, routers, and a tied embedding.
    pub fn is_multiplied(&self, id: ParamId) -> bool {
        let tied_head = self.tied && self.head.has_lm() && id.slot == Slot::Embed;
        id.kind == ParamKind::Weight && (id.slot.is_linear() || id.slot == Slot::Router || tied_head)
    }
}

#[derive(Default)]
struct List(Vec<ParamShape>);

impl List {
    fn push(&mut self, id: ParamId, rows: usize, cols: usize) {
        self.0.push(ParamShape { id, rows, cols });
    }
    fn norm(&mut self, id: ParamId, width: usize, bias: bool) {
        self.push(id, 1, width);
        if bias {
            self.push(id.bias(), 1, width);
        }
    }
    fn linear(&mut self, id: ParamId, rows: usize, cols: usize, bias: bool) {
        self.push(id, rows, cols);
        if bias {
            self.push(id.bias(), 1, rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checkpoints and the seeds of new weights depend on these.
    #[test]
    fn names_stay_as_they_were_written() {
        let value = ParamId::model(Slot::Value);
        let ids = [
            (ParamId::model(Slot::Embed), "embed"),
            (ParamId::model(Slot::Position), "position"),
            (ParamId::model(Slot::Head), "head"),
            (ParamId::model(Slot::FinalNorm), "final_norm.weight"),
            (value, "value.weight"),
            (value.bias(), "value.bias"),
            (ParamId::layer(3, Slot::AttnPostNorm), "layers.3.attn_post_norm.weight"),
            (ParamId::layer(12, Slot::Qkv).bias(), "layers.12.qkv.bias"),
            (ParamId::layer(7, Slot::Router), "layers.7.router.weight"),
            (ParamId::layer(7, Slot::ExpertDown(30)), "layers.7.experts.30.down.weight"),
            (
                ParamId { kind: ParamKind::LoraA(2), ..ParamId::layer(12, Slot::Qkv) },
                "layers.12.qkv.lora_a.2",
            ),
            (
                ParamId { kind: ParamKind::LoraB(0), ..ParamId::layer(0, Slot::Down) },
                "layers.0.down.lora_b.0",
            ),
        ];
        for (id, name) in ids {
            assert_eq!(id.to_string(), name);
        }
    }
}
