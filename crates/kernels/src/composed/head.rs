//! The head from materialised logits of a few rows at a time, on the host: reference formulas, and a start for a new device.

use super::vectors::download;
use crate::backend::{
    HeadGrads, HeadInput, LinearGrads, LinearOps, LogpGrads, LogpHead, LogpStats, MemoryOps, SampleOps,
    SampleSpec, TokenChoice,
};
use crate::math::{exp, ln};
use crate::truncate::Truncation;
use crate::{Buffer, DType, Result, Weight};

/// Rows whose logits are materialised at a time.
const ROWS: usize = 64;

/// Some rows of hidden states with their scaled logits.
struct Logits {
    first: usize,
    x: Buffer,
    /// `[rows, vocab]`
    scaled: Vec<f32>,
    lse: Vec<f32>,
    vocab: usize,
}

/// `log Σ e^l`
fn log_sum_exp(row: &[f32]) -> f32 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    (most + ln(row.iter().map(|&l| exp(f64::from(l) - most)).sum())) as f32
}

/// Calls `each` for all rows of `x`, [`ROWS`] at a time.
fn by_rows<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    mut each: impl FnMut(Logits) -> Result<()>,
) -> Result<()> {
    let rows = x.len() / w.k;
    for first in (0..rows).step_by(ROWS) {
        each(logits_of(b, op, (x, w), first, ROWS.min(rows - first))?)?;
    }
    Ok(())
}

fn logits_of<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    (x, w): (&Buffer, &Weight),
    first: usize,
    count: usize,
) -> Result<Logits> {
    let mut part = b.alloc(x.dtype(), count * w.k)?;
    b.copy(x, first * w.k, &mut part, 0, count * w.k)?;
    let mut y = b.alloc(DType::F32, count * w.n)?;
    b.linear(&part, w, None, &mut y)?;
    let mut scaled = download(b, &y)?;
    let tanh = |x: f64| 1.0 - 2.0 / (exp(2.0 * x) + 1.0);
    for l in &mut scaled {
        let capped = op.softcap.map_or(*l, |cap| cap * tanh(f64::from(*l / cap)) as f32);
        *l = capped / op.temperature;
    }
    let lse = scaled.chunks(w.n).map(log_sum_exp).collect();
    Ok(Logits { first, x: part, scaled, lse, vocab: w.n })
}

impl Logits {
    fn rows(&self) -> impl Iterator<Item = (usize, &[f32], f32)> {
        let rows = self.scaled.chunks(self.vocab).zip(&self.lse).enumerate();
        rows.map(|(i, (row, &lse))| (self.first + i, row, lse))
    }

    /// Backward from gradients of the scaled logits: writes these rows of `dx`, adds to `dw`.
    fn backward<B: LinearOps + ?Sized>(
        &self,
        b: &B,
        op: LogpHead,
        w: &Weight,
        mut dlogits: Vec<f32>,
        to: &mut HeadGrads<'_>,
    ) -> Result<()> {
        for (d, l) in dlogits.iter_mut().zip(&self.scaled) {
            let slope = op.softcap.map_or(1.0, |cap| 1.0 - (l * op.temperature / cap).powi(2));
            *d *= slope / op.temperature;
        }
        let mut dy = b.alloc(w.compute, dlogits.len())?;
        b.write(&mut dy, 0, &dlogits)?;
        let mut part = b.alloc(to.dx.dtype(), self.x.len())?;
        b.linear_dx(&dy, w, &mut part)?;
        b.copy(&part, 0, to.dx, self.first * w.k, part.len())?;
        let weight = to.dw.as_deref_mut();
        b.linear_dw(&dy, &self.x, self.lse.len(), LinearGrads { weight, bias: None, add: true })
    }
}

/// Probability of a token with this scaled logit.
pub(super) fn probability(logit: f32, lse: f32) -> f32 {
    exp(f64::from(logit - lse)) as f32
}

fn entropy(row: &[f32], lse: f32) -> f32 {
    row.iter().map(|&l| probability(l, lse) * (lse - l)).sum()
}

