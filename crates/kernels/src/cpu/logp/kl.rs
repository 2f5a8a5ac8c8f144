//! Full-vocabulary KL(p || q), and its gradient with respect to p's logits: `p (log p - log q - KL)`.

use super::backward::{GradElement, GradTile, through_vocabulary};
use super::forward::{Wanted, fold_buffer};
use super::{HeadRows, TILE, Tiles, cleared, logit_tile, scale_slope, task, tile_width, with_tiles};
use crate::backend::{DivergenceOps, HeadGrads, LogpHead};
use crate::cpu::Cpu;
use crate::cpu::linear::forward_pack;
use crate::cpu::math::exp;
use crate::cpu::matmul::Scratch;
use crate::cpu::memory::{Slice, f32s, f32s_mut, floats};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::{LANES, multiversion};
use crate::{Buffer, Result, Weight, shapes};
use std::ops::Range;

/// One of the two models, with the log-sum-exp of its rows.
pub(super) struct Side<'a, E: GradElement> {
    pub head: HeadRows<'a, E>,
    pub lse: &'a [f32],
    /// Tiles of its weight before the compared range.
    pub skip: usize,
}

impl<E: GradElement> Clone for Side<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<E: GradElement> Copy for Side<'_, E> {}

multiversion! {
    /// Per row, `Σ p (log p - log q)` over the tile.
    pub(super) fn kl_tile<S, type E: GradElement>(s, scratch: &mut Scratch, tiles: &mut Tiles, sides: [Side<'_, E>; 2], at: (Range<usize>, usize), out: (Disjoint<'_, f32>, usize)) {
        let ([p, q], (rows, tile), (out, n_tiles)) = (sides, at, out);
        logit_tile(s, scratch, p.head, rows.clone(), p.skip + tile, &mut tiles.first);
        logit_tile(s, scratch, q.head, rows.clone(), q.skip + tile, &mut tiles.second);
        let width = tile_width(p.head.w.shape.n, p.skip + tile);
        for (i, row) in rows.enumerate() {
            let (pl, ql) = (s.splat(p.lse[row]), s.splat(q.lse[row]));
            let mut sum = s.splat(0.0);
            let mut c = 0;
            while c < width {
                // SAFETY: a tile's row has TILE elements.
                let (lp, lq) = unsafe { (s.load(tiles.first.as_ptr().add(i * TILE + c)), s.load(tiles.second.as_ptr().add(i * TILE + c))) };
                let (lp, lq) = (s.sub(lp, pl), s.sub(lq, ql));
                let term = s.mul(exp(s, lp), s.sub(lp, lq));
                sum = s.add(sum, s.select_first((width - c).min(LANES), term, s.splat(0.0)));
                c += LANES;
            }
            // SAFETY: only this task accesses this row and tile.
            unsafe { out.part(row * n_tiles + tile, 1)[0] = s.sum(sum) };
        }
    }
}

