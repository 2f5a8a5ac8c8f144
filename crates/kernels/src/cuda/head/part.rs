//! The vocabulary-parallel head: the kernels of the whole head (`logp.cu`, `logp_backward.cu`) on some of its tiles.
//!
//! Forward has the bits of the whole head. So has the gradient in f32. In bf16 the gradient of the hidden states is another
//! cuBLASLt GEMM than the whole head's, and the weight's may use another split-k: both may round in another order.

use super::kl::{kl_finish, kl_tiles};
use super::logp::{
    HeadGradients, RawLogits, TILE, WantedLogits, finish, fold_tiles, head_args, in_place_kernel, parts,
    rows_at_a_time,
};
use crate::backend::{
    LogpGrads, LogpHead, LogpStats, MemoryOps, PartGrads, PartInput, PartSide, TileStats, VectorOps,
    VocabOps, VocabPart,
};
use crate::cuda::Cuda;
use crate::cuda::gemm::linear::{
    ForwardShape, form, forward, long_input_gradient_columns, stored, weight_gradient,
};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{CardMemory, f32_ptr, ptr, u32s};
use crate::{Buffer, DType, Error, Result, shapes};

/// First row and number of rows.
type RowRange = (usize, usize);

/// Raw logits of some rows for the tokens of a part, `[rows, tokens]` f32.
fn part_logits(cuda: &Cuda, (x, part): (&Buffer, VocabPart<'_>), rows: RowRange, out: u64) -> Result<()> {
    let (w, (first, count)) = (part.w, rows);
    let size = w.compute.size();
    let x = ptr(x) + (first * w.k * size) as u64;
    let own = form(w) + ((part.from - part.first) * w.k * size) as u64;
    let shape = ForwardShape { sizes: [count, part.width(), w.k], whole: w.whole };
    forward(cuda, shape, x, (own, w.compute), None, (out, DType::F32))
}

/// Tokens of the whole vocabulary relative to a part's first, as the kernels need them (those of other parts are out of range):
/// per row the target, then the others.
struct PartTokens {
    memory: CardMemory,
    rows: usize,
    extra: usize,
}

impl PartTokens {
    fn of(cuda: &Cuda, from: usize, firsts: impl Iterator<Item = u32>, others: Vec<u32>) -> Result<Self> {
        let local = |id: u32| id.wrapping_sub(from as u32);
        let mut all: Vec<u32> = firsts.map(local).collect();
        let rows = all.len();
        let extra = others.len() / rows.max(1);
        all.extend(others.into_iter().map(local));
        Ok(PartTokens { memory: cuda.uploaded(&all)?, rows, extra })
    }

    /// Their addresses; nothing else is requested.
    fn wanted(&self) -> WantedLogits {
        let targets = self.memory.ptr();
        let others = targets + (self.rows * 4) as u64;
        WantedLogits { targets, others, extra: self.extra, ..WantedLogits::default() }
    }
}

/// Backward over blocks of rows: see [`PartGrads`].
struct PartBackward<'a> {
    cuda: &'a Cuda,
    /// Hidden states and this rank's tokens, if it has any.
    own: Option<(&'a Buffer, VocabPart<'a>)>,
    rows: usize,
    /// Copies of the logits in memory.
    copies: usize,
}

