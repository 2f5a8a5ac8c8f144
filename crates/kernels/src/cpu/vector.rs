//! Vectors: fill, conversion, dot products, gather and scatter of rows.

use super::Cpu;
use super::element::{Stored, get, put};
use super::memory::{f32s, f32s_mut, u8s, u8s_mut, u32s, u32s_mut};
use super::pool::Disjoint;
use super::simd::{LANES, Simd, multiversion, widen};
use crate::backend::{DOT_CHUNK, MemoryOps, VectorOps};
use crate::codes::decode_nf4;
use crate::shapes::NO_ROW;
use crate::{Buffer, DType, MemoryUsage, Purpose, Result, shapes};
use std::any::TypeId;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements per task: enough to be worth dispatching to another thread.
pub(crate) const PIECE: usize = 16 * 1024;
/// Elements checked together for NaN or infinity.
const FINITE_CHUNK: usize = 1024;

/// Evaluates an expression with float buffers bound to their slices, once per storage type:
/// `typed!([ref x, mut y] kernel(x, y))`.
macro_rules! typed {
    ([] $body:expr) => { $body };
    ([ref $b:ident $(, $($rest:tt)*)?] $body:expr) => {
        match $crate::cpu::memory::floats($b) {
            $crate::cpu::memory::Slice::F32($b) => $crate::cpu::vector::typed!([$($($rest)*)?] $body),
            $crate::cpu::memory::Slice::Bf16($b) => $crate::cpu::vector::typed!([$($($rest)*)?] $body),
        }
    };
    ([mut $b:ident $(, $($rest:tt)*)?] $body:expr) => {
        match $crate::cpu::memory::floats_mut($b) {
            $crate::cpu::memory::SliceMut::F32($b) => $crate::cpu::vector::typed!([$($($rest)*)?] $body),
            $crate::cpu::memory::SliceMut::Bf16($b) => $crate::cpu::vector::typed!([$($($rest)*)?] $body),
        }
    };
}
pub(crate) use typed;

/// Rows per task, for rows of this width.
pub(crate) fn rows_of_task(width: usize) -> usize {
    (PIECE / width.max(1)).max(1)
}

/// Number of rows of `width` in `len` elements.
pub(crate) fn row_count(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} elements are not rows of {width}");
    len / width
}

impl MemoryOps for Cpu {
    fn memory(&self) -> (usize, usize) {
        self.arena.usage()
    }
    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        self.arena.set_purpose(purpose)
    }
    fn trim(&self) {
        self.arena.trim();
    }
    fn books(&self) -> Option<MemoryUsage> {
        Some(self.arena.books())
    }
    fn set_memory_limit(&self, bytes: Option<usize>) {
        self.limit_memory(bytes);
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.arena.buffer(dtype, len)
    }
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()> {
        shapes::fill(self, dst)?;
        if dst.dtype() == DType::U8 {
            u8s_mut(dst).fill(value as u8);
            return Ok(());
        }
        typed!([mut dst] fill_slice(self, dst, value));
        Ok(())
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        shapes::write(self, dst, at, src.len())?;
        if dst.dtype() == DType::U8 {
            u8s_mut(dst)[at..][..src.len()].iter_mut().zip(src).for_each(|(code, x)| *code = *x as u8);
            return Ok(());
        }
        typed!([mut dst] copy_slice(self, src, &mut dst[at..][..src.len()]));
        Ok(())
    }
    fn write_bf16(&self, dst: &mut Buffer, at: usize, src: &[u8]) -> Result<()> {
        shapes::write_bf16(self, dst, at, src.len())?;
        // SAFETY: any two bytes are a number.
        let (before, numbers, after) = unsafe { src.align_to::<u16>() };
        let aligned = before.is_empty() && after.is_empty() && cfg!(target_endian = "little");
        let pairs = || src.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<u16>>();
        let copied = if aligned { Vec::new() } else { pairs() };
        let numbers = if aligned { numbers } else { &copied };
        typed!([mut dst] copy_slice(self, numbers, &mut dst[at..][..numbers.len()]));
        Ok(())
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        shapes::read(self, src, at, dst.len())?;
        if src.dtype() == DType::U8 {
            dst.iter_mut().zip(&u8s(src)[at..]).for_each(|(x, code)| *x = f32::from(*code));
            return Ok(());
        }
        typed!([ref src] copy_slice(self, &src[at..][..dst.len()], dst));
        Ok(())
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        let mut memory = self.arena.take(size_of_val(values))?;
        memory.slice_mut(values.len()).copy_from_slice(values);
        Ok(Buffer::new(DType::U32, values.len(), Box::new(memory)))
    }
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        shapes::set_indices(self, dst, values.len())?;
        u32s_mut(dst).copy_from_slice(values);
        Ok(())
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        shapes::copy(self, (src, from), (dst, to), len)?;
        typed!([ref src, mut dst] copy_slice(self, &src[from..][..len], &mut dst[to..][..len]));
        Ok(())
    }
    fn copy_block(
        &self,
        (src, from, pitch): (&Buffer, usize, usize),
        (dst, to, to_pitch): (&mut Buffer, usize, usize),
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        shapes::copy_block(self, (src, from, pitch), (dst, to, to_pitch), [rows, columns])?;
        if rows * columns > 0 {
            typed!([ref src, mut dst] copy_rows(self, (&src[from..], pitch), (&mut dst[to..], to_pitch), [rows, columns]));
        }
        Ok(())
    }
}

