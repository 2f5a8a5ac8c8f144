//! RMSNorm and LayerNorm of rows.
//!
//! Backward recomputes a row's statistics: cheaper than storing them, and the same bits.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::{Memory, Slice, SliceMut, f32s, f32s_mut, floats, floats_mut};
use super::pool::Disjoint;
use super::simd::{LANES, Simd, multiversion};
use super::vector::{clear, row_count, rows_of_task, typed};
use crate::backend::{Norm, NormGrads, NormInput, NormOps, NormRecompute, Normed, Target};
use crate::{Buffer, Result, shapes};
use std::ops::Range;

/// Rows per partial sum of weight gradients; partial sums are added in order.
pub(crate) const CHUNK: usize = 64;

/// Statistics of a row.
#[derive(Clone, Copy)]
pub(crate) struct NormStats {
    /// Zero for RMSNorm.
    mean: f32,
    /// `1 / sqrt(variance + eps)`
    scale: f32,
}

impl NormStats {
    #[inline(always)]
    pub(crate) fn of<S: Simd, T: Stored>(s: S, op: Norm, row: &[T]) -> Self {
        let n = row.len() as f32;
        let mean = if op.centred { sum(s, row) / n } else { 0.0 };
        let variance = sum_squares(s, row, mean) / n;
        NormStats { mean, scale: 1.0 / (variance + op.eps).sqrt() }
    }

    /// Normalises a vector.
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, x: S::V) -> S::V {
        s.mul(s.sub(x, s.splat(self.mean)), s.splat(self.scale))
    }
}

