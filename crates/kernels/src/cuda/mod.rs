//! The CUDA backend.
//!
//! One context, one stream, one caching allocator (`handles` documents ownership). Kernels are `.cu` text next to their
//! launchers, compiled at run time for the GPU at hand ([`compile`]) after a common prelude (`prelude.cuh`); large GEMMs go
//! through cuBLASLt (`gemm`). Because all work is on one stream, freed memory can be reused at once. Transfers to other GPUs
//! have a stream of their own and hold their memory until the compute stream waits for them (`exchange`).

// Private: operations are called through the trait `Backend`, which checks their operands.
mod ahead;
mod attention;
pub mod compile;
mod context;
mod decode;
mod elementwise;
mod exchange;
mod footprint;
mod gemm;
mod graph;
mod handles;
mod head;
mod launch;
pub(crate) mod libraries;
mod memory;
mod norm;
mod optim;
mod peak;
mod profile;
mod tensor_map;
mod trace;
mod transfer;

pub use ahead::settle;
pub use context::Cuda;
pub(crate) use exchange::{CardId, CardStaging, ExchangeStream};
pub use footprint::FOOTPRINT;
pub(crate) use handles::StreamEvent;
pub(crate) use memory::element;

use crate::backend::{Backend, DeviceInfo, Heads};
use crate::{Buffer, DType, Result, Weight};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub fn open(index: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Cuda::new(index)?))
}

impl DeviceInfo for Cuda {
    fn as_info(&self) -> &dyn DeviceInfo {
        self
    }
    fn holds(&self, buffer: &Buffer) -> bool {
        memory::holds(&self.arena, buffer)
    }
    // One copy serves forward and backward.
    fn holds_weight(&self, weight: &Weight, _backward: bool) -> bool {
        gemm::linear::holds(&self.arena, weight)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        memory::u32s(buffer)
    }
    fn block_tokens(&self) -> usize {
        attention::TOKENS
    }
    fn block_len(&self, heads: Heads) -> usize {
        attention::block_len(heads)
    }
    fn vocab_tile(&self) -> usize {
        head::logp::TILE
    }
}

impl Backend for Cuda {
    fn describe(&self) -> String {
        self.describe_card()
    }
    fn is_exact(&self) -> bool {
        self.exact()
    }
    fn set_exact(&self, exact: bool) -> Result<()> {
        self.exact.store(exact, Ordering::Relaxed);
        Ok(())
    }
    fn wait(&self) -> Result<()> {
        self.synchronize()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        peak::measure(self, dtype)
    }
    fn busy_tokens(&self) -> usize {
        16384
    }
    fn as_card(&self) -> Option<&Cuda> {
        Some(self)
    }
}
