//! Backward: logits are computed again, a stretch of the vocabulary at a time for all rows, turned into their
//! gradient in place, and multiplied into `dx` and `dw` before the next stretch.

use super::{ROWS, TILE, Tiles, logit_tile, scale_slope, task, tile_width, with_tiles};
use crate::backend::{LogpGrads, LogpHead, LogpStats};
use crate::buffer::{Buffer, Weight};
use crate::cpu::Cpu;
use crate::cpu::element::Stored;
use crate::cpu::linear::{backward_pack, forward_pack};
use crate::cpu::math::exp;
use crate::cpu::matmul::pack::{Packed, Shape, TokenRows, pack_tokens};
use crate::cpu::matmul::{self, Out, Scratch};
use crate::cpu::memory::{Plain, Slice, SliceMut, f32s, f32s_mut, floats, floats_mut, u32s};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::{LANES, multiversion, narrow};
use crate::error::Result;
use std::ops::Range;

/// How a row's gradient by its scaled logits follows from its numbers.
pub(super) struct RowGrads<'a> {
    pub targets: &'a [u32],
    pub others: &'a [u32],
    pub lse: &'a [f32],
    pub entropy: &'a [f32],
    pub dlogp: &'a [f32],
    pub dentropy: Option<&'a [f32]>,
    pub dothers: &'a [f32],
}

/// Elements a gradient tile may be stored as.
pub(super) trait GradElement: TokenRows<Unit: Plain> + Stored + Plain + From32 {}
impl GradElement for f32 {}
impl GradElement for u16 {}

/// Rounds one number to the storage type.
pub(super) trait From32 {
    fn from32(x: f32) -> Self;
}
impl From32 for f32 {
    fn from32(x: f32) -> f32 {
        x
    }
}
impl From32 for u16 {
    fn from32(x: f32) -> u16 {
        narrow(x)
    }
}

multiversion! {
    fn dlogits<S, type E: GradElement>(s, scratch: &mut Scratch, tiles: &mut Tiles, op: LogpHead, x: &[E], w: Packed<'_, E>, rows: Range<usize>, tile: usize, g: &RowGrads<'_>, out: Disjoint<E>, at: usize, ld: usize) {
        logit_tile(s, scratch, op, x, rows.clone(), w, tile, &mut tiles.first);
        let (from, width) = (tile * TILE, tile_width(w.shape.n, tile));
        let extra = g.others.len() / g.targets.len();
        for (i, row) in rows.enumerate() {
            let logits = &mut tiles.first[i * TILE..][..TILE];
            let mut total = g.dlogp[row];
            for j in 0..extra {
                total += g.dothers[row * extra + j];
            }
            let dentropy = g.dentropy.map_or(0.0, |d| d[row]);
            let (lse, entropy) = (s.splat(g.lse[row]), s.splat(g.entropy[row]));
            let (total, dentropy) = (s.splat(total), s.splat(dentropy));
            // The chosen tokens' own logits, before they are overwritten.
            let slope_at = |logits: &[f32], token: usize| {
                let l = s.splat(logits[token - from]);
                s.largest(scale_slope(s, op, l))
            };
            let inside = |token: u32| (token as usize) >= from && (token as usize) < from + width;
            let own = if inside(g.targets[row]) { g.dlogp[row] * slope_at(logits, g.targets[row] as usize) } else { 0.0 };
            let mut listed = [0f32; 32];
            for j in 0..extra.min(32) {
                let token = g.others[row * extra + j];
                if inside(token) {
                    listed[j] = g.dothers[row * extra + j] * slope_at(logits, token as usize);
                }
            }
            let mut c = 0;
            while c < width {
                // SAFETY: a tile's row has TILE elements.
                unsafe {
                    let l = s.load(logits.as_ptr().add(c));
                    let logp = s.sub(l, lse);
                    let p = exp(s, logp);
                    let pull = s.fma(dentropy, s.add(logp, entropy), total);
                    let d = s.mul(s.mul(s.sub(s.splat(0.0), p), pull), scale_slope(s, op, l));
                    s.store(logits.as_mut_ptr().add(c), d);
                }
                c += LANES;
            }
            if inside(g.targets[row]) {
                logits[g.targets[row] as usize - from] += own;
            }
            for j in 0..extra.min(32) {
                let token = g.others[row * extra + j];
                if inside(token) {
                    logits[token as usize - from] += listed[j];
                }
            }
            // SAFETY: this task alone has this row and tile.
            let out = unsafe { out.part(row * ld + at, width) };
            let mut c = 0;
            while c < width {
                // SAFETY: `width - c` elements are left in `out`; a tile's row has TILE elements.
                unsafe { E::put(s, width - c, out.as_mut_ptr().add(c), s.load(logits.as_ptr().add(c))) };
                c += LANES;
            }
        }
    }
}

