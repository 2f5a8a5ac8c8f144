//! What a device must be able to do: about fifty coarse operations, each backward beside its forward.
//!
//! Rules every backend keeps:
//! - **Row invariance.** A forward result for a token depends on that token's sequence alone: the same bits
//!   alone or in any batch, at any place in it, with any number of threads.
//! - **Fixed-order sums.** Gradients are the same bits under any number of threads.
//! - Sums are kept in f32 whatever the storage type; `f32` and `bf16` name the storage of activations ("compute
//!   type"). The residual stream, statistics, master weights and gradients of weights are always f32.
//! - Operands that do not fit (lengths, types, indices, memory of another device) are errors, found before anything is
//!   computed: `shapes` has what each operation asks for.

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
pub use memory::{DOT_CHUNK, Home, MemoryOps, VectorOps};
pub use optimizer::OptimizerOps;
pub use vocab::VocabOps;

use crate::Card;
use crate::buffer::DType;
use crate::error::{Error, Result};

/// A device: all kinds of operations together.
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
    /// One line for people: device, instruction set, threads.
    fn describe(&self) -> String;
    /// The instruction set of a CPU: two of them agree within rounding, not to the bit. Empty for a card.
    fn instruction_set(&self) -> &'static str {
        ""
    }
    /// Whether rows are invariant to the bit: they are unless [`Backend::set_exact`] said that they need not be.
    fn is_exact(&self) -> bool {
        true
    }
    /// Without exactness a row's bits may depend on the batch it is in, where that is faster; the same work still gives
    /// the same bits every time. An error where nothing would be gained.
    fn set_exact(&self, exact: bool) -> Result<()> {
        if exact {
            return Ok(());
        }
        Err(Error::usage("inexact arithmetic changes nothing on this device, where exactness costs nothing")
            .fix("leave it out, or compute on another device"))
    }
    /// Waits until everything that was started is done. Operations give their results in order without it; it is for
    /// clocks and for errors.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    /// The most multiply-adds the device can do in that type, in GFLOP/s: the yardstick for benches.
    fn peak_gflops(&self, dtype: DType) -> f64;
    /// Tokens of a batch that keep the device busy; larger ones only take memory.
    fn busy_tokens(&self) -> usize {
        2048
    }
    /// The card, for libraries that move its memory; `None` where the device is none.
    fn as_card(&self) -> Option<&Card> {
        None
    }
}
