//! The vocabulary-parallel head: all parts together equal the head of one process.

use super::logp::{HeadCaseInputs, Outputs, both_ways, stats};
use super::{Check, download, nan_filled, upload, weight};
use crate::backend::{
    Backend, LogpGrads, LogpHead, LogpStats, PartGrads, PartInput, PartSide, TileStats, VocabPart,
};
use crate::comm::part;
use crate::{Buffer, DType, Result, Weight};
use std::cell::RefCell;
use std::ops::Range;

/// Rows, vocabulary, hidden width, additional tokens per row, parts, and the head's options: parts of several tiles and of
/// none, and more rows than are gathered at once.
const SHAPES: &[(usize, usize, usize, usize, usize, LogpHead)] = &[
    (70, 5000, 128, 3, 3, LogpHead { temperature: 1.0, softcap: None }),
    (33, 601, 64, 0, 4, LogpHead { temperature: 0.7, softcap: Some(8.0) }),
    (5, 96, 32, 2, 2, LogpHead { temperature: 1.3, softcap: None }),
    (301, 70_000, 16, 0, 2, LogpHead { temperature: 1.0, softcap: None }),
];

/// A rank of a vocabulary-parallel head.
struct Rank {
    tokens: Range<usize>,
    columns: Range<usize>,
    /// `None` if it has no tokens.
    w: Option<Weight>,
    back: Weight,
}

impl Rank {
    fn part(&self) -> Option<VocabPart<'_>> {
        let Range { start: from, end: to } = self.tokens;
        self.w.as_ref().map(|w| VocabPart { w, first: from, from, to })
    }
}

fn shared(b: &dyn Backend, dtype: DType, w: &[f32], k: usize, size: usize) -> Result<Vec<Rank>> {
    let (vocab, tile) = (w.len() / k, b.vocab_tile());
    let rank = |i: usize| {
        let (tiles, columns) = (part(vocab.div_ceil(tile), i, size), part(k, i, size));
        let tokens = tiles.start * tile..(tiles.end * tile).min(vocab);
        let own = &w[tokens.start * k..tokens.end * k];
        let turned: Vec<f32> = columns.clone().flat_map(|c| w[c..].iter().step_by(k)).copied().collect();
        let mut own = if own.is_empty() { None } else { Some(weight(b, dtype, tokens.len(), k, own)?) };
        own.iter_mut().for_each(|own| own.whole = vocab);
        let mut back = weight(b, dtype, columns.len(), vocab, &turned)?;
        back.whole = k;
        Ok(Rank { tokens, columns, w: own, back })
    };
    (0..size).map(rank).collect()
}

/// Concatenates columns of several ranks.
fn joined(rows: usize, parts: &[(Range<usize>, Vec<f32>)]) -> Vec<f32> {
    let width: usize = parts.iter().map(|(r, _)| r.len()).sum();
    let mut all = vec![f32::NAN; rows * width];
    for (columns, values) in parts {
        for (to, from) in all.chunks_mut(width).zip(values.chunks(columns.len().max(1))) {
            to[columns.clone()].copy_from_slice(from);
        }
    }
    all
}

/// Simulates the all-gather, in call order: the first pass returns zeros and records, the second returns the recorded data.
fn gathered(
    b: &dyn Backend,
    ranks: &[Rank],
    mut run: impl FnMut(&Rank, &mut dyn FnMut(&Buffer, usize) -> Result<Buffer>) -> Result<()>,
) -> Result<()> {
    let sent: RefCell<Vec<Vec<Vec<f32>>>> = RefCell::new(vec![Vec::new(); ranks.len()]);
    let vocab = ranks.iter().map(|r| r.tokens.end).max().unwrap_or_default();
    for (i, rank) in ranks.iter().enumerate() {
        run(rank, &mut |own, rows| {
            sent.borrow_mut()[i].push(download(b, own)?);
            upload(b, own.dtype(), &vec![0.0; rows * vocab])
        })?;
    }
    for rank in ranks {
        let mut call = 0;
        run(rank, &mut |own, rows| {
            let sent = sent.borrow();
            let parts: Vec<_> =
                ranks.iter().zip(&sent[..]).map(|(r, sent)| (r.tokens.clone(), sent[call].clone())).collect();
            call += 1;
            upload(b, own.dtype(), &joined(rows, &parts))
        })?;
    }
    Ok(())
}

