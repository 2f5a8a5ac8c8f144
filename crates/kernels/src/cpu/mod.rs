//! The CPU backend: one implementation, generic over the instruction set, is both the reference and the fast path.

// Private: operations are called through the trait `Backend`, which checks their operands.
mod activation;
mod attention;
mod element;
mod embed;
mod experts;
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

use crate::backend::{Backend, DecodeOps, DeviceInfo, GraphOps, Heads};
use crate::{Buffer, DType, Error, Result, Weight, cores, counted};
use memory::Arena;
use pool::ThreadPool;
use std::sync::Arc;

/// Opens the CPU; the only index is 0.
pub fn open(index: usize, threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    if index > 0 {
        return Err(Error::usage("all cores are one device, number 0").fix("leave the number out"));
    }
    Ok(Arc::new(Cpu::new(threads)?))
}

/// Thread pool, instruction set, and caching allocator.
pub struct Cpu {
    /// Instruction set of every kernel.
    level: Level,
    pool: ThreadPool,
    /// Allocates buffers and scratch.
    arena: Arena,
}

impl Cpu {
    /// One thread per core unless `threads` is given; the best instruction set unless `FERRL_SIMD` names one.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        Self::with_level(threads.unwrap_or_else(cores), Level::from_env()?)
    }
    /// For tests: a given number of threads and instruction set.
    pub fn with_level(threads: usize, level: Level) -> Result<Self> {
        Ok(Cpu { level, pool: ThreadPool::new(threads)?, arena: Arena::default() })
    }
    /// Instruction set of its kernels.
    pub fn level(&self) -> Level {
        self.level
    }
    /// Number of compute threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }
    /// Limits the bytes of all buffers; `None` removes the limit.
    pub fn limit_memory(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }
}

impl DeviceInfo for Cpu {
    fn as_info(&self) -> &dyn DeviceInfo {
        self
    }
    fn holds(&self, buffer: &Buffer) -> bool {
        memory::memory_of(buffer).is_some_and(|m| m.has_room(buffer.len(), buffer.dtype().size()))
    }
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool {
        linear::holds(weight, backward)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        memory::u32s(buffer)
    }
    fn block_tokens(&self) -> usize {
        attention::BLOCK
    }
    fn block_len(&self, heads: Heads) -> usize {
        attention::paged::block_len(heads)
    }
}

impl Backend for Cpu {
    fn describe(&self) -> String {
        format!("cpu, {}, {}", self.level.name(), counted(self.pool.threads(), "thread"))
    }
    fn instruction_set(&self) -> &'static str {
        self.level.name()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        peak::measure(self.level, dtype) * self.pool.threads() as f64
    }
}

// The defaults compose these from the operations above.
impl DecodeOps for Cpu {}
impl GraphOps for Cpu {}
