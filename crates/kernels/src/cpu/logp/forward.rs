//! Row statistics of the head, and logits for decoding.

use super::{Fold, HeadRows, ROWS, TILE, Tiles, logit_tile, scalar_exp, task, tile_width, with_tiles};
use crate::backend::{Draw, HeadInput, LogpHead, LogpStats, SampleOps, VocabPart};
use crate::cpu::Cpu;
use crate::cpu::linear::forward_pack;
use crate::cpu::math::exp;
use crate::cpu::matmul::Scratch;
use crate::cpu::matmul::pack::TokenRows;
use crate::cpu::memory::{Plain, Slice, f32s, f32s_mut, floats, u32s};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::{LANES, Level, multiversion};
use crate::{Buffer, Result, Weight, shapes};
use std::ops::Range;

/// Outputs of a pass over the vocabulary.
struct Pass<'a> {
    rows: Range<usize>,
    tile: usize,
    /// Tokens whose logit is requested: `wanted[row * per_row..]`.
    wanted: &'a [u32],
    per_row: usize,
    /// Their scaled logits.
    found: Disjoint<'a, f32>,
    /// `[rows][tiles]`
    folds: Disjoint<'a, Fold>,
    tiles: usize,
    /// Tiles of the weight before this range.
    skip: usize,
    /// Vocabulary entries in the range.
    vocab: usize,
    /// `[rows][vocab]`, for decoding.
    logits: Option<Disjoint<'a, f32>>,
}

multiversion! {
    fn pass<S, type E: TokenRows>(s, scratch: &mut Scratch, tiles: &mut Tiles, head: HeadRows<'_, E>, p: Pass<'_>) {
        logit_tile(s, scratch, head, p.rows.clone(), p.skip + p.tile, &mut tiles.first);
        let vocab = p.vocab;
        let (from, width) = (p.tile * TILE, tile_width(vocab, p.tile));
        for (i, row) in p.rows.enumerate() {
            let logits = &tiles.first[i * TILE..][..width];
            // SAFETY: only this task accesses this row and tile.
            unsafe { p.folds.part(row * p.tiles + p.tile, 1)[0] = Fold::of(s, logits) };
            for j in row * p.per_row..(row + 1) * p.per_row {
                let token = p.wanted[j] as usize;
                if token >= from && token < from + width {
                    // SAFETY: a token is in one tile only.
                    unsafe { p.found.part(j, 1)[0] = logits[token - from] };
                }
            }
            if let Some(all) = p.logits {
                // SAFETY: only this task accesses this row and tile.
                unsafe { all.part(row * vocab + from, width).copy_from_slice(logits) };
            }
        }
    }
}

multiversion! {
    pub(super) fn fold_row<S>(s, folds: &[Fold]) -> Fold {
        let mut total = Fold::EMPTY;
        for f in folds {
            total = total.join(s, *f);
        }
        total
    }
}

/// Requested logits.
#[derive(Default)]
pub(super) struct Wanted<'a> {
    /// Tokens of each row, concatenated, and their scaled logits.
    pub tokens: &'a [u32],
    pub found: &'a mut [f32],
    /// All scaled logits, `[rows, vocab]`.
    pub logits: Option<&'a mut [f32]>,
}

/// Computes the statistics of every row, and the requested logits.
pub(super) fn fold_rows<E: TokenRows<Unit: Plain>>(
    cpu: &Cpu,
    op: LogpHead,
    x: &[E],
    w: &Weight,
    wanted: Wanted<'_>,
) -> Vec<Fold> {
    assert!(wanted.tokens.iter().all(|&t| (t as usize) < w.n));
    let (tiles, mut out) = (w.n.div_ceil(TILE), Vec::with_capacity(x.len() / w.k));
    let part = VocabPart { w, first: 0, from: 0, to: w.n };
    fold_tiles_of(cpu, op, (x, part), wanted, |_, folds| {
        out.extend(folds.chunks_exact(tiles).map(|row| fold_row(cpu.level, row)));
    });
    out
}

