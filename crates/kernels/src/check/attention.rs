//! Attention: close to the CPU's; same bits alone, in a batch, in chunks, and token by token from the cache.

use super::{Check, download, nan_filled, random, stored, upload};
use crate::backend::{Attention, AttentionSaved, Backend, Heads, PagedRows, PagedSequence, Segments};
use crate::philox::philox4x32;
use crate::{DType, Result};

/// Heads (of queries, of keys, head width), soft cap, window, sequence lengths.
type Shape = ([usize; 3], Option<f32>, Option<usize>, &'static [usize]);

/// Shapes of known models, every option, widths that tensor cores do not support, more heads per key head than a tile has rows.
const SHAPES: &[Shape] = &[
    ([14, 2, 64], None, None, &[1, 200, 63, 65]),
    ([16, 8, 128], None, None, &[130, 0, 40]),
    ([12, 2, 128], None, Some(50), &[150, 7]),
    ([8, 4, 128], Some(5.0), Some(70), &[150, 20]),
    ([6, 2, 64], Some(4.0), None, &[140, 66]),
    ([4, 2, 256], Some(5.0), Some(64), &[100, 70]),
    ([8, 8, 80], Some(3.0), None, &[90, 33]),
    ([5, 1, 24], None, Some(1), &[70]),
    ([60, 1, 16], None, Some(7), &[80, 3]),
    ([6, 3, 20], Some(4.0), Some(40), &[100, 31]),
    ([3, 3, 33], None, None, &[70, 5]),
];

fn operation(
    [heads, kv_heads, head_dim]: [usize; 3],
    softcap: Option<f32>,
    window: Option<usize>,
) -> Attention {
    let scale = 2.0 / (head_dim as f32).sqrt();
    Attention { heads: Heads { heads, kv_heads, head_dim }, scale, softcap, window }
}

/// Output and log-sum-exp.
fn forward(
    b: &dyn Backend,
    op: Attention,
    dtype: DType,
    qkv: &[f32],
    lengths: &[usize],
) -> Result<[Vec<f32>; 2]> {
    let segments = Segments::of(lengths.iter().copied());
    let mut out = nan_filled(b, dtype, segments.rows() * op.heads.out_width())?;
    let mut lse = nan_filled(b, DType::F32, segments.rows() * op.heads.heads)?;
    b.attention(op, &upload(b, dtype, qkv)?, &segments, &mut out, &mut lse)?;
    Ok([download(b, &out)?, download(b, &lse)?])
}

fn backward(
    b: &dyn Backend,
    op: Attention,
    dtype: DType,
    (qkv, [out, lse]): (&[f32], &[Vec<f32>; 2]),
    dout: &[f32],
    lengths: &[usize],
) -> Result<Vec<f32>> {
    let segments = Segments::of(lengths.iter().copied());
    let mut dqkv = nan_filled(b, dtype, qkv.len())?;
    let (q, o, d) = (upload(b, dtype, qkv)?, upload(b, dtype, out)?, upload(b, dtype, dout)?);
    b.attention_backward(
        op,
        AttentionSaved { qkv: &q, out: &o, lse: &upload(b, DType::F32, lse)? },
        &d,
        &segments,
        &mut dqkv,
    )?;
    download(b, &dqkv)
}

fn name(op: &Attention, dtype: DType, what: &str) -> String {
    let Heads { heads, kv_heads, head_dim } = op.heads;
    let options = [op.softcap.map(|_| " cap"), op.window.map(|_| " window")];
    let options: String = options.into_iter().flatten().collect();
    format!("attention {} {heads}/{kv_heads}x{head_dim}{options} {what}", dtype.name())
}

/// The queries, keys or values of rows.
fn columns(heads: Heads, qkv: &[f32], part: usize) -> Vec<f32> {
    let (q, kv) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
    let range = [0..q, q..q + kv, q + kv..q + 2 * kv][part].clone();
    qkv.chunks(heads.qkv_width()).flat_map(|row| row[range.clone()].iter().copied()).collect()
}

/// Close to the CPU's.
pub fn results(check: &mut Check<'_>) -> Result<()> {
    for &(heads, softcap, window, lengths) in SHAPES {
        let op = operation(heads, softcap, window);
        for dtype in [DType::F32, DType::Bf16] {
            let rows: usize = lengths.iter().sum();
            let qkv = stored(dtype, &random(1, rows * op.heads.qkv_width()));
            let dout = stored(dtype, &random(2, rows * op.heads.out_width()));
            let want = forward(check.cpu, op, dtype, &qkv, lengths)?;
            let got = forward(check.card, op, dtype, &qkv, lengths)?;
            // In bf16 the weights are rounded before they are multiplied by the values.
            let (fine, coarse) = if dtype == DType::F32 { (5e-6, 5e-5) } else { (1.5e-2, 4e-2) };
            check.close(name(&op, dtype, "out"), &got[0], &want[0], fine);
            check.close(name(&op, dtype, "lse"), &got[1], &want[1], 5e-6);
            // Each from its own forward: errors of the stored values count.
            let want = backward(check.cpu, op, dtype, (&qkv, &want), &dout, lengths)?;
            let first = backward(check.card, op, dtype, (&qkv, &got), &dout, lengths)?;
            // Gradients of keys and values are sums over the heads of a group and have a scale of their own. If a token attends
            // to itself only, those of queries and keys are pure rounding noise.
            for (part, what) in ["gradient of q", "gradient of k", "gradient of v"].into_iter().enumerate() {
                let [first, part] = [&first, &want].map(|x| columns(op.heads, x, part));
                let beside = if op.window == Some(1) { &want } else { &part };
                check.close_within(name(&op, dtype, what), &first, &part, beside, coarse);
            }
            let again = backward(check.card, op, dtype, (&qkv, &got), &dout, lengths)?;
            check.same(name(&op, dtype, "gradient again"), &first, &again);
        }
    }
    Ok(())
}

/// Same bits in any batch.
pub fn bits(check: &mut Check<'_>) -> Result<()> {
    for (i, &(heads, softcap, window, lengths)) in SHAPES.iter().enumerate() {
        let op = operation(heads, softcap, window);
        for dtype in [DType::F32, DType::Bf16] {
            let (width, ow) = (op.heads.qkv_width(), op.heads.out_width());
            let segments = Segments::of(lengths.iter().copied());
            let qkv = stored(dtype, &random(3, segments.rows() * width));
            let all = forward(check.card, op, dtype, &qkv, lengths)?;
            let again = forward(check.card, op, dtype, &qkv, lengths)?;
            check.same(name(&op, dtype, "again"), &again[0], &all[0]);
            let last = segments.starts[lengths.len() - 1]..segments.rows();
            let alone =
                forward(check.card, op, dtype, &qkv[last.start * width..], &lengths[lengths.len() - 1..])?;
            check.same(name(&op, dtype, "alone"), &alone[0], &all[0][last.start * ow..]);
            let heads = op.heads.heads;
            check.same(name(&op, dtype, "alone, lse"), &alone[1], &all[1][last.start * heads..]);
            for (what, most) in [("in chunks", 90), ("token by token", 1)] {
                let got = paged(check.card, op, dtype, (&qkv, lengths), i as u32, most)?;
                check.same(name(&op, dtype, what), &got, &all[0]);
            }
        }
    }
    Ok(())
}

/// Feeds the sequences through a cache full of NaN, at most `most` tokens of each at a time, in shuffled blocks that are moved
/// between steps.
fn paged(
    b: &dyn Backend,
    op: Attention,
    dtype: DType,
    (qkv, lengths): (&[f32], &[usize]),
    seed: u32,
    most: usize,
) -> Result<Vec<f32>> {
    let (width, ow, size) = (op.heads.qkv_width(), op.heads.out_width(), b.block_tokens());
    let segments = Segments::of(lengths.iter().copied());
    let mut counter = 0;
    let mut below = |n: usize| {
        counter += 1;
        philox4x32([counter, 2, 0, 0], [seed, 99])[0] as usize % n
    };
    let needed: Vec<usize> = lengths.iter().map(|l| l.div_ceil(size)).collect();
    let total = needed.iter().sum::<usize>() + 3;
    let mut free: Vec<u32> = (0..total as u32).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, below(i + 1));
    }
    let mut blocks: Vec<Vec<u32>> = needed.iter().map(|n| free.drain(..*n).collect()).collect();
    let mut cache = nan_filled(b, dtype, b.cache_len(op.heads, total))?;
    let mut done = vec![0; lengths.len()];
    let mut result = vec![f32::NAN; segments.rows() * ow];
    while done.iter().zip(lengths).any(|(d, l)| d < l) {
        let (mut rows, mut x, mut batch) = (PagedRows::default(), Vec::new(), Vec::new());
        for s in 0..lengths.len() {
            let left = lengths[s] - done[s];
            if left == 0 || below(4) == 0 {
                continue;
            }
            if done[s] > 0 && below(3) == 0 {
                let newest = &mut blocks[s][(done[s] - 1) / size];
                let to = free.remove(below(free.len()));
                b.cache_copies(op.heads, &[(*newest, to)], std::slice::from_mut(&mut cache))?;
                free.push(std::mem::replace(newest, to));
            }
            let count = 1 + below(left.min(most));
            let (from, row) = (segments.starts[s] + done[s], x.len() / width);
            x.extend_from_slice(&qkv[from * width..(from + count) * width]);
            rows.sequences.push(PagedSequence { row, count, position: done[s], blocks: blocks[s].clone() });
            batch.push((row, from, count));
            done[s] += count;
        }
        let x = upload(b, dtype, &x)?;
        let mut out = nan_filled(b, dtype, x.len() / width * ow)?;
        b.cache_write(op.heads, &x, &rows, &mut cache)?;
        b.attention_paged(op, &x, &rows, &cache, &mut out)?;
        let out = download(b, &out)?;
        for (row, from, count) in batch {
            result[from * ow..(from + count) * ow].copy_from_slice(&out[row * ow..(row + count) * ow]);
        }
    }
    Ok(result)
}
