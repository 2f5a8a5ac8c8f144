//! The logp head, and the KL of two models.

use super::{Check, download, nan_filled, random, random_ids, stored, upload, weight};
use crate::backend::{Backend, HeadGrads, HeadInput, LogpGrads, LogpHead, LogpStats};
use crate::{Buffer, DType, Result, Weight};

/// Rows, vocabulary, hidden width, additional tokens per row, and the head's options: vocabularies of several tiles, of less
/// than one, and of odd sizes.
const SHAPES: &[(usize, usize, usize, usize, LogpHead)] = &[
    (70, 5000, 128, 3, LogpHead { temperature: 1.0, softcap: None }),
    (33, 3001, 64, 0, LogpHead { temperature: 0.7, softcap: Some(8.0) }),
    (5, 96, 32, 2, LogpHead { temperature: 1.3, softcap: None }),
    (4200, 2048, 64, 0, LogpHead { temperature: 1.0, softcap: None }),
];

fn name(dtype: DType, vocab: usize, what: &str) -> String {
    format!("logp head {} of {vocab} {what}", dtype.name())
}

pub(super) struct HeadCaseInputs {
    pub(super) x: Vec<f32>,
    pub(super) w: Vec<f32>,
    pub(super) targets: Vec<u32>,
    pub(super) others: Vec<u32>,
    /// With respect to logp, entropy, additional tokens.
    pub(super) grads: [Vec<f32>; 3],
}

impl HeadCaseInputs {
    pub(super) fn new(dtype: DType, rows: usize, vocab: usize, k: usize, extra: usize) -> Self {
        let scaled = |seed, n: usize, by: f32| -> Vec<f32> {
            stored(dtype, &random(seed, n).iter().map(|x| x * by).collect::<Vec<f32>>())
        };
        HeadCaseInputs {
            x: scaled(1, rows * k, 1.0),
            w: scaled(2, vocab * k, 3.0 / (k as f32).sqrt()),
            targets: random_ids(3, rows, vocab),
            others: random_ids(4, rows * extra, vocab),
            grads: [random(5, rows), random(6, rows), random(7, rows * extra)],
        }
    }
}

pub(super) struct Outputs {
    /// logp, entropy, lse, logp of additional tokens.
    pub(super) stats: [Vec<f32>; 4],
    pub(super) dx: Vec<f32>,
    pub(super) dw: Vec<f32>,
}

pub(super) fn stats(b: &dyn Backend, rows: usize) -> Result<LogpStats> {
    let new = || nan_filled(b, DType::F32, rows);
    Ok(LogpStats { logp: new()?, entropy: new()?, lse: new()? })
}

pub(super) fn both_ways(
    b: &dyn Backend,
    op: LogpHead,
    dtype: DType,
    i: &HeadCaseInputs,
    vocab: usize,
) -> Result<Outputs> {
    let rows = i.targets.len();
    let k = i.x.len() / rows;
    let (x, w) = (upload(b, dtype, &i.x)?, weight(b, dtype, vocab, k, &i.w)?);
    let targets = b.indices(&i.targets)?;
    let mut stats = stats(b, rows)?;
    let ids = if i.others.is_empty() { None } else { Some(b.indices(&i.others)?) };
    let mut other_logp = nan_filled(b, DType::F32, i.others.len())?;
    b.logp(
        HeadInput { op, x: &x, w: &w, targets: &targets },
        ids.as_ref().map(|ids| (ids, &mut other_logp)),
        &mut stats,
    )?;
    let [dlogp, dentropy, dothers] = &i.grads;
    let (dlogp, dentropy) = (upload(b, DType::F32, dlogp)?, upload(b, DType::F32, dentropy)?);
    let dothers = upload(b, DType::F32, dothers)?;
    let grads = LogpGrads { logp: &dlogp, entropy: Some(&dentropy), others: ids.as_ref().map(|_| &dothers) };
    let mut dx = nan_filled(b, dtype, i.x.len())?;
    let mut dw = upload(b, DType::F32, &vec![1.0; i.w.len()])?;
    b.logp_backward(
        HeadInput { op, x: &x, w: &w, targets: &targets },
        ids.as_ref(),
        &stats,
        &grads,
        HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
    )?;
    let stats = [
        download(b, &stats.logp)?,
        download(b, &stats.entropy)?,
        download(b, &stats.lse)?,
        download(b, &other_logp)?,
    ];
    Ok(Outputs { stats, dx: download(b, &dx)?, dw: download(b, &dw)? })
}

