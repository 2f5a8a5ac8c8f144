//! Peak multiply-add throughput of this CPU, the reference for GEMM benchmarks.

use super::simd::{Level, bf16_per_unit, multiversion};
use crate::buffer::DType;
use std::time::Instant;

const CHAINS: usize = 24;

multiversion! {
    fn f32_chains<S>(s, rounds: usize) -> f32 {
        // Different chains, or the optimiser would compute one for all.
        let mut acc = [s.splat(0.0); CHAINS];
        for (i, c) in acc.iter_mut().enumerate() {
            *c = s.splat(std::hint::black_box(i as f32));
        }
        let (a, b) = (s.splat(0.999_9), s.splat(1e-4));
        for _ in 0..rounds {
            for c in &mut acc {
                *c = s.fma(*c, a, b);
            }
        }
        let mut sum = 0.0;
        for c in acc {
            sum += s.sum(c);
        }
        sum
    }
}

multiversion! {
    fn bf16_chains<S>(s, rounds: usize) -> f32 {
        let mut acc = [s.splat(0.0); CHAINS];
        for (i, c) in acc.iter_mut().enumerate() {
            *c = s.splat(std::hint::black_box(i as f32));
        }
        let pair = s.splat_pair(0x3c00_3c00);
        for _ in 0..rounds {
            for c in &mut acc {
                *c = s.dot(pair, pair, *c);
            }
        }
        let mut sum = 0.0;
        for c in acc {
            sum += s.sum(c);
        }
        sum
    }
}

/// GFLOP/s of one thread: the best of several short runs.
pub fn measure(level: Level, dtype: DType) -> f64 {
    let rounds = 100_000;
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        let sum = match dtype {
            DType::Bf16 => bf16_chains(level, rounds),
            _ => f32_chains(level, rounds),
        };
        std::hint::black_box(sum);
        best = best.min(start.elapsed().as_secs_f64());
    }
    let per_lane = if dtype == DType::Bf16 { 2 * bf16_per_unit(level) } else { 2 } as f64;
    rounds as f64 * CHAINS as f64 * 16.0 * per_lane / best / 1e9
}
