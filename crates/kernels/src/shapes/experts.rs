//! Weighted sums of rows.

use super::{Dev, Op};
use crate::backend::RowMix;
use crate::{Buffer, Result};

pub(crate) fn mix_rows(dev: Dev<'_>, mix: RowMix<'_>, src: &Buffer, out: &Buffer) -> Result<()> {
    mixed(Op::new(dev, "mix_rows"), mix, src, ("out", out)).map(drop)
}

pub(crate) fn mix_rows_backward(
    dev: Dev<'_>,
    mix: RowMix<'_>,
    [src, dout]: [&Buffer; 2],
    [dsrc, dweights]: [&Buffer; 2],
) -> Result<()> {
    let op = Op::new(dev, "mix_rows_backward");
    let count = mixed(op, mix, src, ("dout", dout))?;
    op.floats("dsrc", dsrc, src.len())?;
    op.f32s("dweights", dweights, mix.rows.len())?;
    op.expect(count == mix.rows.len(), || {
        format!("src has {count} rows, expected one for each of the {} in rows", mix.rows.len())
    })?;
    let mut seen = vec![false; count];
    let twice = dev.ids(mix.rows).iter().find(|&&row| std::mem::replace(&mut seen[row as usize], true));
    op.expect(twice.is_none(), || format!("row {} is in rows twice", twice.copied().unwrap_or_default()))
}

/// Returns the number of rows of `src`.
fn mixed(op: Op<'_>, mix: RowMix<'_>, src: &Buffer, (name, out): (&str, &Buffer)) -> Result<usize> {
    op.expect(mix.per_row > 0, || "sums of no rows".into())?;
    let count = op.rows("src", src, mix.width)?;
    let sums = op.rows(name, out, mix.width)?;
    op.below("rows", mix.rows, op.times(sums, mix.per_row)?, count)?;
    op.f32s("weights", mix.weights, mix.rows.len())?;
    Ok(count)
}
