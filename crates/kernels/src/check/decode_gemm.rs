//! Fused decode GEMMs: same bits as the operations they fuse, on the same device.

use super::{Check, download, nan_filled, random, upload, weight};
use crate::backend::{
    Activation, Affine, Backend, Heads, Norm, Normed, PagedRows, PagedSequence, QkvLayer, Rotation,
};
use crate::{Buffer, DType, Result, composed};

/// Hidden width, heads, feed-forward width, LayerNorm, biases, and the activation.
const SHAPES: &[(usize, Heads, usize, bool, bool, Activation)] = &[
    (896, Heads { heads: 14, kv_heads: 2, head_dim: 64 }, 4864, false, true, Activation::SiluGated),
    (256, Heads { heads: 4, kv_heads: 4, head_dim: 64 }, 320, true, true, Activation::GeluGated),
    (192, Heads { heads: 3, kv_heads: 1, head_dim: 32 }, 512, false, false, Activation::SiluGated),
    (96, Heads { heads: 2, kv_heads: 1, head_dim: 48 }, 64, true, true, Activation::Gelu),
    // Weights that stream: of qkv, of gate and up, and with a long k.
    (3584, Heads { heads: 28, kv_heads: 4, head_dim: 128 }, 2432, false, true, Activation::SiluGated),
    (256, Heads { heads: 2, kv_heads: 2, head_dim: 128 }, 18944, true, true, Activation::GeluGated),
    (40, Heads { heads: 5, kv_heads: 1, head_dim: 8 }, 72, false, false, Activation::SiluGated),
];
/// What is compared.
const WHAT: [&str; 7] = [
    "queries",
    "cache",
    "activation",
    "residual stream",
    "queries of normed rows",
    "their cache",
    "queries without a cache",
];
/// Positions in the RoPE tables.
const REACH: usize = 200;

/// A layer's parameters on a device.
struct LayerBuffers {
    norm: Norm,
    weight: Buffer,
    shift: Option<Buffer>,
    matrices: [crate::buffer::Weight; 3],
    biases: [Option<Buffer>; 3],
    angles: [Buffer; 2],
}

/// Rows with the next token of each sequence, in scattered blocks.
fn new_tokens(b: &dyn Backend, rows: usize) -> (PagedRows, Vec<u32>, usize) {
    let size = b.block_tokens();
    let position = |i: usize| (i * 37 + 5) % REACH;
    let each = REACH.div_ceil(size);
    let sequences = (0..rows).map(|i| PagedSequence {
        row: i,
        count: 1,
        position: position(i),
        blocks: (0..=position(i) / size).map(|j| (j * rows + i) as u32).collect(),
    });
    let positions = (0..rows).map(|i| position(i) as u32).collect();
    (PagedRows { sequences: sequences.collect() }, positions, rows * each)
}

pub fn all(check: &mut Check<'_>) -> Result<()> {
    let b = check.card;
    for &(hidden, heads, ffn, centred, biased, op) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let f32s = |seed, n: usize, by: f32| {
                upload(b, DType::F32, &random(seed, n).iter().map(|x| x * by).collect::<Vec<f32>>())
            };
            let some = |wanted: bool, seed, n| if wanted { f32s(seed, n, 0.3).map(Some) } else { Ok(None) };
            let up = if op == Activation::Gelu { ffn } else { 2 * ffn };
            let matrix = |seed, n: usize, k: usize| {
                let by = 1.0 / (k as f32).sqrt();
                weight(b, dtype, n, k, &random(seed, n * k).iter().map(|x| x * by).collect::<Vec<f32>>())
            };
            let angles = |f: fn(f64) -> f64| -> Result<Buffer> {
                let half = heads.head_dim / 2;
                let all =
                    (0..REACH * half).map(|i| f((i / half) as f64 * 0.7 / (1 + i % half) as f64) as f32);
                upload(b, DType::F32, &all.collect::<Vec<f32>>())
            };
            let layer = LayerBuffers {
                norm: Norm { centred, plus_one: !centred, eps: 1e-6, width: hidden },
                weight: f32s(2, hidden, 1.0)?,
                shift: some(centred, 3, hidden)?,
                matrices: [
                    matrix(4, heads.qkv_width(), hidden)?,
                    matrix(5, up, hidden)?,
                    matrix(6, hidden, ffn)?,
                ],
                biases: [some(biased, 7, heads.qkv_width())?, some(biased, 8, up)?, some(biased, 9, hidden)?],
                angles: [angles(f64::cos)?, angles(f64::sin)?],
            };
            for rows in [1, 2, 5, 8, 40] {
                run_shape(check, &layer, heads, (ffn, op), rows)?;
            }
        }
    }
    Ok(())
}

