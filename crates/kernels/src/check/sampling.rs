//! Sampling.

use super::logp::HeadCaseInputs;
use super::{Check, download, nan_filled, random, upload, weight};
use crate::backend::{Backend, LogpHead, SampleSpec, TokenChoice};
use crate::{Buffer, DType, Result};

/// Logits of random rows, and their log-sum-exp.
fn logits(b: &dyn Backend, rows: usize, vocab: usize, k: usize) -> Result<(Buffer, Buffer)> {
    let i = HeadCaseInputs::new(DType::F32, rows, vocab, k, 0);
    let (x, w) = (upload(b, DType::F32, &i.x)?, weight(b, DType::F32, vocab, k, &i.w)?);
    let (mut logits, mut lse) = (nan_filled(b, DType::F32, rows * vocab)?, nan_filled(b, DType::F32, rows)?);
    b.logits(LogpHead { temperature: 1.0, softcap: None }, &x, &w, &mut logits, &mut lse)?;
    Ok((logits, lse))
}

fn ids(ids: &[u32]) -> Vec<f32> {
    ids.iter().map(|&i| i as f32).collect()
}

/// Sampled tokens are where the cumulative distribution exceeds the draw; argmax finds the first maximum.
pub fn draws(check: &mut Check<'_>) -> Result<()> {
    for (rows, vocab, k) in [(64, 32_000, 64), (9, 1003, 32), (3, 40, 32)] {
        let b = check.card;
        let (logits, lse) = logits(b, rows, vocab, k)?;
        let mut draws: Vec<f32> = (0..rows).map(|r| (r as f32 + 0.5) / rows as f32).collect();
        draws[0] = 0.0;
        draws[rows - 1] = 1.0 - f32::EPSILON / 2.0;
        let chosen = b.sample(&logits, &lse, &draws)?;
        let again = b.sample(&logits, &lse, &draws)?;
        let (values, sums) = (download(b, &logits)?, download(b, &lse)?);
        let mut worst = 0f64;
        for (r, &token) in chosen.iter().enumerate() {
            let row = &values[r * vocab..(r + 1) * vocab];
            let p: Vec<f64> = row.iter().map(|l| f64::from(l - sums[r]).exp()).collect();
            worst = worst.max(beside(&p, f64::from(draws[r]), token as usize));
        }
        check.report(format!("sampling of {vocab}: draws"), worst, 2e-6);
        check.same(format!("sampling of {vocab} again"), &ids(&again), &ids(&chosen));
        let largest = check.card.argmax(&logits, rows)?;
        let want = check.cpu.argmax(&upload(check.cpu, DType::F32, &values)?, rows)?;
        check.same(format!("largest of {vocab}"), &ids(&largest), &ids(&want));
    }
    // Ties go to the first; a flat row is sampled where the draw says.
    let flat = upload(check.card, DType::F32, &vec![0.0; 5000])?;
    let lse = upload(check.card, DType::F32, &[5000f32.ln()])?;
    let first = check.card.argmax(&flat, 1)?[0];
    check.report("largest of equals".into(), f64::from(first), 0.0);
    let middle = check.card.sample(&flat, &lse, &[0.5])?[0];
    check.report("sampling of equals".into(), (f64::from(middle) - 2500.0).abs(), 1.0);
    many_alike(check)
}

/// Distance of a draw from a token's interval of the cumulative distribution.
fn beside(p: &[f64], draw: f64, token: usize) -> f64 {
    let below: f64 = p[..token].iter().sum();
    (below - draw).max(draw - (below + p[token])).max(0.0)
}

/// Over a large vocabulary of almost equally probable tokens, most draws give the token of exact sums; f32 sums miss one in six.
fn many_alike(check: &mut Check<'_>) -> Result<()> {
    let (rows, vocab, b) = (64, 151_936, check.card);
    let row: Vec<f32> = random(11, vocab).iter().map(|x| 0.3 * x).collect();
    let exact = row.iter().map(|&l| f64::from(l).exp()).sum::<f64>().ln() as f32;
    let p: Vec<f64> = row.iter().map(|l| f64::from(l - exact).exp()).collect();
    let draws: Vec<f32> = (0..rows).map(|r| (r as f32 + 0.5) / rows as f32).collect();
    let (logits, lse) =
        (upload(b, DType::F32, &row.repeat(rows))?, upload(b, DType::F32, &vec![exact; rows])?);
    let chosen = b.sample(&logits, &lse, &draws)?;
    let missed =
        chosen.iter().zip(&draws).filter(|(t, d)| beside(&p, f64::from(**d), **t as usize) > 0.0).count();
    check.report(format!("sampling of {vocab}: missed of {rows}"), missed as f64, rows as f64 / 4.0);
    Ok(())
}

