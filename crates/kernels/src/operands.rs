//! Operands and results of a [`Backend`](crate::Backend)'s operations: settings, shapes, row lists.

use crate::{Buffer, Result, Weight};
use std::any::Any;
use std::ops::Range;

/// RMSNorm or LayerNorm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// Whether the mean is subtracted (LayerNorm) or not (RMSNorm).
    pub centred: bool,
    /// Multiply by `1 + weight` instead of `weight`.
    pub plus_one: bool,
    /// Added to the variance.
    pub eps: f32,
    /// Elements of a row.
    pub width: usize,
}

/// The input of a norm of the residual stream.
#[derive(Clone, Copy)]
pub struct NormInput<'a> {
    /// f32; `x + delta` is normalised.
    pub x: &'a Buffer,
    /// Output of the preceding sublayer, in the compute type.
    pub delta: Option<&'a Buffer>,
}

/// Weighted sums of rows, equally many per sum.
#[derive(Clone, Copy)]
pub struct RowMix<'a> {
    /// Row indices, `[sums, per_row]`.
    pub rows: &'a Buffer,
    /// Their weights, f32, `[sums, per_row]`.
    pub weights: &'a Buffer,
    /// Rows per sum.
    pub per_row: usize,
    /// Elements of a row.
    pub width: usize,
}

/// A result that is written or accumulated.
pub struct Target<'a> {
    pub to: &'a mut Buffer,
    /// `+=` instead of `=`.
    pub add: bool,
}

/// Accumulators of a norm's parameter gradients; each total is added once.
#[derive(Default)]
pub struct NormGrads<'a> {
    /// f32, one element per column.
    pub weight: Option<&'a mut Buffer>,
    /// As `weight`.
    pub bias: Option<&'a mut Buffer>,
    /// `+=` instead of `=`.
    pub add: bool,
}

/// Backward of a norm of the residual stream that also recomputes its output.
pub struct NormRecompute<'a> {
    /// Gradient of the output.
    pub dy: &'a Buffer,
    /// Receives the output, in the type of `dy`.
    pub y: &'a mut Buffer,
    /// f32; the gradient of the input is added to it.
    pub dx: &'a mut Buffer,
    /// Receives a copy of `dx` in the type of `dy`.
    pub rounded: Option<&'a mut Buffer>,
    /// Gradients of the parameters.
    pub grads: NormGrads<'a>,
}

/// QK norm.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// Type and epsilon; its width is that of a head.
    pub op: Norm,
    /// Head counts.
    pub heads: Heads,
    /// Whether all query heads are normalised together, and all key heads.
    pub whole: bool,
    /// f32, one element per column of a query head, or of all query heads.
    pub q_weight: &'a Buffer,
    /// As `q_weight`, for keys.
    pub k_weight: &'a Buffer,
}

impl HeadNorm<'_> {
    /// For queries and keys: the number of norms per row of `qkv`, and the norm with its width.
    pub fn parts(&self) -> [(usize, Norm); 2] {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let part = |heads: usize| match self.whole {
            true => (1, Norm { width: heads * head_dim, ..self.op }),
            false => (heads, self.op),
        };
        [part(heads), part(kv_heads)]
    }
}

/// Activation of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `[gate, up] -> silu(gate) * up`
    SiluGated,
    /// `[gate, up] -> gelu_tanh(gate) * up`
    GeluGated,
    /// `x -> gelu_tanh(x)`
    Gelu,
}

/// Head counts of an attention layer. A row of `qkv` is `[heads | kv_heads | kv_heads] * head_dim`.
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
    /// Elements of a row of attention's output, or of its queries.
    pub fn out_width(self) -> usize {
        self.heads * self.head_dim
    }
}

/// Causal attention over packed sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Head counts.
    pub heads: Heads,
    /// Scores are `q . k * scale`.
    pub scale: f32,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Sliding window: keys that a query attends to, itself included.
    pub window: Option<usize>,
}

