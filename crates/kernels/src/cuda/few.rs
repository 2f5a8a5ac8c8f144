//! Linear layers of a few rows, with what comes before and after them: decoding one or a few sequences.
//!
//! In exact mode a product is served where its sums are, bit for bit, those of the library for many rows; that is tried
//! once for each shape, on operands of which another order of additions would show (`rows`). Elsewhere the operations are
//! done one by one (`composed`).

use super::context::Cuda;
use super::launch::{Arg, Grid, args};
use super::linear::form;
use super::memory::{f32_ptr, ptr};
use super::norm::offset;
use super::rotary::check_positions;
use super::rows::agreeing;
use crate::backend::{Activation, Affine, Heads, Normed, PagedRows, Turns};
use crate::buffer::{Buffer, DType};
use crate::error::Result;
use std::collections::HashMap;
use std::sync::Mutex;

/// Rows at most, and features of a tile at least: half of an operand of a tensor core.
const ROWS: usize = 8;
const TILE: usize = 8;
/// Rows up to which one kernel is faster than several with the library's products: measured on an H200.
pub const WORTH: usize = 4;
/// Threads of a block of few.cu.
const THREADS: u32 = 128;
/// Shared memory of a block besides what it asks for.
const RESERVED: usize = 2048;
/// The widest row that is normed on the way.
const WIDEST: usize = 4096;

/// What is known of shapes (n, k) without and with a bias: up to how many rows the kernel serves.
pub type Known = Mutex<HashMap<(usize, usize, bool), usize>>;

/// A product of `rows` rows and what becomes of it, as the kernels are told.
struct Few<'a> {
    layer: Affine<'a>,
    rows: usize,
    /// Features of a tile: those that a warp has at the end.
    features: usize,
    /// Vectors of a norm: its weight, and its bias.
    norm: usize,
}

impl Few<'_> {
    /// Tiles of features that a block has: one if that keeps all processors busy, else three if all blocks are in the
    /// processors at once then, else two.
    fn tiles(&self, cuda: &Cuda) -> usize {
        let (all, processors) = (self.layer.weight.n / self.features, cuda.card.processors as usize);
        if all <= 2 * processors || self.features == TILE {
            return 1;
        }
        let at_once = cuda.card.shared / (self.shared_of(3) + RESERVED) * processors;
        if all.div_ceil(3) <= at_once { 3 } else { 2 }
    }

    /// Bytes of shared memory of a block with that many tiles: its weights, the rows and the parameters of a norm. Hopper's
    /// products read the weights of 64 features, and eight rows, whatever is there.
    fn shared_of(&self, tiles: usize) -> usize {
        let (k, features) = (self.layer.weight.k, tiles * self.features);
        let beside = (ROWS * 16) + self.rows * (k + 8) * 2 + self.norm * 4 * k;
        let read = if features > TILE { (64 - features) * 128 } else { 0 };
        features * (k + 8) * 2 + beside.max(read)
    }

    fn shared(&self, cuda: &Cuda) -> usize {
        self.shared_of(self.tiles(cuda))
    }

    fn fits(&self, cuda: &Cuda) -> bool {
        let w = self.layer.weight;
        let whole = w.n.is_multiple_of(self.features) && w.k.is_multiple_of(128) && w.dtype == DType::Bf16;
        whole && (1..=ROWS).contains(&self.rows) && self.shared(cuda) + RESERVED <= cuda.card.shared
    }

    fn launch(
        &self,
        cuda: &Cuda,
        kernel: &str,
        weights: u64,
        out: u64,
        before: [Arg; 6],
        turns: [Arg; 8],
        gelu: bool,
    ) -> Result<()> {
        let (w, tiles) = (self.layer.weight, self.tiles(cuda));
        let mut all = args![weights, self.layer.bias, out].to_vec();
        all.extend(before);
        all.extend(turns);
        all.extend(args![gelu, self.rows as u32, w.n as u32, w.k as u32, tiles as u32]);
        let blocks = (w.n / self.features).div_ceil(tiles);
        let grid = Grid::new(blocks, THREADS).with_shared(self.shared(cuda)).early();
        // Fours of a normed row that a thread has.
        let fours = if self.norm > 0 { w.k.div_ceil(4 * THREADS as usize) } else { 1 };
        cuda.launch_variant("few", &format!("FOURS={fours}"), kernel, grid, &all)
    }
}

/// Rows of `x` as they are.
fn as_it_is(x: u64) -> [Arg; 6] {
    args![x, 0u64, 0u64, 0f32, 0f32, 0u32]
}

/// Rows of the residual stream, normed.
fn normed(norm: Normed<'_>, x: &Buffer) -> [Arg; 6] {
    let Normed { op, weight, bias } = norm;
    args![f32_ptr(x), f32_ptr(weight), bias, offset(op), op.eps, u32::from(op.centred)]
}