impl PartBackward<'_> {
    /// Calls `fill(rows, at)`, which writes raw logits at the address and overwrites them by their gradient in the compute
    /// type, for all rows. Blocks of rows depend on the numbers of rows and of vocabulary entries, as in the whole head.
    fn run(
        &self,
        mut to: PartGrads<'_>,
        mut fill: impl FnMut(VocabPart<'_>, RowRange, u64) -> Result<()>,
    ) -> Result<()> {
        let cuda = self.cuda;
        if let (0, false, Some(dw)) = (self.rows, to.add, to.dw.as_deref_mut()) {
            return cuda.fill(dw, 0.0);
        }
        let (compute, vocab) = (to.back.compute, to.back.k);
        let step = rows_at_a_time(self.rows, vocab, self.copies);
        for (first, count) in parts(self.rows, step) {
            let own = match self.own {
                Some((x, part)) => {
                    let width = part.width();
                    // Sized for f32; bf16 gradients use the first half of each row.
                    let room = cuda.alloc(compute, count * width * 4 / compute.size())?;
                    fill(part, (first, count), ptr(&room))?;
                    self.weight((x, part), (first, count), ptr(&room), &mut to)?;
                    dense(cuda, room, count, width)?
                }
                None => cuda.alloc(compute, 0)?,
            };
            let all = (to.gather)(&own, count)?;
            drop(own);
            if all.len() != count * vocab || all.dtype() != compute {
                return Err(Error::rank("gradients of another number of logits were gathered"));
            }
            let (columns, hidden) = (to.back.n, to.back.whole);
            let dx = ptr(to.dx) + (first * columns * to.dx.dtype().size()) as u64;
            let sizes = ([count, vocab, columns], hidden);
            long_input_gradient_columns(cuda, sizes, ptr(&all), stored(to.back), (dx, to.dx.dtype()))?;
        }
        Ok(())
    }

    /// Adds the gradient of some rows' logits, times their hidden states, to the part's rows of the weight.
    fn weight(
        &self,
        (x, part): (&Buffer, VocabPart<'_>),
        (first, count): RowRange,
        grad: u64,
        to: &mut PartGrads<'_>,
    ) -> Result<()> {
        let Some(dw) = to.dw.as_deref() else { return Ok(()) };
        let (w, width, size) = (part.w, part.width(), part.w.compute.size());
        assert_eq!(dw.len(), width * w.k);
        let x = (ptr(x) + (first * w.k * size) as u64, w.k);
        let to = (f32_ptr(dw), to.add || first > 0);
        weight_gradient(self.cuda, [count, width, w.k], (grad, width * 4 / size), x, w.compute, to)
    }
}

/// Compacts rows that are spaced as f32.
fn dense(cuda: &Cuda, room: Buffer, rows: usize, width: usize) -> Result<Buffer> {
    if room.dtype() == DType::F32 {
        return Ok(room);
    }
    let even: Vec<u32> = (0..rows as u32).map(|row| 2 * row).collect();
    let mut own = cuda.alloc(room.dtype(), rows * width)?;
    cuda.gather_rows(&room, &cuda.indices(&even)?, width, &mut own)?;
    Ok(own)
}

impl VocabOps for Cuda {
    fn tile_stats(&self, op: LogpHead, x: &Buffer, part: VocabPart<'_>, to: TileStats<'_>) -> Result<()> {
        shapes::tile_stats(self, x, part, &to)?;
        let (rows, width, tiles) = (x.len() / part.w.k, part.width(), part.tiles(TILE));
        let listed = to.found.filter(|(ids, _)| !ids.is_empty());
        let mut tokens = None;
        if let Some((ids, _)) = &listed {
            let each = ids.len() / rows;
            let (firsts, others) =
                (u32s(ids).iter().step_by(each), u32s(ids).chunks(each).flat_map(|row| &row[1..]));
            tokens = Some(PartTokens::of(self, part.from, firsts.copied(), others.copied().collect())?);
        }
        let wanted = tokens.as_ref().map_or(WantedLogits::default(), PartTokens::wanted);
        let found = listed.as_ref().map_or(0, |(_, found)| f32_ptr(found));
        let step = rows_at_a_time(rows, width, 1);
        let room = match &to.logits {
            Some(_) => None,
            None => Some(self.arena.take(rows.min(step) * width * 4)?),
        };
        for (first, count) in parts(rows, step) {
            let after = |start: u64, per_row: usize| start + (first * per_row * 4) as u64;
            let at = match &to.logits {
                Some(logits) => after(f32_ptr(logits), width),
                None => room.as_ref().map_or(0, CardMemory::ptr),
            };
            part_logits(self, (x, part), (first, count), at)?;
            let found = if found == 0 { 0 } else { after(found, 1 + wanted.extra) };
            let logits = RawLogits { at, rows: count, vocab: width };
            let to_tiles = after(f32_ptr(to.tiles), 3 * tiles);
            fold_tiles(self, op, logits, to.logits.is_some(), wanted.after(first), [found, to_tiles])?;
        }
        Ok(())
    }

    fn fold_tiles(&self, tiles: &Buffer, lse: &mut Buffer, entropy: &mut Buffer) -> Result<()> {
        shapes::fold_tiles(self, tiles, [lse, entropy])?;
        let rows = lse.len();
        if rows == 0 {
            return Ok(());
        }
        let wanted = WantedLogits { entropy: f32_ptr(entropy), ..WantedLogits::default() };
        finish(self, [rows, tiles.len() / rows / 3], [f32_ptr(tiles), 0], wanted, f32_ptr(lse))
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
        let (from, vocab) = (part.map_or(0, |part| part.from), to.back.k);
        let listed = others.map_or(Vec::new(), |ids| u32s(ids).to_vec());
        let tokens = PartTokens::of(self, from, u32s(targets).iter().copied(), listed)?;
        let flow = HeadGradients {
            op,
            grads: WantedLogits {
                logp: f32_ptr(grads.logp),
                entropy: grads.entropy.map_or(0, f32_ptr),
                other_logp: grads.others.map_or(0, f32_ptr),
                ..tokens.wanted()
            },
            lse: f32_ptr(&stats.lse),
            entropy: f32_ptr(&stats.entropy),
        };
        let own = part.map(|part| (x, part));
        PartBackward { cuda: self, own, rows: targets.len(), copies: 1 }.run(to, |part, rows, at| {
            part_logits(self, (x, part), rows, at)?;
            let (width, compute) = (part.width(), part.w.compute);
            flow.to_gradient(self, &in_place_kernel("dlogits", compute, width, vocab), width, rows, at)
        })
    }

    fn kl_tiles(&self, op: LogpHead, p: PartSide<'_>, q: PartSide<'_>, sums: &mut Buffer) -> Result<()> {
        shapes::kl_tiles(self, p, q, sums)?;
        let (rows, width, tiles) = (p.lse.len(), p.part.width(), p.part.tiles(TILE));
        let step = rows_at_a_time(rows, width, 2);
        let room = || self.arena.take(rows.min(step) * width * 4);
        let room = [room()?, room()?];
        for (first, count) in parts(rows, step) {
            let after = |start: &Buffer, per_row: usize| f32_ptr(start) + (first * per_row * 4) as u64;
            for (side, room) in [p, q].into_iter().zip(&room) {
                part_logits(self, (side.x, side.part), (first, count), room.ptr())?;
            }
            let (logits, lse) = (room.each_ref().map(CardMemory::ptr), [after(p.lse, 1), after(q.lse, 1)]);
            kl_tiles(self, op, [count, width], logits, lse, after(sums, tiles))?;
        }
        Ok(())
    }

    fn fold_kl(&self, tiles: &Buffer, kl: &mut Buffer) -> Result<()> {
        shapes::fold_kl(self, tiles, kl)?;
        match kl.len() {
            0 => Ok(()),
            rows => kl_finish(self, [rows, tiles.len() / rows], f32_ptr(tiles), f32_ptr(kl)),
        }
    }

    fn kl_part_backward(
        &self,
        op: LogpHead,
        sides: Option<[PartSide<'_>; 2]>,
        (kl, dkl): (&Buffer, &Buffer),
        to: PartGrads<'_>,
    ) -> Result<()> {
        shapes::kl_part_backward(self, sides, [kl, dkl], &to)?;
        let (rows, vocab) = (kl.len(), to.back.k);
        let step = rows_at_a_time(rows, vocab, 2);
        let width = sides.map_or(0, |[_, q]| q.part.width());
        let other = self.arena.take(rows.min(step) * width * 4)?;
        let own = sides.map(|[p, _]| (p.x, p.part));
        PartBackward { cuda: self, own, rows, copies: 2 }.run(to, |part, rows, at| {
            let Some([p, q]) = sides else { return Ok(()) };
            part_logits(self, (p.x, part), rows, at)?;
            part_logits(self, (q.x, q.part), rows, other.ptr())?;
            let (first, count) = rows;
            let later = |start: &Buffer| f32_ptr(start) + (first * 4) as u64;
            let mut all = args![at, other.ptr(), width as u32].to_vec();
            all.extend(head_args(op));
            all.extend(args![later(p.lse), later(q.lse), later(kl), later(dkl)]);
            let kernel = in_place_kernel("kl_dlogits", part.w.compute, width, vocab);
            self.launch("logp_backward", &kernel, Grid::new(count, 512), &all)
        })
    }

    // Sampling adds probabilities in a tree over the whole vocabulary (`sample.cu`).
    fn draws_by_parts(&self) -> bool {
        false
    }
}
