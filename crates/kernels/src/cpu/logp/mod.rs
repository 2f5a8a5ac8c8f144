//! From hidden states to log-probabilities without materialising the logits.
//!
//! The vocabulary is processed in tiles of `TILE` entries. Each tile is reduced to three numbers per row (maximum, sum of
//! exponentials, sum of exponentials times logits, see `Fold`), which are combined in tile order. So it does not matter which
//! thread computed which tile, and decoding has the bits of training.

mod backward;
mod forward;
mod kl;
mod part;

use super::Cpu;
use super::math::{exp, tanh};
use super::matmul::pack::{Packed, TokenRows};
use super::matmul::tile::PANEL;
use super::matmul::{ProductBlock, Scratch, product};
use super::simd::{LANES, Simd};
use super::vector::clear;
use crate::backend::{HeadGrads, HeadInput, HeadOps, LogpGrads, LogpHead, LogpStats};
use crate::math::ln;
use crate::{Buffer, Result, Weight, shapes};
use std::cell::RefCell;
use std::ops::Range;

/// Vocabulary entries per tile.
pub(crate) const TILE: usize = crate::backend::VOCAB_TILE;
/// Rows per task.
pub(crate) const ROWS: usize = 56;

/// Statistics of a row's logits: `m` the maximum, `s = Σ e^(l-m)`, `w = Σ e^(l-m) (l-m)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fold {
    pub m: f32,
    pub s: f32,
    pub w: f32,
}

impl Fold {
    pub const EMPTY: Fold = Fold { m: f32::NEG_INFINITY, s: 0.0, w: 0.0 };

    /// Statistics of one tile's scaled logits.
    #[inline(always)]
    pub fn of<S: Simd>(s: S, tile: &[f32]) -> Fold {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut m = lowest;
        let mut at = 0;
        while at < tile.len() {
            m = s.max(m, load(s, tile, at, lowest));
            at += LANES;
        }
        let largest = s.largest(m);
        let m = s.splat(largest);
        let (mut sum, mut weighted) = (s.splat(0.0), s.splat(0.0));
        at = 0;
        while at < tile.len() {
            let n = (tile.len() - at).min(LANES);
            let d = s.sub(load(s, tile, at, m), m);
            let e = s.select_first(n, exp(s, d), s.splat(0.0));
            sum = s.add(sum, e);
            weighted = s.fma(e, d, weighted);
            at += LANES;
        }
        Fold { m: largest, s: s.sum(sum), w: s.sum(weighted) }
    }

    /// The statistics of the union.
    #[inline(always)]
    pub fn join<S: Simd>(self, s: S, other: Fold) -> Fold {
        if other.s == 0.0 {
            return self;
        }
        if self.s == 0.0 {
            return other;
        }
        let m = if self.m > other.m { self.m } else { other.m };
        let (d1, d2) = (self.m - m, other.m - m);
        let (a1, a2) = (scalar_exp(s, d1), scalar_exp(s, d2));
        Fold {
            m,
            s: self.s * a1 + other.s * a2,
            w: a1 * (self.w + d1 * self.s) + a2 * (other.w + d2 * other.s),
        }
    }

    pub fn lse(self) -> f32 {
        self.m + ln(self.s as f64) as f32
    }
    pub fn entropy(self) -> f32 {
        ln(self.s as f64) as f32 - self.w / self.s
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, tile: &[f32], at: usize, fill: S::V) -> S::V {
    let n = (tile.len() - at).min(LANES);
    // SAFETY: `n` elements are left from `at`.
    let v = unsafe { s.load_first(n, tile[at..].as_ptr(), 0.0) };
    s.select_first(n, v, fill)
}

#[inline(always)]
pub(crate) fn scalar_exp<S: Simd>(s: S, x: f32) -> f32 {
    // One lane would do, but all paths share the vector function.
    s.largest(exp(s, s.splat(x)))
}

/// Soft cap and temperature: `cap * tanh(x / cap) / temperature`.
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, op: LogpHead, raw: S::V) -> S::V {
    let inverse = s.splat(1.0 / op.temperature);
    match op.softcap {
        Some(cap) => {
            let t = tanh(s, s.mul(raw, s.splat(1.0 / cap)));
            s.mul(s.mul(t, s.splat(cap)), inverse)
        }
        None => s.mul(raw, inverse),
    }
}