/// Close to the CPU's.
pub fn results(check: &mut Check<'_>) -> Result<()> {
    for &(rows, vocab, k, extra, op) in SHAPES {
        for dtype in [DType::F32, DType::Bf16] {
            let inputs = HeadCaseInputs::new(dtype, rows, vocab, k, extra);
            let want = both_ways(check.cpu, op, dtype, &inputs, vocab)?;
            let got = both_ways(check.card, op, dtype, &inputs, vocab)?;
            let again = both_ways(check.card, op, dtype, &inputs, vocab)?;
            for (j, what) in ["logp", "entropy", "lse", "other logp"].into_iter().enumerate() {
                check.close(name(dtype, vocab, what), &got.stats[j], &want.stats[j], 2e-5);
                check.same(name(dtype, vocab, &format!("{what} again")), &again.stats[j], &got.stats[j]);
            }
            // In bf16, gradients of logits are rounded before the GEMMs.
            let limit = if dtype == DType::F32 { 5e-5 } else { 2e-2 };
            check.close(name(dtype, vocab, "dx"), &got.dx, &want.dx, limit);
            check.close(name(dtype, vocab, "dw"), &got.dw, &want.dw, limit);
            check.same(name(dtype, vocab, "dx again"), &again.dx, &got.dx);
            check.same(name(dtype, vocab, "dw again"), &again.dw, &got.dw);
        }
    }
    Ok(())
}

/// Gradients of `logp` only, in one call or two, for some of the rows: stats, `dx`, `dw`.
fn by_logp(
    b: &dyn Backend,
    op: LogpHead,
    (i, w): (&HeadCaseInputs, &Weight),
    rows: std::ops::Range<usize>,
    at_once: bool,
    dw: &mut Buffer,
) -> Result<[Vec<f32>; 3]> {
    let dtype = w.compute;
    let (count, k) = (rows.len(), w.k);
    let x = upload(b, dtype, &i.x[rows.start * k..rows.end * k])?;
    let (targets, dlogp) =
        (b.indices(&i.targets[rows.clone()])?, upload(b, DType::F32, &i.grads[0][rows.clone()])?);
    let (mut stats, mut dx) = (stats(b, count)?, nan_filled(b, dtype, x.len())?);
    let add = rows.start > 0;
    if at_once {
        b.logp_one_pass(
            HeadInput { op, x: &x, w, targets: &targets },
            &dlogp,
            &mut stats,
            HeadGrads { dx: &mut dx, dw: Some(dw), add },
        )?;
    } else {
        b.logp(HeadInput { op, x: &x, w, targets: &targets }, None, &mut stats)?;
        let grads = LogpGrads { logp: &dlogp, entropy: None, others: None };
        b.logp_backward(
            HeadInput { op, x: &x, w, targets: &targets },
            None,
            &stats,
            &grads,
            HeadGrads { dx: &mut dx, dw: Some(dw), add },
        )?;
    }
    Ok([download(b, &stats.logp)?, download(b, &stats.entropy)?, download(b, &dx)?])
}

/// The one-pass head has the bits of forward and backward; a batch processed in parts gives what the parts give.
pub fn one_pass(check: &mut Check<'_>) -> Result<()> {
    let b = check.card;
    let large = (2400, 151_936, 32, 0, LogpHead { temperature: 0.9, softcap: None });
    for &(rows, vocab, k, _, op) in SHAPES.iter().chain([&large]) {
        for dtype in [DType::F32, DType::Bf16] {
            if dtype == DType::F32 && rows == large.0 {
                continue;
            }
            let i = HeadCaseInputs::new(dtype, rows, vocab, k, 0);
            let w = weight(b, dtype, vocab, k, &i.w)?;
            let room = || nan_filled(b, DType::F32, i.w.len());
            let (mut first, mut second, mut third) = (room()?, room()?, room()?);
            let (first, second, third) = (&mut first, &mut second, &mut third);
            let once = by_logp(b, op, (&i, &w), 0..rows, true, first)?;
            let twice = by_logp(b, op, (&i, &w), 0..rows, false, second)?;
            for (j, what) in ["logp", "entropy", "dx"].into_iter().enumerate() {
                check.same(name(dtype, vocab, &format!("{what} at once")), &once[j], &twice[j]);
            }
            let (whole, again) = (download(b, first)?, download(b, second)?);
            check.same(name(dtype, vocab, "dw at once"), &whole, &again);
            let mut parts = by_logp(b, op, (&i, &w), 0..rows / 3, true, third)?;
            let rest = by_logp(b, op, (&i, &w), rows / 3..rows, true, third)?;
            for ((j, what), limit) in ["logp", "entropy", "dx"].into_iter().enumerate().zip([0.0, 0.0, 2e-2])
            {
                parts[j].extend_from_slice(&rest[j]);
                check.close(name(dtype, vocab, &format!("{what} in parts")), &once[j], &parts[j], limit);
            }
            check.close(name(dtype, vocab, "dw in parts"), &whole, &download(b, third)?, 1e-4);
        }
    }
    Ok(())
}

