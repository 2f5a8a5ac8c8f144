//! Memory, vectors, and rows by index.

use super::{Dev, Op};
use crate::{Buffer, DType, Result};

pub(crate) fn fill(dev: Dev<'_>, dst: &Buffer) -> Result<()> {
    Op::new(dev, "fill").numbers("dst", dst, 0, dst.len())
}

pub(crate) fn write(dev: Dev<'_>, dst: &Buffer, at: usize, len: usize) -> Result<()> {
    Op::new(dev, "write").numbers("dst", dst, at, len)
}

pub(crate) fn write_bf16(dev: Dev<'_>, dst: &Buffer, at: usize, bytes: usize) -> Result<()> {
    let op = Op::new(dev, "write_bf16");
    op.expect(bytes.is_multiple_of(2), || format!("src has {bytes} bytes, expected two for each number"))?;
    op.float_range("dst", dst, at, bytes / 2)
}

pub(crate) fn read(dev: Dev<'_>, src: &Buffer, at: usize, len: usize) -> Result<()> {
    Op::new(dev, "read").numbers("src", src, at, len)
}

pub(crate) fn set_indices(dev: Dev<'_>, dst: &Buffer, len: usize) -> Result<()> {
    Op::new(dev, "set_indices").typed("dst", dst, DType::U32, len)
}

pub(crate) fn copy(
    dev: Dev<'_>,
    (src, from): (&Buffer, usize),
    (dst, to): (&Buffer, usize),
    len: usize,
) -> Result<()> {
    let op = Op::new(dev, "copy");
    op.float_range("src", src, from, len)?;
    op.float_range("dst", dst, to, len)
}

/// Each side with its offset and row pitch.
pub(crate) fn copy_block(
    dev: Dev<'_>,
    (src, from, pitch): (&Buffer, usize, usize),
    (dst, to, to_pitch): (&Buffer, usize, usize),
    [rows, columns]: [usize; 2],
) -> Result<()> {
    let op = Op::new(dev, "copy_block");
    let same = src.dtype() == dst.dtype();
    op.expect(same, || format!("src is {}, dst {}", src.dtype().name(), dst.dtype().name()))?;
    for (operand, buffer, at, pitch) in [("src", src, from, pitch), ("dst", dst, to, to_pitch)] {
        op.expect(pitch >= columns, || format!("rows of {columns} elements of {operand} overlap"))?;
        let before = op.times(rows.saturating_sub(1), pitch)?;
        op.float_range(operand, buffer, at, if rows == 0 { 0 } else { before + columns })?;
    }
    Ok(())
}

pub(crate) fn axpy(dev: Dev<'_>, x: &Buffer, y: &Buffer) -> Result<()> {
    let op = Op::new(dev, "axpy");
    op.floats("x", x, y.len())?;
    op.floats("y", y, y.len())
}

pub(crate) fn axpy_from(dev: Dev<'_>, x: &Buffer, at: usize, y: &Buffer) -> Result<()> {
    let op = Op::new(dev, "axpy_from");
    op.float_range("x", x, at, y.len())?;
    op.floats("y", y, y.len())
}

pub(crate) fn dot(dev: Dev<'_>, x: &Buffer, y: &Buffer) -> Result<()> {
    let op = Op::new(dev, "dot");
    op.floats("x", x, y.len())?;
    op.floats("y", y, y.len())
}

pub(crate) fn decode_nf4(
    dev: Dev<'_>,
    codes: &Buffer,
    absmax: &Buffer,
    block: usize,
    out: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "decode_nf4");
    op.expect(block > 0 && block.is_multiple_of(2), || {
        format!("blocks of {block}, expected an even number")
    })?;
    op.f32s("out", out, out.len())?;
    op.typed("codes", codes, DType::U8, out.len().div_ceil(2))?;
    op.f32s("absmax", absmax, out.len().div_ceil(block))
}

pub(crate) fn first_non_finite(dev: Dev<'_>, x: &Buffer) -> Result<()> {
    Op::new(dev, "first_non_finite").floats("x", x, x.len())
}

pub(crate) fn gather_rows(
    dev: Dev<'_>,
    src: &Buffer,
    rows: &Buffer,
    width: usize,
    dst: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "gather_rows");
    let count = op.rows("src", src, width)?;
    op.below("rows", rows, rows.len(), count)?;
    op.floats("dst", dst, op.times(rows.len(), width)?)
}

/// Marks a row that becomes zero.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// Returns the row of `src` for each row of `dst`.
pub(crate) fn scatter_rows(
    dev: Dev<'_>,
    src: &Buffer,
    rows: &Buffer,
    width: usize,
    dst: &Buffer,
) -> Result<Vec<u32>> {
    let op = Op::new(dev, "scatter_rows");
    let count = op.rows("dst", dst, width)?;
    op.below("rows", rows, rows.len(), count)?;
    op.floats("src", src, op.times(rows.len(), width)?)?;
    let mut from = vec![NO_ROW; count];
    for (i, &row) in dev.ids(rows).iter().enumerate() {
        let place = &mut from[row as usize];
        op.expect(*place == NO_ROW, || format!("row {row} is scattered to twice"))?;
        *place = i as u32;
    }
    Ok(from)
}

fn table(op: Op<'_>, ids: &Buffer, rows: (&str, &Buffer), table: (&str, &Buffer)) -> Result<usize> {
    if ids.is_empty() {
        op.below("ids", ids, 0, 0)?;
        op.floats(rows.0, rows.1, 0)?;
        return Ok(0);
    }
    let width = rows.1.len() / ids.len();
    op.rows(rows.0, rows.1, width)?;
    op.floats(rows.0, rows.1, op.times(ids.len(), width)?)?;
    op.f32s(table.0, table.1, table.1.len())?;
    let count = op.rows(table.0, table.1, width)?;
    op.below("ids", ids, ids.len(), count)?;
    Ok(width)
}

/// Returns the row width.
pub(crate) fn embed(dev: Dev<'_>, ids: &Buffer, from: &Buffer, out: &Buffer) -> Result<usize> {
    let op = Op::new(dev, "embed");
    op.f32s("out", out, out.len())?;
    table(op, ids, ("out", out), ("table", from))
}

/// Returns the row width.
pub(crate) fn embed_backward(dev: Dev<'_>, ids: &Buffer, dout: &Buffer, to: &Buffer) -> Result<usize> {
    table(Op::new(dev, "embed_backward"), ids, ("dout", dout), ("dtable", to))
}
