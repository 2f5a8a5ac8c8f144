//! Packing of the right operand into panels of 32 columns.
//!
//! Layout `[panel][unit of k][32]`, zero-padded in the last panel's columns and in an odd last bf16 pair.

use super::tile::{Element, PANEL};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::cpu::simd::{LANES, Level, Simd, multiversion, narrow};

/// Shape of a packed operand: `n` columns, dot products of length `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedShape {
    /// Columns: output features.
    pub n: usize,
    /// Length of a dot product: input features.
    pub k: usize,
}

impl PackedShape {
    /// Panels of 32 columns.
    pub fn panels(self) -> usize {
        self.n.div_ceil(PANEL)
    }
    /// Units of k, given the elements per unit.
    pub fn units(self, per_unit: usize) -> usize {
        self.k.div_ceil(per_unit)
    }
    /// Units of the whole packed matrix.
    pub fn storage(self, per_unit: usize) -> usize {
        self.panels() * self.units(per_unit) * PANEL
    }
}

/// A packed matrix, or a range of its k, borrowed.
#[derive(Clone, Copy)]
pub struct Packed<'a, E: Element> {
    /// `n` and `k`
    pub shape: PackedShape,
    /// Elements per unit, at the instruction set it was packed for.
    pub per_unit: usize,
    /// Units between panels, divided by 32.
    pub stride: usize,
    /// Starts at the first panel's first unit.
    pub data: &'a [E::Unit],
}

impl<'a, E: Element> Packed<'a, E> {
    /// A whole matrix.
    pub fn new(shape: PackedShape, per_unit: usize, data: &'a [E::Unit]) -> Self {
        assert!(data.len() >= shape.storage(per_unit));
        Packed { shape, per_unit, stride: shape.units(per_unit), data }
    }
    /// Whether `data` holds what the shape implies, in units of `S`.
    pub fn is_whole<S: Simd>(&self) -> bool {
        self.per_unit == E::per_unit::<S>() && self.is_all_there()
    }
    /// Whether `data` holds what the shape implies.
    pub fn is_all_there(&self) -> bool {
        let units = self.shape.units(self.per_unit);
        let last = self.shape.panels().saturating_sub(1) * self.stride + units;
        units <= self.stride && self.data.len() >= last * PANEL
    }
    /// The sub-range `from..from + k` of k; `from` is a multiple of the elements per unit.
    pub fn k_range(self, from: usize, k: usize) -> Self {
        assert!(from.is_multiple_of(self.per_unit) && from + k <= self.shape.k);
        let data = &self.data[from / self.per_unit * PANEL..];
        Packed { shape: PackedShape { n: self.shape.n, k }, data, ..self }
    }
}

/// Conversion from an f32 master.
pub trait FromMaster: Element {
    /// A unit from its two elements, rounded to nearest even; `high` is `None` for single-element units.
    fn unit(low: f32, high: Option<f32>) -> Self::Unit;
}

impl FromMaster for f32 {
    #[inline(always)]
    fn unit(low: f32, _: Option<f32>) -> f32 {
        low
    }
}

impl FromMaster for u16 {
    #[inline(always)]
    fn unit(low: f32, high: Option<f32>) -> u32 {
        match high {
            Some(high) => u32::from(narrow(low)) | u32::from(narrow(high)) << 16,
            None => u32::from(narrow(low)) << 16,
        }
    }
}

/// Packs a row-major f32 `w` of shape `[n, k]` as right operand of `x · wᵀ`.
pub fn pack_weight<E: FromMaster>(
    level: Level,
    pool: &ThreadPool,
    w: &[f32],
    shape: PackedShape,
    out: &mut [E::Unit],
) {
    let per_unit = E::per_unit_at(level);
    let (k, units) = (shape.k, shape.units(per_unit));
    assert!(w.len() == shape.n * k && out.len() == shape.storage(per_unit));
    let out = Disjoint::new(out);
    pool.run(shape.panels(), |p| {
        // SAFETY: each task has its own panel.
        let panel = unsafe { out.part(p * units * PANEL, units * PANEL) };
        let columns = (shape.n - p * PANEL).min(PANEL);
        // Blocks of 16 units keep the scattered writes in the L1 cache.
        for from in (0..units).step_by(16) {
            let to = (from + 16).min(units);
            for j in 0..columns {
                let row = &w[(p * PANEL + j) * k..][..k];
                for u in from..to {
                    let at = u * per_unit;
                    let high = (per_unit == 2).then(|| if at + 1 < k { row[at + 1] } else { 0.0 });
                    panel[u * PANEL + j] = E::unit(row[at], high);
                }
            }
            for j in columns..PANEL {
                (from..to).for_each(|u| panel[u * PANEL + j] = E::Unit::default());
            }
        }
    });
}

