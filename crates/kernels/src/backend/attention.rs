//! Attention, its KV cache, rotary position embedding, and what is fused with them.

use super::{ActivationOps, LinearOps, MemoryOps, NormOps};
use crate::buffer::Buffer;
use crate::composed;
use crate::error::Result;
use crate::operands::*;
use crate::shapes;

/// Causal attention over packed sequences.
pub trait AttentionOps: MemoryOps {
    /// `lse` is f32 `[rows, heads]`, for the backward.
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()>;
    /// Writes `dqkv`.
    fn attention_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()>;
    /// `attention` of some rows, bit for bit: from their queries `q`, and keys and values `kv` of all rows. `lse` and `out` have
    /// the shard's rows.
    fn attention_shard(
        &self,
        op: Attention,
        shard: RowShard<'_>,
        (q, kv): (&Buffer, &Buffer),
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard(self.as_home(), &op, shard, (q, kv), [out, lse])?;
        composed::attention_shard(self, op, shard, (q, kv), out, lse)
    }
    /// `attention_backward` of some rows, bit for bit: gradients of their queries, keys and values. Operands have all rows, `dqkv`
    /// the shard's.
    fn attention_shard_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        shard: RowShard<'_>,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard_backward(self.as_home(), &op, saved, dout, shard, dqkv)?;
        composed::attention_shard_backward(self, op, saved, dout, shard, dqkv)
    }
}

/// The paged KV cache, and attention over it.
pub trait CacheOps: MemoryOps {
    /// Elements of one layer's cache of that many blocks, keys and values together.
    fn cache_len(&self, heads: Heads, blocks: usize) -> usize {
        blocks * self.block_len(heads)
    }
    /// Stores the keys and values of the rows.
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()>;
    /// In every layer's cache, the second block of each pair becomes a copy of the first. No block that is written is in
    /// another pair.
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        shapes::cache_copies(self.as_home(), heads, pairs, layers)?;
        composed::cache_copies(self, heads, pairs, layers)
    }
    /// The same bits as `attention` gives for these rows; their own keys are in the cache already.
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()>;
}

/// Rotary position embedding, alone and fused with the projection to queries, keys and values.
pub trait RopeOps: LinearOps + CacheOps {
    /// Rotates queries and keys in place: dimension `i` of a head with dimension `i + rotation.dim / 2`. `inverse` rotates
    /// back, which is the backward.
    fn rotary(&self, heads: Heads, rotation: Rotation<'_>, inverse: bool, qkv: &mut Buffer) -> Result<()>;
    /// Queries, keys and values of tokens, from their normed rows `x`: `linear`, `rotary`, and `cache_write` where there
    /// is a cache.
    fn linear_qkv(
        &self,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = cache.as_ref().map(|(rows, cache)| (*rows, &**cache));
        shapes::linear_qkv(self.as_home(), x, layer, to, qkv)?;
        composed::linear_qkv(self, x, layer, cache, qkv)
    }
    /// Backward of RoPE and bias: rotates `dqkv` back in place and sums its rows into `dbias`; `+=` with `add`.
    fn qkv_backward(
        &self,
        heads: Heads,
        turns: Option<Rotation<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::qkv_backward(self.as_home(), heads, turns, dqkv, dbias.as_deref())?;
        composed::qkv_backward(self, heads, turns, dqkv, add, dbias)
    }
    /// Sums columns of rows of `dqkv` that are rotated back already, with the bits that `qkv_backward` gives where it rotates whole
    /// heads of that width; `+=` with `add`.
    fn rotated_bias(
        &self,
        head_dim: usize,
        dqkv: &Buffer,
        tokens: usize,
        add: bool,
        dbias: &mut Buffer,
    ) -> Result<()> {
        shapes::rotated_bias(self.as_home(), head_dim, dqkv, tokens, dbias)?;
        composed::rotated_bias(self, dqkv, tokens, add, dbias)
    }
}

/// Operations fused for decoding a few rows; the defaults compose them.
pub trait DecodeOps: RopeOps + NormOps + ActivationOps {
    /// Rows up to which the operations of this part are sooner done than those they are made of, in a model whose longest
    /// input of a linear layer is `widest`. Their results are the same bits.
    fn decode_rows(&self, _widest: usize) -> usize {
        0
    }
    /// The beginning of a layer, from the residual stream `x`: `linear_qkv` of its norm.
    fn normed_qkv(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: (&PagedRows, &mut Buffer),
        qkv: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_qkv(self.as_home(), norm, x, layer, (cache.0, &*cache.1), qkv)?;
        composed::normed_qkv(self, norm, x, layer, cache, qkv)
    }
    /// The end of a sublayer: `to += linear(x)`, which is rounded to the storage of `x` before.
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        shapes::linear_add(self.as_home(), x, layer, to)?;
        composed::linear_add(self, x, layer, to)
    }
    /// The beginning of a feed-forward network: `activation` of `linear` of the norm of the residual stream `x`.
    fn normed_activation(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        op: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_activation(self.as_home(), norm, x, layer, op, y)?;
        composed::normed_activation(self, norm, x, layer, op, y)
    }
}
