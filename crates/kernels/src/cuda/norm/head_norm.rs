//! RMSNorm or LayerNorm of each query and key head inside rows of `qkv`.

use crate::backend::{HeadNormOps, Heads, Norm};
use crate::buffer::{Buffer, DType};
use crate::cuda::context::Cuda;
use crate::cuda::elementwise::vector::{add_chunks, row_count};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{f32_ptr, kernel};
use crate::cuda::norm::offset;
use crate::error::Result;
use crate::shapes;

/// Rows of a block of the backward.
const CHUNK: usize = 16;
const WARPS: usize = 8;

/// How the kernels are cut to a head: elements of it that a lane has.
fn defines(op: Norm) -> String {
    format!("MOST={}", op.width.div_ceil(32))
}

fn check(op: Norm, heads: Heads, weights: [&Buffer; 2]) {
    assert!(op.width == heads.head_dim && op.width <= 512, "heads of up to 512 elements are normalised");
    assert!(weights.iter().all(|w| w.dtype() == DType::F32 && w.len() == op.width));
}

impl HeadNormOps for Cuda {
    fn head_norm(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        shapes::head_norm(self, op, heads, qkv, [q_weight, k_weight], out)?;
        check(op, heads, [q_weight, k_weight]);
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
        let (name, grid) = (kernel("head_norm", &[qkv, out]), Grid::new(warps.div_ceil(8), 256));
        self.launch_variant("head_norm", &defines(op), &name, grid, &args)
    }
    fn head_norm_backward(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        dqkv: &mut Buffer,
        dq_weight: Option<&mut Buffer>,
        dk_weight: Option<&mut Buffer>,
    ) -> Result<()> {
        let dweights = [dq_weight.as_deref(), dk_weight.as_deref()];
        shapes::head_norm_backward(self, op, heads, qkv, [q_weight, k_weight], dqkv, dweights)?;
        check(op, heads, [q_weight, k_weight]);
        assert_eq!(qkv.len(), dqkv.len());
        let (rows, dim) = (row_count(qkv.len(), heads.qkv_width()), op.width);
        let chunks = rows.div_ceil(CHUNK);
        let wanted = dq_weight.is_some() || dk_weight.is_some();
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
        for (from, to) in [(0, dq_weight), (dim, dk_weight)] {
            if let Some(to) = to {
                assert_eq!(to.len(), dim);
                add_chunks(self, at + (from * 4) as u64, 2 * dim, chunks, dim, f32_ptr(to), true)?;
            }
        }
        Ok(())
    }
}
