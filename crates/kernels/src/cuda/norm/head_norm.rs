//! QK norm inside rows of `qkv`.

use crate::backend::{HeadNorm, HeadNormOps, Norm};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{Chunks, add_chunks, row_count};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel};
use crate::cuda::norm::offset;
use crate::{Buffer, DType, Result, composed, shapes};

/// Rows per block of the backward.
const CHUNK: usize = 16;
const WARPS: usize = 8;

/// Tiling for a head: elements per lane.
fn defines(op: Norm) -> String {
    format!("MOST={}", op.width.div_ceil(32))
}

fn check(norm: HeadNorm<'_>) {
    let (width, weights) = (norm.op.width, [norm.q_weight, norm.k_weight]);
    assert!(width == norm.heads.head_dim && width <= 512, "heads of up to 512 elements are normalised");
    assert!(weights.iter().all(|w| w.dtype() == DType::F32 && w.len() == width));
}

// A norm over all heads is a row norm: queries and keys are gathered, normalised and scattered.
impl HeadNormOps for Cuda {
    fn head_norm(&self, norm: HeadNorm<'_>, qkv: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::head_norm(self, norm, qkv, out)?;
        if norm.whole {
            return composed::head_norm(self, norm, qkv, out);
        }
        check(norm);
        let HeadNorm { op, heads, q_weight, k_weight, .. } = norm;
        assert_eq!(qkv.len(), out.len());
        let rows = row_count(qkv.len(), heads.qkv_width());
        let warps = rows * (heads.heads + 2 * heads.kv_heads);
        let args = args![
            qkv,
            q_weight,
            k_weight,
            &*out,
            rows as u32,
            heads.heads as u32,
            heads.kv_heads as u32,
            op.width as u32,
            op.centred,
            offset(op),
            op.eps
        ];
        let (name, grid) = (kernel("head_norm", &[qkv, out]), Grid::new(warps.div_ceil(8), 256).early());
        self.launch_variant("head_norm", &defines(op), &name, grid, &args)
    }
    fn head_norm_backward(
        &self,
        norm: HeadNorm<'_>,
        qkv: &Buffer,
        dqkv: &mut Buffer,
        dweights: [Option<&mut Buffer>; 2],
    ) -> Result<()> {
        shapes::head_norm_backward(self, norm, qkv, dqkv, dweights.each_ref().map(|d| d.as_deref()))?;
        if norm.whole {
            return composed::head_norm_backward(self, norm, qkv, dqkv, dweights);
        }
        check(norm);
        let HeadNorm { op, heads, q_weight, k_weight, .. } = norm;
        assert_eq!(qkv.len(), dqkv.len());
        let (rows, dim) = (row_count(qkv.len(), heads.qkv_width()), op.width);
        let chunks = rows.div_ceil(CHUNK);
        let wanted = dweights.iter().any(|d| d.is_some());
        let sums = if wanted { Some(self.arena.take(chunks * 2 * dim * 4)?) } else { None };
        let at = sums.as_ref().map_or(0, |s| s.ptr());
        let args = args![
            qkv,
            q_weight,
            k_weight,
            &*dqkv,
            rows as u32,
            heads.heads as u32,
            heads.kv_heads as u32,
            dim as u32,
            op.centred,
            offset(op),
            op.eps,
            CHUNK as u32,
            at
        ];
        let grid = Grid::new(chunks, (32 * WARPS) as u32).with_shared(WARPS * 2 * dim * 4);
        let name = kernel("head_norm_backward", &[qkv, dqkv]);
        self.launch_variant("head_norm", &defines(op), &name, grid, &args)?;
        for (from, to) in [0, dim].into_iter().zip(dweights) {
            if let Some(to) = to {
                assert_eq!(to.len(), dim);
                let sums = Chunks { at: at + (from * 4) as u64, stride: 2 * dim, count: chunks, width: dim };
                add_chunks(self, sums, (f32_ptr(to), true))?;
            }
        }
        Ok(())
    }
}
