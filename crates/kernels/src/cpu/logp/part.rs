//! The vocabulary-parallel head. Its parts compute what one process does, tile by tile and range by range in the same order, so
//! that together they give the same bits.
//!
//! The gradient of the hidden states sums over the whole vocabulary and is not split: each rank computes some columns of it from
//! the all-gathered gradient of the logits and these columns of the head.

use super::backward::{FEWEST, GradElement, GradTile, RowGrads, dlogits, put_sums, vocab_chunk};
use super::forward::{Wanted, draw_row, fold_row, fold_tiles_of};
use super::kl::{Side, kl_dlogits, kl_tile};
use super::{Fold, HeadRows, ROWS, TILE, task, with_tiles};
use crate::backend::{
    Draw, LogpGrads, LogpHead, LogpStats, MemoryOps, PartGrads, PartInput, PartSide, TileStats, VocabOps,
    VocabPart,
};
use crate::cpu::Cpu;
use crate::cpu::linear::forward_pack;
use crate::cpu::matmul::pack::{Packed, PackedShape, pack_tokens};
use crate::cpu::matmul::{self, DwChain, Out};
use crate::cpu::memory::{Memory, elements, elements_mut, f32s, f32s_mut, u32s};
use crate::cpu::pool::Disjoint;
use crate::cpu::vector::{clear, typed};
use crate::{Buffer, Error, Result, shapes};

/// Logit gradients that are gathered at a time.
const GATHERED: usize = 4 << 20;

/// Token ids relative to the first of a part; ids of other parts match no tile.
fn counted_from(first: usize, ids: &[u32]) -> Vec<u32> {
    ids.iter().map(|id| id.wrapping_sub(first as u32)).collect()
}

impl VocabOps for Cpu {
    fn tile_stats(&self, op: LogpHead, x: &Buffer, part: VocabPart<'_>, to: TileStats<'_>) -> Result<()> {
        shapes::tile_stats(self, x, part, &to)?;
        let tiles = f32s_mut(to.tiles);
        let (ids, found) = to.found.map_or((Vec::new(), &mut [][..]), |(ids, found)| {
            (counted_from(part.from, u32s(ids)), f32s_mut(found))
        });
        let wanted = Wanted { tokens: &ids, found, logits: to.logits.map(f32s_mut) };
        let store = |row: usize, folds: &[Fold]| {
            let to = tiles[3 * row * part.tiles(TILE)..].chunks_exact_mut(3);
            to.zip(folds).for_each(|(to, fold)| to.copy_from_slice(&[fold.m, fold.s, fold.w]));
        };
        typed!([ref x] fold_tiles_of(self, op, (x, part), wanted, store));
        Ok(())
    }

    fn fold_tiles(&self, tiles: &Buffer, lse: &mut Buffer, entropy: &mut Buffer) -> Result<()> {
        shapes::fold_tiles(self, tiles, [lse, entropy])?;
        let (tiles, lse, entropy) = (f32s(tiles), f32s_mut(lse), f32s_mut(entropy));
        let each = tiles.len() / lse.len().max(1);
        for (row, (lse, entropy)) in lse.iter_mut().zip(entropy).enumerate() {
            let (numbers, _) = tiles[row * each..(row + 1) * each].as_chunks::<3>();
            let folds: Vec<Fold> = numbers.iter().map(|&[m, s, w]| Fold { m, s, w }).collect();
            let fold = fold_row(self.level, &folds);
            (*lse, *entropy) = (fold.lse(), fold.entropy());
        }
        Ok(())
    }

    fn part_backward(
        &self,
        head: PartInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::part_backward(self, head, others, stats, grads, &to)?;
        let PartInput { op, x, part, targets } = head;
        let first = part.map_or(0, |part| part.from);
        let rows = targets.len();
        let (targets, others) =
            (counted_from(first, u32s(targets)), counted_from(first, others.map_or(&[], u32s)));
        let g = RowGrads {
            targets: &targets,
            others: &others,
            lse: f32s(&stats.lse),
            entropy: f32s(&stats.entropy),
            dlogp: f32s(grads.logp),
            dentropy: grads.entropy.map(f32s),
            dothers: grads.others.map_or(&[], f32s),
        };
        typed!([ref x] through_part(self, (x, part), rows, to, |from, part, to| {
            let head = HeadRows { op, x: &x[from * part.w.k..], w: forward_pack(part.w) };
            with_tiles(|c, t| dlogits(self.level, c, t, head, &g.after(from), to))
        }))
    }