/// Statistics of all tiles, and the logits of tokens from the parts that have them.
fn folded(
    b: &dyn Backend,
    op: LogpHead,
    (x, ranks): (&Buffer, &[Rank]),
    ids: &[u32],
    rows: usize,
) -> Result<(LogpStats, Vec<f32>)> {
    let (mut tiles, mut found) = (Vec::new(), vec![f32::NAN; ids.len()]);
    let wanted = b.indices(ids)?;
    let mut first = 0;
    for part in ranks.iter().filter_map(Rank::part) {
        let mut own = nan_filled(b, DType::F32, 3 * rows * part.tiles(b.vocab_tile()))?;
        let mut here = nan_filled(b, DType::F32, ids.len())?;
        let to = TileStats { tiles: &mut own, found: Some((&wanted, &mut here)), logits: None };
        b.tile_stats(op, x, part, to)?;
        tiles.push((first..first + 3 * part.tiles(b.vocab_tile()), download(b, &own)?));
        first += 3 * part.tiles(b.vocab_tile());
        let here = download(b, &here)?;
        let inside = |id: u32| (part.from..part.to).contains(&(id as usize));
        (0..ids.len()).filter(|&i| inside(ids[i])).for_each(|i| found[i] = here[i]);
    }
    let mut stats = stats(b, rows)?;
    b.fold_tiles(&upload(b, DType::F32, &joined(rows, &tiles))?, &mut stats.lse, &mut stats.entropy)?;
    Ok((stats, found))
}

/// The results of `both_ways`, computed by parts.
fn by_parts(
    b: &dyn Backend,
    op: LogpHead,
    dtype: DType,
    i: &HeadCaseInputs,
    shape: [usize; 2],
) -> Result<Outputs> {
    let ([vocab, size], rows) = (shape, i.targets.len());
    let (k, extra) = (i.x.len() / rows, i.others.len() / rows);
    let (x, ranks) = (upload(b, dtype, &i.x)?, shared(b, dtype, &i.w, k, size)?);
    let mut wanted = Vec::new();
    for row in 0..rows {
        wanted.push(i.targets[row]);
        wanted.extend(&i.others[row * extra..(row + 1) * extra]);
    }
    let (stats, found) = folded(b, op, (&x, &ranks), &wanted, rows)?;
    let (lse, targets) = (download(b, &stats.lse)?, b.indices(&i.targets)?);
    let logp: Vec<f32> = found.iter().enumerate().map(|(j, l)| l - lse[j / (1 + extra)]).collect();
    let others = if extra == 0 { None } else { Some(b.indices(&i.others)?) };
    let [dlogp, dentropy, dothers] = [0, 1, 2].map(|j| upload(b, DType::F32, &i.grads[j]));
    let (dlogp, dentropy, dothers) = (dlogp?, dentropy?, dothers?);
    let grads =
        LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: others.as_ref().map(|_| &dothers) };
    let (mut columns, mut dw) = (Vec::new(), vec![f32::NAN; vocab * k]);
    gathered(b, &ranks, |rank, gather| {
        let mut own = upload(b, DType::F32, &vec![1.0; rank.tokens.len() * k])?;
        let mut dx = nan_filled(b, dtype, rows * rank.columns.len())?;
        let to = PartGrads { dx: &mut dx, dw: Some(&mut own), add: true, back: &rank.back, gather };
        let head = PartInput { op, x: &x, part: rank.part(), targets: &targets };
        b.part_backward(head, others.as_ref(), &stats, &grads, to)?;
        columns.push((rank.columns.clone(), download(b, &dx)?));
        dw[rank.tokens.start * k..rank.tokens.end * k].copy_from_slice(&download(b, &own)?);
        Ok(())
    })?;
    let pick = |j: usize, own: bool| (j.is_multiple_of(1 + extra)) == own;
    let picked = |own| (0..logp.len()).filter(|&j| pick(j, own)).map(|j| logp[j]).collect();
    let stats = [picked(true), download(b, &stats.entropy)?, lse, picked(false)];
    Ok(Outputs { stats, dx: joined(rows, &columns[size..]), dw })
}

/// A rank's part of the vocabulary, in its own head shard and in the whole head.
fn in_both<'a>(rank: &'a Rank, whole: &'a Weight) -> Option<(VocabPart<'a>, VocabPart<'a>)> {
    rank.part().map(|part| (part, VocabPart { w: whole, first: 0, ..part }))
}

