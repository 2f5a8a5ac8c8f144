//! Vectors of sixteen f32 lanes on every instruction set.
//!
//! Kernels are written once, generic over [`Simd`], and compiled once per [`Level`] by `multiversion!`. A level's token
//! (`Avx512`, `Avx2`, `Portable`) exists only if the CPU has the instructions, so value operations are safe; only loads and
//! stores are unsafe. Lane order and the shape of every reduction are the same at all levels: results differ in rounding (fused
//! or not), never in structure.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::{Portable, narrow, widen};

use crate::error::{Error, Result, nearest};

pub const LANES: usize = 16;

/// An instruction set of this CPU. Constructed only after detection, so kernels may rely on it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(LevelKind);

impl std::fmt::Debug for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// All instruction sets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LevelKind {
    /// Plain Rust without intrinsics.
    Portable,
    Neon,
    /// NEON with the bf16 dot product.
    NeonBf16,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with the bf16 dot product.
    Avx512Bf16,
}

impl LevelKind {
    /// All levels, slowest first.
    const ALL: [LevelKind; 6] = [
        LevelKind::Portable,
        LevelKind::Neon,
        LevelKind::NeonBf16,
        LevelKind::Avx2,
        LevelKind::Avx512,
        LevelKind::Avx512Bf16,
    ];

    fn name(self) -> &'static str {
        match self {
            LevelKind::Portable => "portable",
            LevelKind::Neon => "neon",
            LevelKind::NeonBf16 => "neonbf16",
            LevelKind::Avx2 => "avx2",
            LevelKind::Avx512 => "avx512",
            LevelKind::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether this CPU can run it.
    fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            match self {
                LevelKind::Portable => true,
                LevelKind::Neon | LevelKind::NeonBf16 => false,
                LevelKind::Avx2 => avx2,
                LevelKind::Avx512 => avx512,
                LevelKind::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected as has;
            match self {
                LevelKind::Portable => true,
                LevelKind::Neon => has!("neon"),
                LevelKind::NeonBf16 => has!("neon") && has!("bf16"),
                _ => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == LevelKind::Portable
        }
    }
}

impl Level {
    /// Plain Rust, for every CPU.
    pub const PORTABLE: Level = Level(LevelKind::Portable);

    /// The name used in `FERRL_SIMD`.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    pub(crate) fn kind(self) -> LevelKind {
        self.0
    }

    /// The CPU's levels, slowest first.
    pub fn available() -> Vec<Level> {
        LevelKind::ALL.into_iter().filter(|kind| kind.is_available()).map(Level).collect()
    }

    /// Names of levels that the CPU lacks.
    pub fn missing() -> Vec<&'static str> {
        LevelKind::ALL.into_iter().filter(|kind| !kind.is_available()).map(LevelKind::name).collect()
    }

    /// The fastest level, unless `FERRL_SIMD` names another.
    pub fn from_env() -> Result<Level> {
        match std::env::var("FERRL_SIMD") {
            Ok(name) => Level::named(&name),
            Err(_) => Ok(Level::available().pop().unwrap_or(Level::PORTABLE)),
        }
    }

    /// The level with this name, if the CPU has it.
    pub fn named(name: &str) -> Result<Level> {
        let names = LevelKind::ALL.map(LevelKind::name);
        let Some(kind) = LevelKind::ALL.into_iter().find(|kind| kind.name() == name) else {
            let hint = nearest(name, names).unwrap_or("portable");
            return Err(Error::usage(format!("FERRL_SIMD={name} is not one of {}", names.join(", ")))
                .fix(format!("FERRL_SIMD={hint}, or unset it")));
        };
        if !kind.is_available() {
            return Err(Error::usage(format!("FERRL_SIMD={name}: this CPU does not have it")).fix(format!(
                "one of {}",
                Level::available().iter().map(|l| l.name()).collect::<Vec<_>>().join(", ")
            )));
        }
        Ok(Level(kind))
    }
}

