//! NEON, part of every 64-bit ARM CPU: a vector is four registers. `DOT`: the CPU also has bf16 dot products.
//!
//! `BFDOT` keeps one addition chain per output element, like every other level. `BFMMLA`, which multiplies blocks of two rows and
//! two columns, would need both operands packed in fours along k.

use super::Simd;
use std::arch::aarch64::*;

/// Token: the CPU has NEON, and with `DOT` the bf16 extension of Armv8.6.
#[derive(Clone, Copy)]
pub struct Neon<const DOT: bool>(());

impl<const DOT: bool> Neon<DOT> {
    /// # Safety
    /// The CPU has these instructions.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Self {
        Neon(())
    }
}

/// Lanes 0-3, 4-7, 8-11 and 12-15.
type Four = [float32x4_t; 4];

// SAFETY (all blocks of this file): the token exists only inside functions compiled for, and dispatched on, CPUs with these
// instructions; pointer operations pass their contract on to the caller.
macro_rules! each {
    ($f:ident, $($v:expr),+) => { std::array::from_fn(|i| unsafe { $f($($v[i]),+) }) };
}

/// `a` if `a > b`, else `b`, also for NaN, as on other CPUs.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

#[allow(clippy::undocumented_unsafe_blocks)]
unsafe impl<const DOT: bool> Simd for Neon<DOT> {
    type V = Four;
    type P = Four;
    const PAIR: usize = if DOT { 2 } else { 1 };
    const MR: usize = 6;
    const NV: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> Four {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        each!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Four, b: Four) -> Four {
        each!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Four, b: Four) -> Four {
        each!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn div(self, a: Four, b: Four) -> Four {
        each!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Four, b: Four, c: Four) -> Four {
        each!(vfmaq_f32, c, a, b)
    }
    #[inline(always)]
    fn max(self, a: Four, b: Four) -> Four {
        std::array::from_fn(|i| larger(a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: Four, b: Four) -> Four {
        std::array::from_fn(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]) })
    }
    #[inline(always)]
    fn sqrt(self, a: Four) -> Four {
        each!(vsqrtq_f32, a)
    }
    #[inline(always)]
    fn round(self, a: Four) -> Four {
        each!(vrndnq_f32, a)
    }
    #[inline(always)]
    fn pow2(self, n: Four) -> Four {
        std::array::from_fn(|i| unsafe {
            let e = vaddq_s32(vcvtq_s32_f32(n[i]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(e))
        })
    }
    #[inline(always)]
    fn select_lt(self, a: Four, b: Four, x: Four, y: Four) -> Four {
        std::array::from_fn(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), x[i], y[i]) })
    }
    #[inline(always)]
    fn select_first(self, n: usize, x: Four, y: Four) -> Four {
        std::array::from_fn(|i| unsafe {
            let lane = vaddq_u32(vld1q_u32([0, 1, 2, 3].as_ptr()), vdupq_n_u32(4 * i as u32));
            vbslq_f32(vcltq_u32(lane, vdupq_n_u32(n as u32)), x[i], y[i])
        })
    }
    #[inline(always)]
    fn sum(self, a: Four) -> f32 {
        unsafe {
            let c = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let d = vadd_f32(vget_low_f32(c), vget_high_f32(c));
            vget_lane_f32::<0>(d) + vget_lane_f32::<1>(d)
        }
    }
    #[inline(always)]
    fn largest(self, a: Four) -> f32 {
        unsafe {
            let c = larger(larger(a[0], a[2]), larger(a[1], a[3]));
            let c = larger(c, vextq_f32::<2>(c, c));
            vgetq_lane_f32::<0>(larger(c, vextq_f32::<1>(c, c)))
        }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Four {
        std::array::from_fn(|i| unsafe { vld1q_f32(p.add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Four) {
        for (i, v) in v.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(4 * i), v) };
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Four {
        std::array::from_fn(|i| unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i)))) })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: Four) {
        for (i, v) in v.into_iter().enumerate() {
            unsafe { vst1_u16(p.add(4 * i), narrow(v)) };
        }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> Four {
        unsafe { self.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, v: Four) {
        unsafe { self.store(p.cast(), v) }
    }
    #[inline(always)]
    fn splat_pair(self, unit: u32) -> Four {
        self.splat(f32::from_bits(unit))
    }
    #[inline(always)]
    unsafe fn zip_bf16(self, low: *const u16, high: *const u16) -> Four {
        if !DOT {
            return unsafe { self.load_bf16(low) };
        }
        std::array::from_fn(|i| unsafe {
            let (low, high) = (vld1_u16(low.add(4 * i)), vld1_u16(high.add(4 * i)));
            vreinterpretq_f32_u32(vorrq_u32(vmovl_u16(low), vshll_n_u16::<16>(high)))
        })
    }
    #[inline(always)]
    fn dot(self, a: Four, b: Four, c: Four) -> Four {
        match DOT {
            true => std::array::from_fn(|i| unsafe { bfdot(a[i], b[i], c[i]) }),
            false => self.fma(a, b, c),
        }
    }
}

#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks)]
unsafe fn narrow(v: float32x4_t) -> uint16x4_t {
    unsafe {
        let bits = vreinterpretq_u32_f32(v);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
    }
}

/// Lane-wise `c + a.low * b.low + a.high * b.high`. The intrinsic is not stable yet.
#[inline(always)]
unsafe fn bfdot(a: float32x4_t, b: float32x4_t, mut c: float32x4_t) -> float32x4_t {
    // SAFETY: the caller has the instruction; it touches nothing but these registers.
    unsafe {
        std::arch::asm!(
            ".arch_extension bf16",
            "bfdot {c:v}.4s, {a:v}.8h, {b:v}.8h",
            a = in(vreg) a, b = in(vreg) b, c = inout(vreg) c,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    c
}