/// Activations that the backward of attention reads.
#[derive(Clone, Copy)]
pub struct AttentionSaved<'a> {
    /// Its input.
    pub qkv: &'a Buffer,
    /// Its output.
    pub out: &'a Buffer,
    /// f32 `[rows, heads]`: log-sum-exp of each row's scores.
    pub lse: &'a Buffer,
}

/// Packed sequences: sequence `i` is rows `starts[i]..starts[i + 1]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Number of sequences + 1 entries; the last is the number of rows.
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
    pub fn rows(&self) -> usize {
        self.starts[self.starts.len() - 1]
    }
    /// Row ranges of the sequences.
    pub fn iter(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.starts.windows(2).map(|w| w[0]..w[1])
    }
}

/// Some rows of packed sequences: a context-parallel rank's part of attention.
#[derive(Clone, Copy, Debug)]
pub struct RowShard<'a> {
    pub segments: &'a Segments,
    /// Row ranges, ascending.
    pub ranges: &'a [Range<usize>],
}

/// The part of a [`RowShard`]'s range that lies in one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// Index of the sequence.
    pub sequence: usize,
    pub positions: Range<usize>,
    /// First row of the piece within the shard.
    pub row: usize,
}

impl RowShard<'_> {
    /// Number of rows of the shard.
    pub fn rows(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }
    /// Its rows, by sequence.
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

/// New tokens of sequences whose keys and values are in the paged cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagedRows {
    /// One entry per sequence, in row order.
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
    /// Block table of the sequence, covering at least `position + count` tokens.
    pub blocks: Vec<u32>,
}

/// The logp head: `log softmax(cap(x · wᵀ) / temperature)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogpHead {
    /// Divisor of the logits.
    pub temperature: f32,
    /// `cap * tanh(logit / cap)` before the temperature.
    pub softcap: Option<f32>,
}

/// Inputs of the logp head.
#[derive(Clone, Copy)]
pub struct HeadInput<'a> {
    /// Temperature and soft cap.
    pub op: LogpHead,
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// `[vocab, k]`
    pub w: &'a Weight,
    /// One target token per row.
    pub targets: &'a Buffer,
}

/// Gradients of a head.
pub struct HeadGrads<'a> {
    /// Of the hidden states; overwritten.
    pub dx: &'a mut Buffer,
    /// f32, of the weight.
    pub dw: Option<&'a mut Buffer>,
    /// Whether `dw` is accumulated (`+=`) or overwritten.
    pub add: bool,
}

/// Row statistics of the logp head, f32, one element per row.
pub struct LogpStats {
    /// Log-probability of the row's target.
    pub logp: Buffer,
    /// Entropy of the row's distribution, in nats.
    pub entropy: Buffer,
    /// Log-sum-exp of the scaled logits.
    pub lse: Buffer,
}

/// Gradients with respect to the row statistics, f32, one element per row.
pub struct LogpGrads<'a> {
    /// d loss / d logp
    pub logp: &'a Buffer,
    /// d loss / d entropy
    pub entropy: Option<&'a Buffer>,
    /// d loss / d logp of the other tokens, `[rows, others]`
    pub others: Option<&'a Buffer>,
}

/// Vocabulary entries per tile of the CPU's head: see [`DeviceInfo::vocab_tile`](crate::backend::DeviceInfo::vocab_tile).
pub const VOCAB_TILE: usize = 256;

/// Vocabulary entries `from..to`, cut at tiles, with the head's rows for them: one rank's part of a vocabulary-parallel head.
#[derive(Clone, Copy)]
pub struct VocabPart<'a> {
    /// `[rows, k]`: contains the rows of these tokens.
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

/// Statistics of the logits of a part of the vocabulary, f32.
pub struct TileStats<'a> {
    /// `[rows, tiles, 3]`: per tile, the maximum `m`, `Σ e^(l-m)` and `Σ e^(l-m) (l-m)`.
    pub tiles: &'a mut Buffer,
    /// Tokens of the whole vocabulary, equally many per row, and the buffer for their scaled logits, of which only those of this
    /// part are written.
    pub found: Option<(&'a Buffer, &'a mut Buffer)>,
    /// All scaled logits, `[rows, tokens of the part]`.
    pub logits: Option<&'a mut Buffer>,
}

