//! Operands and results of the operations of a [`Backend`](crate::Backend): settings, shapes, lists of rows.

use crate::buffer::{Buffer, Weight};
use crate::error::Result;
use std::any::Any;
use std::ops::Range;

/// How rows are normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Mean subtracted as well (LayerNorm), or only the scale (RMSNorm).
    pub centred: bool,
    /// Multiply by `1 + weight` instead of `weight`.
    pub plus_one: bool,
    /// Added to the variance.
    pub eps: f32,
    /// Elements of a row.
    pub width: usize,
}

/// What a norm of the residual stream was computed from.
#[derive(Clone, Copy)]
pub struct NormInput<'a> {
    /// f32; the sum of this and `delta` was normalised.
    pub x: &'a Buffer,
    /// What a sublayer added, in the compute type.
    pub delta: Option<&'a Buffer>,
}

/// Weighted sums of rows: each of as many rows.
#[derive(Clone, Copy)]
pub struct RowMix<'a> {
    /// Which rows each sum is of, one sum after the other.
    pub rows: &'a Buffer,
    /// What each of them is multiplied with, f32.
    pub weights: &'a Buffer,
    /// Rows of a sum.
    pub per_row: usize,
    /// Elements of a row.
    pub width: usize,
}

/// A result that is written, or added to.
pub struct Target<'a> {
    /// Where it goes.
    pub to: &'a mut Buffer,
    /// `+=` instead of `=`.
    pub add: bool,
}

/// Where the gradients of a norm's parameters go, each whole sum in one addition.
#[derive(Default)]
pub struct NormGrads<'a> {
    /// f32, one element a column.
    pub weight: Option<&'a mut Buffer>,
    /// The same.
    pub bias: Option<&'a mut Buffer>,
    /// Whether they are added to, or written.
    pub add: bool,
}

/// The backward of a norm of the residual stream that also recomputes its output.
pub struct NormRecompute<'a> {
    /// Gradient of the output.
    pub dy: &'a Buffer,
    /// Takes the output, in the type of `dy`.
    pub y: &'a mut Buffer,
    /// f32; the gradient of the input is added to it.
    pub dx: &'a mut Buffer,
    /// Takes a copy of `dx` in the type of `dy`.
    pub rounded: Option<&'a mut Buffer>,
    /// Gradients of the parameters.
    pub grads: NormGrads<'a>,
}

/// The norm of queries and keys.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// How a head is normalised; its width is that of a head.
    pub op: Norm,
    /// The heads.
    pub heads: Heads,
    /// Whether all heads of the queries are normalised together, and all heads of the keys.
    pub whole: bool,
    /// f32, one element a column of a query head, or of all of them.
    pub q_weight: &'a Buffer,
    /// The same for keys.
    pub k_weight: &'a Buffer,
}

impl HeadNorm<'_> {
    /// The norms of queries and of keys: how many there are in a row of `qkv`, and how each is computed.
    pub fn parts(&self) -> [(usize, Norm); 2] {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let part = |heads: usize| match self.whole {
            true => (1, Norm { width: heads * head_dim, ..self.op }),
            false => (heads, self.op),
        };
        [part(heads), part(kv_heads)]
    }
}

/// The middle of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `[gate, up] -> silu(gate) * up`
    SiluGated,
    /// `[gate, up] -> gelu_tanh(gate) * up`
    GeluGated,
    /// `x -> gelu_tanh(x)`
    Gelu,
}

/// Heads of an attention layer. A row of `qkv` is `[heads | kv_heads | kv_heads] * head_dim`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Heads {
    /// Elements of a row of `qkv`.
    pub fn qkv_width(self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
    /// Elements of a row's keys and values.
    pub fn kv_width(self) -> usize {
        2 * self.kv_heads * self.head_dim
    }
    /// Elements of a row of attention's output, and of its queries.
    pub fn out_width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// Causal attention over packed sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// The heads.
    pub heads: Heads,
    /// Scores are `q . k * scale`.
    pub scale: f32,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Keys a query sees, counting itself.
    pub window: Option<usize>,
}

/// What the backward of attention needs of its forward.
#[derive(Clone, Copy)]
pub struct AttentionSaved<'a> {
    /// Its input.
    pub qkv: &'a Buffer,
    /// Its output.
    pub out: &'a Buffer,
    /// f32 `[rows, heads]`: log-sum-exp of each row's scores.
    pub lse: &'a Buffer,
}

/// Sequences laid end to end: sequence `i` is rows `starts[i]..starts[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    /// One more than there are sequences; the last is the number of rows.
    pub starts: Vec<usize>,
}