/// Derivative of [`scale`] with respect to the raw logit, given the scaled one.
#[inline(always)]
pub(crate) fn scale_slope<S: Simd>(s: S, op: LogpHead, scaled: S::V) -> S::V {
    let inverse = s.splat(1.0 / op.temperature);
    match op.softcap {
        Some(cap) => {
            let t = s.mul(scaled, s.splat(op.temperature / cap));
            s.mul(inverse, s.sub(s.splat(1.0), s.mul(t, t)))
        }
        None => inverse,
    }
}

/// Hidden states and their head.
pub(crate) struct HeadRows<'a, E: TokenRows> {
    pub op: LogpHead,
    pub x: &'a [E],
    pub w: Packed<'a, E>,
}

impl<E: TokenRows> Clone for HeadRows<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: TokenRows> Copy for HeadRows<'_, E> {}

/// Scaled logits of some rows and one vocabulary tile, into `out`, row-major with `TILE` columns.
#[inline(always)]
pub(crate) fn logit_tile<S: Simd, E: TokenRows>(
    s: S,
    scratch: &mut Scratch,
    head: HeadRows<'_, E>,
    rows: Range<usize>,
    tile: usize,
    out: &mut [f32],
) {
    let HeadRows { op, x, w } = head;
    assert!(out.len() >= rows.len() * TILE);
    let panels = tile * (TILE / PANEL)..((tile + 1) * (TILE / PANEL)).min(w.shape.panels());
    let (first_row, first_panel) = (rows.start, panels.start);
    product(
        s,
        scratch,
        ProductBlock { x, rows, w, panels },
        &mut |s: S, row: usize, count: usize, panel: usize, c: *const f32| {
            for r in 0..count {
                for half in 0..PANEL / LANES {
                    let to = (row + r - first_row) * TILE + (panel - first_panel) * PANEL + half * LANES;
                    // SAFETY: a tile holds `count` rows of 32; `out` holds the rows (asserted above).
                    unsafe {
                        let v = s.load(c.add(r * PANEL + half * LANES));
                        s.store(out.as_mut_ptr().add(to), scale(s, op, v));
                    }
                }
            }
        },
    );
}

/// Scratch for two tiles of logits.
#[derive(Default)]
pub(crate) struct Tiles {
    pub first: Vec<f32>,
    pub second: Vec<f32>,
}

thread_local! {
    static TILES: RefCell<Tiles> = const { RefCell::new(Tiles { first: Vec::new(), second: Vec::new() }) };
}

/// Lends the thread's scratch; see [`super::matmul::with_scratch`].
pub(crate) fn with_tiles<T>(f: impl FnOnce(&mut Scratch, &mut Tiles) -> T) -> T {
    let mut tiles = TILES.take();
    tiles.first.resize(ROWS * TILE, 0.0);
    tiles.second.resize(ROWS * TILE, 0.0);
    let result = super::matmul::with_scratch(|scratch| f(scratch, &mut tiles));
    TILES.set(tiles);
    result
}

/// Valid columns of a tile.
pub(crate) fn tile_width(vocab: usize, tile: usize) -> usize {
    (vocab - tile * TILE).min(TILE)
}

/// Rows and tile of task `i`: the row blocks of a tile are consecutive, so that its weights stay in the cache.
pub(crate) fn task(i: usize, rows: usize) -> (Range<usize>, usize) {
    let blocks = rows.div_ceil(ROWS);
    let block = i % blocks;
    (block * ROWS..((block + 1) * ROWS).min(rows), i / blocks)
}

/// Gradients of a head, zeroed if they are to be overwritten.
fn cleared<'a>(cpu: &Cpu, mut to: HeadGrads<'a>) -> Result<HeadGrads<'a>> {
    if !to.add {
        clear(cpu, [to.dw.as_deref_mut()])?;
    }
    Ok(to)
}

impl HeadOps for Cpu {
    fn logp(
        &self,
        head: HeadInput<'_>,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()> {
        let listed = others.as_ref().map(|(ids, out)| (*ids, &**out));
        shapes::logp(self, head, listed, stats)?;
        forward::logp(self, head, others, stats)
    }
    fn logp_backward(
        &self,
        head: HeadInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_backward(self, head, others, stats, grads, &to)?;
        backward::logp_backward(self, head, others, stats, grads, cleared(self, to)?)
    }
    fn logp_one_pass(
        &self,
        head: HeadInput<'_>,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_one_pass(self, head, dlogp, stats, &to)?;
        backward::logp_one_pass(self, head, dlogp, stats, cleared(self, to)?)
    }
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::logits(self, x, w, [logits, lse])?;
        forward::logits(self, op, x, w, logits, lse)
    }
}
