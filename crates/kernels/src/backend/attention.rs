//! Attention, its KV cache, RoPE, and fusions of these.

use super::{ActivationOps, LinearOps, MemoryOps, NormOps};
use crate::operands::*;
use crate::{Buffer, Result, composed, shapes};

/// Causal attention over packed sequences.
pub trait AttentionOps: MemoryOps {
    /// `lse` is f32 `[rows, heads]`, stored for the backward.
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
    /// `attention` of some rows, bit for bit: `q` has their queries, `kv` the keys and values of all rows. `lse` and `out` have
    /// the shard's rows.
    fn attention_shard(
        &self,
        op: Attention,
        shard: RowShard<'_>,
        (q, kv): (&Buffer, &Buffer),
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard(self.as_info(), &op, shard, (q, kv), [out, lse])?;
        composed::attention_shard(self, op, shard, (q, kv), out, lse)
    }
    /// `attention_backward` of some rows, bit for bit: gradients of their queries, keys and values. Operands have all rows,
    /// `dqkv` the shard's.
    fn attention_shard_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        shard: RowShard<'_>,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard_backward(self.as_info(), &op, saved, dout, shard, dqkv)?;
        composed::attention_shard_backward(self, op, saved, dout, shard, dqkv)
    }
}

/// The paged KV cache, and attention over it.
pub trait CacheOps: MemoryOps {
    /// Elements of one layer's cache with this many blocks, keys and values together.
    fn cache_len(&self, heads: Heads, blocks: usize) -> usize {
        blocks * self.block_len(heads)
    }
    /// Writes the keys and values of the rows to the cache.
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()>;
    /// Copies blocks in every layer's cache: of each pair, the first block to the second. A destination is in no other pair.
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        shapes::cache_copies(self.as_info(), heads, pairs, layers)?;
        composed::cache_copies(self, heads, pairs, layers)
    }
    /// The bits of `attention` for these rows. Their own keys and values must already be in the cache.
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()>;
}

/// RoPE, alone and fused with the QKV projection.
pub trait RopeOps: LinearOps + CacheOps {
    /// Rotates queries and keys in place: dimension `i` of a head with dimension `i + rotation.dim / 2`. `inverse` rotates back,
    /// which is the backward.
    fn rotary(&self, heads: Heads, rotation: Rotation<'_>, inverse: bool, qkv: &mut Buffer) -> Result<()>;
    /// QKV projection of the normed rows `x`: `linear`, `rotary`, and `cache_write` if there is a cache.
    fn linear_qkv(
        &self,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = cache.as_ref().map(|(rows, cache)| (*rows, &**cache));
        shapes::linear_qkv(self.as_info(), x, layer, to, qkv)?;
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
        shapes::qkv_backward(self.as_info(), heads, turns, dqkv, dbias.as_deref())?;
        composed::qkv_backward(self, heads, turns, dqkv, add, dbias)
    }
    /// Column sums of `dqkv` rows that are already rotated back, with the bits of `qkv_backward` for fully rotated heads of that
    /// width; `+=` with `add`.
    fn rotated_bias(
        &self,
        head_dim: usize,
        dqkv: &Buffer,
        tokens: usize,
        add: bool,
        dbias: &mut Buffer,
    ) -> Result<()> {
        shapes::rotated_bias(self.as_info(), head_dim, dqkv, tokens, dbias)?;
        composed::rotated_bias(self, dqkv, tokens, add, dbias)
    }
}

/// Fused operations for decode steps; the defaults compose them.
pub trait DecodeOps: RopeOps + NormOps + ActivationOps {
    /// Largest number of rows for which the fused operations of this trait are faster than the separate ones, in a model whose
    /// widest linear layer has `widest` inputs. The results have the same bits.
    fn decode_rows(&self, _widest: usize) -> usize {
        0
    }
    /// `linear_qkv` of the norm of the residual stream `x`.
    fn normed_qkv(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: (&PagedRows, &mut Buffer),
        qkv: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_qkv(self.as_info(), norm, x, layer, (cache.0, &*cache.1), qkv)?;
        composed::normed_qkv(self, norm, x, layer, cache, qkv)
    }
    /// `to += linear(x)`; the product is rounded to the type of `x` before the addition.
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        shapes::linear_add(self.as_info(), x, layer, to)?;
        composed::linear_add(self, x, layer, to)
    }
    /// `activation(linear(norm(x)))` of the residual stream `x`.
    fn normed_activation(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        op: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_activation(self.as_info(), norm, x, layer, op, y)?;
        composed::normed_activation(self, norm, x, layer, op, y)
    }
}