pub fn logits<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    logits: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    by_rows(b, op, x, w, |part| {
        b.write(logits, part.first * w.n, &part.scaled)?;
        b.write(lse, part.first, &part.lse)
    })
}

pub fn logp<B: LinearOps + ?Sized>(
    b: &B,
    head: HeadInput<'_>,
    mut others: Option<(&Buffer, &mut Buffer)>,
    stats: &mut LogpStats,
) -> Result<()> {
    let targets = b.ids(head.targets);
    by_rows(b, head.op, head.x, head.w, |part| {
        for (r, row, lse) in part.rows() {
            b.write(&mut stats.logp, r, &[row[targets[r] as usize] - lse])?;
            b.write(&mut stats.entropy, r, &[entropy(row, lse)])?;
            b.write(&mut stats.lse, r, &[lse])?;
            if let Some((ids, out)) = &mut others {
                let each = ids.len() / targets.len();
                let listed = &b.ids(ids)[r * each..][..each];
                let logps: Vec<f32> = listed.iter().map(|&id| row[id as usize] - lse).collect();
                b.write(out, r * each, &logps)?;
            }
        }
        Ok(())
    })
}

/// Zeros the gradient of the weight if it is to be overwritten, so that row blocks can be added to it.
fn clear<B: MemoryOps + ?Sized>(b: &B, to: &mut HeadGrads<'_>) -> Result<()> {
    let written = to.dw.as_deref_mut().filter(|_| !to.add);
    written.map_or(Ok(()), |dw| b.fill(dw, 0.0))
}

pub fn logp_backward<B: LinearOps + ?Sized>(
    b: &B,
    head: HeadInput<'_>,
    others: Option<&Buffer>,
    grads: &LogpGrads<'_>,
    mut to: HeadGrads<'_>,
) -> Result<()> {
    clear(b, &mut to)?;
    let HeadInput { op, x, w, targets } = head;
    let (targets, ids) = (b.ids(targets), others.map(|o| b.ids(o)).unwrap_or_default());
    let each = ids.len() / targets.len().max(1);
    let dlogp = download(b, grads.logp)?;
    let dentropy = grads.entropy.map(|d| download(b, d)).transpose()?;
    let dothers = grads.others.map(|d| download(b, d)).transpose()?.unwrap_or_default();
    by_rows(b, op, x, w, |part| {
        let mut d = Vec::with_capacity(part.scaled.len());
        for (r, row, lse) in part.rows() {
            let at = r * each..(r + 1) * each;
            let listed = || ids[at.clone()].iter().zip(&dothers[at.clone()]);
            let all = dlogp[r] + listed().map(|(_, d)| d).sum::<f32>();
            let (h, dh) = (entropy(row, lse), dentropy.as_ref().map_or(0.0, |d| d[r]));
            let start = d.len();
            d.extend(row.iter().map(|&l| -probability(l, lse) * (all + dh * (l - lse + h))));
            d[start + targets[r] as usize] += dlogp[r];
            listed().for_each(|(&id, dother)| d[start + id as usize] += dother);
        }
        part.backward(b, op, w, d, &mut to)
    })
}

/// Calls `each` with rows of `p` and, for each of their logits, `log p - log q`.
fn by_ratios<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    mut each: impl FnMut(Logits, Vec<f32>) -> Result<()>,
) -> Result<()> {
    by_rows(b, op, p.0, p.1, |part| {
        let other = logits_of(b, op, q, part.first, part.lse.len())?;
        let rows = part.rows().zip(other.rows());
        let ratios = rows.flat_map(|((_, p, lp), (_, q, lq))| {
            p.iter().zip(q).map(move |(p, q)| (p - lp) - (q - lq)).collect::<Vec<f32>>()
        });
        let ratios = ratios.collect();
        each(part, ratios)
    })
}

fn divergence(row: &[f32], lse: f32, ratios: &[f32]) -> f32 {
    row.iter().zip(ratios).map(|(&l, ratio)| probability(l, lse) * ratio).sum()
}

