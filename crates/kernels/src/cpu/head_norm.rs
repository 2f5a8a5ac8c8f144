//! QK norm inside rows of `qkv`: per head, or over all heads.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::f32s;
use super::norm::{Partials, RowGradient, norm_row};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{copy_row, row_count, rows_of_task, typed};
use crate::backend::{HeadNorm, HeadNormOps, Norm};
use crate::{Buffer, Result, shapes};

/// A column range of a row, normalised in equal parts.
#[derive(Clone, Copy)]
struct NormColumns<'a> {
    count: usize,
    op: Norm,
    weight: &'a [f32],
}

/// Those of queries and keys, at the start of a row.
fn columns(norm: HeadNorm<'_>) -> [NormColumns<'_>; 2] {
    let [query, key] = norm.parts();
    let of = |(count, op): (usize, Norm), weight| {
        let weight = f32s(weight);
        assert_eq!(weight.len(), op.width);
        NormColumns { count, op, weight }
    };
    assert_eq!(norm.op.width, norm.heads.head_dim);
    [of(query, norm.q_weight), of(key, norm.k_weight)]
}

impl HeadNormOps for Cpu {
    fn head_norm(&self, norm: HeadNorm<'_>, qkv: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::head_norm(self, norm, qkv, out)?;
        let (columns, width) = (columns(norm), norm.heads.qkv_width());
        assert_eq!(qkv.len(), out.len());
        let rows = row_count(qkv.len(), width);
        typed!([ref qkv, mut out] {
            let out = Disjoint::new(out);
            self.pool.ranges(rows, rows_of_task(width), |r| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let out = unsafe { out.part(r.start, r.len()) };
                forward_rows(self.level, columns, width, &qkv[r], out);
            })
        });
        Ok(())
    }
    // Sums over this call's rows and heads start from zero and are added to `dq_weight` and `dk_weight` once.
    fn head_norm_backward(
        &self,
        norm: HeadNorm<'_>,
        qkv: &Buffer,
        dqkv: &mut Buffer,
        dweights: [Option<&mut Buffer>; 2],
    ) -> Result<()> {
        shapes::head_norm_backward(self, norm, qkv, dqkv, dweights.each_ref().map(|d| d.as_deref()))?;
        let (columns, width) = (columns(norm), norm.heads.qkv_width());
        assert_eq!(qkv.len(), dqkv.len());
        let rows = row_count(qkv.len(), width);
        let [query, key] = columns.map(|c| c.op.width);
        let wanted = [(query, dweights[0].is_some()), (key, dweights[1].is_some())];
        let mut partials = Partials::new(self, rows, wanted)?;
        typed!([ref qkv, mut dqkv] {
            let dqkv = Disjoint::new(dqkv);
            partials.run(self, rows, width, |r, dweights| {
                let r = r.start * width..r.end * width;
                // SAFETY: tasks have disjoint rows.
                let dqkv = unsafe { dqkv.part(r.start, r.len()) };
                backward_rows(self.level, columns, width, &qkv[r], dqkv, dweights);
            })
        });
        partials.add(self, dweights);
        Ok(())
    }
}

multiversion! {
    fn forward_rows<S, type T: Stored, type U: Stored>(s, columns: [NormColumns<'_>; 2], width: usize, qkv: &[T], out: &mut [U]) {
        for row in (0..qkv.len()).step_by(width) {
            let mut at = row;
            for NormColumns { count, op, weight } in columns {
                for _ in 0..count {
                    norm_row(s, op, &qkv[at..at + op.width], weight, None, &mut out[at..at + op.width]);
                    at += op.width;
                }
            }
            copy_row(s, &qkv[at..row + width], &mut out[at..row + width]);
        }
    }
}

multiversion! {
    fn backward_rows<S, type T: Stored, type U: Stored>(s, columns: [NormColumns<'_>; 2], width: usize, qkv: &[T], dqkv: &mut [U], dweights: [&mut [f32]; 2]) {
        for row in (0..qkv.len()).step_by(width) {
            let mut at = row;
            for part in 0..2 {
                let (NormColumns { count, op, weight }, dweight) = (columns[part], &mut *dweights[part]);
                for _ in 0..count {
                    let (x, d) = (&qkv[at..at + op.width], &mut dqkv[at..at + op.width]);
                    let gradient = RowGradient::of(s, op, d, x, weight);
                    for j in (0..op.width).step_by(LANES) {
                        let (dy, x) = (get(s, d, j), get(s, x, j));
                        if !dweight.is_empty() {
                            gradient.add_weight(s, dy, x, dweight, j);
                        }
                        put(s, d, j, gradient.input(s, dy, x, get(s, weight, j)));
                    }
                    at += op.width;
                }
            }
        }
    }
}
