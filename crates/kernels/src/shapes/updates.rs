//! Optimizer steps.

use super::{Dev, Op};
use crate::backend::{AdamWParam, Sgd};
use crate::codes::BLOCK;
use crate::{Buffer, DType, Result};
use std::ops::Range;

/// Checks that ranges lie within a parameter, in ascending order, without overlap.
fn check_ranges(op: Op<'_>, ranges: &[Range<usize>], len: usize) -> Result<()> {
    let mut at = 0;
    for r in ranges {
        op.expect(at <= r.start && r.start <= r.end && r.end <= len, || {
            format!("elements {}..{} of a parameter of {len}, after {at}", r.start, r.end)
        })?;
        at = r.end;
    }
    Ok(())
}

pub(crate) fn adamw(dev: Dev<'_>, params: &[AdamWParam<'_>]) -> Result<()> {
    let op = Op::new(dev, "adamw");
    for p in params {
        let n = p.param.len();
        op.expect(p.op.step > 0, || "steps are counted from 1".into())?;
        [("param", &*p.param), ("grad", p.grad)].iter().try_for_each(|(name, b)| op.f32s(name, b, n))?;
        let format = if p.absmax.is_some() { DType::U8 } else { DType::F32 };
        let moments = [("first", &*p.first), ("second", &*p.second)];
        moments.iter().try_for_each(|(name, b)| op.typed(name, b, format, n))?;
        check_ranges(op, p.ranges, n)?;
        if let Some([first, second]) = &p.absmax {
            let blocks = n.div_ceil(BLOCK);
            [("first's absmax", first), ("second's absmax", second)]
                .iter()
                .try_for_each(|(name, b)| op.f32s(name, b, blocks))?;
            let whole = |r: &Range<usize>| {
                r.start.is_multiple_of(BLOCK) && (r.end.is_multiple_of(BLOCK) || r.end == n)
            };
            op.expect(p.ranges.iter().all(whole), || format!("ranges cut blocks of {BLOCK}"))?;
        }
        if let Some(w) = &p.derived {
            op.weight("the weight", w, false)?;
            op.f32s("param", p.param, w.n * w.k)?;
        }
    }
    Ok(())
}

pub(crate) fn sgd(
    dev: Dev<'_>,
    of: Sgd,
    range: &Range<usize>,
    param: &Buffer,
    grad: &Buffer,
    velocity: Option<&Buffer>,
) -> Result<()> {
    let op = Op::new(dev, "sgd");
    let n = param.len();
    op.f32s("param", param, n)?;
    op.f32s("grad", grad, n)?;
    op.some_f32s("velocity", velocity, n)?;
    op.expect(of.momentum == 0.0 || velocity.is_some(), || "momentum needs a velocity".into())?;
    check_ranges(op, std::slice::from_ref(range), n)
}
