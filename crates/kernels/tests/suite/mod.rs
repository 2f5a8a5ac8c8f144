//! What every test of an operation needs: data, every level and thread count, comparisons, and the rules of
//! the backend's contract as one [`check`].
#![allow(dead_code, clippy::unwrap_used)] // not every test uses every helper; helpers of tests are tests

use ferrl_kernels::backend::MemoryOps;
use ferrl_kernels::cpu::{Cpu, Level, narrow, widen};
use ferrl_kernels::philox::{normals, philox4x32};
use ferrl_kernels::{Buffer, DType};
use std::sync::Once;

/// Thread counts every result must be the same for.
pub const THREADS: [usize; 3] = [1, 2, 3];
/// Storage types of activations.
pub const STORAGE: [DType; 2] = [DType::F32, DType::Bf16];
/// Relative error of one rounding to bf16, doubled.
pub const BF16: f64 = 1.0 / 256.0;

/// The levels this CPU has, slowest first; says once which ones it has not.
pub fn levels() -> Vec<Level> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        for level in Level::missing() {
            eprintln!("skipped: this CPU has no {level}");
        }
    });
    Level::available()
}

/// At every level, with every number of threads.
pub fn for_each_cpu(mut f: impl FnMut(&Cpu)) {
    for level in levels() {
        for threads in THREADS {
            f(&Cpu::with_level(threads, level).unwrap());
        }
    }
}

/// Standard normal numbers that depend on the seed alone.
pub fn random(seed: u32, n: usize) -> Vec<f32> {
    (0..n.div_ceil(4)).flat_map(|i| normals(philox4x32([i as u32, 0, 0, 0], [seed, 77]))).take(n).collect()
}

/// Numbers below `below` that depend on the seed alone.
pub fn random_ids(seed: u32, n: usize, below: u32) -> Vec<u32> {
    (0..n).map(|i| philox4x32([i as u32, 1, 0, 0], [seed, 77])[0] % below).collect()
}

/// A buffer with these elements.
pub fn upload(cpu: &Cpu, dtype: DType, values: &[f32]) -> Buffer {
    let mut buffer = cpu.alloc(dtype, values.len()).unwrap();
    cpu.write(&mut buffer, 0, values).unwrap();
    buffer
}

/// A buffer full of NaN, so that an element nobody writes is noticed.
pub fn unwritten(cpu: &Cpu, dtype: DType, n: usize) -> Buffer {
    upload(cpu, dtype, &vec![f32::NAN; n])
}

/// A buffer's elements.
pub fn download(cpu: &Cpu, buffer: &Buffer) -> Vec<f32> {
    let mut values = vec![0.0; buffer.len()];
    cpu.read(buffer, 0, &mut values).unwrap();
    values
}

/// As a buffer of that type would hold them.
pub fn stored(dtype: DType, values: &[f32]) -> Vec<f32> {
    values.iter().map(|&x| if dtype == DType::Bf16 { widen(narrow(x)) } else { x }).collect()
}

/// In f64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x as f64).collect()
}

/// The picked rows, in the order of `picks`.
pub fn pick<T: Copy>(values: &[T], width: usize, picks: &[usize]) -> Vec<T> {
    picks.iter().flat_map(|&r| values[r * width..(r + 1) * width].iter().copied()).collect()
}

/// Equal in every bit.
pub fn assert_same_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}: lengths differ");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a.to_bits() == b.to_bits(), "{what}: element {i} is {a:e} and {b:e}");
    }
}

/// Within `relative` of each value, and `absolute` of the largest one or of 1.
pub fn assert_close(what: &str, got: &[f32], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "{what}: lengths differ");
    let absolute = absolute * want.iter().fold(1f64, |m, x| m.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let far = (got as f64 - want).abs();
        assert!(far <= relative * want.abs() + absolute, "{what}: element {i} is {got:e}, not {want:e}");
    }
}

