//! Weighted sums of gathered rows.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::{Slice, SliceMut, floats, floats_mut, u32s};
use super::pool::Disjoint;
use super::simd::{LANES, multiversion};
use super::vector::{rows_of_task, typed};
use crate::backend::{ExpertOps, RowMix};
use crate::{Buffer, Result, shapes};

impl ExpertOps for Cpu {
    fn mix_rows(&self, mix: RowMix<'_>, src: &Buffer, out: &mut Buffer) -> Result<()> {
        shapes::mix_rows(self, mix, src, out)?;
        let mix = MixElements::of(mix);
        typed!([ref src, mut out] mix.forward(self, src, out));
        Ok(())
    }
    fn mix_rows_backward(
        &self,
        mix: RowMix<'_>,
        src: &Buffer,
        dout: &Buffer,
        dsrc: &mut Buffer,
        dweights: &mut Buffer,
    ) -> Result<()> {
        shapes::mix_rows_backward(self, mix, [src, dout], [dsrc, dweights])?;
        let mix = MixElements::of(mix);
        let SliceMut::F32(dweights) = floats_mut(dweights) else { unreachable!("checked to be f32") };
        typed!([ref src, ref dout, mut dsrc] mix.backward(self, (src, dout), dsrc, dweights));
        Ok(())
    }
}

/// [`RowMix`] as slices.
struct MixElements<'a> {
    rows: &'a [u32],
    weights: &'a [f32],
    per_row: usize,
    width: usize,
}

impl<'a> MixElements<'a> {
    fn of(mix: RowMix<'a>) -> Self {
        let Slice::F32(weights) = floats(mix.weights) else { unreachable!("checked to be f32") };
        MixElements { rows: u32s(mix.rows), weights, per_row: mix.per_row, width: mix.width }
    }

    fn forward<T: Stored, U: Stored>(&self, cpu: &Cpu, src: &[T], out: &mut [U]) {
        let (k, width) = (self.per_row, self.width);
        let (count, out) = (self.rows.len() / k, Disjoint::new(out));
        cpu.pool.ranges(count, rows_of_task(width * k), |r| {
            for t in r {
                // SAFETY: each row has its own elements.
                let to = unsafe { out.part(t * width, width) };
                mix_row(cpu.level, src, &self.rows[t * k..][..k], &self.weights[t * k..][..k], to);
            }
        });
    }

    fn backward<T: Stored, U: Stored, V: Stored>(
        &self,
        cpu: &Cpu,
        (src, dout): (&[T], &[U]),
        dsrc: &mut [V],
        dweights: &mut [f32],
    ) {
        let width = self.width;
        let (dsrc, dweights) = (Disjoint::new(dsrc), Disjoint::new(dweights));
        cpu.pool.ranges(self.rows.len(), rows_of_task(width), |r| {
            for i in r {
                let at = self.rows[i] as usize * width;
                let d = &dout[i / self.per_row * width..][..width];
                // SAFETY: the rows are distinct, and so are the elements.
                let (to, weight) = unsafe { (dsrc.part(at, width), &mut dweights.part(i, 1)[0]) };
                *weight = mix_row_backward(cpu.level, &src[at..][..width], d, self.weights[i], to);
            }
        });
    }
}

multiversion! {
    fn mix_row<S, type T: Stored, type U: Stored>(s, src: &[T], rows: &[u32], weights: &[f32], out: &mut [U]) {
        let width = out.len();
        for i in (0..width).step_by(LANES) {
            let mut sum = s.splat(0.0);
            for j in 0..rows.len() {
                let from = &src[rows[j] as usize * width..][..width];
                sum = s.fma(s.splat(weights[j]), get(s, from, i), sum);
            }
            put(s, out, i, sum);
        }
    }
}

multiversion! {
    fn mix_row_backward<S, type T: Stored, type U: Stored, type V: Stored>(
        s, src: &[T], dout: &[U], weight: f32, dsrc: &mut [V]
    ) -> f32 {
        let (w, mut sum) = (s.splat(weight), s.splat(0.0));
        for i in (0..src.len()).step_by(LANES) {
            let d = get(s, dout, i);
            put(s, dsrc, i, s.mul(w, d));
            sum = s.fma(d, get(s, src, i), sum);
        }
        s.sum(sum)
    }
}