impl VectorOps for Cpu {
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::axpy(self, x, y)?;
        assert_eq!(x.len(), y.len());
        typed!([ref x, mut y] axpy_slice(self, a, x, y));
        Ok(())
    }
    fn axpy_from(&self, a: f32, x: &Buffer, at: usize, y: &mut Buffer) -> Result<()> {
        shapes::axpy_from(self, x, at, y)?;
        let len = y.len();
        typed!([ref x, mut y] axpy_slice(self, a, &x[at..][..len], y));
        Ok(())
    }
    fn chunk_dots(&self, x: &Buffer, y: &Buffer) -> Result<Vec<f64>> {
        shapes::dot(self, x, y)?;
        assert_eq!(x.len(), y.len());
        Ok(typed!([ref x, ref y] chunk_dots(self, x, y)))
    }
    fn decode_nf4(&self, codes: &Buffer, absmax: &Buffer, block: usize, out: &mut Buffer) -> Result<()> {
        shapes::decode_nf4(self, codes, absmax, block, out)?;
        let (n, codes, absmax, out) = (out.len(), u8s(codes), f32s(absmax), Disjoint::new(f32s_mut(out)));
        self.pool.ranges(n, PIECE, |r| {
            // SAFETY: pieces do not overlap.
            decode_nf4(codes, absmax, block, r.start, unsafe { part(&out, &r) });
        });
        Ok(())
    }
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        shapes::first_non_finite(self, x)?;
        Ok(typed!([ref x] first_non_finite_slice(self, x)))
    }
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::gather_rows(self, src, rows, width, dst)?;
        let rows = u32s(rows);
        typed!([ref src, mut dst] gather(self, src, rows, width, dst));
        Ok(())
    }
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        let from = shapes::scatter_rows(self, src, rows, width, dst)?;
        typed!([ref src, mut dst] gather(self, src, &from, width, dst));
        Ok(())
    }
}

/// Zeros sums that will be added to.
pub(crate) fn clear<const N: usize>(cpu: &Cpu, sums: [Option<&mut Buffer>; N]) -> Result<()> {
    sums.into_iter().flatten().try_for_each(|sum| cpu.fill(sum, 0.0))
}

