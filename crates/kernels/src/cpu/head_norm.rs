//! RMSNorm or LayerNorm of each query and key head inside rows of `qkv`.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::f32s;
use super::norm::{Partials, RowGradient, norm_row};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{copy_row, row_count, rows_of_task, typed};
use crate::backend::{HeadNorm, HeadNormOps, Heads, Norm};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::shapes;

/// The weights of a call, and that they fit.
fn parameters(norm: HeadNorm<'_>) -> [&[f32]; 2] {
    let (weights, width) = ([f32s(norm.q_weight), f32s(norm.k_weight)], norm.op.width);
    assert!(width == norm.heads.head_dim && weights.iter().all(|w| w.len() == width));
    weights
}

impl HeadNormOps for Cpu {
    fn head_norm(&self, norm: HeadNorm<'_>, qkv: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::head_norm(self, norm, qkv, out)?;
        let (weights, HeadNorm { op, heads, .. }) = (parameters(norm), norm);
        let width = heads.qkv_width();
        assert_eq!(qkv.len(), out.len());
        let rows = row_count(qkv.len(), width);
        typed!([ref qkv, mut out] {
            let out = Disjoint::new(out);
            self.pool.ranges(rows, rows_of_task(width), |r| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let out = unsafe { out.part(r.start, r.len()) };
                forward_rows(self.level, op, heads, weights, &qkv[r], out);
            })
        });
        Ok(())
    }
    // A call's sums over rows and heads start from zero and are added to `dq_weight` and `dk_weight` in one addition.
    fn head_norm_backward(
        &self,
        norm: HeadNorm<'_>,
        qkv: &Buffer,
        dqkv: &mut Buffer,
        dweights: [Option<&mut Buffer>; 2],
    ) -> Result<()> {
        shapes::head_norm_backward(self, norm, qkv, dqkv, dweights.each_ref().map(|d| d.as_deref()))?;
        let (weights, HeadNorm { op, heads, .. }) = (parameters(norm), norm);
        let width = heads.qkv_width();
        assert_eq!(qkv.len(), dqkv.len());
        let rows = row_count(qkv.len(), width);
        let wanted = dweights.each_ref().map(|d| (op.width, d.is_some()));
        let mut partials = Partials::new(self, rows, wanted)?;
        typed!([ref qkv, mut dqkv] {
            let dqkv = Disjoint::new(dqkv);
            partials.run(self, rows, width, |r, dweights| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let dqkv = unsafe { dqkv.part(r.start, r.len()) };
                backward_rows(self.level, (op, heads), weights, &qkv[r], dqkv, dweights);
            })
        });
        partials.add(self, dweights);
        Ok(())
    }
}

multiversion! {
    fn forward_rows<S, type T: Stored, type U: Stored>(s, op: Norm, heads: Heads, weights: [&[f32]; 2], qkv: &[T], out: &mut [U]) {
        let [q_weight, k_weight] = weights;
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
    fn backward_rows<S, type T: Stored, type U: Stored>(s, norm: (Norm, Heads), weights: [&[f32]; 2], qkv: &[T], dqkv: &mut [U], dweights: [&mut [f32]; 2]) {
        let (op, heads) = norm;
        let ([q_weight, k_weight], [dq_weight, dk_weight]) = (weights, dweights);
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
