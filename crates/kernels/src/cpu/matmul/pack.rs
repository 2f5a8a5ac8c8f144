//! The right-hand matrix in panels: 32 columns wide, one unit of k after the other.
//!
//! `[panel][unit][32]`, the columns of the last panel and an odd last bf16 filled up with zeros.

use super::tile::{Element, PANEL};
use crate::cpu::pool::{Disjoint, Pool};
use crate::cpu::simd::{LANES, Level, Simd, multiversion};

/// Shape of a packed matrix: `n` columns, products of length `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Columns: output features.
    pub n: usize,
    /// Length of a dot product: input features.
    pub k: usize,
}

impl Shape {
    /// Panels of 32 columns.
    pub fn panels(self) -> usize {
        self.n.div_ceil(PANEL)
    }
    /// Units of k for that element.
    pub fn units<E: Element>(self) -> usize {
        self.k.div_ceil(E::PER_UNIT)
    }
    /// Units of storage for the whole matrix.
    pub fn storage<E: Element>(self) -> usize {
        self.panels() * self.units::<E>() * PANEL
    }
}

/// A packed matrix, or a stretch of its k, borrowed.
#[derive(Clone, Copy)]
pub struct Packed<'a, E: Element> {
    /// `n` and `k`
    pub shape: Shape,
    /// Units from one panel to the next, divided by 32.
    pub stride: usize,
    /// Starts at the first panel's first unit.
    pub data: &'a [E::Unit],
}

impl<'a, E: Element> Packed<'a, E> {
    /// A whole matrix.
    pub fn new(shape: Shape, data: &'a [E::Unit]) -> Self {
        assert!(data.len() >= shape.storage::<E>());
        Packed { shape, stride: shape.units::<E>(), data }
    }
    /// Whether all that its shape implies lies in `data`.
    pub fn is_whole(&self) -> bool {
        let units = self.shape.units::<E>();
        let last = self.shape.panels().saturating_sub(1) * self.stride + units;
        units <= self.stride && self.data.len() >= last * PANEL
    }
    /// Products over `from..from + k` only; `from` is a multiple of the elements in a unit.
    pub fn stretch(self, from: usize, k: usize) -> Self {
        assert!(from.is_multiple_of(E::PER_UNIT) && from + k <= self.shape.k);
        let data = &self.data[from / E::PER_UNIT * PANEL..];
        Packed { shape: Shape { n: self.shape.n, k }, stride: self.stride, data }
    }
}

/// How an f32 master becomes an element.
pub trait FromMaster: Element {
    /// Rounded to nearest even.
    fn from_f32(x: f32) -> Self;
    /// One unit from its elements.
    fn unit(low: Self, high: Self) -> Self::Unit;
    /// Zero.
    const ZERO: Self;
}

impl FromMaster for f32 {
    const ZERO: f32 = 0.0;
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn unit(low: f32, _: f32) -> f32 {
        low
    }
}

impl FromMaster for u16 {
    const ZERO: u16 = 0;
    #[inline(always)]
    fn from_f32(x: f32) -> u16 {
        crate::cpu::simd::narrow(x)
    }
    #[inline(always)]
    fn unit(low: u16, high: u16) -> u32 {
        low as u32 | (high as u32) << 16
    }
}

/// Packs a row-major f32 `w` of shape `[n, k]`: the right-hand side of `x · wᵀ`.
pub fn pack_weight<E: FromMaster>(pool: &Pool, w: &[f32], shape: Shape, out: &mut [E::Unit]) {
    let (k, units) = (shape.k, shape.units::<E>());
    assert!(w.len() == shape.n * k && out.len() == shape.storage::<E>());
    let out = Disjoint::new(out);
    pool.run(shape.panels(), |p| {
        // SAFETY: each task has its own panel.
        let panel = unsafe { out.part(p * units * PANEL, units * PANEL) };
        let columns = (shape.n - p * PANEL).min(PANEL);
        // Blocks of 16 units keep the scattered writes in the first-level cache.
        for from in (0..units).step_by(16) {
            let to = (from + 16).min(units);
            for j in 0..columns {
                let row = &w[(p * PANEL + j) * k..][..k];
                for u in from..to {
                    let at = u * E::PER_UNIT;
                    let low = E::from_f32(row[at]);
                    let high =
                        if E::PER_UNIT == 2 && at + 1 < k { E::from_f32(row[at + 1]) } else { E::ZERO };
                    panel[u * PANEL + j] = E::unit(low, high);
                }
            }
            for j in columns..PANEL {
                (from..to).for_each(|u| panel[u * PANEL + j] = E::Unit::default());
            }
        }
    });
}

