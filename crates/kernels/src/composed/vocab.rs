//! The vocabulary-parallel head from materialised logits of a few rows at a time, on the host.

use super::head::probability;
use super::vectors::download;
use crate::backend::{
    Draw, LinearGrads, LinearOps, LogpGrads, LogpHead, LogpStats, MemoryOps, PartGrads, PartInput, PartSide,
    TileStats, VocabPart,
};
use crate::math::{exp, ln};
use crate::{Buffer, DType, Result};
use std::ops::Range;

/// Rows whose logits are materialised at a time.
const ROWS: usize = 64;

/// Scaled logits of some rows for the tokens of a part, `[rows, tokens]`.
fn logits_of<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    (x, part): (&Buffer, VocabPart<'_>),
    rows: Range<usize>,
) -> Result<Vec<f32>> {
    let w = part.w;
    let hidden = rows_of(b, x, w.k, rows.clone())?;
    let mut y = b.alloc(DType::F32, rows.len() * w.n)?;
    b.linear(&hidden, w, None, &mut y)?;
    let tanh = |x: f64| 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    let scale = |l: &f32| op.softcap.map_or(*l, |cap| cap * tanh(f64::from(l / cap)) as f32) / op.temperature;
    let columns = part.from - part.first..part.to - part.first;
    let all = download(b, &y)?;
    Ok(all.chunks(w.n).flat_map(|row| row[columns.clone()].iter().map(scale)).collect())
}

fn rows_of<B: MemoryOps + ?Sized>(b: &B, x: &Buffer, k: usize, rows: Range<usize>) -> Result<Buffer> {
    let mut part = b.alloc(x.dtype(), rows.len() * k)?;
    b.copy(x, rows.start * k, &mut part, 0, rows.len() * k)?;
    Ok(part)
}

/// All rows, as ranges of at most `ROWS`.
fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(ROWS).map(move |from| from..(from + ROWS).min(rows))
}

pub fn tile_stats<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    x: &Buffer,
    part: VocabPart<'_>,
    mut to: TileStats<'_>,
) -> Result<()> {
    let rows = x.len() / part.w.k;
    let ids = to.found.as_ref().map(|(ids, _)| b.ids(ids)).unwrap_or_default();
    let (each, tile) = (ids.len() / rows.max(1), b.vocab_tile());
    for here in blocks(rows) {
        let logits = logits_of(b, op, (x, part), here.clone())?;
        if let Some(all) = &mut to.logits {
            b.write(all, here.start * part.width(), &logits)?;
        }
        let mut numbers = Vec::new();
        for (row, logits) in here.clone().zip(logits.chunks(part.width())) {
            for tile in logits.chunks(tile) {
                let most = tile.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let below = tile.iter().map(|&l| f64::from(l - most));
                let sum: f64 = below.clone().map(exp).sum();
                numbers.extend([most, sum as f32, below.map(|d| exp(d) * d).sum::<f64>() as f32]);
            }
            for i in row * each..(row + 1) * each {
                let at = (ids[i] as usize).checked_sub(part.from).and_then(|at| logits.get(at));
                if let (Some(logit), Some((_, found))) = (at, &mut to.found) {
                    b.write(found, i, &[*logit])?;
                }
            }
        }
        b.write(to.tiles, 3 * here.start * part.tiles(tile), &numbers)?;
    }
    Ok(())
}

pub fn fold_tiles<B: MemoryOps + ?Sized>(
    b: &B,
    tiles: &Buffer,
    lse: &mut Buffer,
    entropy: &mut Buffer,
) -> Result<()> {
    let (rows, numbers) = (lse.len(), download(b, tiles)?);
    for (row, tiles) in numbers.chunks((numbers.len() / rows.max(1)).max(1)).enumerate() {
        let (tiles, _) = tiles.as_chunks::<3>();
        let most = f64::from(tiles.iter().map(|t| t[0]).fold(f32::NEG_INFINITY, f32::max));
        let (mut sum, mut weighted) = (0.0, 0.0);
        for [m, s, w] in tiles.iter().map(|t| t.map(f64::from)) {
            let (d, scale) = (m - most, exp(m - most));
            sum += s * scale;
            weighted += scale * (w + d * s);
        }
        b.write(lse, row, &[(most + ln(sum)) as f32])?;
        b.write(entropy, row, &[(ln(sum) - weighted / sum) as f32])?;
    }
    Ok(())
}