/// KL(p || q) and the gradients of p's hidden states and head, by parts; q's head is whole.
fn kl_by_parts(
    b: &dyn Backend,
    op: LogpHead,
    dtype: DType,
    [p, q]: [&HeadCaseInputs; 2],
    shape: [usize; 2],
) -> Result<[Vec<f32>; 3]> {
    let ([vocab, size], rows) = (shape, p.targets.len());
    let k = p.x.len() / rows;
    let (x, y) = (upload(b, dtype, &p.x)?, upload(b, dtype, &q.x)?);
    let (ranks, theirs) = (shared(b, dtype, &p.w, k, size)?, shared(b, dtype, &q.w, k, size)?);
    let whole = weight(b, dtype, vocab, k, &q.w)?;
    let (ours, _) = folded(b, op, (&x, &ranks), &[], rows)?;
    let (others, _) = folded(b, op, (&y, &theirs), &[], rows)?;
    let mut sums = Vec::new();
    for rank in &ranks {
        let Some((own, all)) = in_both(rank, &whole) else { continue };
        let mut tiles = nan_filled(b, DType::F32, rows * own.tiles(b.vocab_tile()))?;
        let p = PartSide { x: &x, part: own, lse: &ours.lse };
        b.kl_tiles(op, p, PartSide { x: &y, part: all, lse: &others.lse }, &mut tiles)?;
        let first = own.from / b.vocab_tile();
        sums.push((first..first + own.tiles(b.vocab_tile()), download(b, &tiles)?));
    }
    let (mut kl_there, dkl) = (nan_filled(b, DType::F32, rows)?, upload(b, DType::F32, &p.grads[0])?);
    b.fold_kl(&upload(b, DType::F32, &joined(rows, &sums))?, &mut kl_there)?;
    let kl = download(b, &kl_there)?;
    let (mut columns, mut dw) = (Vec::new(), vec![f32::NAN; vocab * k]);
    gathered(b, &ranks, |rank, gather| {
        let mut own = nan_filled(b, DType::F32, rank.tokens.len() * k)?;
        let mut dx = nan_filled(b, dtype, rows * rank.columns.len())?;
        let to = PartGrads { dx: &mut dx, dw: Some(&mut own), add: false, back: &rank.back, gather };
        let sides = in_both(rank, &whole).map(|(own, all)| {
            let p = PartSide { x: &x, part: own, lse: &ours.lse };
            [p, PartSide { x: &y, part: all, lse: &others.lse }]
        });
        b.kl_part_backward(op, sides, (&kl_there, &dkl), to)?;
        columns.push((rank.columns.clone(), download(b, &dx)?));
        dw[rank.tokens.start * k..rank.tokens.end * k].copy_from_slice(&download(b, &own)?);
        Ok(())
    })?;
    Ok([kl, joined(rows, &columns[size..]), dw])
}

/// The same with the whole head.
fn kl_whole(
    b: &dyn Backend,
    op: LogpHead,
    dtype: DType,
    [p, q]: [&HeadCaseInputs; 2],
    vocab: usize,
) -> Result<[Vec<f32>; 3]> {
    let rows = p.targets.len();
    let k = p.x.len() / rows;
    let (x, y) = (upload(b, dtype, &p.x)?, upload(b, dtype, &q.x)?);
    let (w, v) = (weight(b, dtype, vocab, k, &p.w)?, weight(b, dtype, vocab, k, &q.w)?);
    let (mut kl, dkl) = (nan_filled(b, DType::F32, rows)?, upload(b, DType::F32, &p.grads[0])?);
    b.kl(op, (&x, &w), (&y, &v), &mut kl)?;
    let (mut dx, mut dw) = (nan_filled(b, dtype, rows * k)?, nan_filled(b, DType::F32, vocab * k)?);
    let to = crate::backend::HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: false };
    b.kl_backward(op, (&x, &w), (&y, &v), &dkl, to)?;
    Ok([download(b, &kl)?, download(b, &dx)?, download(b, &dw)?])
}

/// The bits of the device's own whole head: everything in f32; forward in bf16, whose gradients are GEMMs that may round in
/// another order.
pub fn bits(check: &mut Check<'_>) -> Result<()> {
    for &(rows, vocab, k, extra, size, op) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let name = |what: &str| format!("head of {vocab} {} in {size} parts: {what}", dtype.name());
            let p = HeadCaseInputs::new(dtype, rows, vocab, k, extra);
            let q = HeadCaseInputs::new(dtype, rows, vocab, k, 1);
            let q = HeadCaseInputs { x: q.x.iter().rev().copied().collect(), ..q };
            let want = both_ways(check.card, op, dtype, &p, vocab)?;
            let got = by_parts(check.card, op, dtype, &p, [vocab, size])?;
            for (j, what) in ["logp", "entropy", "lse", "other logp"].into_iter().enumerate() {
                check.same(name(what), &got.stats[j], &want.stats[j]);
            }
            let kl_want = kl_whole(check.card, op, dtype, [&p, &q], vocab)?;
            let kl_got = kl_by_parts(check.card, op, dtype, [&p, &q], [vocab, size])?;
            check.same(name("kl"), &kl_got[0], &kl_want[0]);
            if dtype == DType::F32 {
                check.same(name("dx"), &got.dx, &want.dx);
                check.same(name("dw"), &got.dw, &want.dw);
                check.same(name("dx of kl"), &kl_got[1], &kl_want[1]);
                check.same(name("dw of kl"), &kl_got[2], &kl_want[2]);
            }
        }
    }
    Ok(())
}