/// Calls `each` with the tile statistics of a vocabulary range, `[rows][tiles]`, for some hundred rows at a time, and the index
/// of the first row. Requested tokens are relative to the range's first.
pub(super) fn fold_tiles_of<E: TokenRows<Unit: Plain>>(
    cpu: &Cpu,
    op: LogpHead,
    (x, part): (&[E], VocabPart<'_>),
    wanted: Wanted<'_>,
    mut each: impl FnMut(usize, &[Fold]),
) {
    let (Wanted { tokens: wanted, found, logits }, w) = (wanted, part.w);
    let (rows, vocab, skip) = (x.len() / w.k, part.width(), (part.from - part.first) / TILE);
    let per_row = wanted.len() / rows.max(1);
    assert!(found.len() == wanted.len() && part.to <= part.first + w.n);
    assert!(logits.as_ref().is_none_or(|l| l.len() == rows * vocab));
    let tiles = part.tiles(TILE);
    let logits = logits.map(Disjoint::new);
    let found = Disjoint::new(found);
    // Tile statistics are stored for some hundred rows at a time.
    let block = (8 * ROWS).max(ROWS * (4096 / tiles));
    let mut folds = vec![Fold::EMPTY; block.min(rows) * tiles];
    for start in (0..rows).step_by(block) {
        let part = start..(start + block).min(rows);
        let x = &x[part.start * w.k..part.end * w.k];
        let shared = Disjoint::new(&mut folds);
        cpu.pool.run(part.len().div_ceil(ROWS) * tiles, |i| {
            let (rows, tile) = task(i, part.len());
            let (found, logits) = (found.shifted(start * per_row), logits.map(|l| l.shifted(start * vocab)));
            let wanted = &wanted[start * per_row..part.end * per_row];
            let p = Pass { rows, tile, wanted, per_row, found, folds: shared, tiles, skip, vocab, logits };
            let head = HeadRows { op, x, w: forward_pack::<E>(w) };
            with_tiles(|scratch, t| pass(cpu.level, scratch, t, head, p));
        });
        each(start, &folds[..part.len() * tiles]);
    }
}

/// [`fold_rows`] for a buffer of either type.
pub(super) fn fold_buffer(cpu: &Cpu, op: LogpHead, x: &Buffer, w: &Weight, wanted: Wanted<'_>) -> Vec<Fold> {
    assert_eq!(x.dtype(), w.compute);
    match floats(x) {
        Slice::F32(x) => fold_rows(cpu, op, x, w, wanted),
        Slice::Bf16(x) => fold_rows(cpu, op, x, w, wanted),
    }
}

/// Writes the statistics of rows `first..`; `target(i)` is the scaled logit of the i-th row's target.
pub(super) fn put_stats(stats: &mut LogpStats, first: usize, folds: &[Fold], target: impl Fn(usize) -> f32) {
    let rows = first..first + folds.len();
    let lse = &mut f32s_mut(&mut stats.lse)[rows.clone()];
    let entropy = &mut f32s_mut(&mut stats.entropy)[rows.clone()];
    let logp = &mut f32s_mut(&mut stats.logp)[rows];
    for (i, fold) in folds.iter().enumerate() {
        lse[i] = fold.lse();
        entropy[i] = fold.entropy();
        logp[i] = target(i) - lse[i];
    }
}

pub fn logp(
    cpu: &Cpu,
    head: HeadInput<'_>,
    others: Option<(&Buffer, &mut Buffer)>,
    stats: &mut LogpStats,
) -> Result<()> {
    let HeadInput { op, x, w, targets } = head;
    let rows = x.len() / w.k;
    let targets = u32s(targets);
    assert_eq!(targets.len(), rows);
    let extra = others.as_ref().map_or(0, |(ids, _)| ids.len() / rows.max(1));
    let per_row = 1 + extra;
    let mut wanted = Vec::with_capacity(rows * per_row);
    for row in 0..rows {
        wanted.push(targets[row]);
        if let Some((ids, _)) = &others {
            wanted.extend_from_slice(&u32s(ids)[row * extra..(row + 1) * extra]);
        }
    }
    let mut found = vec![0f32; wanted.len()];
    let folds = fold_buffer(cpu, op, x, w, Wanted { tokens: &wanted, found: &mut found, logits: None });
    put_stats(stats, 0, &folds, |row| found[row * per_row]);
    if let Some((_, out)) = others {
        for (row, fold) in folds.iter().enumerate() {
            for j in 0..extra {
                f32s_mut(out)[row * extra + j] = found[row * per_row + 1 + j] - fold.lse();
            }
        }
    }
    Ok(())
}

pub fn logits(
    cpu: &Cpu,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    logits: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let folds = fold_buffer(cpu, op, x, w, Wanted { logits: Some(f32s_mut(logits)), ..Wanted::default() });
    f32s_mut(lse).iter_mut().zip(folds).for_each(|(l, f)| *l = f.lse());
    Ok(())
}

multiversion! {
    /// Continues sampling through logits whose first token is `first`, a multiple of the vector length.
    pub(super) fn draw_row<S>(s, logits: &[f32], first: u32, lse: f32, uniform: f32, draw: &mut Draw) {
        if draw.token.is_some() {
            return;
        }
        let mut below = draw.below;
        let mut likeliest_last = usize::MAX;
        let mut at = 0;
        while at < logits.len() {
            let n = (logits.len() - at).min(LANES);
            // SAFETY: `n` elements are left from `at`.
            let l = unsafe { s.load_first(n, logits[at..].as_ptr(), f32::NEG_INFINITY) };
            let p = exp(s, s.sub(l, s.splat(lse)));
            let sum = s.sum(p);
            if sum > 0.0 {
                likeliest_last = at;
            }
            if below + sum > uniform {
                for i in 0..n {
                    below += scalar_exp(s, logits[at + i] - lse);
                    if below > uniform {
                        draw.token = Some((first + (at + i) as u32, logits[at + i]));
                        return;
                    }
                }
            } else {
                below += sum;
            }
            at += LANES;
        }
        draw.below = below;
        if likeliest_last == usize::MAX {
            return;
        }
        // Rounding may leave the total below the uniform number: then the last token with non-zero probability.
        let end = (likeliest_last + LANES).min(logits.len());
        let mut last = likeliest_last;
        for i in likeliest_last..end {
            if scalar_exp(s, logits[i] - lse) > 0.0 {
                last = i;
            }
        }
        draw.last = Some((first + last as u32, logits[last]));
    }
}

impl SampleOps for Cpu {
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        shapes::sample(self, logits, lse, uniform)?;
        let (logits, lse) = (f32s(logits), f32s(lse));
        let vocab = logits.len() / uniform.len().max(1);
        let level: Level = self.level;
        Ok(each_row(self, uniform.len(), |r| {
            let mut draw = Draw::default();
            draw_row(level, &logits[r * vocab..][..vocab], 0, lse[r], uniform[r], &mut draw);
            draw.token.or(draw.last).map_or(0, |(token, _)| token)
        }))
    }
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self, logits, rows)?;
        let logits = f32s(logits);
        let vocab = logits.len() / rows.max(1);
        let level: Level = self.level;
        Ok(each_row(self, rows, |r| {
            let row = &logits[r * vocab..][..vocab];
            let m = largest(level, row);
            row.iter().position(|&x| x == m).unwrap_or(0) as u32
        }))
    }
}

multiversion! {
    fn largest<S>(s, row: &[f32]) -> f32 {
        let mut m = s.splat(f32::NEG_INFINITY);
        let mut at = 0;
        while at < row.len() {
            let n = (row.len() - at).min(LANES);
            // SAFETY: `n` elements are left from `at`.
            m = s.max(m, unsafe { s.load_first(n, row[at..].as_ptr(), f32::NEG_INFINITY) });
            at += LANES;
        }
        s.largest(m)
    }
}

fn each_row(cpu: &Cpu, rows: usize, f: impl Fn(usize) -> u32 + Sync) -> Vec<u32> {
    let mut out = vec![0u32; rows];
    let shared = Disjoint::new(&mut out);
    // SAFETY: each task has its own row.
    cpu.pool.run(rows, |r| unsafe { shared.part(r, 1)[0] = f(r) });
    out
}
