//! Packing of the right operand into panels of 32 columns.
//!
//! Layout `[panel][unit of k][32]`, zero-padded in the last panel's columns and in an odd last bf16 pair.

use super::tile::{Element, PANEL};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::cpu::simd::{LANES, Level, Simd, multiversion};

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
///
/// # Safety
/// `round` writes sixteen units.
pub unsafe trait FromMaster: Element {
    /// Stores sixteen units, rounded to nearest even: unit i has the elements `low[i]` and, if it has two, `high[i]`.
    ///
    /// # Safety
    /// Sixteen units are writable at `out`.
    unsafe fn round<S: Simd>(s: S, low: S::V, high: S::V, out: *mut Self::Unit);
}

// SAFETY: one store.
unsafe impl FromMaster for f32 {
    #[inline(always)]
    unsafe fn round<S: Simd>(s: S, low: S::V, _: S::V, out: *mut f32) {
        // SAFETY: passed on to the caller.
        unsafe { s.store(out, low) }
    }
}

// SAFETY: one store.
unsafe impl FromMaster for u16 {
    #[inline(always)]
    unsafe fn round<S: Simd>(s: S, low: S::V, high: S::V, out: *mut u32) {
        // SAFETY: passed on to the caller.
        unsafe { s.store_pairs(out, s.narrow_pairs(low, high)) }
    }
}

/// Packs a row-major f32 `w` of shape `[n, k]` as right operand of `x · wᵀ` and, given `backward`, of `dy · w`.
pub fn pack_weight<E: FromMaster>(
    level: Level,
    pool: &ThreadPool,
    w: &[f32],
    shape: PackedShape,
    forward: &mut [E::Unit],
    backward: Option<&mut [E::Unit]>,
) {
    let (per_unit, transposed) = (E::per_unit_at(level), PackedShape { n: shape.k, k: shape.n });
    assert!(w.len() == shape.n * shape.k && forward.len() == shape.storage(per_unit));
    assert!(backward.as_ref().is_none_or(|b| b.len() == transposed.storage(per_unit)));
    let (forward, backward) = (Disjoint::new(forward), backward.map(Disjoint::new));
    pool.run(shape.panels(), |p| pack_rows::<E>(level, (w, shape), p, forward, backward));
}

/// Elements of a row between a read and the prefetch that goes with it.
const AHEAD: usize = 64;

multiversion! {
    /// Packs 32 rows of a weight, which are panel `p` of `forward` and some units of every panel of `backward`, in blocks of 16 by
    /// 16 elements, so that the weight is read once.
    fn pack_rows<S, type E: FromMaster>(s, weight: (&[f32], PackedShape), p: usize, forward: Disjoint<'_, E::Unit>, backward: Option<Disjoint<'_, E::Unit>>) {
        let (w, PackedShape { n, k }) = weight;
        let per_unit = E::per_unit::<S>();
        let (units, units_back) = (k.div_ceil(per_unit), n.div_ceil(per_unit));
        for column in (0..k.next_multiple_of(PANEL)).step_by(LANES) {
            let lanes = k.saturating_sub(column).min(LANES);
            for row in [p * PANEL, p * PANEL + LANES] {
                let mut block = [s.splat(0.0); LANES];
                for r in 0..LANES {
                    s.prefetch(w.as_ptr().wrapping_add((row + r) * k + column + AHEAD).cast());
                    if lanes > 0 && row + r < n {
                        let from = &w[(row + r) * k + column..][..lanes];
                        // SAFETY: `from` has this many elements.
                        block[r] = unsafe {
                            if lanes == LANES { s.load(from.as_ptr()) } else { s.load_first(lanes, from.as_ptr(), 0.0) }
                        };
                    }
                }
                if let Some(backward) = backward {
                    for i in 0..LANES / per_unit {
                        let (r, unit) = (i * per_unit, row / per_unit + i);
                        if unit < units_back {
                            let at = (column / PANEL * units_back + unit) * PANEL + column % PANEL;
                            // SAFETY: each task has its own units of every panel.
                            unsafe { E::round(s, block[r], block[r + per_unit - 1], backward.part(at, LANES).as_mut_ptr()) };
                        }
                    }
                }
                let block = s.transpose(block);
                for i in 0..LANES / per_unit {
                    let (c, unit) = (i * per_unit, column / per_unit + i);
                    if unit < units {
                        let at = (p * units + unit) * PANEL + row % PANEL;
                        // SAFETY: each task has its own panel.
                        unsafe { E::round(s, block[c], block[c + per_unit - 1], forward.part(at, LANES).as_mut_ptr()) };
                    }
                }
            }
        }
    }
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

/// Splits the columns into panels of `width` (at most 16) and writes, per panel and unit of rows, sixteen units, of which those
/// beyond `width` and beyond the last column are unspecified; panels are `block` units apart.
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
            let from = p * width;
            // Whole vectors wherever they end within the matrix.
            let last_row = ((c.first + u + 1) * E::per_unit::<S>()).min(rows) - 1;
            let lanes = if last_row * c.ld + c.from + from + LANES <= c.x.len() {
                LANES
            } else {
                width.min(c.lanes - from)
            };
            // SAFETY: the elements lie within the matrix, and `out` holds the blocks (asserted above).
            unsafe { c.zip(s, rows, u, from..from + lanes, out.as_mut_ptr().add(p * block + u * LANES)) };
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
    /// `rows` is [`PanelColumns::row_count`], `u < units`; `columns`, from `self.from` on, lie within the matrix in each row of the
    /// unit; `out` takes sixteen units.
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
        // SAFETY: row < rows and the columns lie within the matrix, as the caller promises.
        unsafe {
            let low = self.x.as_ptr().add(row * self.ld + self.from + columns.start);
            let high =
                if E::per_unit::<S>() == 2 && row + 1 < rows { low.add(self.ld) } else { std::ptr::null() };
            E::zip(s, columns.len(), low, high, out);
        }
    }
}