impl Segments {
    /// From the lengths of the sequences.
    pub fn of(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut starts = vec![0];
        for len in lengths {
            starts.push(starts[starts.len() - 1] + len);
        }
        Segments { starts }
    }
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }
    /// Row ranges of the sequences.
    pub fn iter(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.starts.windows(2).map(|w| w[0]..w[1])
    }
}

/// Some rows of packed sequences: what a rank of a context-parallel group computes of attention.
#[derive(Clone, Copy, Debug)]
pub struct RowShard<'a> {
    /// All sequences.
    pub segments: &'a Segments,
    /// Rows, ascending.
    pub ranges: &'a [Range<usize>],
}

/// The part of a range of a [`RowShard`] that lies in one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// Index of the sequence.
    pub sequence: usize,
    /// Positions in it.
    pub positions: Range<usize>,
    /// First row of the piece within the shard.
    pub row: usize,
}

impl RowShard<'_> {
    /// Number of rows of the shard.
    pub fn rows(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }
    /// Its rows, sequence by sequence.
    pub fn pieces(&self) -> Vec<ShardPiece> {
        let (mut pieces, mut row) = (Vec::new(), 0);
        for range in self.ranges {
            for (sequence, all) in self.segments.iter().enumerate() {
                let (start, end) = (range.start.max(all.start), range.end.min(all.end));
                if start < end {
                    pieces.push(ShardPiece { sequence, positions: start - all.start..end - all.start, row });
                    row += end - start;
                }
            }
        }
        pieces
    }
}

/// New tokens of some sequences whose keys and values live in cache blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedRows {
    /// One entry per sequence, rows in this order.
    pub sequences: Vec<PagedSequence>,
}

/// The new tokens of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedSequence {
    /// First row in this batch.
    pub row: usize,
    /// Number of new tokens.
    pub count: usize,
    /// Position of the first new token; all earlier ones are in the cache.
    pub position: usize,
    /// Cache blocks of the sequence, in order, enough for `position + count` tokens.
    pub blocks: Vec<u32>,
}

/// What turns hidden states into token log-probabilities: `log softmax(cap(x · wᵀ) / temperature)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogpHead {
    /// Divides the logits.
    pub temperature: f32,
    /// `cap * tanh(logit / cap)` before the temperature.
    pub softcap: Option<f32>,
}

/// What the logp head reads.
#[derive(Clone, Copy)]
pub struct HeadInput<'a> {
    /// How logits become log-probabilities.
    pub op: LogpHead,
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// `[vocab, k]`
    pub w: &'a Weight,
    /// One token a row.
    pub targets: &'a Buffer,
}

/// Where the gradients of a head go.
pub struct HeadGrads<'a> {
    /// Of the hidden states; written.
    pub dx: &'a mut Buffer,
    /// f32, of the weight.
    pub dw: Option<&'a mut Buffer>,
    /// Whether `dw` is added to, or written.
    pub add: bool,
}

/// Per-row results of the logp head, f32, one element a row.
pub struct LogpStats {
    /// Log-probability of the row's target.
    pub logp: Buffer,
    /// Entropy of the row's distribution, in nats.
    pub entropy: Buffer,
    /// Log of the sum of exponentials of the scaled logits.
    pub lse: Buffer,
}

/// What flows back into the logp head, f32, one element a row.
pub struct LogpGrads<'a> {
    /// d loss / d logp
    pub logp: &'a Buffer,
    /// d loss / d entropy
    pub entropy: Option<&'a Buffer>,
    /// d loss / d logp of the other tokens, `[rows, others]`
    pub others: Option<&'a Buffer>,
}

/// Tokens of the vocabulary that the CPU's head processes at a time: see [`Home::vocab_tile`](crate::backend::Home::vocab_tile).
pub const VOCAB_TILE: usize = 256;

/// Tokens `from..to` of a vocabulary, cut at tiles, with the head's rows for them: what one of several ranks computes of a
/// head that they share.
#[derive(Clone, Copy)]
pub struct VocabPart<'a> {
    /// `[rows, k]`: has the rows of these tokens, and maybe others.
    pub w: &'a Weight,
    /// Token of its first row.
    pub first: usize,
    /// First token of the part.
    pub from: usize,
    /// Token after the last.
    pub to: usize,
}

impl VocabPart<'_> {
    /// Number of tokens.
    pub fn width(&self) -> usize {
        self.to - self.from
    }
    /// Number of tiles of that many tokens.
    pub fn tiles(&self, tile: usize) -> usize {
        self.width().div_ceil(tile)
    }
}

