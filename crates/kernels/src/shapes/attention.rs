//! Attention over packed sequences and over the paged cache.

use super::layers::{angles, normed};
use super::{Dev, Op};
use crate::backend::{Attention, AttentionSaved, Heads, Normed, PagedRows, QkvLayer, RowShard, Segments};
use crate::{Buffer, Result};

/// Returns the number of rows.
fn sequences(op: Op<'_>, of: &Attention, segments: &Segments) -> Result<usize> {
    op.groups(of)?;
    let starts = &segments.starts;
    op.expect(starts.first() == Some(&0) && starts.is_sorted(), || "sequences overlap".into())?;
    let rows = segments.rows();
    op.times(rows, of.heads.qkv_width())?;
    Ok(rows)
}

pub(crate) fn attention(
    dev: Dev<'_>,
    of: &Attention,
    qkv: &Buffer,
    segments: &Segments,
    [out, lse]: [&Buffer; 2],
) -> Result<()> {
    let op = Op::new(dev, "attention");
    let rows = sequences(op, of, segments)?;
    op.floats("qkv", qkv, rows * of.heads.qkv_width())?;
    op.typed("out", out, qkv.dtype(), rows * of.heads.out_width())?;
    op.f32s("lse", lse, rows * of.heads.heads)
}

pub(crate) fn attention_backward(
    dev: Dev<'_>,
    of: &Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    segments: &Segments,
    dqkv: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "attention_backward");
    let AttentionSaved { qkv, out, lse } = saved;
    let rows = sequences(op, of, segments)?;
    op.floats("qkv", qkv, rows * of.heads.qkv_width())?;
    op.typed("dqkv", dqkv, qkv.dtype(), qkv.len())?;
    op.typed("out", out, qkv.dtype(), rows * of.heads.out_width())?;
    op.typed("dout", dout, qkv.dtype(), out.len())?;
    op.f32s("lse", lse, rows * of.heads.heads)
}

/// Returns the numbers of rows of all sequences and of the shard.
fn shard_rows(op: Op<'_>, of: &Attention, shard: RowShard<'_>) -> Result<(usize, usize)> {
    let rows = sequences(op, of, shard.segments)?;
    let mut end = 0;
    for range in shard.ranges {
        let fits = range.start >= end && range.end >= range.start && range.end <= rows;
        op.expect(fits, || format!("rows {range:?} overlap, or are not among {rows}"))?;
        end = range.end;
    }
    Ok((rows, shard.rows()))
}

pub(crate) fn attention_shard(
    dev: Dev<'_>,
    of: &Attention,
    shard: RowShard<'_>,
    (q, kv): (&Buffer, &Buffer),
    [out, lse]: [&Buffer; 2],
) -> Result<()> {
    let op = Op::new(dev, "attention_shard");
    let (rows, own) = shard_rows(op, of, shard)?;
    op.floats("q", q, own * of.heads.out_width())?;
    op.typed("kv", kv, q.dtype(), rows * of.heads.kv_width())?;
    op.typed("out", out, q.dtype(), q.len())?;
    op.f32s("lse", lse, own * of.heads.heads)
}

pub(crate) fn attention_shard_backward(
    dev: Dev<'_>,
    of: &Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    shard: RowShard<'_>,
    dqkv: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "attention_shard_backward");
    let AttentionSaved { qkv, out, lse } = saved;
    let (rows, own) = shard_rows(op, of, shard)?;
    op.floats("qkv", qkv, rows * of.heads.qkv_width())?;
    op.typed("dqkv", dqkv, qkv.dtype(), own * of.heads.qkv_width())?;
    op.typed("out", out, qkv.dtype(), rows * of.heads.out_width())?;
    op.typed("dout", dout, qkv.dtype(), out.len())?;
    op.f32s("lse", lse, rows * of.heads.heads)
}

