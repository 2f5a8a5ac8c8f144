//! LoRA: `w + bᵀ a` on some rows of `w`, and the gradients of the two factors.

use super::LinearOps;
use crate::operands::*;
use crate::{Buffer, Result, Weight, composed, shapes};

/// Merging LoRA updates into weights, and the gradients of their factors.
pub trait LowRankOps: LinearOps {
    /// `out = base + bᵀ a` in f32 on the rows of each part; `base` elsewhere. `bᵀ a` is an FMA chain over the rank, then added
    /// to the base once.
    fn adapted(&self, base: &Buffer, parts: &[LowRank<'_>], out: &mut Buffer) -> Result<()> {
        shapes::adapted(self.as_info(), base, parts, out)?;
        composed::adapted(self, base, parts, out)
    }
    /// [`LowRankOps::adapted`], rounded to a GEMM weight: the same bits.
    fn load_adapted(&self, base: &Buffer, parts: &[LowRank<'_>], weight: &mut Weight) -> Result<()> {
        shapes::load_adapted(self.as_info(), base, parts, weight)?;
        composed::load_adapted(self, base, parts, weight)
    }
    /// Whether [`LowRankOps::load_adapted`] needs f32 scratch: at most two copies of the weight and one of each part's rows.
    fn merges_in_copies(&self, _weight: &Weight) -> bool {
        true
    }
    /// The gradient `(x wᵀ)ᵀ y` of one factor, summed over all rows of `x` and `y`, of which column ranges may be used.
    fn low_rank_dw(&self, of: LowRankGrad<'_>, grads: LinearGrads<'_>) -> Result<()> {
        shapes::low_rank_dw(self.as_info(), of, &grads)?;
        composed::low_rank_dw(self, of, grads)
    }
}
