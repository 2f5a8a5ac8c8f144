//! Backward: recomputes the logits of a vocabulary range for all rows, replaces them by their gradient in place, multiplies
//! that into `dx` and `dw`, and goes on to the next range.
//!
//! For precomputed gradients of `logp`, [`logp_one_pass`] keeps the logits of some rows from forward to backward and so computes
//! them once. All sums have the same order, so both ways give the same bits.

use super::forward::{Wanted, fold_rows, logp, put_stats};
use super::{HeadRows, ROWS, TILE, Tiles, logit_tile, scale_slope, task, tile_width, with_tiles};
use crate::backend::{HeadGrads, HeadInput, LogpGrads, LogpHead, LogpStats};
use crate::cpu::Cpu;
use crate::cpu::element::Stored;
use crate::cpu::linear::{backward_pack, forward_pack};
use crate::cpu::math::exp;
use crate::cpu::matmul::pack::{Packed, PackedShape, TokenRows, pack_tokens};
use crate::cpu::matmul::{self, DwChain, Out, Scratch};
use crate::cpu::memory::{Memory, Plain, Slice, SliceMut, f32s, f32s_mut, floats, floats_mut, u32s};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::{LANES, Simd, multiversion, narrow};
use crate::{Buffer, Result, Weight};
use std::marker::PhantomData;
use std::ops::Range;

/// Maximum logits that [`logp_one_pass`] keeps: 16 MiB.
const KEPT: usize = 4 << 20;
/// Minimum rows that must fit: with fewer tokens per sum, reading and writing `dw` would dominate.
pub(super) const FEWEST: usize = 256;

/// Gradients of the row statistics, from which the gradient of a row's scaled logits is computed.
pub(super) struct RowGrads<'a> {
    pub targets: &'a [u32],
    pub others: &'a [u32],
    pub lse: &'a [f32],
    pub entropy: &'a [f32],
    pub dlogp: &'a [f32],
    pub dentropy: Option<&'a [f32]>,
    pub dothers: &'a [f32],
}

/// Element type in which gradients of logits are stored.
pub(super) trait GradElement: TokenRows<Unit: Plain> + Stored + Plain + From32 {}
impl GradElement for f32 {}
impl GradElement for u16 {}

/// Rounds an f32 to the storage type.
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

/// Destination of a tile's logit gradients: column `at` of rows of `ld` elements.
pub(super) struct GradTile<'a, E> {
    pub rows: Range<usize>,
    pub tile: usize,
    pub out: Disjoint<'a, E>,
    pub at: usize,
    pub ld: usize,
}

multiversion! {
    pub(super) fn dlogits<S, type E: GradElement>(s, scratch: &mut Scratch, tiles: &mut Tiles, head: HeadRows<'_, E>, g: &RowGrads<'_>, to: GradTile<'_, E>) {
        logit_tile(s, scratch, head, to.rows.clone(), to.tile, &mut tiles.first);
        logit_gradient(s, tiles, head.op, head.w.shape.n, g, to)
    }
}

multiversion! {
    /// From the logits that forward kept, `[rows, vocab]`.
    fn kept_dlogits<S, type E: GradElement>(s, tiles: &mut Tiles, op: LogpHead, stored: (&[f32], usize), g: &RowGrads<'_>, to: GradTile<'_, E>) {
        let (kept, vocab) = stored;
        let (from, width) = (to.tile * TILE, tile_width(vocab, to.tile));
        for (i, row) in to.rows.clone().enumerate() {
            tiles.first[i * TILE..][..width].copy_from_slice(&kept[row * vocab + from..][..width]);
        }
        logit_gradient(s, tiles, op, vocab, g, to)
    }
}

/// Replaces a tile of scaled logits by their gradient and stores it.
#[inline(always)]
fn logit_gradient<S: Simd, E: GradElement>(
    s: S,
    tiles: &mut Tiles,
    op: LogpHead,
    vocab: usize,
    g: &RowGrads<'_>,
    to: GradTile<'_, E>,
) {
    let GradTile { rows, tile, out, at, ld } = to;
    let (from, width) = (tile * TILE, tile_width(vocab, tile));
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
        // Terms of the selected tokens, read before their logits are overwritten.
        let slope_at = |logits: &[f32], token: usize| {
            let l = s.splat(logits[token - from]);
            s.largest(scale_slope(s, op, l))
        };
        let inside = |token: u32| (token as usize) >= from && (token as usize) < from + width;
        let own = if inside(g.targets[row]) {
            g.dlogp[row] * slope_at(logits, g.targets[row] as usize)
        } else {
            0.0
        };
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
        // SAFETY: only this task accesses this row and tile.
        let out = unsafe { out.part(row * ld + at, width) };
        let mut c = 0;
        while c < width {
            // SAFETY: `width - c` elements are left in `out`; a tile's row has TILE elements.
            unsafe { E::put(s, width - c, out.as_mut_ptr().add(c), s.load(logits.as_ptr().add(c))) };
            c += LANES;
        }
    }
}

