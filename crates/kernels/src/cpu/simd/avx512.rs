//! AVX-512: a vector is one register; with `DOT` the bf16 dot product is one instruction.

use super::Simd;
use std::arch::x86_64::*;

/// Token: the CPU has AVX-512 F, BW, DQ and VL, and with `DOT` also BF16.
#[derive(Clone, Copy)]
pub struct Avx512<const DOT: bool>(());

impl<const DOT: bool> Avx512<DOT> {
    /// # Safety
    /// The CPU has these instructions.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Avx512(())
    }
}

// SAFETY (all blocks of this file): the token exists only inside functions compiled for, and dispatched on, CPUs with these
// instructions; pointer operations pass their contract on to the caller.
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl<const DOT: bool> Simd for Avx512<DOT> {
    type V = __m512;
    type P = __m512i;
    const PAIR: usize = if DOT { 2 } else { 1 };
    const MR: usize = 14;
    const NV: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        unsafe { _mm512_sqrt_ps(a) }
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<0>(a) }
    }
    #[inline(always)]
    fn pow2(self, n: __m512) -> __m512 {
        unsafe {
            let e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(e))
        }
    }
    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }
    #[inline(always)]
    fn select_first(self, n: usize, x: __m512, y: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(first(n), y, x) }
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm512_add_ps(a, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a));
            let a = _mm512_add_ps(a, _mm512_shuffle_f32x4::<0b10_11_00_01>(a, a));
            let a = _mm512_add_ps(a, _mm512_permute_ps::<0b01_00_11_10>(a));
            let a = _mm512_add_ps(a, _mm512_permute_ps::<0b10_11_00_01>(a));
            _mm512_cvtss_f32(a)
        }
    }
    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        unsafe {
            let a = _mm512_max_ps(a, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, a));
            let a = _mm512_max_ps(a, _mm512_shuffle_f32x4::<0b10_11_00_01>(a, a));
            let a = _mm512_max_ps(a, _mm512_permute_ps::<0b01_00_11_10>(a));
            let a = _mm512_max_ps(a, _mm512_permute_ps::<0b10_11_00_01>(a));
            _mm512_cvtss_f32(a)
        }
    }
    #[inline(always)]
    fn transpose(self, rows: [__m512; 16]) -> [__m512; 16] {
        let (mut within, mut columns) = (rows, rows);
        unsafe {
            // Blocks of 4 by 4 within the quarters of the vectors, then the quarters.
            for i in [0, 4, 8, 12] {
                let [a, b, c, d] = [rows[i], rows[i + 1], rows[i + 2], rows[i + 3]];
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                within[i] = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
                within[i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
                let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                within[i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
                within[i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            }
            for i in 0..4 {
                let [a, b, c, d] = [within[i], within[4 + i], within[8 + i], within[12 + i]];
                let (ab, cd) = (
                    _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
                    _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d),
                );
                columns[i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
                columns[4 + i] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd);
                let (ab, cd) = (
                    _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
                    _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d),
                );
                columns[8 + i] = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
                columns[12 + i] = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd);
            }
        }
        columns
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        unsafe { widen(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        unsafe { _mm256_storeu_si256(p.cast(), narrow::<DOT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, v: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), v) }
    }
    #[inline(always)]
    fn splat_pair(self, pair: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(pair as i32) }
    }
    #[inline(always)]
    unsafe fn zip_bf16(self, low: *const u16, high: *const u16) -> __m512i {
        unsafe {
            if !DOT {
                return _mm512_castps_si512(self.load_bf16(low));
            }
            let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low.cast()));
            let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(high.cast()));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }
    /// The conversion instruction would flush subnormal numbers to zero.
    #[inline(always)]
    fn narrow_pairs(self, low: __m512, high: __m512) -> __m512i {
        unsafe {
            let low = round_bf16(low);
            if !DOT {
                return _mm512_slli_epi32::<16>(low);
            }
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(round_bf16(high)))
        }
    }
    #[inline(always)]
    fn dot(self, a: __m512i, b: __m512i, c: __m512) -> __m512 {
        unsafe {
            if DOT {
                let a = std::mem::transmute::<__m512i, __m512bh>(a);
                let b = std::mem::transmute::<__m512i, __m512bh>(b);
                return _mm512_dpbf16_ps(c, a, b);
            }
            _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c)
        }
    }
    #[inline(always)]
    unsafe fn load_first(self, n: usize, p: *const f32, fill: f32) -> __m512 {
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(n), p) }
    }
    #[inline(always)]
    unsafe fn store_first(self, n: usize, p: *mut f32, v: __m512) {
        unsafe { _mm512_mask_storeu_ps(p, first(n), v) }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(self, n: usize, p: *const u16) -> __m512 {
        unsafe { widen(_mm256_maskz_loadu_epi16(first(n), p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_first_bf16(self, n: usize, p: *mut u16, v: __m512) {
        unsafe { _mm256_mask_storeu_epi16(p.cast(), first(n), narrow::<DOT>(v)) }
    }
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn widen(v: __m256i) -> __m512 {
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(v))) }
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn narrow<const DOT: bool>(v: __m512) -> __m256i {
    unsafe {
        if DOT {
            return std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
        }
        _mm512_cvtepi32_epi16(round_bf16(v))
    }
}

/// The bits of each lane's bf16, nearest even, as an integer.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn round_bf16(v: __m512) -> __m512i {
    unsafe {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let kept = _mm512_mask_blend_epi32(nan, rounded, quiet);
        _mm512_srli_epi32::<16>(kept)
    }
}