/// Probabilities, by id, of the tokens that truncation keeps.
fn truncated(row: &[f32], spec: &SampleSpec) -> Vec<f64> {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order.truncate(if spec.top_k == 0 { row.len() } else { spec.top_k });
    let share = |id: &usize| f64::from(row[*id] - best).exp();
    let goal = f64::from(spec.top_p) * order.iter().map(share).sum::<f64>();
    let mut before = 0.0;
    order.retain(|id| {
        let kept = spec.top_p == 1.0 || before < goal;
        before += share(id);
        kept
    });
    order.retain(|id| share(id) >= f64::from(spec.min_p));
    let all: f64 = order.iter().map(share).sum();
    let mut p = vec![0.0; row.len()];
    order.iter().for_each(|&id| p[id] = share(&id) / all);
    p
}

/// The CPU's tokens (unless a draw is near an edge) and their log-probabilities; ties are kept in id order.
pub fn truncation(check: &mut Check<'_>) -> Result<()> {
    let spec = |top_k, top_p, min_p| SampleSpec { draw: None, top_k, top_p, min_p };
    let settings = [
        spec(1, 1.0, 0.0),
        spec(50, 1.0, 0.0),
        spec(0, 0.9, 0.0),
        spec(0, 0.999, 0.0),
        spec(0, 1.0, 0.05),
        spec(100, 0.8, 0.01),
        spec(7000, 0.1, 0.0),
        spec(0, 1.0, 0.0),
    ];
    for (vocab, k) in [(32_000, 64), (1003, 32), (40, 32)] {
        let rows = 6 * settings.len();
        let b = check.card;
        let (logits, lse) = logits(b, rows, vocab, k)?;
        let draw = |r: usize| Some((r as f32 * 0.618_034 + 0.01).fract());
        let specs: Vec<SampleSpec> =
            (0..rows).map(|r| SampleSpec { draw: draw(r), ..settings[r % settings.len()] }).collect();
        let choose = |b: &dyn Backend, l: &Buffer, s: &Buffer| -> Result<Vec<TokenChoice>> {
            b.chosen(&b.choose(l, s, &specs)?)
        };
        let (got, again) = (choose(b, &logits, &lse)?, choose(b, &logits, &lse)?);
        let (values, sums) = (download(b, &logits)?, download(b, &lse)?);
        let cpu = check.cpu;
        let want = choose(cpu, &upload(cpu, DType::F32, &values)?, &upload(cpu, DType::F32, &sums)?)?;
        let (mut worst, mut logp, mut differ) = (0f64, 0f64, 0);
        for (r, (choice, spec)) in got.iter().zip(&specs).enumerate() {
            let p = truncated(&values[r * vocab..(r + 1) * vocab], spec);
            let token = choice.token as usize;
            worst = worst.max(beside(&p, f64::from(spec.draw.unwrap_or(0.0)), token));
            logp = logp.max((f64::from(choice.kept) - p[token].ln()).abs());
            differ += usize::from(choice.token != want[r].token);
        }
        let name = |what: &str| format!("truncated sampling of {vocab}: {what}");
        check.report(name("draws"), worst, 2e-5);
        check.report(name("log-probabilities"), logp, 1e-4);
        check.report(name("tokens that are not the CPU's"), differ as f64, 0.0);
        let tokens = |c: &[TokenChoice]| c.iter().map(|c| c.token as f32).collect::<Vec<f32>>();
        check.same(name("again"), &tokens(&again), &tokens(&got));
    }
    // Half of the ties, then ten of them: those with the lowest ids.
    let flat = upload(check.card, DType::F32, &vec![0.25; 2 * 5000])?;
    let lse = upload(check.card, DType::F32, &[5000f32.ln() + 0.25; 2])?;
    let specs = [spec(0, 0.5, 0.0), spec(10, 1.0, 0.0)].map(|a| SampleSpec { draw: Some(0.999), ..a });
    let got = check.card.chosen(&check.card.choose(&flat, &lse, &specs)?)?;
    check.same("truncated sampling of equals", &[got[0].token as f32, got[1].token as f32], &[2497.0, 9.0]);
    Ok(())
}