pub fn logp_backward(
    cpu: &Cpu,
    head: HeadInput<'_>,
    others: Option<&Buffer>,
    stats: &LogpStats,
    grads: &LogpGrads<'_>,
    to: HeadGrads<'_>,
) -> Result<()> {
    let HeadInput { op, x, w, targets } = head;
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
        "at most 32 additional tokens per row"
    );
    match floats(x) {
        Slice::F32(x) => through_vocabulary(cpu, x, w, to, |to| {
            let head = HeadRows { op, x, w: forward_pack(w) };
            with_tiles(|c, t| dlogits(cpu.level, c, t, head, &g, to))
        }),
        Slice::Bf16(x) => through_vocabulary(cpu, x, w, to, |to| {
            let head = HeadRows { op, x, w: forward_pack(w) };
            with_tiles(|c, t| dlogits(cpu.level, c, t, head, &g, to))
        }),
    }
}

pub fn logp_one_pass(
    cpu: &Cpu,
    head: HeadInput<'_>,
    dlogp: &Buffer,
    stats: &mut LogpStats,
    to: HeadGrads<'_>,
) -> Result<()> {
    let rows = u32s(head.targets).len();
    let most = KEPT / head.w.n;
    if rows == 0 || most < rows.min(FEWEST) {
        logp(cpu, head, None, stats)?;
        let grads = LogpGrads { logp: dlogp, entropy: None, others: None };
        return logp_backward(cpu, head, None, stats, &grads, to);
    }
    // Parts of equal, even length: bf16 pairs tokens.
    let part = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(2);
    match floats(head.x) {
        Slice::F32(x) => in_parts(cpu, (head, x), part, f32s(dlogp), stats, to),
        Slice::Bf16(x) => in_parts(cpu, (head, x), part, f32s(dlogp), stats, to),
    }
}