#[inline(always)]
fn sum<S: Simd, T: Stored>(s: S, row: &[T]) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let mut i = 0;
    while i + 4 * LANES <= row.len() {
        for k in 0..4 {
            sums[k] = s.add(sums[k], get(s, row, i + k * LANES));
        }
        i += 4 * LANES;
    }
    while i < row.len() {
        sums[0] = s.add(sums[0], get(s, row, i));
        i += LANES;
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

#[inline(always)]
fn sum_squares<S: Simd, T: Stored>(s: S, row: &[T], mean: f32) -> f32 {
    let (zero, mean) = (s.splat(0.0), s.splat(mean));
    let mut sums = [zero; 4];
    let mut i = 0;
    while i + 4 * LANES <= row.len() {
        for k in 0..4 {
            let d = s.sub(get(s, row, i + k * LANES), mean);
            sums[k] = s.fma(d, d, sums[k]);
        }
        i += 4 * LANES;
    }
    while i < row.len() {
        let d = s.select_first((row.len() - i).min(LANES), s.sub(get(s, row, i), mean), zero);
        sums[0] = s.fma(d, d, sums[0]);
        i += LANES;
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// Added to a weight before use (1 for Gemma's convention).
#[inline(always)]
fn offset(op: Norm) -> f32 {
    if op.plus_one { 1.0 } else { 0.0 }
}

/// `out = norm(row) * weight + bias`
#[inline(always)]
pub(crate) fn norm_row<S: Simd, T: Stored, U: Stored>(
    s: S,
    op: Norm,
    row: &[T],
    weight: &[f32],
    bias: Option<&[f32]>,
    out: &mut [U],
) {
    let (stats, offset) = (NormStats::of(s, op, row), s.splat(offset(op)));
    match bias {
        Some(bias) => {
            for i in (0..row.len()).step_by(LANES) {
                let w = s.add(get(s, weight, i), offset);
                put(s, out, i, s.fma(stats.apply(s, get(s, row, i)), w, get(s, bias, i)));
            }
        }
        None => {
            for i in (0..row.len()).step_by(LANES) {
                let w = s.add(get(s, weight, i), offset);
                put(s, out, i, s.mul(stats.apply(s, get(s, row, i)), w));
            }
        }
    }
}

/// The parameters as slices, with lengths checked.
fn parameters(norm: Normed<'_>) -> (&[f32], Option<&[f32]>) {
    let (weight, bias, width) = (f32s(norm.weight), norm.bias.map(f32s), norm.op.width);
    assert!(weight.len() == width && bias.is_none_or(|b| b.len() == width));
    (weight, bias)
}

impl NormOps for Cpu {
    fn norm(&self, norm: Normed<'_>, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::norm(self, norm, x, y)?;
        let (op, (weight, bias)) = (norm.op, parameters(norm));
        assert_eq!(x.len(), y.len());
        let rows = row_count(x.len(), op.width);
        typed!([ref x, mut y] {
            let y = Disjoint::new(y);
            self.pool.ranges(rows, rows_of_task(op.width), |r| {
                let r = r.start * op.width..r.end * op.width;
                // SAFETY: tasks have disjoint rows.
                norm_rows(self.level, op, &x[r.clone()], weight, bias, unsafe { y.part(r.start, r.len()) });
            })
        });
        Ok(())
    }
    fn add_norm(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        delta: &Buffer,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::add_norm(self, norm, x, delta, [sum, y])?;
        let (op, (weight, bias)) = (norm.op, parameters(norm));
        assert!(x.len() == delta.len() && x.len() == sum.len() && x.len() == y.len());
        let rows = row_count(x.len(), op.width);
        let sum = Disjoint::new(f32s_mut(sum));
        typed!([ref x, ref delta, mut y] {
            let y = Disjoint::new(y);
            self.pool.ranges(rows, rows_of_task(op.width), |r| {
                let r = r.start * op.width..r.end * op.width;
                // SAFETY: tasks have disjoint rows.
                let (sum, y) = unsafe { (sum.part(r.start, r.len()), y.part(r.start, r.len())) };
                add_norm_rows(self.level, op, (weight, bias), (&x[r.clone()], &delta[r]), sum, y);
            })
        });
        Ok(())
    }
    // Sums over this call's rows start from zero and are added to `dweight` and `dbias` once.
    fn norm_backward(
        &self,
        norm: Normed<'_>,
        dy: &Buffer,
        x: &Buffer,
        dx: Target<'_>,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        let Target { to: dx, add } = dx;
        shapes::norm_backward(self, norm, dy, x, dx, &grads)?;
        let [dweight, dbias] = ready(self, grads)?;
        let (op, (weight, _)) = (norm.op, parameters(norm));
        assert!(x.len() == dy.len() && x.len() == dx.len());
        let rows = row_count(x.len(), op.width);
        let wanted = (dweight.is_some(), dbias.is_some());
        let mut partials = Partials::new(self, rows, [(op.width, wanted.0), (op.width, wanted.1)])?;
        typed!([ref dy, ref x, mut dx] {
            let dx = Disjoint::new(dx);
            partials.run(self, rows, op.width, |r, [dweight, dbias]| {
                let r = r.start * op.width..r.end * op.width;
                // SAFETY: tasks have disjoint rows.
                let dx = unsafe { dx.part(r.start, r.len()) };
                backward_rows(self.level, op, weight, (&dy[r.clone()], &x[r]), (dx, add), [dweight, dbias]);
            })
        });
        partials.add(self, [dweight, dbias]);
        Ok(())
    }
    fn norm_recompute(&self, norm: Normed<'_>, of: NormInput<'_>, backward: NormRecompute<'_>) -> Result<()> {
        shapes::norm_recompute(self, norm, of, &backward)?;
        let NormRecompute { dy, y, dx, rounded, grads } = backward;
        let sums = ready(self, grads)?;
        let (delta, rounded, x) = (of.delta.map(floats), rounded.map(floats_mut), f32s(of.x));
        let dx = f32s_mut(dx);
        // Operands are optional, and all have the type of the first.
        macro_rules! recompute {
            ($slice:ident, $dy:ident, $y:ident) => {{
                let delta = delta.map(|d| if let Slice::$slice(d) = d { d } else { panic!("{MIXED}") });
                let rounded =
                    rounded.map(|r| if let SliceMut::$slice(r) = r { r } else { panic!("{MIXED}") });
                let rows = Recomputed { x, delta, dy: $dy, y: $y, dx, rounded: rounded.unwrap_or(&mut []) };
                recompute(self, norm, rows, sums)
            }};
        }
        match (floats(dy), floats_mut(y)) {
            (Slice::F32(dy), SliceMut::F32(y)) => recompute!(F32, dy, y),
            (Slice::Bf16(dy), SliceMut::Bf16(y)) => recompute!(Bf16, dy, y),
            _ => panic!("{MIXED}"),
        }
    }
}

/// Gradients of weight and bias, zeroed if they are to be overwritten.
fn ready<'a>(cpu: &Cpu, mut grads: NormGrads<'a>) -> Result<[Option<&'a mut Buffer>; 2]> {
    if !grads.add {
        clear(cpu, [grads.weight.as_deref_mut(), grads.bias.as_deref_mut()])?;
    }
    Ok([grads.weight, grads.bias])
}

multiversion! {
    fn norm_rows<S, type T: Stored, type U: Stored>(s, op: Norm, x: &[T], weight: &[f32], bias: Option<&[f32]>, y: &mut [U]) {
        for i in (0..x.len()).step_by(op.width) {
            norm_row(s, op, &x[i..i + op.width], weight, bias, &mut y[i..i + op.width]);
        }
    }
}

multiversion! {
    fn add_norm_rows<S, type T: Stored, type D: Stored, type U: Stored>(s, op: Norm, parameters: (&[f32], Option<&[f32]>), addends: (&[T], &[D]), sum: &mut [f32], y: &mut [U]) {
        let ((weight, bias), (x, delta)) = (parameters, addends);
        for i in (0..x.len()).step_by(op.width) {
            let row = i..i + op.width;
            let (x, delta, sum) = (&x[row.clone()], &delta[row.clone()], &mut sum[row.clone()]);
            for j in (0..op.width).step_by(LANES) {
                put(s, sum, j, s.add(get(s, x, j), get(s, delta, j)));
            }
            norm_row(s, op, sum, weight, bias, &mut y[row]);
        }
    }
}

/// Reductions of a row that its gradient needs.
#[derive(Clone, Copy)]
pub(crate) struct RowGradient {
    stats: NormStats,
    offset: f32,
    /// Mean of `dy * weight`; zero for RMSNorm.
    mean: f32,
    /// Mean of `dy * weight * normalised`.
    slope: f32,
}

impl RowGradient {
    #[inline(always)]
    pub(crate) fn of<S: Simd, D: Stored, T: Stored>(
        s: S,
        op: Norm,
        dy: &[D],
        x: &[T],
        weight: &[f32],
    ) -> Self {
        let stats = NormStats::of(s, op, x);
        let (zero, offset_v) = (s.splat(0.0), s.splat(offset(op)));
        // Lanes past the end of the row are zero in `dy`, so they add nothing.
        let (mut sums, mut slopes) = ([zero; 2], [zero; 2]);
        let mut i = 0;
        while i + 2 * LANES <= x.len() {
            for k in 0..2 {
                let at = i + k * LANES;
                let g = s.mul(get(s, dy, at), s.add(get(s, weight, at), offset_v));
                sums[k] = s.add(sums[k], g);
                slopes[k] = s.fma(g, stats.apply(s, get(s, x, at)), slopes[k]);
            }
            i += 2 * LANES;
        }
        while i < x.len() {
            let g = s.mul(get(s, dy, i), s.add(get(s, weight, i), offset_v));
            sums[0] = s.add(sums[0], g);
            slopes[0] = s.fma(g, stats.apply(s, get(s, x, i)), slopes[0]);
            i += LANES;
        }
        let n = x.len() as f32;
        let mean = if op.centred { s.sum(s.add(sums[0], sums[1])) / n } else { 0.0 };
        RowGradient { stats, offset: offset(op), mean, slope: s.sum(s.add(slopes[0], slopes[1])) / n }
    }

    /// Gradient of sixteen elements of the input.
    #[inline(always)]
    pub(crate) fn input<S: Simd>(self, s: S, dy: S::V, x: S::V, weight: S::V) -> S::V {
        let g = s.fma(dy, s.add(weight, s.splat(self.offset)), s.splat(-self.mean));
        let d = s.fma(self.stats.apply(s, x), s.splat(-self.slope), g);
        s.mul(d, s.splat(self.stats.scale))
    }

    /// Adds to the gradients of sixteen weights from `at`.
    #[inline(always)]
    pub(crate) fn add_weight<S: Simd>(self, s: S, dy: S::V, x: S::V, dweight: &mut [f32], at: usize) {
        let sum = s.fma(dy, self.stats.apply(s, x), get(s, dweight, at));
        put(s, dweight, at, sum);
    }
}

multiversion! {
    fn backward_rows<S, type D: Stored, type T: Stored, type U: Stored>(s, op: Norm, weight: &[f32], rows: (&[D], &[T]), to: (&mut [U], bool), sums: [&mut [f32]; 2]) {
        let ((dy, x), (dx, add), [dweight, dbias]) = (rows, to, sums);
        for i in (0..x.len()).step_by(op.width) {
            let row = i..i + op.width;
            let (dy, x, dx) = (&dy[row.clone()], &x[row.clone()], &mut dx[row]);
            let gradient = RowGradient::of(s, op, dy, x, weight);
            for j in (0..op.width).step_by(LANES) {
                let (dy, x) = (get(s, dy, j), get(s, x, j));
                let mut d = gradient.input(s, dy, x, get(s, weight, j));
                if add {
                    d = s.add(get(s, dx, j), d);
                }
                put(s, dx, j, d);
                if !dweight.is_empty() {
                    gradient.add_weight(s, dy, x, dweight, j);
                }
                if !dbias.is_empty() {
                    let sum = s.add(get(s, dbias, j), dy);
                    put(s, dbias, j, sum);
                }
            }
        }
    }
}

const MIXED: &str = "a norm's output, its gradient and what is added before have one type";

/// Rows of [`NormOps::norm_recompute`]: inputs and outputs.
struct Recomputed<'a, T> {
    x: &'a [f32],
    delta: Option<&'a [T]>,
    dy: &'a [T],
    y: &'a mut [T],
    dx: &'a mut [f32],
    /// Empty if not requested.
    rounded: &'a mut [T],
}

fn recompute<T: Stored>(
    cpu: &Cpu,
    norm: Normed<'_>,
    rows: Recomputed<'_, T>,
    [dweight, dbias]: [Option<&mut Buffer>; 2],
) -> Result<()> {
    let (op, (weight, bias)) = (norm.op, parameters(norm));
    let Recomputed { x, delta, dy, y, dx, rounded } = rows;
    let n = x.len();
    assert!(dy.len() == n && y.len() == n && dx.len() == n && delta.is_none_or(|d| d.len() == n));
    assert!(rounded.is_empty() || rounded.len() == n);
    let (rows, rounds) = (row_count(n, op.width), !rounded.is_empty());
    let wanted = (dweight.is_some(), dbias.is_some());
    let mut partials = Partials::new(cpu, rows, [(op.width, wanted.0), (op.width, wanted.1)])?;
    let (y, dx, rounded) = (Disjoint::new(y), Disjoint::new(dx), Disjoint::new(rounded));
    partials.run(cpu, rows, op.width, |r, [dweight, dbias]| {
        let r = r.start * op.width..r.end * op.width;
        // SAFETY: tasks have disjoint rows.
        let (y, dx) = unsafe { (y.part(r.start, r.len()), dx.part(r.start, r.len())) };
        // SAFETY: as above; `rounded` has all rows or none.
        let rounded = if rounds { unsafe { rounded.part(r.start, r.len()) } } else { &mut [] };
        let (delta, dy, x) = (delta.map(|d| &d[r.clone()]), &dy[r.clone()], &x[r]);
        let rows = Recomputed { x, delta, dy, y, dx, rounded };
        recompute_rows(cpu.level, op, (weight, bias), rows, (dweight, dbias));
    });
    partials.add(cpu, [dweight, dbias]);
    Ok(())
}

multiversion! {
    fn recompute_rows<S, type T: Stored>(s, op: Norm, parameters: (&[f32], Option<&[f32]>), rows: Recomputed<'_, T>, sums: (&mut [f32], &mut [f32])) {
        let Recomputed { x, delta, dy, y, dx, rounded } = rows;
        let ((weight, bias), (dweight, dbias)) = (parameters, sums);
        let mut sums = vec![0.0; if delta.is_some() { op.width } else { 0 }];
        for i in (0..x.len()).step_by(op.width) {
            let row = i..i + op.width;
            let mut x = &x[row.clone()];
            if let Some(delta) = delta {
                let delta = &delta[row.clone()];
                for j in (0..op.width).step_by(LANES) {
                    put(s, &mut sums, j, s.add(get(s, x, j), get(s, delta, j)));
                }
                x = &sums;
            }
            let (dy, dx) = (&dy[row.clone()], &mut dx[row.clone()]);
            norm_row(s, op, x, weight, bias, &mut y[row.clone()]);
            let gradient = RowGradient::of(s, op, dy, x, weight);
            for j in (0..op.width).step_by(LANES) {
                let (dy, x) = (get(s, dy, j), get(s, x, j));
                let d = s.add(get(s, dx, j), gradient.input(s, dy, x, get(s, weight, j)));
                put(s, dx, j, d);
                if !rounded.is_empty() {
                    put(s, &mut rounded[row.clone()], j, d);
                }
                if !dweight.is_empty() {
                    gradient.add_weight(s, dy, x, dweight, j);
                }
                if !dbias.is_empty() {
                    let sum = s.add(get(s, dbias, j), dy);
                    put(s, dbias, j, sum);
                }
            }
        }
    }
}

/// Two column sums over rows, kept per chunk of rows and then added in chunk order.
pub(crate) struct Partials {
    /// Widths of the two sums, zero if not requested.
    widths: [usize; 2],
    chunks: usize,
    memory: Option<Memory>,
}

impl Partials {
    /// For sums of these widths, each requested or not.
    pub(crate) fn new(cpu: &Cpu, rows: usize, sums: [(usize, bool); 2]) -> Result<Self> {
        let widths = sums.map(|(width, wanted)| if wanted { width } else { 0 });
        let (chunks, width) = (rows.div_ceil(CHUNK), widths[0] + widths[1]);
        let memory = if width > 0 { Some(cpu.arena.take(chunks * width * size_of::<f32>())?) } else { None };
        Ok(Partials { widths, chunks, memory })
    }

    /// Calls `f(rows, sums to add to)` per chunk; sums not requested are empty.
    pub(crate) fn run(
        &mut self,
        cpu: &Cpu,
        rows: usize,
        width: usize,
        f: impl Fn(Range<usize>, [&mut [f32]; 2]) + Sync,
    ) {
        let [a, b] = self.widths;
        match &mut self.memory {
            None => cpu.pool.ranges(rows, rows_of_task(width).min(CHUNK), |r| f(r, [&mut [], &mut []])),
            Some(memory) => {
                let sums = Disjoint::new(memory.slice_mut(self.chunks * (a + b)));
                cpu.pool.ranges(rows, CHUNK, |r| {
                    // SAFETY: each chunk has its own sums.
                    let sums = unsafe { sums.part(r.start / CHUNK * (a + b), a + b) };
                    sums.fill(0.0);
                    let (first, second) = sums.split_at_mut(a);
                    f(r, [first, second]);
                });
            }
        }
    }

    /// Adds all chunks' sums to their destinations.
    pub(crate) fn add(self, cpu: &Cpu, to: [Option<&mut Buffer>; 2]) {
        let Some(memory) = &self.memory else { return };
        let stride = self.widths[0] + self.widths[1];
        let sums = memory.slice(self.chunks * stride);
        for (from, to) in [0, self.widths[0]].into_iter().zip(to) {
            if let Some(to) = to.map(f32s_mut) {
                add_chunks(cpu.level, sums, from, stride, self.chunks, to);
            }
        }
    }
}

multiversion! {
    fn add_chunks<S>(s, sums: &[f32], from: usize, stride: usize, chunks: usize, to: &mut [f32]) {
        for i in (0..to.len()).step_by(LANES) {
            let mut sum = s.splat(0.0);
            for c in 0..chunks {
                sum = s.add(sum, get(s, &sums[c * stride + from..][..to.len()], i));
            }
            let sum = s.add(get(s, to, i), sum);
            put(s, to, i, sum);
        }
    }
}
