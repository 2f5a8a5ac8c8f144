//! AVX2 and FMA: a vector is two registers.

use super::Simd;
use std::arch::x86_64::*;

/// Token: the CPU has AVX2 and FMA.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has these instructions.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Avx2(())
    }
}

/// Lanes 0-7 and 8-15.
#[derive(Clone, Copy)]
pub struct Two<T>(T, T);

// SAFETY (all blocks of this file): the token exists only inside functions compiled for, and dispatched on, CPUs with these
// instructions; pointer operations pass their contract on to the caller.
macro_rules! both {
    ($f:ident, $($v:expr),+) => { unsafe { Two($f($($v.0),+), $f($($v.1),+)) } };
}

#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl Simd for Avx2 {
    type V = Two<__m256>;
    type P = Two<__m256>;
    const PAIR: usize = 1;
    const MR: usize = 6;
    const NV: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        unsafe { Two(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        both!(_mm256_sqrt_ps, a)
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        unsafe { Two(_mm256_round_ps::<8>(a.0), _mm256_round_ps::<8>(a.1)) }
    }
    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        let half = |n| unsafe {
            let e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(e))
        };
        Two(half(n.0), half(n.1))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        let half = |a, b, x, y| unsafe { _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) };
        Two(half(a.0, b.0, x.0, y.0), half(a.1, b.1, x.1, y.1))
    }
    #[inline(always)]
    fn select_first(self, n: usize, x: Self::V, y: Self::V) -> Self::V {
        let half = |from: i32, x, y| unsafe {
            let lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
            let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lane);
            _mm256_blendv_ps(y, x, _mm256_castsi256_ps(below))
        };
        Two(half(0, x.0, y.0), half(8, x.1, y.1))
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        unsafe {
            let a = _mm256_add_ps(a.0, a.1);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_permute_ps::<0b01_00_11_10>(a));
            _mm_cvtss_f32(_mm_add_ps(a, _mm_permute_ps::<0b10_11_00_01>(a)))
        }
    }
    #[inline(always)]
    fn largest(self, a: Self::V) -> f32 {
        unsafe {
            let a = _mm256_max_ps(a.0, a.1);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_permute_ps::<0b01_00_11_10>(a));
            _mm_cvtss_f32(_mm_max_ps(a, _mm_permute_ps::<0b10_11_00_01>(a)))
        }
    }
    #[inline(always)]
    fn transpose(self, rows: [Self::V; 16]) -> [Self::V; 16] {
        let mut columns = rows;
        for (i, top) in [(0, true), (8, false)] {
            let (mut left, mut right) = ([rows[0].0; 8], [rows[0].0; 8]);
            for r in 0..8 {
                Two(left[r], right[r]) = rows[i + r];
            }
            let (left, right) = unsafe { (transpose_eight(left), transpose_eight(right)) };
            for c in 0..8 {
                if top {
                    (columns[c].0, columns[8 + c].0) = (left[c], right[c]);
                } else {
                    (columns[c].1, columns[8 + c].1) = (left[c], right[c]);
                }
            }
        }
        columns
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        unsafe { Two(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        unsafe {
            _mm256_storeu_ps(p, v.0);
            _mm256_storeu_ps(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        let half = |p: *const u16| unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        };
        unsafe { Two(half(p), half(p.add(8))) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V) {
        unsafe {
            store_half(p, v.0);
            store_half(p.add(8), v.1);
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> Self::P {
        unsafe { self.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, v: Self::P) {
        unsafe { self.store(p.cast(), v) }
    }
    #[inline(always)]
    fn splat_pair(self, unit: u32) -> Self::P {
        self.splat(f32::from_bits(unit))
    }
    #[inline(always)]
    unsafe fn zip_bf16(self, low: *const u16, _: *const u16) -> Self::P {
        unsafe { self.load_bf16(low) }
    }
    #[inline(always)]
    fn dot(self, a: Self::P, b: Self::P, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn transpose_eight(rows: [__m256; 8]) -> [__m256; 8] {
    let (mut within, mut columns) = (rows, rows);
    unsafe {
        // Blocks of 4 by 4 within the halves of the vectors, then the halves.
        for i in [0, 4] {
            let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            within[i] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            within[i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let (ab, cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            within[i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            within[i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
        }
        for i in 0..4 {
            columns[i] = _mm256_permute2f128_ps::<0x20>(within[i], within[4 + i]);
            columns[4 + i] = _mm256_permute2f128_ps::<0x31>(within[i], within[4 + i]);
        }
    }
    columns
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn store_half(p: *mut u16, v: __m256) {
    unsafe {
        let bits = _mm256_castps_si256(v);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let kept = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(kept, kept));
        _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
    }
}
