//! Peak multiply-add throughput of this GPU, the reference for GEMM benchmarks.

use super::context::Cuda;
use super::gemm::Gemm;
use crate::{DType, Result};
use std::time::Instant;

/// Size of the square bf16 GEMM that is timed.
const SIDE: usize = 8192;

/// GFLOP/s: bf16, of a large GEMM; f32, of all FP32 units at the GPU's clock.
pub fn measure(cuda: &Cuda, dtype: DType) -> f64 {
    if dtype == DType::Bf16 {
        // If this fails, everything that is measured against it fails, too, with its own message.
        return timed(cuda).unwrap_or(f64::NAN);
    }
    let units = if cuda.card.capability == (8, 0) { 64.0 } else { 128.0 };
    2e-6 * units * f64::from(cuda.card.processors) * f64::from(cuda.card.clock)
}

fn timed(cuda: &Cuda) -> Result<f64> {
    let room = || cuda.arena.take(SIDE * SIDE * 2);
    let (x, w, y) = (room()?, room()?, room()?);
    for (seed, memory) in [(1u32, &x), (2, &w)] {
        let args = super::launch::args![memory, SIDE * SIDE, seed];
        cuda.launch_flat("linear", "noise", SIDE * SIDE, &args)?;
    }
    let product = Gemm::forward([SIDE; 3], x.ptr(), w.ptr(), (y.ptr(), DType::Bf16));
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        cuda.synchronize()?;
        let start = Instant::now();
        for _ in 0..4 {
            cuda.products.gemm(cuda, &product)?;
        }
        cuda.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / 4.0);
    }
    Ok(2e-9 * (SIDE * SIDE * SIDE) as f64 / best)
}
