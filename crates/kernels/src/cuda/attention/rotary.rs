//! Rotary position embedding of the queries and keys of fused rows, alone and with what is beside it in a layer.

use crate::backend::{Affine, Heads, PagedRows, RopeOps, Turns};
use crate::buffer::{Buffer, DType};
use crate::composed;
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{add_chunks, row_count};
use crate::cuda::gemm::linear::{form, forward};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel, letter, ptr, u32s};
use crate::error::Result;
use crate::shapes;

impl RopeOps for Cuda {
    fn rotary(
        &self,
        heads: Heads,
        rotary_dim: usize,
        cos: &Buffer,
        sin: &Buffer,
        positions: &Buffer,
        inverse: bool,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let turns = Turns { dim: rotary_dim, cos, sin, positions };
        shapes::rotary(self, heads, turns, qkv)?;
        assert!(rotary_dim.is_multiple_of(2) && rotary_dim <= heads.head_dim);
        assert!(cos.len() == sin.len() && qkv.len() == positions.len() * heads.qkv_width());
        if rotary_dim == 0 {
            return Ok(());
        }
        let half = rotary_dim / 2;
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
        layer: Affine<'_>,
        heads: Heads,
        turns: Option<Turns<'_>>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = cache.as_ref().map(|(rows, cache)| (*rows, &**cache));
        shapes::linear_qkv(self, x, layer, heads, turns, to, qkv)?;
        match linear_qkv(self, x, layer, heads, turns, to, qkv)? {
            true => Ok(()),
            false => composed::linear_qkv(self, x, layer, heads, turns, cache, qkv),
        }
    }
    fn qkv_backward(
        &self,
        heads: Heads,
        turns: Option<Turns<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        mut dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        shapes::qkv_backward(self, heads, turns, dqkv, dbias.as_deref())?;
        match qkv_backward(self, heads, turns, dqkv, add, dbias.as_deref_mut())? {
            true => Ok(()),
            false => composed::qkv_backward(self, heads, turns, dqkv, add, dbias),
        }
    }
}

/// Whether all of a head is turned, which the kernels that turn on their way ask for.
fn wholly(turns: &Turns<'_>, heads: Heads) -> bool {
    turns.dim == heads.head_dim
}

/// Checks that the angles of every row are known.
pub(crate) fn check_positions(turns: &Turns<'_>, rows: usize) {
    let known = turns.cos.len() / (turns.dim / 2);
    assert!(turns.cos.len() == turns.sin.len() && turns.positions.len() == rows);
    assert!(
        u32s(turns.positions).iter().all(|&p| (p as usize) < known),
        "a position is beyond the {known} known"
    );
}

/// See [`RopeOps::linear_qkv`](crate::backend::RopeOps::linear_qkv); `false` where it has to be done one by one.
pub fn linear_qkv(
    cuda: &Cuda,
    x: &Buffer,
    layer: Affine<'_>,
    heads: Heads,
    turns: Option<Turns<'_>>,
    cache: Option<(&PagedRows, &Buffer)>,
    qkv: &mut Buffer,
) -> Result<bool> {
    let (w, count) = (layer.weight, qkv.len() / heads.qkv_width());
    let Some(turns) = turns.filter(|t| wholly(t, heads) && qkv.dtype() == DType::Bf16) else {
        return Ok(false);
    };
    assert!(x.len() == count * w.k && w.n == heads.qkv_width());
    check_positions(&turns, count);
    // Sums that a bias is added to must not be rounded before.
    let sums = match layer.bias {
        Some(_) => Some(cuda.arena.take(qkv.len() * 4)?),
        None => None,
    };
    let (at, storage) = sums.as_ref().map_or((ptr(qkv), DType::Bf16), |m| (m.ptr(), DType::F32));
    forward(cuda, [count, w.n, w.k], ptr(x), form(w), w.dtype, None, (at, storage))?;
    let slots = cache
        .map(|(rows, cache)| crate::cuda::attention::slots(cuda, heads, qkv, rows, cache))
        .transpose()?;
    let args = args![
        at,
        layer.bias,
        &*qkv,
        f32_ptr(turns.cos),
        f32_ptr(turns.sin),
        turns.positions,
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

/// Rows whose columns are summed before the sums of such chunks are added in order.
const CHUNK: usize = 64;
/// Fours of columns that a block has, of each half of a head.
const FOURS: usize = 16;
/// Sizes that the kernels share, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("FOURS", FOURS)];

/// See [`RopeOps::qkv_backward`](crate::backend::RopeOps::qkv_backward); `false` where it has to be done one by one.
pub fn qkv_backward(
    cuda: &Cuda,
    heads: Heads,
    turns: Option<Turns<'_>>,
    dqkv: &mut Buffer,
    add: bool,
    dbias: Option<&mut Buffer>,
) -> Result<bool> {
    let (width, half) = (heads.qkv_width(), heads.head_dim / 2);
    let turns = turns.filter(|t| wholly(t, heads) && heads.head_dim.is_multiple_of(8));
    let (Some(turns), Some(dbias)) = (turns, dbias) else { return Ok(false) };
    let rows = row_count(dqkv.len(), width);
    assert_eq!(dbias.len(), width);
    check_positions(&turns, rows);
    let chunks = rows.div_ceil(CHUNK);
    let sums = cuda.arena.take(chunks * width * 4)?;
    let all = heads.heads + 2 * heads.kv_heads;
    let args = args![
        &*dqkv,
        f32_ptr(turns.cos),
        f32_ptr(turns.sin),
        turns.positions,
        rows as u32,
        (heads.heads + heads.kv_heads) as u32,
        all as u32,
        heads.head_dim as u32,
        CHUNK as u32,
        &sums
    ];
    let grid = Grid::plane((all * half / 4).div_ceil(FOURS), chunks, 256);
    cuda.launch("rotary", &kernel("turn_back", &[dqkv]), grid, &args)?;
    add_chunks(cuda, sums.ptr(), width, chunks, width, f32_ptr(dbias), add)?;
    Ok(true)
}