/// KL(p || q) and the gradients of p's hidden states and head, in f64: over a large vocabulary, f32 sums on two devices differ
/// by more than either differs from the exact result.
fn kl_in_f64(op: LogpHead, [p, q]: [&HeadCaseInputs; 2], vocab: usize) -> [Vec<f32>; 3] {
    let rows = p.targets.len();
    let k = p.x.len() / rows;
    let temperature = f64::from(op.temperature);
    // A row's log-probabilities, and the derivatives of the scaled logits.
    let row = |i: &HeadCaseInputs, r: usize| -> (Vec<f64>, Vec<f64>) {
        let x = &i.x[r * k..(r + 1) * k];
        let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let scaled = |l: f64| match op.softcap.map(f64::from) {
            Some(cap) => {
                (cap * (l / cap).tanh() / temperature, (1.0 - (l / cap).tanh().powi(2)) / temperature)
            }
            None => (l / temperature, 1.0 / temperature),
        };
        let (mut logits, slopes): (Vec<f64>, Vec<f64>) = i.w.chunks(k).map(|w| scaled(dot(w))).unzip();
        let most = logits.iter().copied().fold(f64::MIN, f64::max);
        let lse = most + logits.iter().map(|l| (l - most).exp()).sum::<f64>().ln();
        logits.iter_mut().for_each(|l| *l -= lse);
        (logits, slopes)
    };
    let (mut kl, mut dx, mut dw) = (vec![0.0; rows], vec![0.0; rows * k], vec![0.0; vocab * k]);
    for r in 0..rows {
        let ((ours, slopes), (theirs, _)) = (row(p, r), row(q, r));
        kl[r] = ours.iter().zip(&theirs).map(|(a, b)| a.exp() * (a - b)).sum::<f64>();
        for v in 0..vocab {
            let term = ours[v].exp() * (ours[v] - theirs[v] - kl[r]);
            let grad = f64::from(p.grads[0][r]) * term * slopes[v];
            for c in 0..k {
                dx[r * k + c] += grad * f64::from(p.w[v * k + c]);
                dw[v * k + c] += grad * f64::from(p.x[r * k + c]);
            }
        }
    }
    [kl, dx, dw].map(|sums| sums.into_iter().map(|x| x as f32).collect())
}

