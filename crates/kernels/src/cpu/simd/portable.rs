//! Plain Rust: arrays of sixteen lanes, for any CPU and as the reference for the other levels.

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// bf16 to f32.
#[inline(always)]
pub fn widen(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// f32 to bf16, nearest even; a NaN stays a NaN.
#[inline(always)]
pub fn narrow(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return ((bits | 0x0040_0000) >> 16) as u16;
    }
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

// SAFETY: loads and stores copy sixteen elements; there are 4 rows.
unsafe impl Simd for Portable {
    type V = V;
    type P = V;
    const PAIR: usize = 1;
    const MR: usize = 4;
    const NV: usize = 1;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }
    // Not `mul_add`: without FMA instructions it is a library call per lane.
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, a: V) -> V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round(self, a: V) -> V {
        // Adding and removing 1.5 * 2^23 rounds to nearest even; beyond 2^22 the number is returned as it is.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|x| if x.abs() < 4_194_304.0 { (x + MAGIC) - MAGIC } else { x })
    }
    #[inline(always)]
    fn pow2(self, n: V) -> V {
        n.map(|n| f32::from_bits((((n as i32) + 127) << 23) as u32))
    }
    #[inline(always)]
    fn select_lt(self, a: V, b: V, x: V, y: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn select_first(self, n: usize, x: V, y: V) -> V {
        std::array::from_fn(|i| if i < n { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn sum(self, a: V) -> f32 {
        let b: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
        let c: [f32; 4] = std::array::from_fn(|i| b[i] + b[i + 4]);
        (c[0] + c[2]) + (c[1] + c[3])
    }
    #[inline(always)]
    fn largest(self, a: V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if m > x { m } else { x })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V {
        // SAFETY: the caller promises sixteen readable elements.
        unsafe { p.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V) {
        // SAFETY: the caller promises sixteen writable elements.
        unsafe { p.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> V {
        // SAFETY: the caller promises sixteen readable elements.
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(widen)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: V) {
        // SAFETY: the caller promises sixteen writable elements.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(v.map(narrow)) }
    }
    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u32) -> V {
        // SAFETY: passed on to the caller.
        unsafe { self.load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_pairs(self, p: *mut u32, v: V) {
        // SAFETY: passed on to the caller.
        unsafe { self.store(p.cast(), v) }
    }
    #[inline(always)]
    fn splat_pair(self, unit: u32) -> V {
        self.splat(f32::from_bits(unit))
    }
    #[inline(always)]
    unsafe fn zip_bf16(self, low: *const u16, _: *const u16) -> V {
        // SAFETY: passed on to the caller.
        unsafe { self.load_bf16(low) }
    }
    #[inline(always)]
    fn dot(self, a: V, b: V, c: V) -> V {
        self.fma(a, b, c)
    }
}