multiversion! {
    pub(super) fn kl_dlogits<S, type E: GradElement>(s, scratch: &mut Scratch, tiles: &mut Tiles, sides: [Side<'_, E>; 2], flow: (&[f32], &[f32]), to: GradTile<'_, E>) {
        let ([p, q], (kl, dkl), GradTile { rows, tile, out, at, ld }) = (sides, flow, to);
        logit_tile(s, scratch, p.head, rows.clone(), p.skip + tile, &mut tiles.first);
        logit_tile(s, scratch, q.head, rows.clone(), q.skip + tile, &mut tiles.second);
        let (op, width) = (p.head.op, tile_width(p.head.w.shape.n, p.skip + tile));
        for (i, row) in rows.enumerate() {
            let (pl, ql) = (s.splat(p.lse[row]), s.splat(q.lse[row]));
            let (kl, dkl) = (s.splat(kl[row]), s.splat(dkl[row]));
            // SAFETY: only this task accesses this row and tile.
            let out = unsafe { out.part(row * ld + at, width) };
            let mut c = 0;
            while c < width {
                // SAFETY: a tile's row has TILE elements; `width - c` are left in `out`.
                unsafe {
                    let raw = s.load(tiles.first.as_ptr().add(i * TILE + c));
                    let lp = s.sub(raw, pl);
                    let lq = s.sub(s.load(tiles.second.as_ptr().add(i * TILE + c)), ql);
                    let d = s.mul(exp(s, lp), s.sub(s.sub(lp, lq), kl));
                    let d = s.mul(s.mul(dkl, d), scale_slope(s, op, raw));
                    E::put(s, width - c, out.as_mut_ptr().add(c), d);
                }
                c += LANES;
            }
        }
    }
}

fn lse(cpu: &Cpu, op: LogpHead, (x, w): (&Buffer, &Weight)) -> Vec<f32> {
    fold_buffer(cpu, op, x, w, Wanted::default()).into_iter().map(|f| f.lse()).collect()
}

impl DivergenceOps for Cpu {
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self, p, q, kl)?;
        let (p_lse, q_lse) = (lse(self, op, p), lse(self, op, q));
        rows(self, op, [p, q], [&p_lse, &q_lse], f32s_mut(kl));
        Ok(())
    }
    fn kl_backward(
        &self,
        op: LogpHead,
        p: (&Buffer, &Weight),
        q: (&Buffer, &Weight),
        dkl: &Buffer,
        to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::kl_backward(self, p, q, dkl, &to)?;
        let to = cleared(self, to)?;
        let (p_lse, q_lse) = (lse(self, op, p), lse(self, op, q));
        let mut kl = vec![0f32; p_lse.len()];
        rows(self, op, [p, q], [&p_lse, &q_lse], &mut kl);
        let dkl = f32s(dkl);
        match (floats(p.0), floats(q.0)) {
            (Slice::F32(a), Slice::F32(b)) => {
                let sides = [side(op, a, p.1, &p_lse), side(op, b, q.1, &q_lse)];
                through_vocabulary(self, a, p.1, to, |to| {
                    with_tiles(|c, t| kl_dlogits(self.level, c, t, sides, (&kl, dkl), to))
                })
            }
            (Slice::Bf16(a), Slice::Bf16(b)) => {
                let sides = [side(op, a, p.1, &p_lse), side(op, b, q.1, &q_lse)];
                through_vocabulary(self, a, p.1, to, |to| {
                    with_tiles(|c, t| kl_dlogits(self.level, c, t, sides, (&kl, dkl), to))
                })
            }
            _ => unreachable!("asserted in rows"),
        }
    }
}

fn rows(
    cpu: &Cpu,
    op: LogpHead,
    [p, q]: [(&Buffer, &Weight); 2],
    [p_lse, q_lse]: [&[f32]; 2],
    kl: &mut [f32],
) {
    assert!(p.1.n == q.1.n && p.0.dtype() == q.0.dtype());
    assert!(p_lse.len() == kl.len() && q_lse.len() == kl.len());
    let n_tiles = p.1.n.div_ceil(TILE);
    let mut parts = vec![0f32; kl.len() * n_tiles];
    let shared = Disjoint::new(&mut parts);
    let tasks = kl.len().div_ceil(super::ROWS) * n_tiles;
    cpu.pool.run(tasks, |i| {
        let at = task(i, p_lse.len());
        with_tiles(|c, t| match (floats(p.0), floats(q.0)) {
            (Slice::F32(a), Slice::F32(b)) => {
                let sides = [side(op, a, p.1, p_lse), side(op, b, q.1, q_lse)];
                kl_tile(cpu.level, c, t, sides, at, (shared, n_tiles))
            }
            (Slice::Bf16(a), Slice::Bf16(b)) => {
                let sides = [side(op, a, p.1, p_lse), side(op, b, q.1, q_lse)];
                kl_tile(cpu.level, c, t, sides, at, (shared, n_tiles))
            }
            _ => unreachable!("asserted above"),
        })
    });
    for (row, kl) in kl.iter_mut().enumerate() {
        *kl = parts[row * n_tiles..(row + 1) * n_tiles].iter().sum();
    }
}

fn side<'a, E: GradElement>(op: LogpHead, x: &'a [E], w: &'a Weight, lse: &'a [f32]) -> Side<'a, E> {
    Side { head: HeadRows { op, x, w: forward_pack(w) }, lse, skip: 0 }
}