/// What is stored of the logits of a part of the vocabulary, f32.
pub struct TileStats<'a> {
    /// `[rows, tiles, 3]`: largest logit `m`, `Σ e^(l-m)` and `Σ e^(l-m) (l-m)` of each tile.
    pub tiles: &'a mut Buffer,
    /// Tokens of the whole vocabulary, as many for each row, and where their scaled logits go; those of other parts are left
    /// alone.
    pub found: Option<(&'a Buffer, &'a mut Buffer)>,
    /// All scaled logits, `[rows, tokens of the part]`.
    pub logits: Option<&'a mut Buffer>,
}

/// What the backward of a head reads whose vocabulary is shared by ranks.
#[derive(Clone, Copy)]
pub struct PartInput<'a> {
    /// How logits become log-probabilities.
    pub op: LogpHead,
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// This rank's tokens; `None` where it has none.
    pub part: Option<VocabPart<'a>>,
    /// One token a row, of the whole vocabulary.
    pub targets: &'a Buffer,
}

/// One of two models whose distributions are compared on a part of the vocabulary.
#[derive(Clone, Copy)]
pub struct PartSide<'a> {
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// Its head there.
    pub part: VocabPart<'a>,
    /// Log of the sum of exponentials over the whole vocabulary, f32, one element a row.
    pub lse: &'a Buffer,
}

/// Where the gradients of a head go whose vocabulary and input features are shared by ranks.
pub struct PartGrads<'a> {
    /// The columns of the hidden states' gradient that are computed here, `[rows, columns]`; written.
    pub dx: &'a mut Buffer,
    /// f32, of the part's rows of the weight.
    pub dw: Option<&'a mut Buffer>,
    /// Whether `dw` is added to, or written.
    pub add: bool,
    /// These columns of the whole head, transposed: `[columns, vocab]`.
    pub back: &'a Weight,
    /// From the gradient of that many rows' logits by this part's tokens, `[rows, tokens]`, to that by the whole vocabulary. Called
    /// equally often by all ranks: how often follows from the number of rows and the vocabulary.
    pub gather: &'a mut dyn FnMut(&Buffer, usize) -> Result<Buffer>,
}

/// A draw that goes through a row of logits part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Draw {
    /// The probabilities so far.
    pub below: f32,
    /// The token where they exceeded the uniform number, and its logit.
    pub token: Option<(u32, f32)>,
    /// The last token that can occur, where rounding leaves a sliver above the last sum.
    pub last: Option<(u32, f32)>,
}

/// A norm with its parameters, f32.
#[derive(Clone, Copy)]
pub struct Normed<'a> {
    /// How rows are normalised.
    pub op: Norm,
    /// One element a column.
    pub weight: &'a Buffer,
    /// The same.
    pub bias: Option<&'a Buffer>,
}

/// A linear layer.
#[derive(Clone, Copy)]
pub struct Affine<'a> {
    /// What rows are multiplied with.
    pub weight: &'a Weight,
    /// f32, added after.
    pub bias: Option<&'a Buffer>,
}

/// Where the gradients of a linear layer's parameters go, each whole sum in one addition.
#[derive(Default)]
pub struct LinearGrads<'a> {
    /// f32, in the shape of the weight.
    pub weight: Option<&'a mut Buffer>,
    /// f32, one element a feature.
    pub bias: Option<&'a mut Buffer>,
    /// Whether they are added to, or written.
    pub add: bool,
}

/// A low-rank addition `bᵀ a` to some rows of a weight.
#[derive(Clone, Copy)]
pub struct LowRank<'a> {
    /// First row.
    pub row: usize,
    /// f32, `[r, k]`.
    pub a: &'a Buffer,
    /// f32, `[r, rows]`.
    pub b: &'a Buffer,
    /// Rank.
    pub r: usize,
}

impl LowRank<'_> {
    /// Its rows of the weight.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.row..self.row + self.b.len() / self.r.max(1)
    }
}

/// Some columns of rows.
#[derive(Clone, Copy)]
pub struct ColumnsOf<'a> {
    /// The rows.
    pub of: &'a Buffer,
    /// First column.
    pub from: usize,
    /// Number of columns.
    pub width: usize,
}