/// Packs the transpose of a row-major f32 `w` of shape `[k, n]`: the right-hand side of `x · w`.
/// `shape` is the packed matrix's: products run along the rows of `w`.
pub fn pack_transposed<E: FromMaster>(pool: &Pool, w: &[f32], shape: Shape, out: &mut [E::Unit]) {
    let (n, k, units) = (shape.n, shape.k, shape.units::<E>());
    assert!(w.len() == n * k && out.len() == shape.storage::<E>());
    let out = Disjoint::new(out);
    pool.run(shape.panels(), |p| {
        // SAFETY: each task has its own panel.
        let panel = unsafe { out.part(p * units * PANEL, units * PANEL) };
        let columns = (n - p * PANEL).min(PANEL);
        for u in 0..units {
            let at = u * E::PER_UNIT;
            let low = &w[at * n + p * PANEL..][..columns];
            let dst = &mut panel[u * PANEL..][..PANEL];
            if E::PER_UNIT == 2 && at + 1 < k {
                let high = &w[(at + 1) * n + p * PANEL..][..columns];
                for j in 0..columns {
                    dst[j] = E::unit(E::from_f32(low[j]), E::from_f32(high[j]));
                }
            } else {
                for j in 0..columns {
                    dst[j] = E::unit(E::from_f32(low[j]), E::ZERO);
                }
            }
            dst[columns..].fill(E::Unit::default());
        }
    });
}

/// Packs activations `x` of shape `[k, n]` (tokens by features) as the right-hand side of `dyᵀ · x`.
pub fn pack_tokens<E: TokenRows>(level: Level, pool: &Pool, x: &[E], shape: Shape, out: &mut [E::Unit]) {
    let units = shape.units::<E>();
    assert!(x.len() == shape.n * shape.k && out.len() == shape.storage::<E>());
    let out = Disjoint::new(out);
    pool.run(shape.panels(), |p| {
        // SAFETY: each task has its own panel.
        let panel = unsafe { out.part(p * units * PANEL, units * PANEL) };
        let columns = (shape.n - p * PANEL).min(PANEL);
        if columns < PANEL {
            panel.fill(E::Unit::default());
        }
        for half in 0..columns.div_ceil(LANES) {
            let from = p * PANEL + half * LANES;
            let lanes = (shape.n - from).min(LANES);
            let columns = Columns { x, ld: shape.n, from, lanes, first: 0, units };
            pack_columns::<PANEL, E>(level, columns, &mut panel[half * LANES..]);
        }
    });
}

/// Neighbouring columns of a token-by-feature matrix.
#[derive(Clone, Copy)]
pub struct Columns<'a, E> {
    /// the matrix
    pub x: &'a [E],
    /// its row length
    pub ld: usize,
    /// first column
    pub from: usize,
    /// how many columns
    pub lanes: usize,
    /// first unit of rows
    pub first: usize,
    /// how many units of rows
    pub units: usize,
}

/// Elements whose token rows can be zipped into units.
///
/// # Safety
/// `zip` reads `lanes` elements of each row and writes sixteen units.
pub unsafe trait TokenRows: FromMaster {
    /// The first `lanes` elements of a row, or of two rows in pairs; the other lanes are zero.
    ///
    /// # Safety
    /// `lanes` elements are readable at `low`, and at `high` unless it is null.
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const Self, high: *const Self, out: *mut Self::Unit);
}

