//! Operations on independent rows of a batch.

use super::{Check, download};
use crate::backend::Backend;
use crate::operands::AdamW;
use crate::{Buffer, DType, Result};

/// Results of an operation on some rows.
#[derive(Default)]
pub struct Results {
    /// By row: same bits in any batch.
    pub rows: Vec<(&'static str, Vec<Vec<f32>>)>,
    /// Sums over rows: same bits when repeated.
    pub sums: Vec<(&'static str, Vec<f32>)>,
}

/// An operation, its backward, and their inputs.
pub trait RowCase {
    /// Display name.
    fn name(&self) -> String;
    fn rows(&self) -> usize;
    /// Runs it on the picked rows.
    fn run(&self, b: &dyn Backend, dtype: DType, picks: &[usize]) -> Result<Results>;
    /// Size of the terms of a sum that may cancel to rounding noise.
    fn terms(&self, _what: &str) -> f32 {
        0.0
    }
    /// Maximum error of a result that is rounded to the storage type at most once.
    fn limit(&self, dtype: DType) -> f64 {
        if dtype == DType::Bf16 { 8e-3 } else { 2e-5 }
    }
}

/// Close to the CPU's; same bits when repeated, in reverse order, twice in a batch, in a small batch, and alone.
pub fn run_case(check: &mut Check<'_>, case: &dyn RowCase) -> Result<()> {
    for dtype in [DType::F32, DType::Bf16] {
        let name = |what: &str| format!("{} {} {what}", case.name(), dtype.name());
        let n = case.rows();
        let all: Vec<usize> = (0..n).collect();
        let (want, got) = (case.run(check.cpu, dtype, &all)?, case.run(check.card, dtype, &all)?);
        let again = case.run(check.card, dtype, &all)?;
        for (i, (what, rows)) in got.rows.iter().enumerate() {
            let (want, terms) = (want.rows[i].1.concat(), case.terms(what));
            check.close_within(name(what), &rows.concat(), &want, &[terms], case.limit(dtype));
            check.same(name(&format!("{what} again")), &rows.concat(), &again.rows[i].1.concat());
        }
        for (i, (what, sum)) in got.sums.iter().enumerate() {
            check.close(name(what), sum, &want.sums[i].1, case.limit(dtype));
            check.same(name(&format!("{what} again")), sum, &again.sums[i].1);
        }
        let batches: [(&str, Vec<usize>); 6] = [
            ("backwards", (0..n).rev().collect()),
            ("twice in a batch", (0..2 * n).map(|i| i % n).collect()),
            ("one in three", (0..n).step_by(3).collect()),
            ("the first alone", vec![0]),
            ("one alone", vec![n / 2]),
            ("the last alone", vec![n - 1]),
        ];
        for (how, picks) in batches {
            let part = case.run(check.card, dtype, &picks)?;
            for (i, (what, rows)) in got.rows.iter().enumerate() {
                let whole: Vec<f32> = picks.iter().flat_map(|&r| rows[r].iter().copied()).collect();
                check.same(name(&format!("{what}, {how}")), &part.rows[i].1.concat(), &whole);
            }
        }
    }
    Ok(())
}

/// Splits a buffer into rows of `width`.
pub fn by_row(b: &dyn Backend, buffer: &Buffer, width: usize) -> Result<Vec<Vec<f32>>> {
    Ok(download(b, buffer)?.chunks(width).map(<[f32]>::to_vec).collect())
}

/// Number of elements whose bits differ between two buffers.
pub fn differing(b: &dyn Backend, x: &Buffer, y: &Buffer) -> Result<Vec<f32>> {
    let (x, y) = (download(b, x)?, download(b, y)?);
    Ok(vec![x.iter().zip(&y).filter(|(x, y)| x.to_bits() != y.to_bits() || x.is_nan()).count() as f32])
}

/// Gathers rows in the order of `picks`.
pub fn pick<T: Copy>(values: &[T], width: usize, picks: &[usize]) -> Vec<T> {
    picks.iter().flat_map(|&r| values[r * width..(r + 1) * width].iter().copied()).collect()
}

/// Standard normal numbers times a factor.
pub fn scaled(seed: u32, n: usize, factor: f32) -> Vec<f32> {
    super::random(seed, n).iter().map(|x| x * factor).collect()
}

/// An AdamW step in which every term contributes.
pub fn adamw(step: u64) -> AdamW {
    AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: 0.1, step, grad_scale: 0.5 }
}

/// Whole buffers as results.
pub fn sums(b: &dyn Backend, all: &[(&'static str, &Buffer)]) -> Result<Results> {
    let one = |&(name, buffer): &(&'static str, &Buffer)| Ok((name, download(b, buffer)?));
    Ok(Results { rows: Vec::new(), sums: all.iter().map(one).collect::<Result<_>>()? })
}
