//! Loads and stores rows of either storage type as f32 vectors.

use super::simd::{LANES, Simd};

/// A stored float: f32, or the bits of a bf16.
///
/// # Safety
/// `get` and `put` access `n` elements (at most sixteen) and no others.
pub unsafe trait Stored: Copy + Send + Sync + 'static {
    /// Loads up to sixteen elements as f32; lanes past `n` are zero.
    ///
    /// # Safety
    /// `n` elements are readable at `p`.
    unsafe fn get<S: Simd>(s: S, n: usize, p: *const Self) -> S::V;
    /// Stores up to sixteen elements, rounded to the storage type.
    ///
    /// # Safety
    /// `n` elements are writable at `p`.
    unsafe fn put<S: Simd>(s: S, n: usize, p: *mut Self, v: S::V);
}

// SAFETY: whole vectors for sixteen elements, else partial ones.
unsafe impl Stored for f32 {
    #[inline(always)]
    unsafe fn get<S: Simd>(s: S, n: usize, p: *const f32) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { if n >= LANES { s.load(p) } else { s.load_first(n, p, 0.0) } }
    }
    #[inline(always)]
    unsafe fn put<S: Simd>(s: S, n: usize, p: *mut f32, v: S::V) {
        // SAFETY: passed on to the caller.
        unsafe { if n >= LANES { s.store(p, v) } else { s.store_first(n, p, v) } }
    }
}

// SAFETY: as above.
unsafe impl Stored for u16 {
    #[inline(always)]
    unsafe fn get<S: Simd>(s: S, n: usize, p: *const u16) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { if n >= LANES { s.load_bf16(p) } else { s.load_first_bf16(n, p) } }
    }
    #[inline(always)]
    unsafe fn put<S: Simd>(s: S, n: usize, p: *mut u16, v: S::V) {
        // SAFETY: passed on to the caller.
        unsafe { if n >= LANES { s.store_bf16(p, v) } else { s.store_first_bf16(n, p, v) } }
    }
}

/// Loads sixteen elements of `row` from `at` (fewer at its end; the other lanes are zero).
#[inline(always)]
pub fn get<S: Simd, T: Stored>(s: S, row: &[T], at: usize) -> S::V {
    let n = row.len() - at;
    // SAFETY: `n` elements are left from `at`.
    unsafe { T::get(s, n, row[at..].as_ptr()) }
}

/// Stores sixteen elements of `row` from `at` (fewer at its end).
#[inline(always)]
pub fn put<S: Simd, T: Stored>(s: S, row: &mut [T], at: usize, v: S::V) {
    let n = row.len() - at;
    // SAFETY: `n` elements are left from `at`.
    unsafe { T::put(s, n, row[at..].as_mut_ptr(), v) }
}