pub fn kl<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    kl: &mut Buffer,
) -> Result<()> {
    by_ratios(b, op, p, q, |part, ratios| {
        let mut rows = part.rows().zip(ratios.chunks(part.vocab));
        rows.try_for_each(|((r, row, lse), ratios)| b.write(kl, r, &[divergence(row, lse, ratios)]))
    })
}

pub fn kl_backward<B: LinearOps + ?Sized>(
    b: &B,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    dkl: &Buffer,
    mut to: HeadGrads<'_>,
) -> Result<()> {
    clear(b, &mut to)?;
    let dkl = download(b, dkl)?;
    by_ratios(b, op, p, q, |part, ratios| {
        let mut d = Vec::with_capacity(ratios.len());
        for ((r, row, lse), ratios) in part.rows().zip(ratios.chunks(part.vocab)) {
            let kl = divergence(row, lse, ratios);
            d.extend(row.iter().zip(ratios).map(|(&l, ratio)| dkl[r] * probability(l, lse) * (ratio - kl)));
        }
        part.backward(b, op, p.1, d, &mut to)
    })
}

pub fn sample<B: MemoryOps + ?Sized>(
    b: &B,
    logits: &Buffer,
    lse: &Buffer,
    uniform: &[f32],
) -> Result<Vec<u32>> {
    let (values, lse) = (download(b, logits)?, download(b, lse)?);
    let rows = values.chunks((logits.len() / uniform.len().max(1)).max(1)).zip(lse).zip(uniform);
    let draw = |((row, lse), &u): ((&[f32], f32), &f32)| {
        let (mut below, mut last) = (0.0, 0);
        for (id, &l) in row.iter().enumerate() {
            let p = exp(f64::from(l - lse));
            if p > 0.0 {
                (below, last) = (below + p, id);
            }
            if below > f64::from(u) {
                break;
            }
        }
        last as u32
    };
    Ok(rows.map(draw).collect())
}

pub fn argmax<B: MemoryOps + ?Sized>(b: &B, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
    let (values, mut kept) = (download(b, logits)?, Truncation::default());
    let vocab = (logits.len() / rows.max(1)).max(1);
    Ok(values.chunks(vocab).map(|row| kept.choose(row, &SampleSpec::plain(None)).0).collect())
}

pub fn choose<B: SampleOps + ?Sized>(
    b: &B,
    logits: &Buffer,
    lse: &Buffer,
    specs: &[SampleSpec],
) -> Result<Vec<TokenChoice>> {
    let rows = specs.len();
    let vocab = logits.len() / rows.max(1);
    let draws: Vec<f32> = specs.iter().map(|a| a.draw.unwrap_or(0.0)).collect();
    let drawn = specs.iter().any(|a| a.draw.is_some() && !a.truncates());
    let sampled = if drawn { b.sample(logits, lse, &draws)? } else { Vec::new() };
    let greedy = specs.iter().any(|a| a.draw.is_none());
    let largest = if greedy { b.argmax(logits, rows)? } else { Vec::new() };
    let mut sums = vec![0.0; rows];
    b.read(lse, 0, &mut sums)?;
    let (mut values, mut kept) = (Vec::new(), Truncation::default());
    let mut choice = |row: usize| {
        let (spec, lse) = (&specs[row], sums[row]);
        let logit = |token: u32| -> Result<f32> {
            let mut logit = [0.0];
            b.read(logits, row * vocab + token as usize, &mut logit)?;
            Ok(logit[0])
        };
        if spec.truncates() {
            values.resize(vocab, 0.0);
            b.read(logits, row * vocab, &mut values)?;
            let (token, kept) = kept.choose(&values, spec);
            return Ok(TokenChoice { token, logit: values[token as usize], lse, kept });
        }
        let token = if spec.draw.is_some() { sampled[row] } else { largest[row] };
        let logit = logit(token)?;
        Ok(TokenChoice { token, logit, lse, kept: if spec.draw.is_some() { logit - lse } else { 0.0 } })
    };
    (0..rows).map(&mut choice).collect()
}
