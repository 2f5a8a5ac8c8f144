//! Mixture of experts: combining the outputs of several experts per token.

use super::VectorOps;
use crate::operands::*;
use crate::{Buffer, Result, composed, shapes};

/// Weighted sums of gathered rows.
pub trait ExpertOps: VectorOps {
    /// `out[t] = sum_j weights[t, j] * src[rows[t, j]]`, in f32, in order of `j`.
    fn mix_rows(&self, mix: RowMix<'_>, src: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::mix_rows(self.as_info(), mix, src, out)?;
        composed::mix_rows(self, mix, src, out)
    }
    /// `dsrc[rows[t, j]] = weights[t, j] * dout[t]` and `dweights[t, j] = dout[t] . src[rows[t, j]]`. Every row of `src` occurs
    /// once in `rows`.
    fn mix_rows_backward(
        &self,
        mix: RowMix<'_>,
        src: &Buffer,
        dout: &Buffer,
        dsrc: &mut Buffer,
        dweights: &mut Buffer,
    ) -> Result<()> {
        shapes::mix_rows_backward(self.as_info(), mix, [src, dout], [dsrc, dweights])?;
        composed::mix_rows_backward(self, mix, [src, dout], [dsrc, dweights])
    }
}