    fn kl_tiles(&self, op: LogpHead, p: PartSide<'_>, q: PartSide<'_>, sums: &mut Buffer) -> Result<()> {
        shapes::kl_tiles(self, p, q, sums)?;
        let (rows, tiles) = (p.lse.len(), p.part.tiles(TILE));
        let (sums, (a, b)) = (Disjoint::new(f32s_mut(sums)), (p.x, q.x));
        typed!([ref a] compare(op, ([p, q], [a, elements(b)]), 0, |sides| {
            self.pool.run(rows.div_ceil(ROWS) * tiles, |i| {
                let at = task(i, rows);
                with_tiles(|c, t| kl_tile(self.level, c, t, sides, at, (sums, tiles)))
            })
        }));
        Ok(())
    }

    fn kl_part_backward(
        &self,
        op: LogpHead,
        sides: Option<[PartSide<'_>; 2]>,
        (kl, dkl): (&Buffer, &Buffer),
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::kl_part_backward(self, sides, [kl, dkl], &to)?;
        let (rows, kl, dkl) = (kl.len(), f32s(kl), f32s(dkl));
        let Some([p, q]) = sides else {
            // Its columns of `dx` still have to be computed.
            return match to.back.compute {
                crate::DType::Bf16 => through_part::<u16>(self, (&[], None), rows, to, |_, _, _| ()),
                _ => through_part::<f32>(self, (&[], None), rows, to, |_, _, _| ()),
            };
        };
        let (a, b) = (p.x, q.x);
        typed!([ref a] through_part(self, (a, Some(p.part)), rows, to, |from, _, to| {
            compare(op, ([p, q], [a, elements(b)]), from, |sides| {
                let flow = (&kl[from..], &dkl[from..]);
                with_tiles(|c, t| kl_dlogits(self.level, c, t, sides, flow, to))
            })
        }))
    }

    fn sample_part(
        &self,
        (logits, first): (&Buffer, usize),
        lse: &Buffer,
        uniform: &[f32],
        draws: &mut [Draw],
    ) -> Result<()> {
        shapes::sample(self, logits, lse, uniform)?;
        let (logits, lse) = (f32s(logits), f32s(lse));
        let width = logits.len() / uniform.len().max(1);
        for (r, draw) in draws.iter_mut().enumerate() {
            draw_row(self.level, &logits[r * width..][..width], first as u32, lse[r], uniform[r], draw);
        }
        Ok(())
    }
}

impl<'a> RowGrads<'a> {
    /// The gradients from this row on.
    fn after(&self, row: usize) -> RowGrads<'a> {
        let extra = self.others.len() / self.targets.len().max(1);
        RowGrads {
            targets: &self.targets[row..],
            others: &self.others[row * extra..],
            lse: &self.lse[row..],
            entropy: &self.entropy[row..],
            dlogp: &self.dlogp[row..],
            dentropy: self.dentropy.map(|d| &d[row..]),
            dothers: if self.dothers.is_empty() { &[] } else { &self.dothers[row * extra..] },
        }
    }
}