fn fill_slice<T: Stored>(cpu: &Cpu, dst: &mut [T], value: f32) {
    let (n, dst) = (dst.len(), Disjoint::new(dst));
    cpu.pool.ranges(n, PIECE, |r| {
        // SAFETY: pieces of the slice do not overlap.
        fill_piece(cpu.level, unsafe { dst.part(r.start, r.len()) }, value);
    });
}

multiversion! {
    fn fill_piece<S, type T: Stored>(s, dst: &mut [T], value: f32) {
        let v = s.splat(value);
        for i in (0..dst.len()).step_by(LANES) {
            put(s, dst, i, v);
        }
    }
}

fn copy_slice<T: Stored, U: Stored>(cpu: &Cpu, src: &[T], dst: &mut [U]) {
    let dst = Disjoint::new(dst);
    cpu.pool.ranges(src.len(), PIECE, |r| {
        // SAFETY: pieces of the slice do not overlap.
        copy_piece(cpu.level, &src[r.clone()], unsafe { dst.part(r.start, r.len()) });
    });
}

fn copy_rows<T: Stored, U: Stored>(
    cpu: &Cpu,
    (src, pitch): (&[T], usize),
    (dst, to_pitch): (&mut [U], usize),
    [rows, columns]: [usize; 2],
) {
    let dst = Disjoint::new(dst);
    cpu.pool.ranges(rows, rows_of_task(columns), |r| {
        for row in r {
            // SAFETY: rows begin at least their own length apart.
            let to = unsafe { dst.part(row * to_pitch, columns) };
            copy_piece(cpu.level, &src[row * pitch..][..columns], to);
        }
    });
}

multiversion! {
    fn copy_piece<S, type T: Stored, type U: Stored>(s, src: &[T], dst: &mut [U]) {
        copy_row(s, src, dst);
    }
}

/// Copies a row, converting if the types differ, else bit for bit.
#[inline(always)]
pub(crate) fn copy_row<S: Simd, T: Stored, U: Stored>(s: S, src: &[T], dst: &mut [U]) {
    assert_eq!(src.len(), dst.len());
    if TypeId::of::<T>() == TypeId::of::<U>() {
        // SAFETY: both slices have this length and the same element type, and they are different borrows.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr().cast(), dst.as_mut_ptr(), src.len()) };
        return;
    }
    for i in (0..src.len()).step_by(LANES) {
        put(s, dst, i, get(s, src, i));
    }
}

fn axpy_slice<T: Stored, U: Stored>(cpu: &Cpu, a: f32, x: &[T], y: &mut [U]) {
    let y = Disjoint::new(y);
    cpu.pool.ranges(x.len(), PIECE, |r| {
        // SAFETY: pieces of the slice do not overlap.
        axpy_piece(cpu.level, a, &x[r.clone()], unsafe { y.part(r.start, r.len()) });
    });
}

multiversion! {
    fn axpy_piece<S, type T: Stored, type U: Stored>(s, a: f32, x: &[T], y: &mut [U]) {
        let a = s.splat(a);
        for i in (0..x.len()).step_by(LANES) {
            let v = s.fma(a, get(s, x, i), get(s, y, i));
            put(s, y, i, v);
        }
    }
}

fn chunk_dots<T: Wide, U: Wide>(cpu: &Cpu, x: &[T], y: &[U]) -> Vec<f64> {
    let mut sums = vec![0f64; x.len().div_ceil(DOT_CHUNK)];
    let (count, shared) = (sums.len(), Disjoint::new(&mut sums));
    cpu.pool.ranges(count, PIECE / DOT_CHUNK, |chunks| {
        for c in chunks {
            let r = c * DOT_CHUNK..((c + 1) * DOT_CHUNK).min(x.len());
            let sum = dot_chunk(cpu.level, &x[r.clone()], &y[r]);
            // SAFETY: each chunk has its own element.
            unsafe { shared.part(c, 1)[0] = sum };
        }
    });
    sums
}

/// Conversion to f64, in which the product of two elements is exact.
trait Wide: Stored {
    fn wide(self) -> f64;
}

