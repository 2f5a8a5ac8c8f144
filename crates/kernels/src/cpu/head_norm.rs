//! RMSNorm or LayerNorm of each query and key head inside rows of `qkv`.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::f32s;
use super::norm::{Partials, RowGradient, norm_row};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{copy_row, row_count, rows_of_task, typed};
use crate::backend::{HeadNormOps, Heads, Norm};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::shapes;

/// The weights of a call, and that they fit.
fn parameters<'a>(op: Norm, heads: Heads, q_weight: &'a Buffer, k_weight: &'a Buffer) -> [&'a [f32]; 2] {
    let weights = [f32s(q_weight), f32s(k_weight)];
    assert!(op.width == heads.head_dim && weights.iter().all(|w| w.len() == op.width));
    weights
}

impl HeadNormOps for Cpu {
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
        let [q_weight, k_weight] = parameters(op, heads, q_weight, k_weight);
        let width = heads.qkv_width();
        assert_eq!(qkv.len(), out.len());
        let rows = row_count(qkv.len(), width);
        typed!([ref qkv, mut out] {
            let out = Disjoint::new(out);
            self.pool.ranges(rows, rows_of_task(width), |r| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let out = unsafe { out.part(r.start, r.len()) };
                forward_rows(self.level, op, heads, &qkv[r], q_weight, k_weight, out);
            })
        });
        Ok(())
    }
    // A call's sums over rows and heads start from zero and are added to `dq_weight` and `dk_weight` in one addition.
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
        let [q_weight, k_weight] = parameters(op, heads, q_weight, k_weight);
        let width = heads.qkv_width();
        assert_eq!(qkv.len(), dqkv.len());
        let rows = row_count(qkv.len(), width);
        let wanted = [(op.width, dq_weight.is_some()), (op.width, dk_weight.is_some())];
        let mut partials = Partials::new(self, rows, wanted)?;
        typed!([ref qkv, mut dqkv] {
            let dqkv = Disjoint::new(dqkv);
            partials.run(self, rows, width, |r, [dq_weight, dk_weight]| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let dqkv = unsafe { dqkv.part(r.start, r.len()) };
                backward_rows(self.level, op, heads, &qkv[r], q_weight, k_weight, dqkv, dq_weight, dk_weight);
            })
        });
        partials.add(self, [dq_weight, dk_weight]);
        Ok(())
    }
}

multiversion! {
    fn forward_rows<S, type T: Stored, type U: Stored>(s, op: Norm, heads: Heads, qkv: &[T], q_weight: &[f32], k_weight: &[f32], out: &mut [U]) {
        let (dim, normed, width) = (heads.head_dim, heads.heads + heads.kv_heads, heads.qkv_width());
        for row in (0..qkv.len()).step_by(width) {
            for h in 0..normed {
                let (at, weight) = (row + h * dim, if h < heads.heads { q_weight } else { k_weight });
                norm_row(s, op, &qkv[at..at + dim], weight, None, &mut out[at..at + dim]);
            }
            copy_row(s, &qkv[row + normed * dim..row + width], &mut out[row + normed * dim..row + width]);
        }
    }
}

multiversion! {
    fn backward_rows<S, type T: Stored, type U: Stored>(s, op: Norm, heads: Heads, qkv: &[T], q_weight: &[f32], k_weight: &[f32], dqkv: &mut [U], dq_weight: &mut [f32], dk_weight: &mut [f32]) {
        let (dim, width) = (heads.head_dim, heads.qkv_width());
        for row in (0..qkv.len()).step_by(width) {
            for h in 0..heads.heads + heads.kv_heads {
                let query = h < heads.heads;
                let at = row + h * dim..row + (h + 1) * dim;
                let (x, d) = (&qkv[at.clone()], &mut dqkv[at]);
                let weight = if query { q_weight } else { k_weight };
                let dweight = if query { &mut *dq_weight } else { &mut *dk_weight };
                let gradient = RowGradient::of(s, op, d, x, weight);
                for j in (0..dim).step_by(LANES) {
                    let (dy, x) = (get(s, d, j), get(s, x, j));
                    if !dweight.is_empty() {
                        gradient.add_weight(s, dy, x, dweight, j);
                    }
                    put(s, d, j, gradient.input(s, dy, x, get(s, weight, j)));
                }
            }
        }
    }
}
