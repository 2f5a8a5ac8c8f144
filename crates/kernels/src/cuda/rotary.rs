//! Rotary position embedding, in place on the queries and keys of fused rows.

use super::context::Cuda;
use super::launch::{Grid, args};
use super::memory::{f32_ptr, kernel, u32s};
use crate::backend::Heads;
use crate::buffer::Buffer;
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
