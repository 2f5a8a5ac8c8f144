//! Maps the decoder's fused parameters to tensors of a checkpoint.

use super::config::{Head, ModelConfig, Position};
use super::param::{ParamKind, ParamShape, Slot};

/// A parameter of the decoder and the checkpoint tensors it is fused from, stacked by rows.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The parameter and its shape.
    pub param: ParamShape,
    /// Its tensors, in order.
    pub parts: Vec<StoredPart>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPart {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Whether it is stored as `[in, out]`, transposed relative to the decoder.
    pub transposed: bool,
    pub order: RowOrder,
}

/// Row order of a stored tensor (or element order of a vector).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// The decoder's order.
    Same,
    /// Interleaved RoPE: in each head, stored rows `2i` and `2i + 1` are the decoder's rows `i` and `i + rotary_dim / 2`.
    Interleaved {
        /// rows of a head
        head_dim: usize,
        /// how many of them are rotated
        rotary_dim: usize,
    },
}

impl RowOrder {
    /// The decoder's row for stored row `row`.
    pub fn decoder_row(self, row: usize) -> usize {
        let RowOrder::Interleaved { head_dim, rotary_dim } = self else { return row };
        let (head, at) = (row / head_dim * head_dim, row % head_dim);
        if at >= rotary_dim { row } else { head + at % 2 * (rotary_dim / 2) + at / 2 }
    }
}

impl StoredPart {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether some element has another index in the decoder.
    pub fn is_rearranged(&self) -> bool {
        self.transposed || self.order != RowOrder::Same
    }
    /// The decoder's index, relative to the part's first element, for stored element `at`.
    pub fn decoder_index(&self, at: usize) -> usize {
        match self.shape[..] {
            [rows, cols] if self.transposed => at % cols * rows + self.order.decoder_row(at / cols),
            [_, cols] => self.order.decoder_row(at / cols) * cols + at % cols,
            _ => self.order.decoder_row(at),
        }
    }
}

/// Which rows of a parameter (or elements of a vector) a stored tensor holds.
#[derive(Clone, Copy)]
pub(crate) enum RowShare {
    /// All of them.
    All,
    /// The queries.
    Query,
    /// The keys or the values.
    KeyOrValue,
    /// Half of them: gate or up projection.
    Half,
    /// The queries, stored as [`RowOrder::Interleaved`].
    InterleavedQuery,
    /// The keys, stored as [`RowOrder::Interleaved`].
    InterleavedKey,
}

/// A slot of a layer and the tensors it is fused from.
type SlotParts = (Slot, &'static [(&'static str, RowShare)]);

/// A family's tensor names.
pub(crate) struct Naming {
    pub(crate) prefix: &'static str,
    pub(crate) embed: &'static str,
    pub(crate) position: &'static str,
    pub(crate) layers: &'static str,
    pub(crate) final_norm: &'static str,
    /// Whether the matrices inside layers are stored as `[in, out]`.
    pub(crate) transposed: bool,
    /// Slots that differ from [`LLAMA_SLOTS`].
    pub(crate) slots: &'static [SlotParts],
}

impl Naming {
    /// Tensors of every parameter.
    pub(crate) fn tensors(&self, config: &ModelConfig) -> Vec<Tensor> {
        config.params().into_iter().map(|p| Tensor { parts: self.parts(config, &p), param: p }).collect()
    }

    fn parts(&self, config: &ModelConfig, param: &ParamShape) -> Vec<StoredPart> {
        let ParamShape { id, rows, cols } = *param;
        if let Some(layer) = id.layer {
            return self.layer_parts(config, layer, param);
        }
        let prefix = self.prefix;
        let module = match id.slot {
            Slot::Embed => format!("{prefix}{}", self.embed),
            Slot::Position => format!("{prefix}{}", self.position),
            Slot::FinalNorm => format!("{prefix}{}", self.final_norm),
            Slot::Head => "lm_head".into(),
            Slot::Value if config.head == Head::Score => "score".into(),
            Slot::Value => "v_head.summary".into(),
            _ => return Vec::new(),
        };
        let shape = if id.is_vector() { vec![cols] } else { vec![rows, cols] };
        vec![StoredPart {
            name: stored_name(&module, id.kind),
            shape,
            transposed: false,
            order: RowOrder::Same,
        }]
    }

