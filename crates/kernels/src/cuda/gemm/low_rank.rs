//! LoRA: merge in one pass over the weight, and GEMMs that read column ranges in place.

use crate::backend::{ColumnsOf, LinearGrads, LowRank, LowRankGrad, LowRankOps};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::convert;
use crate::cuda::gemm::linear::{cut_forward, stored, weight_gradient};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, letter, ptr, split_parts};
use crate::{Buffer, DType, Result, Weight, composed, shapes};
use std::ops::Range;

/// Rows per block, and ranks whose factors it loads at a time.
const ROWS: usize = 16;
const PIECE: usize = 32;
/// Threads per block; each has four columns.
const THREADS: usize = 256;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("ROWS", ROWS), ("PIECE", PIECE)];

impl LowRankOps for Cuda {
    fn load_adapted(&self, base: &Buffer, parts: &[LowRank<'_>], weight: &mut Weight) -> Result<()> {
        shapes::load_adapted(self, base, parts, weight)?;
        let (n, k) = (weight.n, weight.k);
        assert!(base.len() == n * k && parts.iter().all(|p| p.a.len() == p.r * k && p.rows().end <= n));
        if self.merges_in_copies(weight) || split_parts(base, 0).is_some() {
            return composed::load_adapted(self, base, parts, weight);
        }
        let (to, out) = stored(weight);
        let (from, size) = ((ptr(base), base.dtype()), base.dtype().size());
        let at = |row: usize| (from.0 + (row * k * size) as u64, to + (row * k * out.size()) as u64);
        let plain = |rows: Range<usize>| {
            let (from, to) = at(rows.start);
            convert(self, (from, base.dtype()), (to, out), rows.len() * k)
        };
        let mut done = 0;
        for part in parts {
            let rows = part.rows();
            if done < rows.start {
                plain(done..rows.start)?;
            }
            done = rows.end;
            let (from, to) = at(rows.start);
            let grid = Grid::plane(k.div_ceil(4 * THREADS), rows.len().div_ceil(ROWS), THREADS as u32);
            let name = format!("load_adapted_{}{}", letter(base.dtype()), letter(out));
            let all = args![from, part.a, part.b, to, rows.len() as u32, k as u32, part.r as u32];
            self.launch("low_rank", &name, grid, &all)?;
        }
        if done < n { plain(done..n) } else { Ok(()) }
    }

    // The kernel has four columns per thread, and reads the base in place.
    fn merges_in_copies(&self, weight: &Weight) -> bool {
        !weight.k.is_multiple_of(4)
    }

    // Split-k is allowed here: gradients of a micro-batch need not have the bits of another's.
    fn low_rank_dw(&self, of: LowRankGrad<'_>, grads: LinearGrads<'_>) -> Result<()> {
        shapes::low_rank_dw(self, of, &grads)?;
        let LowRankGrad { x, w, y, tokens } = of;
        let aligned = |c: ColumnsOf<'_>| c.from.is_multiple_of(8) && (c.of.len() / tokens).is_multiple_of(8);
        if tokens == 0 || !aligned(x) || !aligned(y) {
            return composed::low_rank_dw(self, of, grads);
        }
        let Some(dw) = grads.weight else { return Ok(()) };
        let at = |c: ColumnsOf<'_>| (ptr(c.of) + (c.from * c.of.dtype().size()) as u64, c.of.len() / tokens);
        let dtype: DType = x.of.dtype();
        let u = self.arena.take(tokens * w.n * dtype.size())?;
        cut_forward(self, [tokens, w.n, w.k], at(x), stored(w), (u.ptr(), dtype))?;
        let to = (f32_ptr(dw), grads.add);
        weight_gradient(self, [tokens, w.n, y.width], (u.ptr(), w.n), at(y), dtype, to)
    }
}
