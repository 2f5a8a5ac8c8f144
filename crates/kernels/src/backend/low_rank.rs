//! Low-rank additions to weights (LoRA): `w + bᵀ a` on some rows of `w`, and the gradients of the two factors.

use super::LinearOps;
use crate::buffer::{Buffer, Weight};
use crate::composed;
use crate::error::Result;
use crate::operands::*;
use crate::shapes;

/// Weights with low-rank additions, and the gradients of these.
pub trait LowRankOps: LinearOps {
    /// `out = base + bᵀ a` in f32, of every part; `base` elsewhere. Each sum is a chain over the rank, added to the base at once.
    fn adapted(&self, base: &Buffer, parts: &[LowRank<'_>], out: &mut Buffer) -> Result<()> {
        shapes::adapted(self.as_home(), base, parts, out)?;
        composed::adapted(self, base, parts, out)
    }
    /// [`LowRankOps::adapted`], rounded to what products read: the same bits.
    fn load_adapted(&self, base: &Buffer, parts: &[LowRank<'_>], weight: &mut Weight) -> Result<()> {
        shapes::load_adapted(self.as_home(), base, parts, weight)?;
        composed::load_adapted(self, base, parts, weight)
    }
    /// Whether [`LowRankOps::load_adapted`] works on copies of the weight in f32: two at most, and one of each part's rows.
    fn merges_in_copies(&self, _weight: &Weight) -> bool {
        true
    }
    /// The gradient `(x wᵀ)ᵀ y` of one factor, over all rows of `x` and `y`, of which columns may be left out.
    fn low_rank_dw(&self, of: LowRankGrad<'_>, grads: LinearGrads<'_>) -> Result<()> {
        shapes::low_rank_dw(self.as_home(), of, &grads)?;
        composed::low_rank_dw(self, of, grads)
    }
}
