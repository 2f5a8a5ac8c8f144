//! Operations composed of simpler ones: the fallback for devices without a fused kernel, and the reference that a fused kernel
//! must equal bit for bit.
//!
//! Some run on the host: a new device starts with them and replaces them one by one.

mod attention;
mod experts;
mod head;
mod low_rank;
mod vectors;
mod vocab;

pub(crate) use attention::*;
pub(crate) use experts::*;
pub(crate) use head::*;
pub(crate) use low_rank::*;
pub(crate) use vectors::*;
pub(crate) use vocab::*;

use crate::backend::{
    Activation, Affine, CacheOps, DecodeOps, Heads, LinearGrads, LinearOps, NormOps, Normed, PagedRows,
    QkvLayer, RopeOps, Rotation,
};
use crate::{Buffer, Result};

pub fn add_norm<B: NormOps + ?Sized>(
    b: &B,
    norm: Normed<'_>,
    x: &Buffer,
    delta: &Buffer,
    [sum, y]: [&mut Buffer; 2],
) -> Result<()> {
    b.copy(x, 0, sum, 0, x.len())?;
    b.axpy(1.0, delta, sum)?;
    b.norm(norm, sum, y)
}

pub fn cache_copies<B: CacheOps + ?Sized>(
    b: &B,
    heads: Heads,
    pairs: &[(u32, u32)],
    layers: &mut [Buffer],
) -> Result<()> {
    let len = b.block_len(heads);
    for layer in layers {
        let mut block = b.alloc(layer.dtype(), len)?;
        for &(from, to) in pairs {
            b.copy(layer, from as usize * len, &mut block, 0, len)?;
            b.copy(&block, 0, layer, to as usize * len, len)?;
        }
    }
    Ok(())
}

pub fn linear_qkv<B: RopeOps + ?Sized>(
    b: &B,
    x: &Buffer,
    layer: QkvLayer<'_>,
    cache: Option<(&PagedRows, &mut Buffer)>,
    qkv: &mut Buffer,
) -> Result<()> {
    let QkvLayer { linear, heads, rotation } = layer;
    b.linear(x, linear.weight, linear.bias, qkv)?;
    if let Some(rotation) = rotation {
        b.rotary(heads, rotation, false, qkv)?;
    }
    cache.map_or(Ok(()), |(rows, cache)| b.cache_write(heads, qkv, rows, cache))
}

pub fn qkv_backward<B: RopeOps + ?Sized>(
    b: &B,
    heads: Heads,
    rotation: Option<Rotation<'_>>,
    dqkv: &mut Buffer,
    add: bool,
    dbias: Option<&mut Buffer>,
) -> Result<()> {
    if let Some(rotation) = rotation {
        b.rotary(heads, rotation, true, dqkv)?;
    }
    dbias.map_or(Ok(()), |dbias| rotated_bias(b, dqkv, dqkv.len() / heads.qkv_width(), add, dbias))
}

pub fn rotated_bias<B: LinearOps + ?Sized>(
    b: &B,
    dqkv: &Buffer,
    tokens: usize,
    add: bool,
    dbias: &mut Buffer,
) -> Result<()> {
    // The second operand does not matter without a weight gradient.
    b.linear_dw(dqkv, dqkv, tokens, LinearGrads { weight: None, bias: Some(dbias), add })
}

pub fn normed_qkv<B: DecodeOps + ?Sized>(
    b: &B,
    norm: Normed<'_>,
    x: &Buffer,
    layer: QkvLayer<'_>,
    cache: (&PagedRows, &mut Buffer),
    qkv: &mut Buffer,
) -> Result<()> {
    let mut h = b.alloc(layer.linear.weight.compute, x.len())?;
    b.norm(norm, x, &mut h)?;
    linear_qkv(b, &h, layer, Some(cache), qkv)
}

pub fn linear_add<B: DecodeOps + ?Sized>(
    b: &B,
    x: &Buffer,
    layer: Affine<'_>,
    to: &mut Buffer,
) -> Result<()> {
    let mut y = b.alloc(x.dtype(), to.len())?;
    b.linear(x, layer.weight, layer.bias, &mut y)?;
    b.axpy(1.0, &y, to)
}

pub fn normed_activation<B: DecodeOps + ?Sized>(
    b: &B,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    op: Activation,
    y: &mut Buffer,
) -> Result<()> {
    let rows = x.len() / norm.op.width;
    let mut up = b.alloc(y.dtype(), rows * layer.weight.n)?;
    let mut h = b.alloc(layer.weight.compute, x.len())?;
    b.norm(norm, x, &mut h)?;
    b.linear(&h, layer.weight, layer.bias, &mut up)?;
    b.activation(op, y.len() / rows.max(1), &up, y)
}