    /// Tensors of a parameter inside a layer. A slot missing from the lists would get none; a test over all families rules that
    /// out.
    fn layer_parts(&self, config: &ModelConfig, layer: usize, param: &ParamShape) -> Vec<StoredPart> {
        let ParamShape { id, rows, cols } = *param;
        // All experts of a layer share one entry.
        let listed = match id.slot {
            Slot::ExpertUp(_) => Slot::ExpertUp(0),
            Slot::ExpertDown(_) => Slot::ExpertDown(0),
            slot => slot,
        };
        let Some((_, sources)) = self.slots.iter().chain(LLAMA_SLOTS).find(|(slot, _)| *slot == listed)
        else {
            return Vec::new();
        };
        let total = if id.is_vector() { cols } else { rows };
        let part = |&(source, share): &(&str, RowShare)| {
            let rows = match share {
                RowShare::All => total,
                RowShare::Query | RowShare::InterleavedQuery => config.attention_width(),
                RowShare::KeyOrValue | RowShare::InterleavedKey => config.kv_heads * config.head_dim,
                RowShare::Half => total / 2,
            };
            let order = match (share, &config.position) {
                (RowShare::InterleavedQuery | RowShare::InterleavedKey, Position::Rotary(rope)) => {
                    RowOrder::Interleaved { head_dim: config.head_dim, rotary_dim: rope.rotary_dim }
                }
                _ => RowOrder::Same,
            };
            let transposed = self.transposed && !id.is_vector();
            let shape = match (id.is_vector(), transposed) {
                (true, _) => vec![rows],
                (false, false) => vec![rows, cols],
                (false, true) => vec![cols, rows],
            };
            let source = match id.slot.expert() {
                Some(expert) => source.replace(EXPERT, &expert.to_string()),
                None => source.to_string(),
            };
            let module = format!("{}{}.{layer}.{source}", self.prefix, self.layers);
            StoredPart { name: stored_name(&module, id.kind), shape, transposed, order }
        };
        sources.iter().map(part).collect()
    }
}

/// Placeholder for the expert's index in tensor names.
const EXPERT: &str = "{expert}";

/// A tensor's name in PyTorch.
fn stored_name(module: &str, kind: ParamKind) -> String {
    match kind {
        ParamKind::Weight => format!("{module}.weight"),
        ParamKind::Bias => format!("{module}.bias"),
        ParamKind::LoraA(_) | ParamKind::LoraB(_) => unreachable!("an adapter's tensors are named by PEFT"),
    }
}

/// The names of Llama and of the families that follow it.
pub(crate) const LLAMA_NAMES: Naming = Naming {
    prefix: "model.",
    embed: "embed_tokens",
    position: "",
    layers: "layers",
    final_norm: "norm",
    transposed: false,
    slots: &[],
};

/// Tensors of each slot of a layer in Llama and its descendants, unless a family overrides them.
const LLAMA_SLOTS: &[SlotParts] = &[
    (Slot::AttnNorm, &[("input_layernorm", RowShare::All)]),
    (Slot::AttnPostNorm, &[("post_attention_layernorm", RowShare::All)]),
    (Slot::MlpNorm, &[("post_attention_layernorm", RowShare::All)]),
    (Slot::MlpPostNorm, &[("post_feedforward_layernorm", RowShare::All)]),
    (Slot::QNorm, &[("self_attn.q_norm", RowShare::All)]),
    (Slot::KNorm, &[("self_attn.k_norm", RowShare::All)]),
    (
        Slot::Qkv,
        &[
            ("self_attn.q_proj", RowShare::Query),
            ("self_attn.k_proj", RowShare::KeyOrValue),
            ("self_attn.v_proj", RowShare::KeyOrValue),
        ],
    ),
    (Slot::AttnOut, &[("self_attn.o_proj", RowShare::All)]),
    (Slot::Up, &[("mlp.gate_proj", RowShare::Half), ("mlp.up_proj", RowShare::Half)]),
    (Slot::Down, &[("mlp.down_proj", RowShare::All)]),
    (Slot::Router, &[("mlp.gate", RowShare::All)]),
    (
        Slot::ExpertUp(0),
        &[
            ("mlp.experts.{expert}.gate_proj", RowShare::Half),
            ("mlp.experts.{expert}.up_proj", RowShare::Half),
        ],
    ),
    (Slot::ExpertDown(0), &[("mlp.experts.{expert}.down_proj", RowShare::All)]),
];
