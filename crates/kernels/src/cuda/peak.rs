//! The most multiply-adds this card does: the yardstick for matrix products.

use super::context::Cuda;
use super::gemm::Gemm;
use crate::buffer::DType;
use crate::error::Result;
use std::time::Instant;

/// Side of the square product that is timed in bf16.
const SIDE: usize = 8192;

/// GFLOP/s: of a large product in bf16; in f32, of all plain units at the card's clock.
pub fn measure(cuda: &Cuda, dtype: DType) -> f64 {
    if dtype == DType::Bf16 {
        // A card that fails here fails in everything that is measured against it, with a message of its own.
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