// SAFETY: one load and one store.
unsafe impl TokenRows for f32 {
    #[inline(always)]
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const f32, _: *const f32, out: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { s.store(out, if lanes == LANES { s.load(low) } else { s.load_first(lanes, low, 0.0) }) }
    }
}

// SAFETY: two loads and one store.
unsafe impl TokenRows for u16 {
    #[inline(always)]
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const u16, high: *const u16, out: *mut u32) {
        // SAFETY: passed on to the caller; the copies stay within `lanes`.
        unsafe {
            if lanes == LANES && !high.is_null() {
                return s.store_pairs(out, s.zip_bf16(low, high));
            }
            let (mut l, mut h) = ([0u16; LANES], [0u16; LANES]);
            std::ptr::copy_nonoverlapping(low, l.as_mut_ptr(), lanes);
            if !high.is_null() {
                std::ptr::copy_nonoverlapping(high, h.as_mut_ptr(), lanes);
            }
            s.store_pairs(out, s.zip_bf16(l.as_ptr(), h.as_ptr()));
        }
    }
}

multiversion! {
    /// Writes up to sixteen columns for each unit of rows, `STEP` units apart.
    fn pack_columns<S, const STEP: usize, type E: TokenRows>(s, c: Columns<'_, E>, out: &mut [E::Unit]) {
        let (rows, units) = (c.row_count(), c.units);
        assert!(c.lanes <= LANES && out.len() >= (units - 1) * STEP + LANES);
        for u in 0..units {
            // SAFETY: `lanes` columns from the first on, and `out` holds the last store (asserted above).
            unsafe { c.zip(s, rows, u, 0..c.lanes, out.as_mut_ptr().add(u * STEP)) };
        }
    }
}

/// Cuts the columns into panels of `width` (at most 16) and writes for each panel sixteen units for each unit of
/// rows; the panels lie `block` units apart.
#[inline(always)]
pub fn pack_panels<S: Simd, E: TokenRows>(
    s: S,
    c: Columns<'_, E>,
    width: usize,
    block: usize,
    out: &mut [E::Unit],
) {
    let (rows, panels) = (c.row_count(), c.lanes.div_ceil(width));
    assert!(width <= LANES && c.units * LANES <= block && out.len() >= panels * block);
    for u in 0..c.units {
        for p in 0..panels {
            let lanes = width.min(c.lanes - p * width);
            // SAFETY: the panel's columns are among the `lanes`, and `out` holds the blocks (asserted above).
            unsafe {
                c.zip(s, rows, u, p * width..p * width + lanes, out.as_mut_ptr().add(p * block + u * LANES))
            };
        }
    }
}

impl<E: TokenRows> Columns<'_, E> {
    /// Rows of the matrix, after a look at whether the columns and units lie in it.
    #[inline(always)]
    fn row_count(&self) -> usize {
        let rows = self.x.len() / self.ld;
        assert!(self.from + self.lanes <= self.ld && (self.first + self.units - 1) * E::PER_UNIT < rows);
        rows
    }

    /// One unit of rows, some of the columns.
    ///
    /// # Safety
    /// `rows` is [`Columns::row_count`], `u < units`, `columns` lie below `self.lanes`; `out` takes sixteen units.
    #[inline(always)]
    unsafe fn zip<S: Simd>(
        &self,
        s: S,
        rows: usize,
        u: usize,
        columns: std::ops::Range<usize>,
        out: *mut E::Unit,
    ) {
        let row = (self.first + u) * E::PER_UNIT;
        // SAFETY: row < rows and the columns lie within the row, as the caller promises.
        unsafe {
            let low = self.x.as_ptr().add(row * self.ld + self.from + columns.start);
            let high = if E::PER_UNIT == 2 && row + 1 < rows { low.add(self.ld) } else { std::ptr::null() };
            E::zip(s, columns.len(), low, high, out);
        }
    }
}