/// A vector of sixteen lanes and its operations.
///
/// # Safety
/// Loads and stores access exactly the elements documented; `MR` is at most 14.
pub unsafe trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen bf16 units: pairs if the level has a bf16 dot product, else elements widened to f32.
    type P: Copy;
    /// Elements per bf16 unit: 2 in a pair, 1 widened. Widening happens once when packing, so GEMMs are then as fast as f32's.
    const PAIR: usize;
    /// Rows of the GEMM register tile, as many as the register file holds.
    const MR: usize;
    /// Vectors per row of the GEMM register tile; divides 2.
    const NV: usize;

    /// Broadcasts `x`.
    fn splat(self, x: f32) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused if the level has FMA
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Larger of the two, `b` if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Smaller of the two, `b` if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// Nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `2^n` for integer-valued `n` in -126..=127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Lanes of `x` where `a < b`, lanes of `y` elsewhere (and where a NaN is compared).
    fn select_lt(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The first `n` lanes of `x`, the rest of `y`.
    fn select_first(self, n: usize, x: Self::V, y: Self::V) -> Self::V;
    /// Sum of all lanes, by halving: 16 to 8 to 4 ...
    fn sum(self, a: Self::V) -> f32;
    /// Largest lane.
    fn largest(self, a: Self::V) -> f32;

    /// # Safety
    /// `p..p+16` is readable.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// # Safety
    /// `p..p+16` is writable.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Sixteen bf16 widened to f32.
    /// # Safety
    /// `p..p+16` is readable.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Stores sixteen bf16, rounded to nearest even.
    /// # Safety
    /// `p..p+16` is writable.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);

    /// Loads sixteen bf16 units.
    /// # Safety
    /// `p..p+16` is readable.
    unsafe fn load_pairs(self, p: *const u32) -> Self::P;
    /// # Safety
    /// `p..p+16` is writable.
    unsafe fn store_pairs(self, p: *mut u32, v: Self::P);
    /// Broadcasts a unit.
    fn splat_pair(self, pair: u32) -> Self::P;
    /// Lane i is (`low[i]`, `high[i]`); for single-element units `low[i]` widened.
    /// # Safety
    /// `low..low+16` and `high..high+16` are readable.
    unsafe fn zip_bf16(self, low: *const u16, high: *const u16) -> Self::P;
    /// Lane i is (`low[i]`, `high[i]`), rounded to nearest even; for single-element units `low[i]` rounded and widened.
    #[inline(always)]
    fn narrow_pairs(self, low: Self::V, high: Self::V) -> Self::P {
        let (mut l, mut h) = ([0u16; LANES], [0u16; LANES]);
        // SAFETY: the arrays have sixteen elements.
        unsafe {
            self.store_bf16(l.as_mut_ptr(), low);
            if Self::PAIR == 2 {
                self.store_bf16(h.as_mut_ptr(), high);
            }
            self.zip_bf16(l.as_ptr(), h.as_ptr())
        }
    }
    /// Lane-wise `c + a.low * b.low + a.high * b.high`; `c + a * b` for single-element units.
    fn dot(self, a: Self::P, b: Self::P, c: Self::V) -> Self::V;

    /// Lane j of vector i becomes lane i of vector j.
    #[inline(always)]
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES] {
        let (mut from, mut to) = ([[0f32; LANES]; LANES], [[0f32; LANES]; LANES]);
        let mut columns = rows;
        // SAFETY: the arrays have sixteen elements.
        unsafe {
            for i in 0..LANES {
                self.store(from[i].as_mut_ptr(), rows[i]);
            }
            for i in 0..LANES {
                for j in 0..LANES {
                    to[i][j] = from[j][i];
                }
                columns[i] = self.load(to[i].as_ptr());
            }
        }
        columns
    }

    /// Prefetches the cache line at `p`, which may be any address.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}

    /// The first `n` lanes from memory, the rest `fill`.
    /// # Safety
    /// `p..p+n` is readable, `n <= 16`.
    #[inline(always)]
    unsafe fn load_first(self, n: usize, p: *const f32, fill: f32) -> Self::V {
        let mut lanes = [fill; LANES];
        // SAFETY: the caller promises n readable elements, and n <= 16.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            self.load(lanes.as_ptr())
        }
    }
    /// Stores the first `n` lanes.
    /// # Safety
    /// `p..p+n` is writable, `n <= 16`.
    #[inline(always)]
    unsafe fn store_first(self, n: usize, p: *mut f32, v: Self::V) {
        let mut lanes = [0f32; LANES];
        // SAFETY: the caller promises n writable elements, and n <= 16.
        unsafe {
            self.store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
    /// `load_first` from bf16.
    /// # Safety
    /// `p..p+n` is readable, `n <= 16`.
    #[inline(always)]
    unsafe fn load_first_bf16(self, n: usize, p: *const u16) -> Self::V {
        let mut lanes = [0u16; LANES];
        // SAFETY: the caller promises n readable elements, and n <= 16.
        unsafe {
            std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            self.load_bf16(lanes.as_ptr())
        }
    }
    /// `store_first` to bf16.
    /// # Safety
    /// `p..p+n` is writable, `n <= 16`.
    #[inline(always)]
    unsafe fn store_first_bf16(self, n: usize, p: *mut u16, v: Self::V) {
        let mut lanes = [0u16; LANES];
        // SAFETY: the caller promises n writable elements, and n <= 16.
        unsafe {
            self.store_bf16(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
}

/// Compiles a function once per level; the generated function takes the [`Level`] instead of the token. Helpers it calls must be
/// `#[inline(always)]`, so that they are compiled for the level, too.
macro_rules! multiversion {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$S:ident $(, const $C:ident : $CT:ty)* $(, type $T:ident : $B:path)*>($s:ident $(, $arg:ident : $ty:ty)* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name<$(const $C: $CT,)* $($T: $B,)*>(level: $crate::cpu::simd::Level $(, $arg: $ty)*) $(-> $ret)? {
            #[allow(unused_imports)]
            use $crate::cpu::simd::{LevelKind, Simd, Portable};
            #[inline(always)]
            fn generic<$S: Simd, $(const $C: $CT,)* $($T: $B,)*>($s: $S $(, $arg: $ty)*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
            fn avx512bf16<$(const $C: $CT,)* $($T: $B,)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: compiled for these instructions, and called where the CPU has them.
                let token = unsafe { $crate::cpu::simd::Avx512::<true>::new() };
                generic::<_, $($C,)* $($T,)*>(token $(, $arg)*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512<$(const $C: $CT,)* $($T: $B,)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: compiled for these instructions, and called where the CPU has them.
                let token = unsafe { $crate::cpu::simd::Avx512::<false>::new() };
                generic::<_, $($C,)* $($T,)*>(token $(, $arg)*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$(const $C: $CT,)* $($T: $B,)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: compiled for these instructions, and called where the CPU has them.
                let token = unsafe { $crate::cpu::simd::Avx2::new() };
                generic::<_, $($C,)* $($T,)*>(token $(, $arg)*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            fn neon<$(const $C: $CT,)* $($T: $B,)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: compiled for these instructions, and called where the CPU has them.
                let token = unsafe { $crate::cpu::simd::Neon::<false>::new() };
                generic::<_, $($C,)* $($T,)*>(token $(, $arg)*)
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,bf16")]
            fn neonbf16<$(const $C: $CT,)* $($T: $B,)*>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: compiled for these instructions, and called where the CPU has them.
                let token = unsafe { $crate::cpu::simd::Neon::<true>::new() };
                generic::<_, $($C,)* $($T,)*>(token $(, $arg)*)
            }
            match level.kind() {
                LevelKind::Portable => generic::<_, $($C,)* $($T,)*>(Portable $(, $arg)*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: there is a level only where `LevelKind::is_available` confirmed it.
                LevelKind::Avx2 => unsafe { avx2::<$($C,)* $($T,)*>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                LevelKind::Avx512 => unsafe { avx512::<$($C,)* $($T,)*>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                LevelKind::Avx512Bf16 => unsafe { avx512bf16::<$($C,)* $($T,)*>($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: as above.
                LevelKind::Neon => unsafe { neon::<$($C,)* $($T,)*>($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: as above.
                LevelKind::NeonBf16 => unsafe { neonbf16::<$($C,)* $($T,)*>($($arg),*) },
                #[allow(unreachable_patterns)]
                _ => unreachable!("a level of another architecture"),
            }
        }
    };
}
pub(crate) use multiversion;

multiversion! {
    /// Elements per bf16 unit at a level.
    pub(crate) fn bf16_per_unit<S>(_s) -> usize {
        S::PAIR
    }
}