/// What the gradient of a low-rank factor is made of.
#[derive(Clone, Copy)]
pub struct LowRankGrad<'a> {
    /// `[tokens, ..]`, multiplied with the other factor.
    pub x: ColumnsOf<'a>,
    /// The other factor, `[r, columns of x]`.
    pub w: &'a Weight,
    /// `[tokens, ..]`
    pub y: ColumnsOf<'a>,
    /// Number of rows.
    pub tokens: usize,
}

/// The projection to queries, keys and values, with RoPE after it.
#[derive(Clone, Copy)]
pub struct QkvLayer<'a> {
    /// The projection.
    pub linear: Affine<'a>,
    /// The heads.
    pub heads: Heads,
    /// `None` where positions are not rotary.
    pub rotation: Option<Rotation<'a>>,
}

/// How [`RopeOps::rotary`](crate::backend::RopeOps::rotary) rotates queries and keys.
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// Dimensions of a head that are rotated.
    pub dim: usize,
    /// f32 `[positions, dim / 2]`.
    pub cos: &'a Buffer,
    /// The same.
    pub sin: &'a Buffer,
    /// One a row.
    pub positions: &'a Buffer,
}

/// How a token of a row is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ask {
    /// At least 0 and below 1: the first token, in the order of ids, whose cumulative probability exceeds it. Without one
    /// the largest is taken, whatever the rest says.
    pub draw: Option<f32>,
    /// Top-k; ties go to the lower id; 0 disables it.
    pub top_k: usize,
    /// Nucleus (top-p) sampling among these; 1 disables it.
    pub top_p: f32,
    /// Min-p sampling among these: at least this fraction of the largest probability; 0 disables it.
    pub min_p: f32,
}

impl Ask {
    /// With that draw, or the largest; no token is dropped.
    pub fn plain(draw: Option<f32>) -> Self {
        Ask { draw, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }
    /// Whether tokens are dropped.
    pub fn truncates(&self) -> bool {
        self.draw.is_some() && (self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }
}

/// A token chosen from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChoice {
    /// Which.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
    /// The row's log of the sum of exponentials.
    pub lse: f32,
    /// Its log-probability among the tokens that could be chosen; 0 for the largest.
    pub kept: f32,
}

/// Choices that a device has begun to make; see [`SampleOps::choose`](crate::backend::SampleOps::choose).
pub struct Choices(Box<dyn Any + Send + Sync>);

impl Choices {
    /// For backends: wraps what they made.
    pub fn new(data: Box<dyn Any + Send + Sync>) -> Self {
        Choices(data)
    }
    /// For backends: what they made.
    pub fn data(&self) -> &dyn Any {
        &*self.0
    }
}

/// AdamW's settings for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled: `w -= lr * weight_decay * w`.
    pub weight_decay: f64,
    /// Steps taken, counting this one; for the bias correction.
    pub step: u64,
    /// Multiplies the gradient first (clipping).
    pub grad_scale: f32,
}

/// A parameter that AdamW updates; buffers are f32 but for moments that are codes.
pub struct AdamWParam<'a> {
    /// The step's settings.
    pub op: AdamW,
    /// Elements that are updated.
    pub ranges: &'a [std::ops::Range<usize>],
    /// The parameter.
    pub param: &'a mut Buffer,
    /// Its gradient.
    pub grad: &'a Buffer,
    /// First moment.
    pub first: &'a mut Buffer,
    /// Second moment.
    pub second: &'a mut Buffer,
    /// Where the moments are codes, one a weight ([`codes`](crate::codes)): of each block of
    /// [`BLOCK`](crate::codes::BLOCK) its largest magnitude, for either moment. Ranges then begin and end with blocks.
    pub absmax: Option<[&'a mut Buffer; 2]>,
    /// What products read.
    pub derived: Option<&'a mut Weight>,
}

/// SGD's settings for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the velocity; 0 is plain gradient descent.
    pub momentum: f64,
    /// Added to the gradient: `g += weight_decay * w`.
    pub weight_decay: f64,
    /// Multiplies the gradient first (clipping).
    pub grad_scale: f32,
}

/// Work that a device may capture; see [`GraphOps::repeat`](crate::backend::GraphOps::repeat). Empty at first.
#[derive(Default)]
pub struct Graph(Option<Box<dyn Any + Send + Sync>>);

impl Graph {
    /// For backends: what they keep, made at first.
    pub fn data<T: Any + Send + Sync>(&mut self) -> Option<&mut T> {
        self.0.as_mut().and_then(|data| data.downcast_mut())
    }
    /// For backends: keeps that.
    pub fn keep(&mut self, data: Box<dyn Any + Send + Sync>) {
        self.0 = Some(data);
    }
}
