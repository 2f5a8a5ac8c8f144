//! Vectors, embeddings and norms, by copies and on the host.

use crate::backend::{
    DOT_CHUNK, EmbeddingOps, HeadNorm, HeadNormOps, Heads, MemoryOps, NormGrads, Normed, Target, VectorOps,
};
use crate::{Buffer, DType, Result};
use std::collections::BTreeMap;

pub(crate) fn download<B: MemoryOps + ?Sized>(b: &B, x: &Buffer) -> Result<Vec<f32>> {
    let mut values = vec![0.0; x.len()];
    b.read(x, 0, &mut values)?;
    Ok(values)
}

pub fn chunk_dots<B: MemoryOps + ?Sized>(b: &B, x: &Buffer, y: &Buffer) -> Result<Vec<f64>> {
    let (x, y) = (download(b, x)?, download(b, y)?);
    let dot = |(x, y): (&[f32], &[f32])| x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
    Ok(x.chunks(DOT_CHUNK).zip(y.chunks(DOT_CHUNK)).map(dot).collect())
}

pub fn decode_nf4<B: MemoryOps + ?Sized>(
    b: &B,
    codes: &Buffer,
    absmax: &Buffer,
    block: usize,
    out: &mut Buffer,
) -> Result<()> {
    let codes: Vec<u8> = download(b, codes)?.into_iter().map(|code| code as u8).collect();
    let mut values = vec![0.0; out.len()];
    crate::codes::decode_nf4(&codes, &download(b, absmax)?, block, 0, &mut values);
    b.write(out, 0, &values)
}

pub fn gather_rows<B: MemoryOps + ?Sized>(
    b: &B,
    src: &Buffer,
    rows: &Buffer,
    width: usize,
    dst: &mut Buffer,
) -> Result<()> {
    let mut rows = b.ids(rows).iter().enumerate();
    rows.try_for_each(|(i, &row)| b.copy(src, row as usize * width, dst, i * width, width))
}

pub fn scatter_rows<B: MemoryOps + ?Sized>(
    b: &B,
    src: &Buffer,
    rows: &Buffer,
    width: usize,
    dst: &mut Buffer,
) -> Result<()> {
    b.fill(dst, 0.0)?;
    let mut rows = b.ids(rows).iter().enumerate();
    rows.try_for_each(|(i, &row)| b.copy(src, i * width, dst, row as usize * width, width))
}

pub fn embed<B: VectorOps + ?Sized>(
    b: &B,
    ids: &Buffer,
    table: &Buffer,
    scale: f32,
    add: bool,
    out: &mut Buffer,
) -> Result<()> {
    let mut rows = b.alloc(DType::F32, out.len())?;
    b.gather_rows(table, ids, out.len() / ids.len().max(1), &mut rows)?;
    if !add {
        b.fill(out, 0.0)?;
    }
    b.axpy(scale, &rows, out)
}

pub fn embed_backward<B: EmbeddingOps + ?Sized>(
    b: &B,
    ids: &Buffer,
    dout: &Buffer,
    scale: f32,
    dtable: &mut Buffer,
) -> Result<()> {
    let width = dout.len() / ids.len().max(1);
    let mut sums = BTreeMap::<u32, Vec<f32>>::new();
    for (id, row) in b.ids(ids).iter().zip(download(b, dout)?.chunks(width.max(1))) {
        let sum = sums.entry(*id).or_insert_with(|| vec![0.0; width]);
        sum.iter_mut().zip(row).for_each(|(s, d)| *s += scale * d);
    }
    for (id, mut sum) in sums {
        let (at, mut row) = (id as usize * width, vec![0.0; width]);
        b.read(dtable, at, &mut row)?;
        sum.iter_mut().zip(row).for_each(|(s, t)| *s += t);
        b.write(dtable, at, &sum)?;
    }
    Ok(())
}

/// Applies `each` (given index and rows) to the query, key and value heads of `qkv`, with one head per row; the results go to
/// `out` in the layout of `qkv`.
fn by_head<B: HeadNormOps + ?Sized>(
    b: &B,
    heads: Heads,
    out: &mut Buffer,
    mut each: impl FnMut(usize, &Buffer, &Buffer) -> Result<Buffer>,
) -> Result<()> {
    let (dim, counts) = (heads.head_dim, [heads.heads, heads.kv_heads, heads.kv_heads]);
    let all = counts.iter().sum::<usize>();
    let tokens = out.len() / heads.qkv_width();
    let mut parts = b.alloc(out.dtype(), out.len())?;
    let (mut done, mut first, mut place) = (0, 0, vec![0; tokens * all]);
    for (part, count) in counts.into_iter().enumerate() {
        let rows = (0..tokens).flat_map(|t| (t * all + first..).take(count));
        let rows: Vec<u32> = rows.map(|row| row as u32).collect();
        let made = each(part, &b.indices(&rows)?, out)?;
        b.copy(&made, 0, &mut parts, done * dim, made.len())?;
        for (i, &row) in rows.iter().enumerate() {
            place[row as usize] = (done + i) as u32;
        }
        (done, first) = (done + rows.len(), first + count);
    }
    b.gather_rows(&parts, &b.indices(&place)?, dim, out)
}

/// Gathers rows of `src`.
fn gathered<B: VectorOps + ?Sized>(b: &B, src: &Buffer, rows: &Buffer, width: usize) -> Result<Buffer> {
    let mut dst = b.alloc(src.dtype(), rows.len() * width)?;
    b.gather_rows(src, rows, width, &mut dst)?;
    Ok(dst)
}

pub fn head_norm<B: HeadNormOps + ?Sized>(
    b: &B,
    norm: HeadNorm<'_>,
    qkv: &Buffer,
    out: &mut Buffer,
) -> Result<()> {
    let HeadNorm { heads, q_weight, k_weight, .. } = norm;
    let (weights, parts) = ([q_weight, k_weight], norm.parts());
    by_head(b, heads, out, |part, rows, out| {
        let x = gathered(b, qkv, rows, heads.head_dim)?;
        let Some(weight) = weights.get(part) else { return Ok(x) };
        let mut y = b.alloc(out.dtype(), x.len())?;
        b.norm(Normed { op: parts[part].1, weight, bias: None }, &x, &mut y)?;
        Ok(y)
    })
}

pub fn head_norm_backward<B: HeadNormOps + ?Sized>(
    b: &B,
    norm: HeadNorm<'_>,
    qkv: &Buffer,
    dqkv: &mut Buffer,
    mut dweights: [Option<&mut Buffer>; 2],
) -> Result<()> {
    let HeadNorm { heads, q_weight, k_weight, .. } = norm;
    let (weights, parts) = ([q_weight, k_weight], norm.parts());
    by_head(b, heads, dqkv, |part, rows, dqkv| {
        let dy = gathered(b, dqkv, rows, heads.head_dim)?;
        let Some(weight) = weights.get(part) else { return Ok(dy) };
        let x = gathered(b, qkv, rows, heads.head_dim)?;
        let mut dx = b.alloc(dqkv.dtype(), x.len())?;
        let grads = NormGrads { weight: dweights[part].as_deref_mut(), bias: None, add: true };
        b.norm_backward(
            Normed { op: parts[part].1, weight, bias: None },
            &dy,
            &x,
            Target { to: &mut dx, add: false },
            grads,
        )?;
        Ok(dx)
    })
}
