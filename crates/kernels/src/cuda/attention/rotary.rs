//! RoPE of the queries and keys in qkv rows, alone and fused.

use crate::backend::{Heads, PagedRows, QkvLayer, RopeOps, Rotation};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{Chunks, add_chunks, row_count};
use crate::cuda::gemm::linear::{ForwardShape, forward, stored};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel, letter, ptr, u32s};
use crate::{Buffer, DType, Result, composed, shapes};

impl RopeOps for Cuda {
    fn rotary(&self, heads: Heads, rotation: Rotation<'_>, inverse: bool, qkv: &mut Buffer) -> Result<()> {
        shapes::rotary(self, heads, rotation, qkv)?;
        let Rotation { dim, cos, sin, positions } = rotation;
        assert!(dim.is_multiple_of(2) && dim <= heads.head_dim);
        assert!(cos.len() == sin.len() && qkv.len() == positions.len() * heads.qkv_width());
        if dim == 0 {
            return Ok(());
        }
        let half = dim / 2;
        let known = cos.len() / half;
        assert!(
            u32s(positions).iter().all(|&p| (p as usize) < known),
            "a position is beyond the {known} known"
        );
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
        self.launch("rotary", &kernel("rotary", &[qkv]), Grid::new(positions.len(), 128), &args)
    }
    fn linear_qkv(
        &self,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = cache.as_ref().map(|(rows, cache)| (*rows, &**cache));
        shapes::linear_qkv(self, x, layer, to, qkv)?;
        match linear_qkv(self, x, layer, to, qkv)? {
            true => Ok(()),
            false => composed::linear_qkv(self, x, layer, cache, qkv),
        }
    }
    fn qkv_backward(
        &self,
        heads: Heads,
        rotation: Option<Rotation<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        mut dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::qkv_backward(self, heads, rotation, dqkv, dbias.as_deref())?;
        match qkv_backward(self, heads, rotation, dqkv, add, dbias.as_deref_mut())? {
            true => Ok(()),
            false => composed::qkv_backward(self, heads, rotation, dqkv, add, dbias),
        }
    }
    fn rotated_bias(
        &self,
        head_dim: usize,
        dqkv: &Buffer,
        tokens: usize,
        add: bool,
        dbias: &mut Buffer,
    ) -> Result<()> {
        shapes::rotated_bias(self, head_dim, dqkv, tokens, dbias)?;
        if !head_dim.is_multiple_of(8) || tokens == 0 {
            return composed::rotated_bias(self, dqkv, tokens, add, dbias);
        }
        let (width, chunks) = (dbias.len(), tokens.div_ceil(CHUNK));
        assert_eq!(dqkv.len(), tokens * width);
        let sums = self.arena.take(chunks * width * 4)?;
        let args = args![dqkv, tokens as u32, width as u32, CHUNK as u32, &sums];
        let grid = Grid::plane(width.div_ceil(64), chunks, 64);
        self.launch("rotary", &kernel("rotated_sums", &[dqkv]), grid, &args)?;
        let sums = Chunks { at: sums.ptr(), stride: width, count: chunks, width };
        add_chunks(self, sums, (f32_ptr(dbias), add))
    }
}

/// Whether all of a head is rotated, which the fused kernels require.
fn wholly(rotation: &Rotation<'_>, heads: Heads) -> bool {
    rotation.dim == heads.head_dim
}

/// Checks that the RoPE tables cover every row's position.
pub(crate) fn check_positions(rotation: &Rotation<'_>, rows: usize) {
    let known = rotation.cos.len() / (rotation.dim / 2);
    assert!(rotation.cos.len() == rotation.sin.len() && rotation.positions.len() == rows);
    assert!(
        u32s(rotation.positions).iter().all(|&p| (p as usize) < known),
        "a position is beyond the {known} known"
    );
}

/// See [`RopeOps::linear_qkv`](crate::backend::RopeOps::linear_qkv); `false` if it must be composed.
pub fn linear_qkv(
    cuda: &Cuda,
    x: &Buffer,
    layer: QkvLayer<'_>,
    cache: Option<(&PagedRows, &Buffer)>,
    qkv: &mut Buffer,
) -> Result<bool> {
    let QkvLayer { linear, heads, rotation } = layer;
    let (w, count) = (linear.weight, qkv.len() / heads.qkv_width());
    let Some(rotation) = rotation.filter(|r| wholly(r, heads) && qkv.dtype() == DType::Bf16) else {
        return Ok(false);
    };
    assert!(x.len() == count * w.k && w.n == heads.qkv_width());
    check_positions(&rotation, count);
    // Before a bias is added, the product must not be rounded.
    let sums = match linear.bias {
        Some(_) => Some(cuda.arena.take(qkv.len() * 4)?),
        None => None,
    };
    let (at, storage) = sums.as_ref().map_or((ptr(qkv), DType::Bf16), |m| (m.ptr(), DType::F32));
    forward(cuda, ForwardShape::of(count, w), ptr(x), stored(w), None, (at, storage))?;
    let slots = cache
        .map(|(rows, cache)| crate::cuda::attention::slots(cuda, heads, qkv, rows, cache))
        .transpose()?;
    let args = args![
        at,
        linear.bias,
        &*qkv,
        f32_ptr(rotation.cos),
        f32_ptr(rotation.sin),
        rotation.positions,
        slots.as_ref().map_or(0, |s| s.ptr()),
        cache.map(|(_, cache)| cache),
        heads.heads as u32,
        heads.kv_heads as u32,
        heads.head_dim as u32
    ];
    let name = format!("finish_qkv_{}", letter(storage));
    cuda.launch("rotary", &name, Grid::new(count, 96).early(), &args)?;
    Ok(true)
}

/// Rows per partial sum; partial sums are added in order.
const CHUNK: usize = 64;
/// Groups of four columns per block, in each half of a head.
const FOURS: usize = 16;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("FOURS", FOURS)];

/// See [`RopeOps::qkv_backward`](crate::backend::RopeOps::qkv_backward); `false` if it must be composed.
pub fn qkv_backward(
    cuda: &Cuda,
    heads: Heads,
    rotation: Option<Rotation<'_>>,
    dqkv: &mut Buffer,
    add: bool,
    dbias: Option<&mut Buffer>,
) -> Result<bool> {
    let (width, half) = (heads.qkv_width(), heads.head_dim / 2);
    let rotation = rotation.filter(|t| wholly(t, heads) && heads.head_dim.is_multiple_of(8));
    let (Some(rotation), Some(dbias)) = (rotation, dbias) else { return Ok(false) };
    let rows = row_count(dqkv.len(), width);
    assert_eq!(dbias.len(), width);
    check_positions(&rotation, rows);
    let chunks = rows.div_ceil(CHUNK);
    let sums = cuda.arena.take(chunks * width * 4)?;
    let all = heads.heads + 2 * heads.kv_heads;
    let args = args![
        &*dqkv,
        f32_ptr(rotation.cos),
        f32_ptr(rotation.sin),
        rotation.positions,
        rows as u32,
        (heads.heads + heads.kv_heads) as u32,
        all as u32,
        heads.head_dim as u32,
        CHUNK as u32,
        &sums
    ];
    let grid = Grid::plane((all * half / 4).div_ceil(FOURS), chunks, 256);
    cuda.launch("rotary", &kernel("rotate_back", &[dqkv]), grid, &args)?;
    let sums = Chunks { at: sums.ptr(), stride: width, count: chunks, width };
    add_chunks(cuda, sums, (f32_ptr(dbias), add))?;
    Ok(true)
}