/// Decoding and training compute the same logits, for any number of rows.
pub fn bits(check: &mut Check<'_>) -> Result<()> {
    let b = check.card;
    let large = (300, 32_000, 256, 0, LogpHead { temperature: 0.9, softcap: None });
    for &(rows, vocab, k, _, op) in SHAPES.iter().chain([&large]) {
        for dtype in [DType::F32, DType::Bf16] {
            let i = HeadCaseInputs::new(dtype, rows, vocab, k, 0);
            let w = weight(b, dtype, vocab, k, &i.w)?;
            let mut all = stats(b, rows)?;
            b.logp(
                HeadInput { op, x: &upload(b, dtype, &i.x)?, w: &w, targets: &b.indices(&i.targets)? },
                None,
                &mut all,
            )?;
            let (logp, lse) = (download(b, &all.logp)?, download(b, &all.lse)?);
            for count in [1, 7, 64, 256].into_iter().filter(|c| *c <= rows) {
                let from = rows - count;
                let x = upload(b, dtype, &i.x[from * k..])?;
                let mut logits = nan_filled(b, DType::F32, count * vocab)?;
                let mut sums = nan_filled(b, DType::F32, count)?;
                b.logits(op, &x, &w, &mut logits, &mut sums)?;
                let (logits, sums) = (download(b, &logits)?, download(b, &sums)?);
                let picked: Vec<f32> =
                    (0..count).map(|r| logits[r * vocab + i.targets[from + r] as usize] - sums[r]).collect();
                let what = |what| name(dtype, vocab, &format!("{what} of {count} of {rows} rows"));
                check.same(what("lse"), &sums, &lse[from..]);
                check.same(what("logp"), &picked, &logp[from..]);
            }
        }
    }
    Ok(())
}

/// KL and its gradient: close to the CPU's, same bits when repeated.
pub fn divergence(check: &mut Check<'_>) -> Result<()> {
    for &(rows, vocab, k, _, op) in &SHAPES[..3] {
        for dtype in [DType::F32, DType::Bf16] {
            let (p, q) = (
                HeadCaseInputs::new(dtype, rows, vocab, k, 0),
                HeadCaseInputs::new(dtype, rows, vocab, k, 0),
            );
            let moved: Vec<f32> = q.x.iter().zip(random(8, q.x.len())).map(|(x, y)| x + 0.3 * y).collect();
            let moved = stored(dtype, &moved);
            let compute = |b: &dyn Backend| -> Result<[Vec<f32>; 3]> {
                let (px, pw) = (upload(b, dtype, &p.x)?, weight(b, dtype, vocab, k, &p.w)?);
                let (qx, qw) = (upload(b, dtype, &moved)?, weight(b, dtype, vocab, k, &q.w)?);
                let mut kl = nan_filled(b, DType::F32, rows)?;
                b.kl(op, (&px, &pw), (&qx, &qw), &mut kl)?;
                let dkl: Buffer = upload(b, DType::F32, &p.grads[0])?;
                let mut dx = nan_filled(b, dtype, p.x.len())?;
                let mut dw = upload(b, DType::F32, &vec![0.5; p.w.len()])?;
                b.kl_backward(
                    op,
                    (&px, &pw),
                    (&qx, &qw),
                    &dkl,
                    HeadGrads { dx: &mut dx, dw: Some(&mut dw), add: true },
                )?;
                Ok([download(b, &kl)?, download(b, &dx)?, download(b, &dw)?])
            };
            let (want, got, again) = (compute(check.cpu)?, compute(check.card)?, compute(check.card)?);
            let limit = if dtype == DType::F32 { 1e-4 } else { 2e-2 };
            for (j, (what, limit)) in [("", 1e-4), (" dx", limit), (" dw", limit)].into_iter().enumerate() {
                let name = format!("divergence {} of {vocab}{what}", dtype.name());
                check.close(&name, &got[j], &want[j], limit);
                check.same(format!("{name} again"), &again[j], &got[j]);
            }
        }
    }
    Ok(())
}