/// Backward from gradients of some rows' scaled logits for a part's tokens: writes these rows of `dx`, adds to `dw`.
fn backward<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    (x, part): (&Buffer, Option<VocabPart<'_>>),
    rows: Range<usize>,
    (mut dlogits, logits): (Vec<f32>, &[f32]),
    to: &mut PartGrads<'_>,
) -> Result<()> {
    for (d, l) in dlogits.iter_mut().zip(logits) {
        let slope = op.softcap.map_or(1.0, |cap| 1.0 - (l * op.temperature / cap).powi(2));
        *d *= slope / op.temperature;
    }
    let mut dy = b.alloc(to.back.compute, dlogits.len())?;
    b.write(&mut dy, 0, &dlogits)?;
    let all = (to.gather)(&dy, rows.len())?;
    let mut columns = b.alloc(to.dx.dtype(), rows.len() * to.back.n)?;
    b.linear(&all, to.back, None, &mut columns)?;
    b.copy(&columns, 0, to.dx, rows.start * to.back.n, columns.len())?;
    let Some(part) = part else { return Ok(()) };
    let hidden = rows_of(b, x, part.w.k, rows.clone())?;
    let weight = to.dw.as_deref_mut();
    b.linear_dw(&dy, &hidden, rows.len(), LinearGrads { weight, bias: None, add: true })
}

fn clear<B: MemoryOps + ?Sized>(b: &B, to: &mut PartGrads<'_>) -> Result<()> {
    let written = to.dw.as_deref_mut().filter(|_| !to.add);
    written.map_or(Ok(()), |dw| b.fill(dw, 0.0))
}

pub fn part_backward<B: LinearOps + ?Sized>(
    b: &B,
    head: PartInput<'_>,
    others: Option<&Buffer>,
    (stats, grads): (&LogpStats, &LogpGrads<'_>),
    mut to: PartGrads<'_>,
) -> Result<()> {
    clear(b, &mut to)?;
    let PartInput { op, x, part, targets } = head;
    let (targets, ids) = (b.ids(targets), others.map(|o| b.ids(o)).unwrap_or_default());
    let each = ids.len() / targets.len().max(1);
    let (lse, dlogp) = (download(b, &stats.lse)?, download(b, grads.logp)?);
    let entropies = download(b, &stats.entropy)?;
    let dentropy = grads.entropy.map(|d| download(b, d)).transpose()?;
    let dothers = grads.others.map(|d| download(b, d)).transpose()?.unwrap_or_default();
    for rows in blocks(targets.len()) {
        let logits = part.map(|part| logits_of(b, op, (x, part), rows.clone())).transpose()?;
        let (logits, from, width) =
            (logits.unwrap_or_default(), part.map_or(0, |p| p.from), part.map_or(1, |p| p.width()));
        let mut d = Vec::with_capacity(logits.len());
        for (r, row) in rows.clone().zip(logits.chunks(width)) {
            let listed = || ids[r * each..(r + 1) * each].iter().zip(&dothers[r * each..(r + 1) * each]);
            let all = dlogp[r] + listed().map(|(_, d)| d).sum::<f32>();
            let (h, dh) = (entropies[r], dentropy.as_ref().map_or(0.0, |d| d[r]));
            let start = d.len();
            d.extend(row.iter().map(|&l| -probability(l, lse[r]) * (all + dh * (l - lse[r] + h))));
            for (&id, dlogp) in std::iter::once((&targets[r], &dlogp[r])).chain(listed()) {
                let at = (id as usize).checked_sub(from).filter(|&at| at < width);
                at.into_iter().for_each(|at| d[start + at] += dlogp);
            }
        }
        backward(b, op, (x, part), rows, (d, &logits), &mut to)?;
    }
    Ok(())
}

/// Logits of p and, for each, `log p - log q`.
fn ratios<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    [p, q]: [PartSide<'_>; 2],
    rows: Range<usize>,
) -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
    let (p_lse, q_lse) = (download(b, p.lse)?, download(b, q.lse)?);
    let ours = logits_of(b, op, (p.x, p.part), rows.clone())?;
    let theirs = logits_of(b, op, (q.x, q.part), rows.clone())?;
    let width = p.part.width();
    let both = ours.chunks(width).zip(theirs.chunks(width));
    let ratios = rows.zip(both).flat_map(|(r, (ours, theirs))| {
        let (lp, lq) = (p_lse[r], q_lse[r]);
        ours.iter().zip(theirs).map(move |(a, b)| (a - lp) - (b - lq)).collect::<Vec<f32>>()
    });
    let ratios = ratios.collect();
    Ok((ours, ratios, p_lse))
}