fn run_shape(
    check: &mut Check<'_>,
    layer: &LayerBuffers,
    heads: Heads,
    (ffn, op): (usize, Activation),
    rows: usize,
) -> Result<()> {
    let (b, hidden, dtype) = (check.card, layer.norm.width, layer.matrices[0].compute);
    let norm = Normed { op: layer.norm, weight: &layer.weight, bias: layer.shift.as_ref() };
    let affine = |i: usize| Affine { weight: &layer.matrices[i], bias: layer.biases[i].as_ref() };
    let x = upload(b, DType::F32, &random(1, rows * hidden))?;
    let (places, positions, blocks) = new_tokens(b, rows);
    let positions = b.indices(&positions)?;
    let [cos, sin] = &layer.angles;
    let rotation = Some(Rotation { dim: heads.head_dim, cos, sin, positions: &positions });
    let qkv_layer = QkvLayer { linear: affine(0), heads, rotation };
    let name = |what: &str| format!("decode GEMM: {what} {} of {rows} x {hidden}", dtype.name());
    let cache_of = || -> Result<Buffer> {
        let mut cache = b.alloc(dtype, b.cache_len(heads, blocks))?;
        b.fill(&mut cache, 0.5)?;
        Ok(cache)
    };
    let run = |whole: bool| -> Result<[Vec<f32>; 7]> {
        let (mut cache, mut qkv) = (cache_of()?, nan_filled(b, dtype, rows * heads.qkv_width())?);
        let (mut act, mut stream) =
            (nan_filled(b, dtype, rows * ffn)?, upload(b, DType::F32, &random(1, rows * hidden))?);
        let (mut second, mut plain) = (cache_of()?, nan_filled(b, dtype, qkv.len())?);
        let mut alone = nan_filled(b, dtype, qkv.len())?;
        let normed = upload(b, dtype, &random(12, rows * hidden))?;
        let narrow = upload(b, dtype, &random(10, rows * ffn))?;
        if whole {
            b.normed_qkv(norm, &x, qkv_layer, (&places, &mut cache), &mut qkv)?;
            b.linear_qkv(&normed, qkv_layer, Some((&places, &mut second)), &mut plain)?;
            b.linear_qkv(&normed, qkv_layer, None, &mut alone)?;
            b.normed_activation(norm, &x, affine(1), op, &mut act)?;
            b.linear_add(&narrow, affine(2), &mut stream)?;
        } else {
            composed::normed_qkv(b, norm, &x, qkv_layer, (&places, &mut cache), &mut qkv)?;
            composed::linear_qkv(b, &normed, qkv_layer, Some((&places, &mut second)), &mut plain)?;
            composed::linear_qkv(b, &normed, qkv_layer, None, &mut alone)?;
            composed::normed_activation(b, norm, &x, affine(1), op, &mut act)?;
            composed::linear_add(b, &narrow, affine(2), &mut stream)?;
        }
        let all = [&qkv, &cache, &act, &stream, &plain, &second, &alone].map(|x| download(b, x));
        let [a, b, c, d, e, f, g] = all;
        Ok([a?, b?, c?, d?, e?, f?, g?])
    };
    let (want, got) = (run(false)?, run(true)?);
    for (i, what) in WHAT.into_iter().enumerate() {
        check.same(name(what), &got[i], &want[i]);
    }
    Ok(())
}
