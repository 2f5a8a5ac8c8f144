//! Linear layers.

use super::units::{Results, RowCase, by_row, pick, run_case, scaled};
use super::{Check, download, nan_filled, random, upload, weight};
use crate::backend::{Backend, LinearGrads};
use crate::philox::philox4x32;
use crate::{DType, Result};

/// Odd sizes, one output, and the shapes of a known model.
pub fn all(check: &mut Check<'_>) -> Result<()> {
    let shapes = [(3, 33, 7), (29, 5, 40), (130, 40, 70), (300, 1152, 896), (70, 896, 4864), (200, 1, 64)];
    shapes.iter().try_for_each(|&(rows, n, k)| run_case(check, &LinearCase { rows, n, k }))
}

/// Rows alone, a few and many, of products whose sums cancel: only accumulated rounding errors remain, so that a different
/// order of additions shows in the leading digits. Includes shapes whose single rows once differed on a GPU, unnoticed in sums
/// that do not cancel.
pub fn bits(check: &mut Check<'_>) -> Result<()> {
    const ROWS: usize = 40;
    const PARTS: [usize; 6] = [1, 2, 3, 5, 8, 23];
    let known = [(896, 896), (40, 70)];
    for (n, k) in (8..=144).step_by(8).map(|n| (n, 4864)).chain(known) {
        for (dtype, out) in [(DType::Bf16, DType::F32), (DType::Bf16, DType::Bf16)] {
            let b = check.card;
            let (x, w) = (cancelling(1, ROWS, k, true), weight(b, dtype, n, k, &cancelling(2, n, k, false))?);
            let run = |first: usize, count: usize| -> Result<Vec<f32>> {
                let mut y = nan_filled(b, out, count * n)?;
                b.linear(&upload(b, dtype, &x[first * k..(first + count) * k])?, &w, None, &mut y)?;
                download(b, &y)
            };
            let all = run(0, ROWS)?;
            let (mut got, mut want) = (Vec::new(), Vec::new());
            for count in PARTS {
                for first in [0, 17] {
                    got.extend(run(first, count)?);
                    want.extend_from_slice(&all[first * n..(first + count) * n]);
                }
            }
            let name = |what: &str| format!("linear {n} x {k} {} into {} {what}", dtype.name(), out.name());
            check.same(name("of rows beside others"), &got, &want);
            let zeros = all.iter().filter(|&&y| y == 0.0).count();
            check.report(name("without rounding"), zeros as f64 / all.len() as f64, 0.9);
        }
    }
    Ok(())
}

/// Rows of numbers of many magnitudes, exact in bf16, whose second half repeats the first, negated if `negated`.
fn cancelling(seed: u32, rows: usize, k: usize, negated: bool) -> Vec<f32> {
    let number = |i: usize| {
        let h = philox4x32([i as u32, 2, 0, 0], [seed, 99])[0];
        f32::from_bits((h & 0x8000_0000) | (127 - (h >> 8) % 10) << 23 | (h & 0x7f) << 16)
    };
    let mut all = Vec::with_capacity(rows * k);
    for row in 0..rows {
        let half: Vec<f32> = (0..k / 2).map(|i| number(row * k + i)).collect();
        all.extend_from_slice(&half);
        all.extend(half.iter().map(|&v| if negated { -v } else { v }));
    }
    all
}

struct LinearCase {
    rows: usize,
    n: usize,
    k: usize,
}

impl RowCase for LinearCase {
    fn name(&self) -> String {
        format!("linear {} x {} x {}", self.rows, self.n, self.k)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results> {
        let (n, k) = (self.n, self.k);
        let w = weight(b, dtype, n, k, &scaled(1, n * k, 0.3))?;
        let x = upload(b, dtype, &pick(&scaled(2, self.rows * k, 0.3), k, picks))?;
        let dy = upload(b, dtype, &pick(&scaled(3, self.rows * n, 0.3), n, picks))?;
        let bias = upload(b, DType::F32, &random(4, n))?;
        let (mut y, mut plain) = (nan_filled(b, dtype, dy.len())?, nan_filled(b, DType::F32, dy.len())?);
        b.linear(&x, &w, Some(&bias), &mut y)?;
        b.linear(&x, &w, None, &mut plain)?;
        let mut without = nan_filled(b, dtype, dy.len())?;
        b.linear(&x, &w, None, &mut without)?;
        let mut dx = nan_filled(b, dtype, x.len())?;
        b.linear_dx(&dy, &w, &mut dx)?;
        let mut dw = upload(b, DType::F32, &random(5, n * k))?;
        let mut db = upload(b, DType::F32, &random(6, n))?;
        b.linear_dw(
            &dy,
            &x,
            picks.len(),
            LinearGrads { weight: Some(&mut dw), bias: Some(&mut db), add: true },
        )?;
        b.linear_dw(&dy, &x, picks.len(), LinearGrads { weight: Some(&mut dw), bias: None, add: true })?;
        let (mut new_dw, mut new_db) = (nan_filled(b, DType::F32, n * k)?, nan_filled(b, DType::F32, n)?);
        b.linear_dw(
            &dy,
            &x,
            picks.len(),
            LinearGrads { weight: Some(&mut new_dw), bias: Some(&mut new_db), add: false },
        )?;
        Ok(Results {
            rows: vec![
                ("linear with bias", by_row(b, &y, n)?),
                ("linear into f32", by_row(b, &plain, n)?),
                ("linear", by_row(b, &without, n)?),
            ],
            sums: vec![
                ("dx", download(b, &dx)?),
                ("dw", download(b, &dw)?),
                ("dbias", download(b, &db)?),
                ("dw, written", download(b, &new_dw)?),
                ("dbias, written", download(b, &new_db)?),
            ],
        })
    }
}