/// Checks new tokens of a batch of `batch` rows and their block tables. If `written`, no two sequences share a written block.
fn paged(
    op: Op<'_>,
    heads: Heads,
    rows: &PagedRows,
    batch: usize,
    cache: &Buffer,
    written: bool,
) -> Result<()> {
    let (tokens, len) = (op.dev.block_tokens(), op.dev.block_len(heads));
    let blocks = cache.len() / len;
    let (mut end, mut to) = (0, Vec::new());
    for (i, s) in rows.sequences.iter().enumerate() {
        let wrong = |what: &str| format!("sequence {i} {what}");
        let last = s.row.checked_add(s.count).filter(|&last| s.row >= end && last <= batch);
        end = last.ok_or_else(|| op.error(wrong(&format!("has rows beside the batch's {batch}"))))?;
        let seen = s.position.checked_add(s.count).filter(|&seen| seen.div_ceil(tokens) <= s.blocks.len());
        let seen = seen.ok_or_else(|| op.error(wrong(&format!("has {} blocks, too few", s.blocks.len()))))?;
        let used = &s.blocks[..seen.div_ceil(tokens)];
        let highest = used.iter().copied().max().unwrap_or(0) as usize;
        op.expect(used.is_empty() || highest < blocks, || {
            wrong(&format!("is in block {highest}, the cache has {blocks}"))
        })?;
        if written && s.count > 0 {
            to.extend_from_slice(&used[s.position / tokens..]);
        }
    }
    to.sort_unstable();
    op.expect(to.windows(2).all(|w| w[0] != w[1]), || "two sequences write to one block".into())
}

pub(crate) fn cache_write(
    dev: Dev<'_>,
    heads: Heads,
    qkv: &Buffer,
    rows: &PagedRows,
    cache: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "cache_write");
    op.heads(heads)?;
    let batch = op.rows("qkv", qkv, heads.qkv_width())?;
    op.typed("cache", cache, qkv.dtype(), cache.len())?;
    paged(op, heads, rows, batch, cache, true)
}

pub(crate) fn attention_paged(
    dev: Dev<'_>,
    of: &Attention,
    qkv: &Buffer,
    rows: &PagedRows,
    cache: &Buffer,
    out: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "attention_paged");
    op.groups(of)?;
    let batch = op.rows("qkv", qkv, of.heads.qkv_width())?;
    op.typed("cache", cache, qkv.dtype(), cache.len())?;
    op.typed("out", out, qkv.dtype(), batch * of.heads.out_width())?;
    paged(op, of.heads, rows, batch, cache, false)
}

pub(crate) fn cache_copies(
    dev: Dev<'_>,
    heads: Heads,
    pairs: &[(u32, u32)],
    layers: &[Buffer],
) -> Result<()> {
    let op = Op::new(dev, "cache_copies");
    op.heads(heads)?;
    let Some(first) = layers.first() else { return Ok(()) };
    op.floats("a layer", first, first.len())?;
    layers.iter().try_for_each(|layer| op.typed("a layer", layer, first.dtype(), first.len()))?;
    let blocks = first.len() / dev.block_len(heads);
    for (i, &(from, to)) in pairs.iter().enumerate() {
        let highest = from.max(to) as usize;
        op.expect(highest < blocks, || format!("block {highest}, the cache has {blocks}"))?;
        let others = pairs.iter().enumerate().filter(|&(j, _)| i != j);
        let alone = { others }.all(|(_, &(a, b))| a != to && b != to) && from != to;
        op.expect(alone, || format!("block {to} is written and in another pair"))?;
    }
    Ok(())
}

pub(crate) fn linear_qkv(
    dev: Dev<'_>,
    x: &Buffer,
    layer: QkvLayer<'_>,
    cache: Option<(&PagedRows, &Buffer)>,
    qkv: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "linear_qkv");
    let rows = op.affine(x, layer.linear)?;
    projected(op, layer, cache, rows, qkv)
}

pub(crate) fn normed_qkv(
    dev: Dev<'_>,
    norm: Normed<'_>,
    x: &Buffer,
    layer: QkvLayer<'_>,
    cache: (&PagedRows, &Buffer),
    qkv: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "normed_qkv");
    let rows = normed(op, norm, x, layer.linear)?;
    projected(op, layer, Some(cache), rows, qkv)
}

fn projected(
    op: Op<'_>,
    layer: QkvLayer<'_>,
    cache: Option<(&PagedRows, &Buffer)>,
    rows: usize,
    qkv: &Buffer,
) -> Result<()> {
    let QkvLayer { linear, heads, rotation } = layer;
    op.heads(heads)?;
    let (n, width) = (linear.weight.n, heads.qkv_width());
    op.expect(n == width, || format!("a weight of {n} features, heads of {width}"))?;
    op.floats("qkv", qkv, op.times(rows, width)?)?;
    rotation.map_or(Ok(()), |of| angles(op, heads, of, rows))?;
    let Some((paged_rows, cache)) = cache else { return Ok(()) };
    op.typed("cache", cache, qkv.dtype(), cache.len())?;
    paged(op, heads, paged_rows, rows, cache, true)
}