/// Inputs of the backward of a vocabulary-parallel head.
#[derive(Clone, Copy)]
pub struct PartInput<'a> {
    /// Temperature and soft cap.
    pub op: LogpHead,
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// This rank's tokens, if any.
    pub part: Option<VocabPart<'a>>,
    /// One target token per row, of the whole vocabulary.
    pub targets: &'a Buffer,
}

/// One of two models compared on a part of the vocabulary.
#[derive(Clone, Copy)]
pub struct PartSide<'a> {
    /// Hidden states, `[rows, k]`.
    pub x: &'a Buffer,
    /// Its head for the part.
    pub part: VocabPart<'a>,
    /// Log-sum-exp over the whole vocabulary, f32, one element per row.
    pub lse: &'a Buffer,
}

/// Gradients of a vocabulary-parallel head whose input features are shared as well.
pub struct PartGrads<'a> {
    /// This rank's columns of the hidden states' gradient, `[rows, columns]`; overwritten.
    pub dx: &'a mut Buffer,
    /// f32, of the part's rows of the weight.
    pub dw: Option<&'a mut Buffer>,
    /// Whether `dw` is accumulated (`+=`) or overwritten.
    pub add: bool,
    /// These columns of the full head, transposed: `[columns, vocab]`.
    pub back: &'a Weight,
    /// All-gather of the logits' gradient for a number of rows: from this part's tokens, `[rows, tokens]`, to the whole
    /// vocabulary. Collective: the number of calls is a function of the numbers of rows and of vocabulary entries.
    pub gather: &'a mut dyn FnMut(&Buffer, usize) -> Result<Buffer>,
}

/// State of sampling a row part by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Draw {
    /// Cumulative probability so far.
    pub below: f32,
    /// The sampled token and its logit, once the cumulative probability exceeds the uniform number.
    pub token: Option<(u32, f32)>,
    /// The last token with non-zero probability: sampled if rounding leaves the total below the uniform number.
    pub last: Option<(u32, f32)>,
}

/// A norm with its f32 parameters.
#[derive(Clone, Copy)]
pub struct Normed<'a> {
    /// Type, epsilon and width.
    pub op: Norm,
    /// One element per column.
    pub weight: &'a Buffer,
    /// One element per column.
    pub bias: Option<&'a Buffer>,
}

/// A linear layer's parameters.
#[derive(Clone, Copy)]
pub struct Affine<'a> {
    /// GEMM weight.
    pub weight: &'a Weight,
    /// f32.
    pub bias: Option<&'a Buffer>,
}

/// Accumulators of a linear layer's parameter gradients; each total is added once.
#[derive(Default)]
pub struct LinearGrads<'a> {
    /// f32, `[n, k]`.
    pub weight: Option<&'a mut Buffer>,
    /// f32, one element per output feature.
    pub bias: Option<&'a mut Buffer>,
    /// `+=` instead of `=`.
    pub add: bool,
}

/// A LoRA update `bᵀ a` of some rows of a weight.
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
    /// The rows of the weight.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.row..self.row + self.b.len() / self.r.max(1)
    }
}

/// A column range of a matrix.
#[derive(Clone, Copy)]
pub struct ColumnsOf<'a> {
    /// The matrix, row-major.
    pub of: &'a Buffer,
    /// First column.
    pub from: usize,
    /// Number of columns.
    pub width: usize,
}

/// Operands of a LoRA factor's gradient.
#[derive(Clone, Copy)]
pub struct LowRankGrad<'a> {
    /// `[tokens, ..]`, multiplied by `wᵀ`.
    pub x: ColumnsOf<'a>,
    /// The other factor, `[r, columns of x]`.
    pub w: &'a Weight,
    /// `[tokens, ..]`
    pub y: ColumnsOf<'a>,
    /// Number of rows of `x` and `y`.
    pub tokens: usize,
}

/// QKV projection followed by RoPE.
#[derive(Clone, Copy)]
pub struct QkvLayer<'a> {
    /// The projection.
    pub linear: Affine<'a>,
    /// Head counts.
    pub heads: Heads,
    /// `None` without RoPE.
    pub rotation: Option<Rotation<'a>>,
}