/// Nothing is turned.
fn still() -> [Arg; 8] {
    args![0u64, 0u64, 0u64, 0u64, 0u64, 0u32, 0u32, 0u32]
}

/// Whether the kernel's sums are the library's; tried once for each shape.
fn serves(cuda: &Cuda, few: &Few<'_>) -> Result<bool> {
    if !few.fits(cuda) {
        return Ok(false);
    }
    // Where no bits are promised these are as good as any, and sooner there.
    if !cuda.exact() {
        return Ok(true);
    }
    let (w, biased) = (few.layer.weight, few.layer.bias.is_some());
    let key = (w.n, w.k, biased);
    let known = cuda.few.lock().unwrap_or_else(|e| e.into_inner()).get(&key).copied();
    if let Some(rows) = known {
        return Ok(few.rows <= rows);
    }
    // Sums that a bias is added to are not rounded before; others are.
    let out = if biased { DType::F32 } else { DType::Bf16 };
    let rows = agreeing(cuda, [w.n, w.k], out, ROWS, |rows, x, weights, to| {
        let trial = Few { layer: Affine { weight: w, bias: None }, rows, features: TILE, norm: 0 };
        if !trial.fits(cuda) {
            return Ok(false);
        }
        trial.launch(cuda, "few_sums", weights, to, as_it_is(x), still(), false).map(|()| true)
    })?;
    cuda.profile
        .note(|| format!("few rows of {}x{}: the library's sums up to {rows} of {ROWS} rows", w.n, w.k));
    cuda.few.lock().unwrap_or_else(|e| e.into_inner()).insert(key, rows);
    Ok(few.rows <= rows)
}

/// Vectors of a norm.
fn vectors(norm: Normed<'_>) -> usize {
    1 + usize::from(norm.bias.is_some())
}

/// Whether rows of the residual stream can be normed on the way.
fn norms(norm: Normed<'_>, x: &Buffer) -> bool {
    x.dtype() == DType::F32 && norm.op.width.is_multiple_of(4) && norm.op.width <= WIDEST
}

/// See [`crate::Backend::normed_qkv`]; `false` where it has to be done one by one.
pub fn normed_qkv(
    cuda: &Cuda,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    heads: Heads,
    turns: Option<Turns<'_>>,
    rows: &PagedRows,
    cache: &mut Buffer,
    qkv: &mut Buffer,
) -> Result<bool> {
    let few = Few { layer, rows: x.len() / norm.op.width, features: 2 * TILE, norm: vectors(norm) };
    let Some(turns) = turns.filter(|t| t.dim == heads.head_dim && t.dim.is_multiple_of(16)) else {
        return Ok(false);
    };
    let whole = layer.weight.n == heads.qkv_width() && qkv.dtype() == DType::Bf16;
    if !whole || !norms(norm, x) || !serves(cuda, &few)? {
        return Ok(false);
    }
    assert_eq!(qkv.len(), few.rows * heads.qkv_width());
    check_positions(&turns, few.rows);
    let slots = super::attention::slots(cuda, heads, qkv, rows, cache)?;
    let turned = args![
        f32_ptr(turns.cos),
        f32_ptr(turns.sin),
        turns.positions,
        &slots,
        &*cache,
        heads.heads as u32,
        heads.kv_heads as u32,
        heads.head_dim as u32
    ];
    few.launch(cuda, "few_turned", form(layer.weight), ptr(qkv), normed(norm, x), turned, false)?;
    Ok(true)
}

/// See [`crate::Backend::linear_add`]; `false` where it has to be done one by one.
pub fn linear_add(cuda: &Cuda, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<bool> {
    let few = Few { layer, rows: x.len() / layer.weight.k, features: TILE, norm: 0 };
    if x.dtype() != DType::Bf16 || !serves(cuda, &few)? {
        return Ok(false);
    }
    assert_eq!(to.len(), few.rows * layer.weight.n);
    few.launch(cuda, "few_add", form(layer.weight), f32_ptr(to), as_it_is(ptr(x)), still(), false)?;
    Ok(true)
}

/// See [`crate::Backend::normed_activation`]; `false` where it has to be done one by one.
pub fn normed_activation(
    cuda: &Cuda,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    op: Activation,
    y: &mut Buffer,
) -> Result<bool> {
    let few = Few { layer, rows: x.len() / norm.op.width, features: 2 * TILE, norm: vectors(norm) };
    let served = op != Activation::Gelu && y.dtype() == DType::Bf16 && norms(norm, x);
    if !served || !serves(cuda, &few)? {
        return Ok(false);
    }
    assert_eq!(y.len(), few.rows * layer.weight.n / 2);
    few.launch(
        cuda,
        "few_gated",
        form(layer.weight),
        ptr(y),
        normed(norm, x),
        still(),
        op == Activation::GeluGated,
    )?;
    Ok(true)
}