/// Packs the transpose of a row-major f32 `w` of shape `[k, n]` as right operand of `x · w`. `shape` is the packed matrix's: dot
/// products run along the rows of `w`.
pub fn pack_transposed<E: FromMaster>(
    level: Level,
    pool: &ThreadPool,
    w: &[f32],
    shape: PackedShape,
    out: &mut [E::Unit],
) {
    let per_unit = E::per_unit_at(level);
    let (n, k, units) = (shape.n, shape.k, shape.units(per_unit));
    assert!(w.len() == n * k && out.len() == shape.storage(per_unit));
    let out = Disjoint::new(out);
    pool.run(shape.panels(), |p| {
        // SAFETY: each task has its own panel.
        let panel = unsafe { out.part(p * units * PANEL, units * PANEL) };
        let columns = (n - p * PANEL).min(PANEL);
        for u in 0..units {
            let at = u * per_unit;
            let row = |at: usize| &w[at * n + p * PANEL..][..columns];
            let (low, dst) = (row(at), &mut panel[u * PANEL..][..PANEL]);
            if per_unit == 1 {
                dst.iter_mut().zip(low).for_each(|(d, x)| *d = E::unit(*x, None));
            } else if at + 1 < k {
                let pairs = low.iter().zip(row(at + 1));
                dst.iter_mut().zip(pairs).for_each(|(d, (x, y))| *d = E::unit(*x, Some(*y)));
            } else {
                dst.iter_mut().zip(low).for_each(|(d, x)| *d = E::unit(*x, Some(0.0)));
            }
            dst[columns..].fill(E::Unit::default());
        }
    });
}

/// Packs activations `x` of shape `[k, n]` (tokens by features) as right operand of `dyᵀ · x`.
pub fn pack_tokens<E: TokenRows>(
    level: Level,
    pool: &ThreadPool,
    x: &[E],
    shape: PackedShape,
    out: &mut [E::Unit],
) {
    let per_unit = E::per_unit_at(level);
    let units = shape.units(per_unit);
    assert!(x.len() == shape.n * shape.k && out.len() == shape.storage(per_unit));
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
            let columns = PanelColumns { x, ld: shape.n, from, lanes, first: 0, units };
            pack_columns::<PANEL, E>(level, columns, &mut panel[half * LANES..]);
        }
    });
}

/// A block of columns and rows of a token-by-feature matrix.
#[derive(Clone, Copy)]
pub struct PanelColumns<'a, E> {
    /// the matrix
    pub x: &'a [E],
    /// its row length
    pub ld: usize,
    /// first column
    pub from: usize,
    /// number of columns
    pub lanes: usize,
    /// first unit of rows
    pub first: usize,
    /// number of units of rows
    pub units: usize,
}

/// Elements whose token rows can be interleaved into units.
///
/// # Safety
/// `zip` reads `lanes` elements of each row and writes sixteen units.
pub unsafe trait TokenRows: FromMaster {
    /// The first `lanes` elements of a row (interleaved with another row's for two-element units); the other lanes are zero.
    ///
    /// # Safety
    /// `lanes` elements are readable at `low`, and at `high` unless it is null.
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const Self, high: *const Self, out: *mut Self::Unit);
    /// Copies `len` elements of a row as units; an odd last pair is zero-padded.
    ///
    /// # Safety
    /// `len` elements are readable at `x`, and the units that hold them writable at `out`.
    unsafe fn copy<S: Simd>(s: S, x: *const Self, len: usize, out: *mut Self::Unit);
}

