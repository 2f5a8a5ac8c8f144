//! Attention of some rows, by computing all rows.

use crate::backend::{Attention, AttentionOps, AttentionSaved, RowShard};
use crate::{Buffer, DType, Result};

pub fn attention_shard<B: AttentionOps + ?Sized>(
    b: &B,
    op: Attention,
    shard: RowShard<'_>,
    (q, kv): (&Buffer, &Buffer),
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let (heads, rows) = (op.heads, shard.segments.rows());
    let (width, queries, kv_width) = (heads.qkv_width(), heads.out_width(), heads.kv_width());
    // Queries of other rows do not affect the result, but must be initialised.
    let mut qkv = b.alloc(q.dtype(), rows * width)?;
    b.fill(&mut qkv, 0.0)?;
    for row in 0..rows {
        b.copy(kv, row * kv_width, &mut qkv, row * width + queries, kv_width)?;
    }
    for (own, row) in shard.ranges.iter().cloned().flatten().enumerate() {
        b.copy(q, own * queries, &mut qkv, row * width, queries)?;
    }
    let mut all = b.alloc(q.dtype(), rows * queries)?;
    let mut all_lse = b.alloc(DType::F32, rows * heads.heads)?;
    b.attention(op, &qkv, shard.segments, &mut all, &mut all_lse)?;
    pick(b, shard, &all, queries, out)?;
    pick(b, shard, &all_lse, heads.heads, lse)
}

pub fn attention_shard_backward<B: AttentionOps + ?Sized>(
    b: &B,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    shard: RowShard<'_>,
    dqkv: &mut Buffer,
) -> Result<()> {
    let mut all = b.alloc(dqkv.dtype(), saved.qkv.len())?;
    b.attention_backward(op, saved, dout, shard.segments, &mut all)?;
    pick(b, shard, &all, op.heads.qkv_width(), dqkv)
}

/// Gathers the shard's rows of `all`.
fn pick<B: AttentionOps + ?Sized>(
    b: &B,
    shard: RowShard<'_>,
    all: &Buffer,
    width: usize,
    to: &mut Buffer,
) -> Result<()> {
    let mut at = 0;
    for range in shard.ranges {
        b.copy(all, range.start * width, to, at, range.len() * width)?;
        at += range.len() * width;
    }
    Ok(())
}
