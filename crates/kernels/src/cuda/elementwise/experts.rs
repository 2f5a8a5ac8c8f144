//! Weighted sums of gathered rows.

use crate::backend::{ExpertOps, RowMix};
use crate::cuda::context::Cuda;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel};
use crate::{Buffer, Result, shapes};

impl ExpertOps for Cuda {
    fn mix_rows(&self, mix: RowMix<'_>, src: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::mix_rows(self, mix, src, out)?;
        if mix.rows.is_empty() {
            return Ok(());
        }
        let grid = Grid::new(mix.rows.len() / mix.per_row, 128);
        let (k, width) = (mix.per_row as u32, mix.width);
        let args = args![src, mix.rows, f32_ptr(mix.weights), k, width, &*out];
        self.launch("experts", &kernel("mix", &[src, out]), grid, &args)
    }
    fn mix_rows_backward(
        &self,
        mix: RowMix<'_>,
        src: &Buffer,
        dout: &Buffer,
        dsrc: &mut Buffer,
        dweights: &mut Buffer,
    ) -> Result<()> {
        shapes::mix_rows_backward(self, mix, [src, dout], [dsrc, dweights])?;
        if mix.rows.is_empty() {
            return Ok(());
        }
        let (k, width) = (mix.per_row as u32, mix.width);
        let args = args![src, dout, mix.rows, f32_ptr(mix.weights), k, width, &*dsrc, f32_ptr(dweights)];
        let grid = Grid::new(mix.rows.len(), 128);
        self.launch("experts", &kernel("mix_backward", &[src, dout, dsrc]), grid, &args)
    }
}