// SAFETY: one load and one store.
unsafe impl TokenRows for f32 {
    #[inline(always)]
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const f32, _: *const f32, out: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { s.store(out, if lanes == LANES { s.load(low) } else { s.load_first(lanes, low, 0.0) }) }
    }
    #[inline(always)]
    unsafe fn copy<S: Simd>(_: S, x: *const f32, len: usize, out: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { std::ptr::copy_nonoverlapping(x, out, len) }
    }
}

// SAFETY: two loads and one store.
unsafe impl TokenRows for u16 {
    #[inline(always)]
    unsafe fn zip<S: Simd>(s: S, lanes: usize, low: *const u16, high: *const u16, out: *mut u32) {
        // SAFETY: passed on to the caller; the copies stay within `lanes`.
        unsafe {
            if S::PAIR == 1 {
                let v = if lanes == LANES { s.load_bf16(low) } else { s.load_first_bf16(lanes, low) };
                return s.store(out.cast(), v);
            }
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
    #[inline(always)]
    unsafe fn copy<S: Simd>(s: S, x: *const u16, len: usize, out: *mut u32) {
        // SAFETY: passed on to the caller; vectors stay within `len`, and a pair whose second element is beyond it is handled
        // separately.
        unsafe {
            if S::PAIR == 2 {
                let pairs: *mut u16 = out.cast();
                std::ptr::copy_nonoverlapping(x, pairs, len);
                if len % 2 == 1 {
                    *pairs.add(len) = 0;
                }
                return;
            }
            let mut at = 0;
            while at + LANES <= len {
                s.store(out.add(at).cast(), s.load_bf16(x.add(at)));
                at += LANES;
            }
            if at < len {
                s.store_first(len - at, out.add(at).cast(), s.load_first_bf16(len - at, x.add(at)));
            }
        }
    }
}

multiversion! {
    /// Writes up to sixteen columns per unit of rows, `STEP` units apart.
    fn pack_columns<S, const STEP: usize, type E: TokenRows>(s, c: PanelColumns<'_, E>, out: &mut [E::Unit]) {
        let (rows, units) = (c.row_count::<S>(), c.units);
        assert!(c.lanes <= LANES && out.len() >= (units - 1) * STEP + LANES);
        for u in 0..units {
            // SAFETY: `lanes` columns from the first on, and `out` holds the last store (asserted above).
            unsafe { c.zip(s, rows, u, 0..c.lanes, out.as_mut_ptr().add(u * STEP)) };
        }
    }
}

/// Splits the columns into panels of `width` (at most 16) and writes, per panel and unit of rows, sixteen units; panels are
/// `block` units apart.
#[inline(always)]
pub fn pack_panels<S: Simd, E: TokenRows>(
    s: S,
    c: PanelColumns<'_, E>,
    width: usize,
    block: usize,
    out: &mut [E::Unit],
) {
    let (rows, panels) = (c.row_count::<S>(), c.lanes.div_ceil(width));
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

impl<E: TokenRows> PanelColumns<'_, E> {
    /// Number of rows; asserts that the columns and units lie within the matrix.
    #[inline(always)]
    fn row_count<S: Simd>(&self) -> usize {
        let rows = self.x.len() / self.ld;
        assert!(
            self.from + self.lanes <= self.ld && (self.first + self.units - 1) * E::per_unit::<S>() < rows
        );
        rows
    }

    /// One unit of rows, for some of the columns.
    ///
    /// # Safety
    /// `rows` is [`PanelColumns::row_count`], `u < units`, `columns` lie below `self.lanes`; `out` takes sixteen units.
    #[inline(always)]
    unsafe fn zip<S: Simd>(
        &self,
        s: S,
        rows: usize,
        u: usize,
        columns: std::ops::Range<usize>,
        out: *mut E::Unit,
    ) {
        let row = (self.first + u) * E::per_unit::<S>();
        // SAFETY: row < rows and the columns lie within the row, as the caller promises.
        unsafe {
            let low = self.x.as_ptr().add(row * self.ld + self.from + columns.start);
            let high =
                if E::per_unit::<S>() == 2 && row + 1 < rows { low.add(self.ld) } else { std::ptr::null() };
            E::zip(s, columns.len(), low, high, out);
        }
    }
}
