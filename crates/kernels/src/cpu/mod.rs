//! The CPU backend: the readable reference and the fast path are the same code, generic over the instruction set.

pub mod activation;
pub mod attention;
mod backend;
pub mod element;
pub mod embed;
mod footprint;
pub mod head_norm;
pub mod linear;
pub mod logp;
pub mod math;
pub mod matmul;
pub mod memory;
pub mod norm;
pub mod optim;
pub mod peak;
pub mod pool;
pub mod rotary;
pub mod simd;
pub mod vector;

pub use footprint::FOOTPRINT;

use crate::backend::Backend;
use crate::error::{Error, Result};
use memory::Arena;
use pool::Pool;
use simd::Level;
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
    pub level: Level,
    /// Runs tasks.
    pub pool: Pool,
    /// Hands out buffers and scratch.
    pub arena: Arena,
}

impl Cpu {
    /// All cores unless `threads` says otherwise; the best instruction set unless `FERRL_SIMD` names one.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        Ok(Self::with_level(threads.unwrap_or_else(cores), Level::from_env()?))
    }
    /// For tests: that many threads at that level, which the CPU must have.
    pub fn with_level(threads: usize, level: Level) -> Self {
        assert!(level.is_available(), "this CPU has no {level:?}");
        Cpu { level, pool: Pool::new(threads), arena: Arena::default() }
    }
    /// Refuses to have more than so many bytes of buffers in use; `None` lifts the limit.
    pub fn limit_memory(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }
}
