//! Weighted sums of rows, computed on the host.

use super::download;
use crate::backend::{MemoryOps, RowMix};
use crate::{Buffer, Result};

pub fn mix_rows<B: MemoryOps + ?Sized>(b: &B, mix: RowMix<'_>, src: &Buffer, out: &mut Buffer) -> Result<()> {
    let (source, weights, mut sums) = (download(b, src)?, download(b, mix.weights)?, vec![0f32; out.len()]);
    for (i, (&row, w)) in b.ids(mix.rows).iter().zip(&weights).enumerate() {
        let from = &source[row as usize * mix.width..][..mix.width];
        let to = &mut sums[i / mix.per_row * mix.width..][..mix.width];
        to.iter_mut().zip(from).for_each(|(to, x)| *to = w.mul_add(*x, *to));
    }
    b.write(out, 0, &sums)
}

pub fn mix_rows_backward<B: MemoryOps + ?Sized>(
    b: &B,
    mix: RowMix<'_>,
    [src, dout]: [&Buffer; 2],
    [dsrc, dweights]: [&mut Buffer; 2],
) -> Result<()> {
    let (source, weights, dout) = (download(b, src)?, download(b, mix.weights)?, download(b, dout)?);
    let (mut by_row, mut by_weight) = (vec![0f32; dsrc.len()], vec![0f32; dweights.len()]);
    for (i, (&row, w)) in b.ids(mix.rows).iter().zip(&weights).enumerate() {
        let at = row as usize * mix.width;
        let d = &dout[i / mix.per_row * mix.width..][..mix.width];
        by_row[at..][..mix.width].iter_mut().zip(d).for_each(|(to, d)| *to = w * d);
        by_weight[i] = source[at..][..mix.width].iter().zip(d).fold(0.0, |sum, (x, d)| x.mul_add(*d, sum));
    }
    b.write(dsrc, 0, &by_row)?;
    b.write(dweights, 0, &by_weight)
}
