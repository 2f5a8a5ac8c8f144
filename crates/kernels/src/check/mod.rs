//! Conformance checks of a device against the CPU and against the contract of [`Backend`]: the cases of `ferrl bench --check`.
//!
//! Three kinds of checks: a result is close to the CPU's ([`Check::close`]); it has the same bits where the contract requires it
//! ([`Check::same`]); it has the same bits when repeated. Inputs depend only on the case.

mod attention;
mod decode;
mod decode_gemm;
mod linear;
mod logp;
mod low_rank;
mod masters;
mod rows;
mod sampling;
mod shapes;
mod units;
mod vectors;
mod vocab;

use crate::backend::Backend;
use crate::philox::{normals, philox4x32};
use crate::{Buffer, DType, Result, Weight, narrow, widen};

#[derive(Clone, Debug)]
pub struct CheckOutcome {
    /// What was compared.
    pub name: String,
    /// The largest error, or the number of elements whose bits differ.
    pub worst: f64,
    /// The tolerance.
    pub limit: f64,
}

impl CheckOutcome {
    /// Whether the device passed.
    pub fn is_right(&self) -> bool {
        self.worst <= self.limit
    }
}

/// A device under test and the reference.
pub struct Check<'a> {
    /// The reference.
    pub cpu: &'a dyn Backend,
    /// The device under test.
    pub card: &'a dyn Backend,
    each: &'a mut dyn FnMut(&CheckOutcome),
    right: bool,
}

/// A group of checks.
pub type CheckFn = fn(&mut Check<'_>) -> Result<()>;

/// Every case, by name.
pub const CASES: &[(&str, CheckFn)] = &[
    ("operands", shapes::all),
    ("vectors", vectors::all),
    ("masters", masters::all),
    ("rows", rows::all),
    ("rotated bias: bits", rows::rotated_bias),
    ("linear", linear::all),
    ("linear: bits", linear::bits),
    ("low rank", low_rank::all),
    ("attention", attention::results),
    ("attention: bits", attention::bits),
    ("decode GEMMs", decode_gemm::all),
    ("decode products", decode::all),
    ("logp head", logp::results),
    ("logp head: bits", logp::bits),
    ("logp head: known", logp::one_pass),
    ("sampling", sampling::draws),
    ("sampling: truncation", sampling::truncation),
    ("divergence", logp::divergence),
    ("shared vocabulary", vocab::results),
    ("shared vocabulary: bits", vocab::bits),
];

impl<'a> Check<'a> {
    /// No checks yet; `each` is called with every outcome.
    pub fn new(cpu: &'a dyn Backend, card: &'a dyn Backend, each: &'a mut dyn FnMut(&CheckOutcome)) -> Self {
        Check { cpu, card, each, right: true }
    }

    /// Whether all checks so far passed.
    pub fn is_right(&self) -> bool {
        self.right
    }

    fn report(&mut self, name: String, worst: f64, limit: f64) {
        let outcome = CheckOutcome { name, worst, limit };
        self.right &= outcome.is_right();
        (self.each)(&outcome);
    }

    /// Errors relative to the expected element plus the RMS of all.
    pub fn close(&mut self, name: impl Into<String>, got: &[f32], want: &[f32], limit: f64) {
        self.close_within(name, got, want, want, limit);
    }

    /// The same for a part of a result that may be pure rounding noise: relative to the RMS of the whole if that is larger.
    pub fn close_within(
        &mut self,
        name: impl Into<String>,
        got: &[f32],
        want: &[f32],
        whole: &[f32],
        limit: f64,
    ) {
        assert_eq!(got.len(), want.len());
        let size = |x: &[f32]| {
            let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            (squares / x.len().max(1) as f64).sqrt()
        };
        let typical = size(want).max(size(whole)).max(1e-30);
        let error = |(&g, &w): (&f32, &f32)| {
            let far = (f64::from(g) - f64::from(w)).abs() / (f64::from(w).abs() + typical);
            if far.is_nan() { f64::INFINITY } else { far }
        };
        let worst = got.iter().zip(want).map(error).fold(0.0, f64::max);
        self.report(name.into(), worst, limit);
    }

    /// Bitwise equality.
    pub fn same(&mut self, name: impl Into<String>, a: &[f32], b: &[f32]) {
        assert_eq!(a.len(), b.len());
        let wrong = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan()).count();
        self.report(name.into(), wrong as f64, 0.0);
    }
}

/// Standard normal numbers, a function of the seed.
pub fn random(seed: u32, n: usize) -> Vec<f32> {
    (0..n.div_ceil(4)).flat_map(|i| normals(philox4x32([i as u32, 0, 0, 0], [seed, 99]))).take(n).collect()
}

/// Numbers below `below`, a function of the seed.
pub fn random_ids(seed: u32, n: usize, below: usize) -> Vec<u32> {
    (0..n).map(|i| philox4x32([i as u32, 1, 0, 0], [seed, 99])[0] % below as u32).collect()
}

/// Values rounded to a type.
pub fn stored(dtype: DType, values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| if dtype == DType::Bf16 { widen(narrow(x)) } else { x }).collect()
}

/// A buffer with these elements.
pub fn upload(b: &dyn Backend, dtype: DType, values: &[f32]) -> Result<Buffer> {
    let mut buffer = b.alloc(dtype, values.len())?;
    b.write(&mut buffer, 0, values)?;
    Ok(buffer)
}

/// A buffer full of NaN, to detect elements that are never written.
pub fn nan_filled(b: &dyn Backend, dtype: DType, n: usize) -> Result<Buffer> {
    let mut buffer = b.alloc(dtype, n)?;
    b.fill(&mut buffer, f32::NAN)?;
    Ok(buffer)
}

/// A buffer's elements.
pub fn download(b: &dyn Backend, buffer: &Buffer) -> Result<Vec<f32>> {
    let mut values = vec![0.0; buffer.len()];
    b.read(buffer, 0, &mut values)?;
    Ok(values)
}

pub fn weight(b: &dyn Backend, dtype: DType, n: usize, k: usize, values: &[f32]) -> Result<Weight> {
    let mut w = b.weight(n, k, dtype, true)?;
    b.load_weight(&upload(b, DType::F32, values)?, &mut w)?;
    Ok(w)
}
