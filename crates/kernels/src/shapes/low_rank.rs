//! LoRA updates of weights.

use super::{Dev, Op};
use crate::backend::{ColumnsOf, LinearGrads, LowRank, LowRankGrad};
use crate::{Buffer, Result, Weight};

pub(crate) fn adapted(dev: Dev<'_>, base: &Buffer, parts: &[LowRank<'_>], out: &Buffer) -> Result<()> {
    let op = Op::new(dev, "adapted");
    op.f32s("out", out, base.len())?;
    additions(op, base, parts, None)
}

pub(crate) fn load_adapted(
    dev: Dev<'_>,
    base: &Buffer,
    parts: &[LowRank<'_>],
    weight: &Weight,
) -> Result<()> {
    let op = Op::new(dev, "load_adapted");
    op.weight("the weight", weight, false)?;
    op.floats("base", base, weight.n * weight.k)?;
    additions(op, base, parts, Some(weight.k))
}

/// Checks factors that update consecutive, disjoint rows; `k` if known.
fn additions(op: Op<'_>, base: &Buffer, parts: &[LowRank<'_>], k: Option<usize>) -> Result<()> {
    op.floats("base", base, base.len())?;
    let mut end = 0;
    for part in parts {
        op.expect(part.r > 0, || "a rank of 0".into())?;
        let columns = k.unwrap_or(part.a.len() / part.r);
        op.f32s("a", part.a, op.times(part.r, columns)?)?;
        op.f32s("b", part.b, op.times(part.r, part.rows().len())?)?;
        let rows = part.rows();
        op.expect(rows.start >= end, || "parts that overlap, or are not in order".into())?;
        end = rows.end;
        let inside = op.times(rows.end, columns)? <= base.len();
        op.expect(inside, || format!("rows {rows:?} of {columns} lie beyond the weight"))?;
    }
    Ok(())
}

pub(crate) fn low_rank_dw(dev: Dev<'_>, of: LowRankGrad<'_>, grads: &LinearGrads<'_>) -> Result<()> {
    let op = Op::new(dev, "low_rank_dw");
    op.weight("the factor", of.w, false)?;
    for (name, columns, width) in [("x", of.x, of.w.k), ("y", of.y, of.y.width)] {
        let ColumnsOf { of: rows, from, width: found } = columns;
        op.typed(name, rows, of.w.compute, rows.len())?;
        let all = rows.len() / of.tokens.max(1);
        op.floats(name, rows, all * of.tokens)?;
        let inside = of.tokens == 0 || from.checked_add(found).is_some_and(|end| end <= all);
        op.expect(inside && found == width, || {
            format!("{name} has {all} columns, expected {width} from {from} on")
        })?;
    }
    op.expect(grads.bias.is_none(), || "a low-rank factor has no bias".into())?;
    op.some_f32s("the gradient", grads.weight.as_deref(), op.times(of.w.n, of.y.width)?)
}
