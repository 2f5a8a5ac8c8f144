//! Linear layers.

use super::units::{Case, Results, ask, by_row, pick, scaled};
use super::{Check, download, random, unwritten, upload, weight};
use crate::backend::Backend;
use crate::buffer::DType;
use crate::error::Result;

/// Odd sizes, one output, and the shapes of a known model.
pub fn all(check: &mut Check<'_>) -> Result<()> {
    let shapes = [(3, 33, 7), (29, 5, 40), (130, 40, 70), (300, 1152, 896), (70, 896, 4864), (200, 1, 64)];
    shapes.iter().try_for_each(|&(rows, n, k)| ask(check, &Linear { rows, n, k }))
}

struct Linear {
    rows: usize,
    n: usize,
    k: usize,
}

impl Case for Linear {
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
        let (mut y, mut plain) = (unwritten(b, dtype, dy.len())?, unwritten(b, DType::F32, dy.len())?);
        b.linear(&x, &w, Some(&bias), &mut y)?;
        b.linear(&x, &w, None, &mut plain)?;
        let mut without = unwritten(b, dtype, dy.len())?;
        b.linear(&x, &w, None, &mut without)?;
        let mut dx = unwritten(b, dtype, x.len())?;
        b.linear_dx(&dy, &w, &mut dx)?;
        let mut dw = upload(b, DType::F32, &random(5, n * k))?;
        let mut db = upload(b, DType::F32, &random(6, n))?;
        b.linear_dw(&dy, &x, picks.len(), true, Some(&mut dw), Some(&mut db))?;
        b.linear_dw(&dy, &x, picks.len(), true, Some(&mut dw), None)?;
        let (mut new_dw, mut new_db) = (unwritten(b, DType::F32, n * k)?, unwritten(b, DType::F32, n)?);
        b.linear_dw(&dy, &x, picks.len(), false, Some(&mut new_dw), Some(&mut new_db))?;
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