/// See [`crate::Backend::logp_backward`].
pub fn logp_backward(
    cpu: &Cpu,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    targets: &Buffer,
    others: Option<&Buffer>,
    stats: &LogpStats,
    grads: &LogpGrads<'_>,
    dx: &mut Buffer,
    dw: Option<&mut Buffer>,
) -> Result<()> {
    let g = RowGrads {
        targets: u32s(targets),
        others: others.map_or(&[], u32s),
        lse: f32s(&stats.lse),
        entropy: f32s(&stats.entropy),
        dlogp: f32s(grads.logp),
        dentropy: grads.entropy.map(f32s),
        dothers: grads.others.map_or(&[], f32s),
    };
    let rows = g.targets.len();
    assert!(
        g.others.len() == g.dothers.len() && g.others.len() <= 32 * rows,
        "at most 32 other tokens a row"
    );
    match floats(x) {
        Slice::F32(x) => through_vocabulary(cpu, x, w, dx, dw, |rows, tile, out, at, ld| {
            with_tiles(|c, t| dlogits(cpu.level, c, t, op, x, forward_pack(w), rows, tile, &g, out, at, ld))
        }),
        Slice::Bf16(x) => through_vocabulary(cpu, x, w, dx, dw, |rows, tile, out, at, ld| {
            with_tiles(|c, t| dlogits(cpu.level, c, t, op, x, forward_pack(w), rows, tile, &g, out, at, ld))
        }),
    }
}

/// Runs `fill(rows, tile, out, column in out, row length of out)` for every tile, a stretch of the vocabulary at
/// a time, and multiplies each stretch's gradient into `dx` and `dw`.
pub(super) fn through_vocabulary<E: GradElement>(
    cpu: &Cpu,
    x: &[E],
    w: &Weight,
    dx: &mut Buffer,
    dw: Option<&mut Buffer>,
    fill: impl Fn(Range<usize>, usize, Disjoint<E>, usize, usize) + Sync,
) -> Result<()> {
    let rows = x.len() / w.k;
    if rows == 0 {
        return Ok(());
    }
    // The stretch depends on the number of rows alone, so the order of additions does too.
    let stretch = (4 * 1024 * 1024 / rows / TILE).clamp(1, 8) * TILE;
    let mut grad = cpu.arena.take(rows * stretch.min(w.n) * size_of::<E>())?;
    let mut dx32 = cpu.arena.take(rows * w.k * 4)?;
    let dx32 = dx32.slice_mut::<f32>(rows * w.k);
    dx32.fill(0.0);
    let tokens = Shape { n: w.k, k: rows };
    let mut packed = cpu.arena.take(4 * tokens.storage::<E>())?;
    let packed = packed.slice_mut(tokens.storage::<E>());
    let mut dw = dw.map(f32s_mut);
    if dw.is_some() {
        pack_tokens(cpu.level, &cpu.pool, x, tokens, packed);
    }
    for from in (0..w.n).step_by(stretch) {
        let width = (w.n - from).min(stretch);
        let grad = grad.slice_mut::<E>(rows * width);
        let shared = Disjoint::new(grad);
        cpu.pool.run(rows.div_ceil(ROWS) * width.div_ceil(TILE), |i| {
            let (rows, tile) = task(i, rows);
            fill(rows, from / TILE + tile, shared, tile * TILE, width);
        });
        let back = backward_pack::<E>(w).stretch(from, width);
        matmul::linear(cpu.level, &cpu.pool, grad, back, None, Out::AddF32(Disjoint::new(dx32)));
        if let Some(dw) = &mut dw {
            let dw = &mut dw[from * w.k..(from + width) * w.k];
            matmul::accumulate_dw(cpu.level, &cpu.pool, grad, Packed::new(tokens, packed), dw);
        }
    }
    match floats_mut(dx) {
        SliceMut::F32(dx) => dx.copy_from_slice(dx32),
        SliceMut::Bf16(dx) => dx.iter_mut().zip(dx32).for_each(|(d, x)| *d = u16::from32(*x)),
    }
    Ok(())
}
