//! Rotary position embedding, in place on the queries and keys of fused rows.

use super::context::Cuda;
use super::launch::{Grid, args};
use super::linear::{form, forward};
use super::memory::{f32_ptr, kernel, letter, ptr, u32s};
use crate::backend::{Affine, Heads, PagedRows, Turns};
use crate::buffer::{Buffer, DType};
use crate::error::Result;

/// See [`Backend::rotary`](crate::Backend::rotary).
pub fn rotary(
    cuda: &Cuda,
    heads: Heads,
    rotary_dim: usize,
    cos: &Buffer,
    sin: &Buffer,
    positions: &Buffer,
    inverse: bool,
    qkv: &mut Buffer,
) -> Result<()> {
    assert!(rotary_dim.is_multiple_of(2) && rotary_dim <= heads.head_dim);
    assert!(cos.len() == sin.len() && qkv.len() == positions.len() * heads.qkv_width());
    if rotary_dim == 0 {
        return Ok(());
    }
    let half = rotary_dim / 2;
    let known = cos.len() / half;
    assert!(u32s(positions).iter().all(|&p| (p as usize) < known), "a position is beyond the {known} known");
    let args = args![
        &*qkv,
        f32_ptr(cos),
        f32_ptr(sin),
        positions,
        (heads.heads + heads.kv_heads) as u32,
        heads.qkv_width() as u32,
        heads.head_dim as u32,
        half as u32,
        if inverse { -1f32 } else { 1.0 }
    ];
    cuda.launch("rotary", &kernel("rotary", &[qkv]), Grid::new(positions.len(), 128), &args)
}

/// See [`Backend::linear_qkv`](crate::Backend::linear_qkv); `false` where it has to be done one by one.
pub fn linear_qkv(
    cuda: &Cuda,
    x: &Buffer,
    layer: Affine<'_>,
    heads: Heads,
    turns: Option<Turns<'_>>,
    rows: &PagedRows,
    cache: &mut Buffer,
    qkv: &mut Buffer,
) -> Result<bool> {
    let (w, count) = (layer.weight, qkv.len() / heads.qkv_width());
    let Some(turns) = turns.filter(|t| t.dim == heads.head_dim && qkv.dtype() == DType::Bf16) else {
        return Ok(false);
    };
    let known = turns.cos.len() / (turns.dim / 2);
    assert!(x.len() == count * w.k && w.n == heads.qkv_width() && turns.positions.len() == count);
    assert!(
        u32s(turns.positions).iter().all(|&p| (p as usize) < known),
        "a position is beyond the {known} known"
    );
    // Sums that a bias is added to must not be rounded before.
    let sums = match layer.bias {
        Some(_) => Some(cuda.arena.take(qkv.len() * 4)?),
        None => None,
    };
    let (at, storage) = sums.as_ref().map_or((ptr(qkv), DType::Bf16), |m| (m.ptr(), DType::F32));
    forward(cuda, [count, w.n, w.k], ptr(x), form(w), w.dtype, None, (at, storage))?;
    let slots = super::attention::slots(cuda, heads, qkv, rows, cache)?;
    let args = args![
        at,
        layer.bias,
        &*qkv,
        f32_ptr(turns.cos),
        f32_ptr(turns.sin),
        turns.positions,
        &slots,
        &*cache,
        heads.heads as u32,
        heads.kv_heads as u32,
        heads.head_dim as u32
    ];
    let name = format!("finish_qkv_{}", letter(storage));
    cuda.launch("rotary", &name, Grid::new(count, 128).early(), &args)?;
    Ok(true)
}