/// Close to the CPU's whole head; KL in f32 close to sums in f64.
pub fn results(check: &mut Check<'_>) -> Result<()> {
    for &(rows, vocab, k, extra, size, op) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let name = |what: &str| format!("head of {vocab} {} in {size} parts: {what}", dtype.name());
            let (p, q) = (
                HeadCaseInputs::new(dtype, rows, vocab, k, extra),
                HeadCaseInputs::new(dtype, rows, vocab, k, 1),
            );
            let q = HeadCaseInputs { x: q.x.iter().rev().copied().collect(), ..q };
            let want = both_ways(check.cpu, op, dtype, &p, vocab)?;
            let got = by_parts(check.card, op, dtype, &p, [vocab, size])?;
            for (j, what) in ["logp", "entropy", "lse", "other logp"].into_iter().enumerate() {
                check.close(name(what), &got.stats[j], &want.stats[j], 2e-5);
            }
            let limit = if dtype == DType::F32 { 5e-5 } else { 2e-2 };
            check.close(name("dx"), &got.dx, &want.dx, limit);
            check.close(name("dw"), &got.dw, &want.dw, limit);
            let want = match dtype {
                DType::F32 => kl_in_f64(op, [&p, &q], vocab),
                _ => kl_whole(check.cpu, op, dtype, [&p, &q], vocab)?,
            };
            let got = kl_by_parts(check.card, op, dtype, [&p, &q], [vocab, size])?;
            for (what, (got, want)) in ["kl", "dx of kl", "dw of kl"].into_iter().zip(got.iter().zip(&want)) {
                check.close(name(what), got, want, limit);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::backend::Draw;

    /// Sampling part by part, and from whole rows.
    fn drawn(
        b: &dyn Backend,
        op: LogpHead,
        dtype: DType,
        i: &HeadCaseInputs,
        shape: [usize; 2],
    ) -> Result<[Vec<u32>; 2]> {
        let ([vocab, size], rows) = (shape, i.targets.len());
        let k = i.x.len() / rows;
        let (x, ranks) = (upload(b, dtype, &i.x)?, shared(b, dtype, &i.w, k, size)?);
        let (mut logits, mut lse) =
            (nan_filled(b, DType::F32, rows * vocab)?, nan_filled(b, DType::F32, rows)?);
        b.logits(op, &x, &weight(b, dtype, vocab, k, &i.w)?, &mut logits, &mut lse)?;
        // Also at both ends.
        let uniform = |r: usize| [(r as f32 * 0.618).fract(), 0.0, 1.0][[0, 1, 0, 0, 2][r % 5]];
        let uniform: Vec<f32> = (0..rows).map(uniform).collect();
        let mut draws = vec![Draw::default(); rows];
        for part in ranks.iter().filter_map(Rank::part) {
            let mut tiles = nan_filled(b, DType::F32, 3 * rows * part.tiles(b.vocab_tile()))?;
            let mut own = nan_filled(b, DType::F32, rows * part.width())?;
            let to = TileStats { tiles: &mut tiles, found: None, logits: Some(&mut own) };
            b.tile_stats(op, &x, part, to)?;
            b.sample_part((&own, part.from), &lse, &uniform, &mut draws)?;
        }
        let chosen = draws.iter().map(|d| d.token.or(d.last).map_or(0, |(token, _)| token)).collect();
        Ok([chosen, b.sample(&logits, &lse, &uniform)?])
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// The CPU against itself by parts, and against f64.
    #[test]
    fn results_agree_with_f64() {
        let b = &*crate::open("cpu", Some(2)).unwrap();
        for &(rows, vocab, k, _, _, op) in SHAPES {
            let p = HeadCaseInputs::new(DType::F32, rows, vocab, k, 0);
            let q = HeadCaseInputs {
                x: p.x.iter().rev().copied().collect(),
                ..HeadCaseInputs::new(DType::F32, rows, vocab, k, 0)
            };
            let (want, got) =
                (kl_in_f64(op, [&p, &q], vocab), kl_whole(b, op, DType::F32, [&p, &q], vocab).unwrap());
            for (what, (got, want)) in ["kl", "dx", "dw"].into_iter().zip(got.iter().zip(&want)) {
                let typical = (want.iter().map(|x| x * x).sum::<f32>() / want.len() as f32).sqrt();
                let far = got
                    .iter()
                    .zip(want)
                    .map(|(g, w)| (g - w).abs() / (w.abs() + typical))
                    .fold(0.0, f32::max);
                eprintln!("{what} of {vocab}: {far:.2e}");
                assert!(far < 5e-5, "{what} of {vocab}: {far}");
            }
        }
    }

    #[test]
    fn parts_of_the_vocabulary_have_the_bits_of_the_whole() {
        let b = &*crate::open("cpu", Some(2)).unwrap();
        for &(rows, vocab, k, extra, size, op) in SHAPES {
            for dtype in [DType::F32, DType::Bf16] {
                let p = HeadCaseInputs::new(dtype, rows, vocab, k, extra);
                let q = HeadCaseInputs::new(dtype, rows, vocab, k, 0);
                let q = HeadCaseInputs { x: q.x.iter().rev().copied().collect(), ..q };
                let (want, got) = (
                    both_ways(b, op, dtype, &p, vocab).unwrap(),
                    by_parts(b, op, dtype, &p, [vocab, size]).unwrap(),
                );
                for (got, want) in got.stats.iter().zip(&want.stats) {
                    assert_eq!(bits(got), bits(want), "{dtype:?} of {vocab}");
                }
                assert!(bits(&got.dx) == bits(&want.dx), "dx {dtype:?} of {vocab}");
                assert!(bits(&got.dw) == bits(&want.dw), "dw {dtype:?} of {vocab}");
                let want = kl_whole(b, op, dtype, [&p, &q], vocab).unwrap();
                let got = kl_by_parts(b, op, dtype, [&p, &q], [vocab, size]).unwrap();
                for (got, want) in got.iter().zip(&want) {
                    assert!(bits(got) == bits(want), "kl {dtype:?} of {vocab}");
                }
                let [parts, whole] = drawn(b, op, dtype, &p, [vocab, size]).unwrap();
                assert_eq!(parts, whole, "{dtype:?} of {vocab}");
            }
        }
    }
}