/// Calls `f` with both models' rows from one on.
fn compare<E: GradElement, T>(
    op: LogpHead,
    ([p, q], [a, b]): ([PartSide<'_>; 2], [&[E]; 2]),
    from: usize,
    f: impl FnOnce([Side<'_, E>; 2]) -> T,
) -> T {
    let skip = |part: VocabPart<'_>| (part.from - part.first) / TILE;
    let (x, y) = (&a[from * p.part.w.k..], &b[from * q.part.w.k..]);
    let (wp, wq) = (forward_pack(p.part.w), forward_pack(q.part.w));
    f([
        Side { head: HeadRows { op, x, w: wp }, lse: &f32s(p.lse)[from..], skip: skip(p.part) },
        Side { head: HeadRows { op, x: y, w: wq }, lse: &f32s(q.lse)[from..], skip: skip(q.part) },
    ])
}

/// Gradient of a part's weight rows, summed over row blocks.
struct PartSum<'a, E: GradElement> {
    cpu: &'a Cpu,
    part: VocabPart<'a>,
    rows: usize,
    dw: &'a mut [f32],
    /// The hidden states, packed.
    packed: Memory,
    /// Partial sums over the rows so far.
    open: Option<Memory>,
    element: std::marker::PhantomData<E>,
}

impl<'a, E: GradElement> PartSum<'a, E> {
    fn new(cpu: &'a Cpu, (x, part): (&[E], VocabPart<'a>), dw: &'a mut Buffer, pieces: bool) -> Result<Self> {
        let rows = x.len() / part.w.k;
        let tokens = PackedShape { n: part.w.k, k: rows };
        let units = tokens.storage(E::per_unit_at(cpu.level));
        let mut packed = cpu.arena.take(4 * units)?;
        pack_tokens(cpu.level, &cpu.pool, x, tokens, packed.slice_mut(units));
        let open = if pieces { Some(cpu.arena.take(dw.len() * 4)?) } else { None };
        let dw = f32s_mut(dw);
        Ok(PartSum { cpu, part, rows, dw, packed, open, element: std::marker::PhantomData })
    }

    /// Adds the rows from `from` on.
    fn add(&mut self, from: usize, grad: &[E]) {
        let (cpu, rows) = (self.cpu, grad.len() / self.part.width());
        let (tokens, per_unit) = (PackedShape { n: self.part.w.k, k: self.rows }, E::per_unit_at(cpu.level));
        let tokens = Packed::new(tokens, per_unit, self.packed.slice(tokens.storage(per_unit)));
        let (earlier, later) = (from > 0, from + rows < self.rows);
        let open = self.open.as_mut().map(|m| m.slice_mut::<f32>(self.dw.len()));
        let chain = DwChain { open, earlier, later };
        matmul::accumulate_dw(cpu.level, &cpu.pool, grad, tokens.k_range(from, rows), chain, self.dw);
    }
}

/// For some rows at a time: runs `fill(first row, part, tile)` for every tile of the part, accumulates the weight's gradient,
/// all-gathers the logit gradients, and multiplies them with this rank's columns of the head.
fn through_part<E: GradElement>(
    cpu: &Cpu,
    (x, part): (&[E], Option<VocabPart<'_>>),
    rows: usize,
    mut to: PartGrads<'_>,
    fill: impl Fn(usize, VocabPart<'_>, GradTile<'_, E>) + Sync,
) -> Result<()> {
    if !to.add {
        clear(cpu, [to.dw.as_deref_mut()])?;
    }
    if rows == 0 {
        return Ok(());
    }
    let (vocab, columns) = (to.back.k, to.back.n);
    // The same on every rank, and even: bf16 pairs tokens.
    let most = (4 * GATHERED / vocab).max(FEWEST);
    let piece = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(2);
    let gathered = (GATHERED / vocab).max(1);
    let mut sum = match (part, to.dw.as_deref_mut()) {
        (Some(part), Some(dw)) => Some(PartSum::<E>::new(cpu, (x, part), dw, piece < rows)?),
        _ => None,
    };
    let mut dx = cpu.arena.take(rows * columns * 4)?;
    let dx = dx.slice_mut::<f32>(rows * columns);
    dx.fill(0.0);
    let width = part.map_or(0, |part| part.width());
    for from in (0..rows).step_by(piece) {
        let count = piece.min(rows - from);
        let mut grad = cpu.arena.take(count * width * size_of::<E>())?;
        let grad = grad.slice_mut::<E>(count * width);
        if let Some(part) = part {
            let shared = Disjoint::new(grad);
            cpu.pool.run(count.div_ceil(ROWS) * part.tiles(TILE), |i| {
                let (rows, tile) = task(i, count);
                fill(from, part, GradTile { rows, tile, out: shared, at: tile * TILE, ld: width });
            });
        }
        if let Some(sum) = &mut sum {
            sum.add(from, grad);
        }
        for at in (0..count).step_by(gathered) {
            let here = at..(at + gathered).min(count);
            let mut own = cpu.alloc(to.back.compute, here.len() * width)?;
            elements_mut::<E>(&mut own).copy_from_slice(&grad[here.start * width..here.end * width]);
            let all = (to.gather)(&own, here.len())?;
            if all.len() != here.len() * vocab || all.dtype() != to.back.compute {
                return Err(Error::rank("gradients of another number of logits were gathered"));
            }
            let dx = &mut dx[(from + here.start) * columns..(from + here.end) * columns];
            add_columns::<E>(cpu, elements(&all), (to.back, vocab_chunk(rows)), dx)?;
        }
    }
    put_sums(dx, to.dx);
    Ok(())
}

/// `dx += dy back^T`, one vocabulary range after the other, as in one process.
fn add_columns<E: GradElement>(
    cpu: &Cpu,
    dy: &[E],
    (back, vocab_chunk): (&crate::Weight, usize),
    dx: &mut [f32],
) -> Result<()> {
    let (vocab, rows) = (back.k, dx.len() / back.n);
    let mut here = cpu.arena.take(rows * vocab_chunk.min(vocab) * size_of::<E>())?;
    for from in (0..vocab).step_by(vocab_chunk) {
        let width = (vocab - from).min(vocab_chunk);
        let here = here.slice_mut::<E>(rows * width);
        for (to, row) in here.chunks_exact_mut(width).zip(dy.chunks_exact(vocab)) {
            to.copy_from_slice(&row[from..from + width]);
        }
        let columns = forward_pack::<E>(back).k_range(from, width);
        matmul::linear(cpu.level, &cpu.pool, here, columns, None, Out::AddF32(dx));
    }
    Ok(())
}
