//! The inner loop of all GEMMs: a register tile of `R` rows by `32 * P` columns.
//!
//! Every output element is one FMA chain over k in ascending order, whatever `R` and `P`, and wherever the chain is stored and
//! resumed (an f32 is stored exactly). That is why a row's result does not depend on the number of rows in the batch.

use crate::cpu::simd::{LANES, Level, Simd, bf16_per_unit};

/// Columns per packed panel of the right operand.
pub const PANEL: usize = 32;

/// GEMM element type: f32, or bf16, in pairs along k if the instruction set has a bf16 dot product, else widened to f32 when
/// packed. The order of additions in a chain is the same either way.
///
/// # Safety
/// A unit has four bytes, valid for any bit pattern, and holds `per_unit` elements; `load` reads sixteen units.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// One step along k: an f32, or the bits of a bf16 unit.
    type Unit: Copy + Default + Send + Sync + 'static;
    /// Elements of k per unit.
    fn per_unit<S: Simd>() -> usize;
    /// The same at a level.
    fn per_unit_at(level: Level) -> usize;

    /// `c + a * b`: sixteen columns times one row's unit.
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
    /// Broadcasts one unit to all lanes.
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

/// Operands of a tile.
#[derive(Clone, Copy)]
pub struct Operands<E: Element> {
    /// Units along k.
    pub units: usize,
    /// Left operand: unit `k` of row `r` is at `a + r * A_ROW + k * A_STEP` (strides fixed by the caller's layout).
    pub a: *const E::Unit,
    /// First panel of the right operand, at this k: 32 columns per unit.
    pub b: *const E::Unit,
    /// Units between panels.
    pub panel_stride: usize,
    /// Output tile, row-major with 32 columns per row; panels are `c_panel_stride` apart.
    pub c: *mut f32,
    /// Elements between panels of the output.
    pub c_panel_stride: usize,
    /// Whether to accumulate into `c` rather than start from zero.
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
        // Opaque, so that the loop over k has one copy: of two, the compiler kept the sums of one on the stack.
        let mut half = 0;
        while half < 2 {
            // SAFETY: passed on to the caller.
            unsafe { columns::<S, E, R, 1, P, A_ROW, A_STEP>(s, op, half) }
            half = std::hint::black_box(half + 1);
        }
    }
}

/// Columns of `V` vectors of each panel, from vector `first` on.
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