/// For `part` rows at a time: computes logits and statistics, replaces the logits by their gradient, multiplies into `dx` and
/// `dw`.
fn in_parts<E: GradElement>(
    cpu: &Cpu,
    (head, x): (HeadInput<'_>, &[E]),
    part: usize,
    dlogp: &[f32],
    stats: &mut LogpStats,
    to: HeadGrads<'_>,
) -> Result<()> {
    let (HeadInput { op, w, .. }, targets) = (head, u32s(head.targets));
    let HeadGrads { dx, dw, .. } = to;
    let rows = targets.len();
    let mut kept = cpu.arena.take(part.min(rows) * w.n * 4)?;
    let mut found = vec![0f32; part.min(rows)];
    let mut flow = VocabBackward::new(cpu, x, w, dw, part)?;
    for from in (0..rows).step_by(part) {
        let range = from..(from + part).min(rows);
        let (count, targets) = (range.len(), &targets[range.clone()]);
        let kept = kept.slice_mut::<f32>(count * w.n);
        let x = &x[range.start * w.k..range.end * w.k];
        let wanted = Wanted { tokens: targets, found: &mut found[..count], logits: Some(&mut *kept) };
        let folds = fold_rows(cpu, op, x, w, wanted);
        put_stats(stats, from, &folds, |i| found[i]);
        let g = RowGrads {
            targets,
            others: &[],
            lse: &f32s(&stats.lse)[range.clone()],
            entropy: &f32s(&stats.entropy)[range.clone()],
            dlogp: &dlogp[range.clone()],
            dentropy: None,
            dothers: &[],
        };
        flow.part(range, |to| with_tiles(|_, t| kept_dlogits(cpu.level, t, op, (kept, w.n), &g, to)));
    }
    flow.finish(dx);
    Ok(())
}

/// Runs `fill` for every tile of a vocabulary range, multiplies the range's gradient into `dx` and `dw`, and goes on to the next
/// range.
pub(super) fn through_vocabulary<E: GradElement>(
    cpu: &Cpu,
    x: &[E],
    w: &Weight,
    to: HeadGrads<'_>,
    fill: impl Fn(GradTile<'_, E>) + Sync,
) -> Result<()> {
    let rows = x.len() / w.k;
    if rows == 0 {
        return Ok(());
    }
    let mut flow = VocabBackward::new(cpu, x, w, to.dw, rows)?;
    flow.part(0..rows, fill);
    flow.finish(to.dx);
    Ok(())
}

/// Vocabulary entries per partial sum of `dx`.
pub(super) fn vocab_chunk(rows: usize) -> usize {
    (4 * 1024 * 1024 / rows / TILE).clamp(1, 8) * TILE
}

/// Propagates gradients of logits to `dx` and `dw`, for all rows at once or part by part: the same bits.
struct VocabBackward<'a, E: GradElement> {
    cpu: &'a Cpu,
    w: &'a Weight,
    rows: usize,
    vocab_chunk: usize,
    grad: Memory,
    dx: Memory,
    /// The rows of `x`, packed for `dw`.
    packed: Memory,
    dw: Option<&'a mut [f32]>,
    /// Partial sums of `dw` over the parts so far.
    open: Option<Memory>,
    element: PhantomData<E>,
}

impl<'a, E: GradElement> VocabBackward<'a, E> {
    /// For all rows of `x`, at most `part` at a time.
    fn new(cpu: &'a Cpu, x: &[E], w: &'a Weight, dw: Option<&'a mut Buffer>, part: usize) -> Result<Self> {
        let rows = x.len() / w.k;
        // The range depends only on the number of rows, so the order of additions does, too.
        let vocab_chunk = vocab_chunk(rows);
        let grad = cpu.arena.take(part.min(rows) * vocab_chunk.min(w.n) * size_of::<E>())?;
        let mut dx = cpu.arena.take(rows * w.k * 4)?;
        dx.slice_mut::<f32>(rows * w.k).fill(0.0);
        let tokens = PackedShape { n: w.k, k: rows };
        let units = tokens.storage(E::per_unit_at(cpu.level));
        let mut packed = cpu.arena.take(4 * units)?;
        if dw.is_some() {
            pack_tokens(cpu.level, &cpu.pool, x, tokens, packed.slice_mut(units));
        }
        let open = if dw.is_some() && part < rows { Some(cpu.arena.take(w.n * w.k * 4)?) } else { None };
        let dw = dw.map(f32s_mut);
        Ok(VocabBackward { cpu, w, rows, vocab_chunk, grad, dx, packed, dw, open, element: PhantomData })
    }

    /// Adds the next rows; `fill` counts rows from the part's first.
    fn part(&mut self, part: Range<usize>, fill: impl Fn(GradTile<'_, E>) + Sync) {
        let (cpu, w, rows) = (self.cpu, self.w, part.len());
        let dx = &mut self.dx.slice_mut::<f32>(self.rows * w.k)[part.start * w.k..part.end * w.k];
        let tokens = PackedShape { n: w.k, k: self.rows };
        let per_unit = E::per_unit_at(cpu.level);
        let packed = self.packed.slice(tokens.storage(per_unit));
        let tokens = Packed::new(tokens, per_unit, packed).k_range(part.start, rows);
        for from in (0..w.n).step_by(self.vocab_chunk) {
            let width = (w.n - from).min(self.vocab_chunk);
            let grad = self.grad.slice_mut::<E>(rows * width);
            let shared = Disjoint::new(grad);
            cpu.pool.run(rows.div_ceil(ROWS) * width.div_ceil(TILE), |i| {
                let (rows, tile) = task(i, rows);
                fill(GradTile { rows, tile: from / TILE + tile, out: shared, at: tile * TILE, ld: width });
            });
            let back = backward_pack::<E>(w).k_range(from, width);
            matmul::linear(cpu.level, &cpu.pool, grad, back, None, Out::AddF32(&mut *dx));
            if let Some(dw) = &mut self.dw {
                let here = from * w.k..(from + width) * w.k;
                let open = self.open.as_mut().map(|m| &mut m.slice_mut::<f32>(w.n * w.k)[here.clone()]);
                let (earlier, later) = (part.start > 0, part.end < self.rows);
                let chain = DwChain { open, earlier, later };
                matmul::accumulate_dw(cpu.level, &cpu.pool, grad, tokens, chain, &mut dw[here]);
            }
        }
    }

    /// Stores `dx` after the last part.
    fn finish(self, dx: &mut Buffer) {
        put_sums(self.dx.slice::<f32>(self.rows * self.w.k), dx);
    }
}

/// Rounds sums to the type of a buffer.
pub(super) fn put_sums(sums: &[f32], to: &mut Buffer) {
    match floats_mut(to) {
        SliceMut::F32(to) => to.copy_from_slice(sums),
        SliceMut::Bf16(to) => to.iter_mut().zip(sums).for_each(|(d, x)| *d = u16::from32(*x)),
    }
}
