//! The one inner loop of all matrix products: a tile of `R` rows by `32 * P` columns held in registers.
//!
//! Every output element is one chain of multiply-adds over k in ascending order, whatever `R` and `P` are and
//! wherever the chain is interrupted to be stored and resumed (a stored f32 is the register's f32). That is
//! why a row's result does not depend on how many rows are computed beside it.

use crate::cpu::simd::{LANES, Level, Simd, bf16_per_unit};

/// Columns of a packed panel of the right-hand matrix.
pub const PANEL: usize = 32;

/// What a matrix product multiplies: f32, or bf16: in pairs along k where the level has a bf16 dot product, else widened
/// to f32 as they are packed. A chain of products adds its elements in the same order either way.
///
/// # Safety
/// A unit has four bytes and any of their values, and holds `per_unit` elements; `load` reads sixteen units.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// What one step along k reads: an f32, or the bits of a unit of bf16.
    type Unit: Copy + Default + Send + Sync + 'static;
    /// Elements of k in a unit.
    fn per_unit<S: Simd>() -> usize;
    /// The same at a level.
    fn per_unit_at(level: Level) -> usize;

    /// Sixteen columns times one row's unit, added to `c`.
    ///
    /// # Safety
    /// Sixteen units are readable at `b`, one at `a`.
    unsafe fn step<S: Simd>(s: S, a: Self::Wide<S>, b: Self::Wide<S>, c: S::V) -> S::V;
    /// Sixteen units in registers.
    type Wide<S: Simd>: Copy;
    /// Sixteen units from memory.
    ///
    /// # Safety
    /// Sixteen units are readable at `p`.
    unsafe fn load<S: Simd>(s: S, p: *const Self::Unit) -> Self::Wide<S>;
    /// One unit in all lanes.
    fn splat<S: Simd>(s: S, unit: Self::Unit) -> Self::Wide<S>;
}

// SAFETY: a unit is an f32.
unsafe impl Element for f32 {
    type Unit = f32;
    type Wide<S: Simd> = S::V;
    #[inline(always)]
    fn per_unit<S: Simd>() -> usize {
        1
    }
    fn per_unit_at(_: Level) -> usize {
        1
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, a: S::V, b: S::V, c: S::V) -> S::V {
        s.fma(a, b, c)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: passed on to the caller.
        unsafe { s.load(p) }
    }
    #[inline(always)]
    fn splat<S: Simd>(s: S, unit: f32) -> S::V {
        s.splat(unit)
    }
}

// SAFETY: a unit is two bf16, or one widened to f32, as their bits.
unsafe impl Element for u16 {
    type Unit = u32;
    type Wide<S: Simd> = S::P;
    #[inline(always)]
    fn per_unit<S: Simd>() -> usize {
        S::PAIR
    }
    fn per_unit_at(level: Level) -> usize {
        bf16_per_unit(level)
    }
    #[inline(always)]
    unsafe fn step<S: Simd>(s: S, a: S::P, b: S::P, c: S::V) -> S::V {
        s.dot(a, b, c)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u32) -> S::P {
        // SAFETY: passed on to the caller.
        unsafe { s.load_pairs(p) }
    }
    #[inline(always)]
    fn splat<S: Simd>(s: S, unit: u32) -> S::P {
        s.splat_pair(unit)
    }
}

/// Where a tile's operands lie.
#[derive(Clone, Copy)]
pub struct Operands<E: Element> {
    /// Units along k.
    pub units: usize,
    /// Left-hand block: unit `k` of row `r` at `a + r * A_ROW + k * A_STEP` (both fixed by the caller's layout).
    pub a: *const E::Unit,
    /// First panel of the right-hand matrix at this k: 32 columns a unit.
    pub b: *const E::Unit,
    /// Units from one panel to the next.
    pub panel_stride: usize,
    /// Output tile, row-major with 32 columns a row, panel after panel `c_panel_stride` apart.
    pub c: *mut f32,
    /// Elements from one panel's tile to the next.
    pub c_panel_stride: usize,
    /// Whether to go on from what `c` holds, or to start from zero.
    pub resume: bool,
}

/// Computes one tile: `R` rows, `P` panels.
///
/// # Safety
/// `a`, `b` and `c` are valid for the extents that `units`, `R`, `P` and the strides imply.
#[inline(always)]
pub unsafe fn tile<
    S: Simd,
    E: Element,
    const R: usize,
    const P: usize,
    const A_ROW: usize,
    const A_STEP: usize,
>(
    s: S,
    op: Operands<E>,
) {
    if S::NV == 2 {
        // SAFETY: passed on to the caller.
        unsafe { columns::<S, E, R, 2, P, A_ROW, A_STEP>(s, op, 0) }
    } else {
        for half in 0..2 {
            // SAFETY: passed on to the caller.
            unsafe { columns::<S, E, R, 1, P, A_ROW, A_STEP>(s, op, half) }
        }
    }
}

/// `V` vectors of each panel, starting at vector `first`.
#[inline(always)]
unsafe fn columns<
    S: Simd,
    E: Element,
    const R: usize,
    const V: usize,
    const P: usize,
    const A_ROW: usize,
    const A_STEP: usize,
>(
    s: S,
    op: Operands<E>,
    first: usize,
) {
    let mut acc = [[[s.splat(0.0); V]; P]; R];
    // SAFETY: the caller promises the extents of a, b and c.
    unsafe {
        if op.resume {
            for r in 0..R {
                for p in 0..P {
                    for v in 0..V {
                        let at = p * op.c_panel_stride + r * PANEL + (first + v) * LANES;
                        acc[r][p][v] = s.load(op.c.add(at));
                    }
                }
            }
        }
        let mut a = op.a;
        let mut b = op.b.add(first * LANES);
        for _ in 0..op.units {
            let mut column = [[E::splat(s, E::Unit::default()); V]; P];
            for p in 0..P {
                for v in 0..V {
                    column[p][v] = E::load(s, b.add(p * op.panel_stride + v * LANES));
                }
            }
            for r in 0..R {
                let row = E::splat(s, *a.add(r * A_ROW));
                for p in 0..P {
                    for v in 0..V {
                        acc[r][p][v] = E::step(s, row, column[p][v], acc[r][p][v]);
                    }
                }
            }
            a = a.add(A_STEP);
            b = b.add(PANEL);
        }
        for r in 0..R {
            for p in 0..P {
                for v in 0..V {
                    let at = p * op.c_panel_stride + r * PANEL + (first + v) * LANES;
                    s.store(op.c.add(at), acc[r][p][v]);
                }
            }
        }
    }
}