pub fn kl_tiles<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    p: PartSide<'_>,
    q: PartSide<'_>,
    sums: &mut Buffer,
) -> Result<()> {
    let (width, tile) = (p.part.width(), b.vocab_tile());
    for rows in blocks(p.lse.len()) {
        let (logits, ratios, lse) = ratios(b, op, [p, q], rows.clone())?;
        let mut all = Vec::new();
        for (r, (row, ratios)) in rows.clone().zip(logits.chunks(width).zip(ratios.chunks(width))) {
            let terms = row.iter().zip(ratios).map(|(&l, ratio)| probability(l, lse[r]) * ratio);
            all.extend(terms.collect::<Vec<f32>>().chunks(tile).map(|tile| tile.iter().sum::<f32>()));
        }
        b.write(sums, rows.start * p.part.tiles(tile), &all)?;
    }
    Ok(())
}

pub fn fold_kl<B: MemoryOps + ?Sized>(b: &B, tiles: &Buffer, kl: &mut Buffer) -> Result<()> {
    let sums = download(b, tiles)?;
    let rows = sums.chunks((sums.len() / kl.len().max(1)).max(1));
    let all: Vec<f32> = rows.map(|tiles| tiles.iter().sum()).collect();
    b.write(kl, 0, &all)
}

pub fn kl_part_backward<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    sides: Option<[PartSide<'_>; 2]>,
    (kl, dkl): (&Buffer, &Buffer),
    mut to: PartGrads<'_>,
) -> Result<()> {
    clear(b, &mut to)?;
    let (kl, dkl) = (download(b, kl)?, download(b, dkl)?);
    for rows in blocks(kl.len()) {
        let Some([p, q]) = sides else {
            let none = b.alloc(to.back.compute, 0)?;
            backward(b, op, (&none, None), rows, (Vec::new(), &[]), &mut to)?;
            continue;
        };
        let (logits, ratios, lse) = ratios(b, op, [p, q], rows.clone())?;
        let width = p.part.width();
        let d = rows.clone().zip(logits.chunks(width).zip(ratios.chunks(width)));
        let d = d.flat_map(|(r, (row, ratios))| {
            let (kl, dkl, lse) = (kl[r], dkl[r], lse[r]);
            let terms = row.iter().zip(ratios);
            terms.map(move |(&l, ratio)| dkl * probability(l, lse) * (ratio - kl)).collect::<Vec<f32>>()
        });
        let d = d.collect();
        backward(b, op, (p.x, Some(p.part)), rows, (d, &logits), &mut to)?;
    }
    Ok(())
}

pub fn sample_part<B: MemoryOps + ?Sized>(
    b: &B,
    (logits, first): (&Buffer, usize),
    lse: &Buffer,
    uniform: &[f32],
    draws: &mut [Draw],
) -> Result<()> {
    let (values, lse) = (download(b, logits)?, download(b, lse)?);
    let rows = values.chunks((values.len() / uniform.len().max(1)).max(1));
    for (((row, lse), &u), draw) in rows.zip(lse).zip(uniform).zip(draws) {
        if draw.token.is_some() {
            continue;
        }
        for (at, &l) in row.iter().enumerate() {
            let (p, here) = (probability(l, lse), Some((first as u32 + at as u32, l)));
            if p > 0.0 {
                (draw.below, draw.last) = (draw.below + p, here);
            }
            if draw.below > u {
                draw.token = here;
                break;
            }
        }
    }
    Ok(())
}
