//! Values that are matrices: products, norms, determinants, inverses.

use super::eval::Value;
use super::{Env, MathResult, Num, Stop};

impl Env<'_> {
    pub(super) fn times(&mut self, a: Value, b: Value) -> MathResult<Value> {
        Ok(match (a, b) {
            (Value::Num(a), Value::Num(b)) => {
                self.budget.spend(a.cost().max(b.cost()))?;
                Value::Num(a.mul(&b)?)
            }
            (Value::Num(s), Value::Mat(n, m)) | (Value::Mat(n, m), Value::Num(s)) => {
                let entries: MathResult<Vec<Num>> = m.iter().map(|e| e.mul(&s)).collect();
                Value::Mat(n, entries?)
            }
            (Value::Mat(inner, a), Value::Mat(cols, b)) => {
                if inner == 0 || cols == 0 || b.len() != inner * cols {
                    return Err(Stop::Undefined);
                }
                let mut out = Vec::new();
                for row in a.chunks(inner) {
                    for col in 0..cols {
                        let mut sum = Num::from(0);
                        for (k, x) in row.iter().enumerate() {
                            self.budget.spend(2 + x.cost())?;
                            sum = sum.add(&x.mul(&b[k * cols + col])?)?;
                        }
                        out.push(sum);
                    }
                }
                Value::Mat(cols, out)
            }
        })
    }

    pub(super) fn norm(&mut self, entries: &[Num]) -> MathResult<Num> {
        let mut sum = Num::from(0);
        for entry in entries {
            sum = sum.add(&entry.mul(entry)?)?;
        }
        sum.root(2)
    }

    /// By elimination with the first entry that is not zero.
    pub(super) fn determinant(&mut self, n: usize, mut m: Vec<Num>) -> MathResult<Num> {
        if n == 0 || m.len() != n * n {
            return Err(Stop::Undefined);
        }
        let mut det = Num::from(1);
        for k in 0..n {
            let Some(pivot) = (k..n).find(|row| !m[row * n + k].maybe_zero()) else { return Ok(0.into()) };
            if pivot != k {
                for col in 0..n {
                    m.swap(pivot * n + col, k * n + col);
                }
                det = det.neg();
            }
            det = det.mul(&m[k * n + k])?;
            for row in k + 1..n {
                let factor = m[row * n + k].div(&m[k * n + k])?;
                for col in k..n {
                    self.budget.spend(2 + factor.cost())?;
                    let term = factor.mul(&m[k * n + col])?;
                    m[row * n + col] = m[row * n + col].sub(&term)?;
                }
            }
        }
        Ok(det)
    }

    /// By Gauss and Jordan, with the first entry that is not zero.
    pub(super) fn inverse(&mut self, matrix: Value) -> MathResult<Value> {
        let Value::Mat(n, mut m) = matrix else { return Err(Stop::Undefined) };
        if n == 0 || m.len() != n * n {
            return Err(Stop::Undefined);
        }
        let mut out: Vec<Num> = (0..n * n).map(|k| Num::from(i64::from(k / n == k % n))).collect();
        for k in 0..n {
            let pivot = (k..n).find(|row| !m[row * n + k].maybe_zero()).ok_or(Stop::Undefined)?;
            let scale = m[pivot * n + k].recip()?;
            for rows in [&mut m, &mut out] {
                for col in 0..n {
                    rows.swap(pivot * n + col, k * n + col);
                    rows[k * n + col] = rows[k * n + col].mul(&scale)?;
                }
            }
            for row in (0..n).filter(|row| *row != k) {
                let factor = m[row * n + k].clone();
                for rows in [&mut m, &mut out] {
                    for col in 0..n {
                        self.budget.spend(2 + factor.cost())?;
                        let term = factor.mul(&rows[k * n + col])?;
                        rows[row * n + col] = rows[row * n + col].sub(&term)?;
                    }
                }
            }
        }
        Ok(Value::Mat(n, out))
    }
}
