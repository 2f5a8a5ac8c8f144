//! The interface of a device: about fifty coarse operations, each backward next to its forward.
//!
//! Rules for every backend:
//! - **Row invariance.** A forward result for a token depends only on that token's sequence: the same bits alone or in any batch,
//!   at any place in it, with any number of threads.
//! - **Fixed-order sums.** Gradients have the same bits with any number of threads.
//! - Accumulators are f32 whatever the storage type; `f32` and `bf16` are the storage types of activations ("compute type"). The
//!   residual stream, statistics, master weights and gradients of weights are always f32.
//! - Operands that do not fit (lengths, types, indices, memory of another device) are errors, detected before anything is
//!   computed: `shapes` has the requirements of each operation.

mod attention;
mod experts;
mod graph;
mod head;
mod layers;
mod low_rank;
mod memory;
mod optimizer;
mod vocab;

pub use crate::operands::*;
pub use attention::{AttentionOps, CacheOps, DecodeOps, RopeOps};
pub use experts::ExpertOps;
pub use graph::GraphOps;
pub use head::{DivergenceOps, HeadOps, SampleOps};
pub use layers::{ActivationOps, EmbeddingOps, HeadNormOps, LinearOps, NormOps};
pub use low_rank::LowRankOps;
pub use memory::{DOT_CHUNK, DeviceInfo, MemoryOps, VectorOps};
pub use optimizer::OptimizerOps;
pub use vocab::VocabOps;

use crate::{Card, DType, Error, Result};

/// A device: all operations together.
pub trait Backend:
    MemoryOps
    + VectorOps
    + EmbeddingOps
    + NormOps
    + HeadNormOps
    + LinearOps
    + LowRankOps
    + ActivationOps
    + ExpertOps
    + AttentionOps
    + CacheOps
    + RopeOps
    + DecodeOps
    + HeadOps
    + DivergenceOps
    + SampleOps
    + VocabOps
    + OptimizerOps
    + GraphOps
    + Send
    + Sync
{
    /// One line for users: device, instruction set, threads.
    fn describe(&self) -> String;
    /// The instruction set of a CPU: two of them agree within rounding, not to the bit. Empty for a card.
    fn instruction_set(&self) -> &'static str {
        ""
    }
    /// Whether rows are bitwise invariant to their batch (the default; see [`Backend::set_exact`]).
    fn is_exact(&self) -> bool {
        true
    }
    /// With `false`, a row's bits may depend on its batch where that is faster; repeating the same work still gives the same
    /// bits. An error on devices where it would gain nothing.
    fn set_exact(&self, exact: bool) -> Result<()> {
        if exact {
            return Ok(());
        }
        Err(Error::usage("inexact arithmetic changes nothing on this device, where exactness costs nothing")
            .fix("leave it out, or compute on another device"))
    }
    /// Waits until all launched work is complete. Results are ordered without it; it is for timing and for reporting errors.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    /// Peak GFLOP/s of multiply-adds in a type, the reference for benchmarks.
    fn peak_gflops(&self, dtype: DType) -> f64;
    /// Batch tokens that saturate the device; larger batches only take memory.
    fn busy_tokens(&self) -> usize {
        2048
    }
    /// The GPU, for communication libraries that access its memory; `None` for other devices.
    fn as_card(&self) -> Option<&Card> {
        None
    }
}