/// Gradient of `f` at `x`, by central differences.
pub fn differences(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let h = 1e-6;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + h;
            let up = f(&x);
            x[i] = at - h;
            let down = f(&x);
            x[i] = at;
            (up - down) / (2.0 * h)
        })
        .collect()
}

/// Sum of products.
pub fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// All results of an operation: those with rows, and the sums over rows.
pub type Results<T> = (Vec<Vec<T>>, Vec<Vec<T>>);

/// An operation with its backward, on data of its own.
pub trait Op {
    /// For messages.
    fn name(&self) -> String;
    /// Rows of the data.
    fn rows(&self) -> usize;
    /// Every result that has rows (gradients of inputs too), for a batch of the picked rows.
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>>;
    /// Every f32 result that is a sum over all rows.
    fn sums(&self, _cpu: &Cpu, _dtype: DType) -> Vec<Vec<f32>> {
        Vec::new()
    }
    /// Both for all rows, in f64 from the stored inputs.
    fn exact(&self, dtype: DType) -> Results<f64>;
    /// Largest error allowed, relative to the largest result (or 1).
    fn tolerance(&self) -> f64 {
        2e-5
    }
    /// The same for results that pass through storage of this type on the way.
    fn slack(&self, _dtype: DType) -> f64 {
        self.tolerance()
    }
}

/// That an operation is right and keeps the contract: at every level near the exact results and those of the
/// portable level; rows the same bits alone, elsewhere, in other batches and with any number of threads; sums the
/// same bits with any number of threads.
pub fn check(op: &dyn Op) {
    let rows = op.rows();
    let all: Vec<usize> = (0..rows).collect();
    let backwards: Vec<usize> = (0..rows).rev().collect();
    let twice: Vec<usize> = (0..2 * rows).map(|i| i % rows).collect();
    let sparse: Vec<usize> = (0..rows).step_by(3).collect();
    let batches = [all.clone(), backwards, twice, sparse, vec![0], vec![rows / 2], vec![rows - 1]];
    for dtype in STORAGE {
        let relative = if dtype == DType::Bf16 { BF16 } else { 1e-5 };
        let (exact, tolerance) = (op.exact(dtype), op.slack(dtype));
        let mut portable: Option<Results<f32>> = None;
        for level in levels() {
            let name = format!("{} {} {}", op.name(), dtype.name(), level.name());
            let one = Cpu::with_level(1, level).unwrap();
            let base = (op.by_row(&one, dtype, &all), op.sums(&one, dtype));
            assert_eq!((base.0.len(), base.1.len()), (exact.0.len(), exact.1.len()), "{name}");
            let portable = portable.get_or_insert_with(|| base.clone());
            for (k, got) in base.0.iter().enumerate() {
                assert_close(&format!("{name} result {k}"), got, &exact.0[k], relative, tolerance);
                let want = wide(&portable.0[k]);
                assert_close(
                    &format!("{name} result {k} against portable"),
                    got,
                    &want,
                    2.0 * relative,
                    tolerance,
                );
            }
            for (k, got) in base.1.iter().enumerate() {
                assert_close(&format!("{name} sum {k}"), got, &exact.1[k], 1e-5, tolerance);
                let want = wide(&portable.1[k]);
                assert_close(&format!("{name} sum {k} against portable"), got, &want, 1e-5, tolerance);
            }
            for threads in THREADS {
                let cpu = Cpu::with_level(threads, level).unwrap();
                for (b, picks) in batches.iter().enumerate() {
                    for (k, got) in op.by_row(&cpu, dtype, picks).iter().enumerate() {
                        let want = pick(&base.0[k], base.0[k].len() / rows, picks);
                        let what = format!("{name} result {k} of batch {b} with {threads} threads");
                        assert_same_bits(&what, got, &want);
                    }
                }
                for (k, got) in op.sums(&cpu, dtype).iter().enumerate() {
                    assert_same_bits(&format!("{name} sum {k} with {threads} threads"), got, &base.1[k]);
                }
            }
        }
    }
}
