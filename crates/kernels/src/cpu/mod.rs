//! The CPU backend: the readable reference and the fast path are the same code, generic over the instruction set.

// Operations have one way in from outside, the trait `Backend`: it checks what they are given.
mod activation;
mod attention;
mod backend;
mod element;
mod embed;
mod footprint;
mod head_norm;
mod linear;
mod logp;
mod math;
mod matmul;
mod memory;
mod norm;
mod optim;
mod peak;
mod pool;
mod rotary;
mod simd;
mod vector;

pub use footprint::FOOTPRINT;
pub use simd::{Level, narrow, widen};

use crate::backend::Backend;
use crate::error::{Error, Result};
use memory::Arena;
use pool::Pool;
use std::sync::Arc;

/// Opens the processor; there is only number 0.
pub fn open(index: usize, threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    if index > 0 {
        return Err(Error::usage("all cores are one device, number 0").fix("leave the number out"));
    }
    Ok(Arc::new(Cpu::new(threads)?))
}

/// Threads, an instruction set, and memory that is kept.
pub struct Cpu {
    /// Instruction set of every kernel.
    level: Level,
    /// Runs tasks.
    pool: Pool,
    /// Hands out buffers and scratch.
    arena: Arena,
}

impl Cpu {
    /// All cores unless `threads` says otherwise; the best instruction set unless `FERRL_SIMD` names one.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        Self::with_level(threads.unwrap_or_else(cores), Level::from_env()?)
    }
    /// For tests: that many threads at that level.
    pub fn with_level(threads: usize, level: Level) -> Result<Self> {
        Ok(Cpu { level, pool: Pool::new(threads)?, arena: Arena::default() })
    }
    /// Instruction set of its kernels.
    pub fn level(&self) -> Level {
        self.level
    }
    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
    /// Refuses to have more than so many bytes of buffers in use; `None` lifts the limit.
    pub fn limit_memory(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }
}