/// RoPE tables and positions, see [`RopeOps::rotary`](crate::backend::RopeOps::rotary).
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// Dimensions of a head that are rotated.
    pub dim: usize,
    /// f32 `[positions, dim / 2]`.
    pub cos: &'a Buffer,
    /// As `cos`.
    pub sin: &'a Buffer,
    /// One position per row.
    pub positions: &'a Buffer,
}

/// How a token is sampled from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleSpec {
    /// Uniform number in [0, 1): the first token, in id order, whose cumulative probability exceeds it is sampled. `None`:
    /// greedy, regardless of the other fields.
    pub draw: Option<f32>,
    /// Top-k (ties: lower id); 0 disables it.
    pub top_k: usize,
    /// Nucleus (top-p) among the top k; 1 disables it.
    pub top_p: f32,
    /// Min-p among these: minimum probability relative to the largest; 0 disables it.
    pub min_p: f32,
}

impl SampleSpec {
    /// Sampling without truncation, or greedy.
    pub fn plain(draw: Option<f32>) -> Self {
        SampleSpec { draw, top_k: 0, top_p: 1.0, min_p: 0.0 }
    }
    /// Whether any truncation is enabled.
    pub fn truncates(&self) -> bool {
        self.draw.is_some() && (self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0)
    }
}

/// A sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChoice {
    /// Its id.
    pub token: u32,
    pub logit: f32,
    /// The row's log-sum-exp.
    pub lse: f32,
    /// Its log-probability after truncation; 0 if greedy.
    pub kept: f32,
}

/// Choices in flight on the device; see [`SampleOps::choose`](crate::backend::SampleOps::choose).
pub struct Choices(Box<dyn Any + Send + Sync>);

impl Choices {
    /// For backends: wraps their data.
    pub fn new(data: Box<dyn Any + Send + Sync>) -> Self {
        Choices(data)
    }
    /// For backends: their data.
    pub fn data(&self) -> &dyn Any {
        &*self.0
    }
}

/// AdamW's hyper-parameters for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled: `w -= lr * weight_decay * w`.
    pub weight_decay: f64,
    /// Number of this step, from 1; for the bias correction.
    pub step: u64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f32,
}

/// A parameter that AdamW updates; buffers are f32 except 8-bit moments.
pub struct AdamWParam<'a> {
    /// Hyper-parameters.
    pub op: AdamW,
    /// Element ranges to update.
    pub ranges: &'a [std::ops::Range<usize>],
    pub param: &'a mut Buffer,
    pub grad: &'a Buffer,
    /// First moment.
    pub first: &'a mut Buffer,
    /// Second moment.
    pub second: &'a mut Buffer,
    /// For 8-bit moments ([`codes`](crate::codes)): the absmax per block of [`BLOCK`](crate::codes::BLOCK) elements of each
    /// moment. Ranges must then be block-aligned.
    pub absmax: Option<[&'a mut Buffer; 2]>,
    /// The GEMM weight to rederive.
    pub derived: Option<&'a mut Weight>,
}

/// SGD's hyper-parameters for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    pub lr: f64,
    /// Momentum; 0 disables it.
    pub momentum: f64,
    /// L2 penalty: `g += weight_decay * w`.
    pub weight_decay: f64,
    /// Factor on the gradient (clipping).
    pub grad_scale: f32,
}

/// A captured graph; see [`GraphOps::repeat`](crate::backend::GraphOps::repeat). Empty at first.
#[derive(Default)]
pub struct Graph(Option<Box<dyn Any + Send + Sync>>);

impl Graph {
    /// For backends: their data, if stored.
    pub fn data<T: Any + Send + Sync>(&mut self) -> Option<&mut T> {
        self.0.as_mut().and_then(|data| data.downcast_mut())
    }
    /// For backends: stores their data.
    pub fn keep(&mut self, data: Box<dyn Any + Send + Sync>) {
        self.0 = Some(data);
    }
}