impl Wide for f32 {
    #[inline(always)]
    fn wide(self) -> f64 {
        self as f64
    }
}

impl Wide for u16 {
    #[inline(always)]
    fn wide(self) -> f64 {
        widen(self) as f64
    }
}

multiversion! {
    fn dot_chunk<S, type T: Wide, type U: Wide>(_s, x: &[T], y: &[U]) -> f64 {
        // Element i goes to sum i % 16 at every level; the compiler vectorises it.
        let mut sums = [0f64; LANES];
        let whole = x.len() / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            let (x, y) = (&x[i..i + LANES], &y[i..i + LANES]);
            for l in 0..LANES {
                sums[l] += x[l].wide() * y[l].wide();
            }
        }
        for i in whole..x.len() {
            sums[i - whole] += x[i].wide() * y[i].wide();
        }
        let mut n = LANES / 2;
        while n > 0 {
            for l in 0..n {
                sums[l] += sums[l + n];
            }
            n /= 2;
        }
        sums[0]
    }
}

fn first_non_finite_slice<T: Stored>(cpu: &Cpu, x: &[T]) -> Option<usize> {
    let first = AtomicUsize::new(usize::MAX);
    cpu.pool.ranges(x.len(), PIECE, |r| {
        if first.load(Ordering::Relaxed) < r.start {
            return;
        }
        if let Some(i) = non_finite_in(cpu.level, &x[r.clone()]) {
            first.fetch_min(r.start + i, Ordering::Relaxed);
        }
    });
    Some(first.into_inner()).filter(|&i| i != usize::MAX)
}

multiversion! {
    fn non_finite_in<S, type T: Stored>(s, x: &[T]) -> Option<usize> {
        let zero = s.splat(0.0);
        for from in (0..x.len()).step_by(FINITE_CHUNK) {
            let chunk = &x[from..(from + FINITE_CHUNK).min(x.len())];
            // 0 * x is zero unless x is NaN or infinite, and NaN propagates through the sum.
            let mut sum = zero;
            for i in (0..chunk.len()).step_by(LANES) {
                sum = s.fma(zero, get(s, chunk, i), sum);
            }
            if s.sum(sum) == 0.0 {
                continue;
            }
            let mut lanes = [0f32; LANES];
            for i in (0..chunk.len()).step_by(LANES) {
                put(s, &mut lanes, 0, get(s, chunk, i));
                for l in 0..LANES {
                    if !lanes[l].is_finite() {
                        return Some(from + i + l);
                    }
                }
            }
        }
        None
    }
}

fn gather<T: Stored, U: Stored>(cpu: &Cpu, src: &[T], rows: &[u32], width: usize, dst: &mut [U]) {
    let dst = Disjoint::new(dst);
    cpu.pool.ranges(rows.len(), rows_of_task(width), |r| {
        // SAFETY: tasks have disjoint rows.
        let dst = unsafe { dst.part(r.start * width, r.len() * width) };
        gather_piece(cpu.level, src, &rows[r], width, dst);
    });
}

multiversion! {
    fn gather_piece<S, type T: Stored, type U: Stored>(s, src: &[T], rows: &[u32], width: usize, dst: &mut [U]) {
        let zero = s.splat(0.0);
        for i in 0..rows.len() {
            let to = &mut dst[i * width..(i + 1) * width];
            if rows[i] == NO_ROW {
                for j in (0..width).step_by(LANES) {
                    put(s, to, j, zero);
                }
            } else {
                copy_row(s, &src[rows[i] as usize * width..][..width], to);
            }
        }
    }
}

/// The part of a slice given by a range, for tasks that own it.
///
/// # Safety
/// As [`Disjoint::part`].
#[allow(clippy::mut_from_ref)]
pub(crate) unsafe fn part<'a, T>(of: &Disjoint<'a, T>, range: &Range<usize>) -> &'a mut [T] {
    // SAFETY: passed on to the caller.
    unsafe { of.part(range.start, range.len()) }
}
