//! GEMM: all matrix products go through one inner loop ([`mod@tile`]).
//!
//! - `linear`: `x · wᵀ`, weights packed once per update. Training, scoring, prefill and decoding all use it, so a row has the
//!   same bits in each.
//! - the same routine on the transposed packing gives `dx = dy · w`.
//! - `accumulate_dw`: `dw += dyᵀ · x`, summed over tokens in ascending order.
//!
//! Work is divided into blocks of row panels times column panels; k is never split between threads.

pub mod pack;
pub mod tile;

use super::pool::{Disjoint, ThreadPool};
use super::simd::{LANES, Level, LevelKind, Simd, multiversion};
use pack::{Packed, PackedShape, PanelColumns, TokenRows, pack_panels};
use std::cell::RefCell;
use std::ops::Range;
use tile::{Element, Operands, PANEL, tile};

/// k-block in units: a row panel of it stays in the L1 cache while it is multiplied with the column panels.
const K_BLOCK: usize = 256;
/// Maximum panels of rows, and of columns, per task: its block of the right operand (288 KiB) and its accumulator tiles
/// (126 KiB) stay in the L2 cache.
const MAX_ROW_PANELS: usize = 8;
const MAX_COLUMN_PANELS: usize = 9;
/// The same in [`accumulate_dw`], where each task packs its rows: more columns amortise that.
const MAX_DW_COLUMN_PANELS: usize = 18;
/// Rows of the largest register tile of any instruction set.
const MAX_ROWS: usize = 14;

/// Length of the fewest equal parts of `total` that are no longer than `max`.
fn equal_parts(total: usize, max: usize) -> usize {
    total.div_ceil(total.div_ceil(max))
}

/// Output of a GEMM.
pub enum Out<'a> {
    /// f32, row-major
    F32(&'a mut [f32]),
    /// bf16, row-major
    Bf16(&'a mut [u16]),
    /// accumulated into f32, row-major
    AddF32(&'a mut [f32]),
}

impl Out<'_> {
    fn len(&self) -> usize {
        match self {
            Out::F32(o) | Out::AddF32(o) => o.len(),
            Out::Bf16(o) => o.len(),
        }
    }
}

/// [`Out`], shared by tasks.
#[derive(Clone, Copy)]
enum SharedTiles<'a> {
    F32(Disjoint<'a, f32>),
    Bf16(Disjoint<'a, u16>),
    AddF32(Disjoint<'a, f32>),
}

/// Rows of the register tile at a level.
pub fn tile_rows(level: Level) -> usize {
    match level.kind() {
        LevelKind::Portable => super::simd::Portable::MR,
        #[cfg(target_arch = "x86_64")]
        LevelKind::Avx2 => super::simd::Avx2::MR,
        #[cfg(target_arch = "x86_64")]
        LevelKind::Avx512 | LevelKind::Avx512Bf16 => super::simd::Avx512::<true>::MR,
        #[cfg(target_arch = "aarch64")]
        LevelKind::Neon | LevelKind::NeonBf16 => super::simd::Neon::<false>::MR,
        #[allow(unreachable_patterns)]
        _ => unreachable!("a level of another architecture"),
    }
}

/// `out = x · wᵀ + bias`; `x` is `[m, k]`, `out` is `[m, n]`.
pub fn linear<E: TokenRows>(
    level: Level,
    pool: &ThreadPool,
    x: &[E],
    w: Packed<'_, E>,
    bias: Option<&[f32]>,
    out: Out<'_>,
) {
    let m = x.len() / w.shape.k;
    assert!(x.len() == m * w.shape.k && w.is_all_there());
    assert!(out.len() == m * w.shape.n && bias.is_none_or(|b| b.len() == w.shape.n));
    let out = match out {
        Out::F32(o) => SharedTiles::F32(Disjoint::new(o)),
        Out::Bf16(o) => SharedTiles::Bf16(Disjoint::new(o)),
        Out::AddF32(o) => SharedTiles::AddF32(Disjoint::new(o)),
    };
    let mr = tile_rows(level);
    let (row_panels, column_panels) = (m.div_ceil(mr), w.shape.panels());
    // Enough tasks for load balance at the end, but each large enough to amortise packing and dispatch.
    let threads = pool.threads();
    let wanted =
        if threads == 1 { 1 } else { (m * w.shape.n * w.shape.k / (1 << 20)).clamp(threads, 8 * threads) };
    // Few rows are packed once per task and multiplied with all its columns: only columns are split.
    let row_chunk = if row_panels <= MAX_ROW_PANELS {
        row_panels
    } else {
        row_panels.div_ceil(wanted).clamp(2, MAX_ROW_PANELS)
    };
    let row_tasks = row_panels.div_ceil(row_chunk.max(1));
    let column_chunk = column_panels.div_ceil(wanted.div_ceil(row_tasks.max(1)));
    let column_chunk = if row_panels > 1 {
        equal_parts(column_panels, column_chunk.clamp(1, MAX_COLUMN_PANELS))
    } else {
        column_chunk
    };
    let column_tasks = column_panels.div_ceil(column_chunk);
    let tiny = m * w.shape.n * w.shape.k < 32 * 1024;
    let task = |i: usize| {
        let (c, r) = (i / row_tasks, i % row_tasks);
        let rows = r * row_chunk * mr..((r + 1) * row_chunk * mr).min(m);
        let panels = c * column_chunk..((c + 1) * column_chunk).min(column_panels);
        let block = ProductBlock { x, rows, w, panels };
        with_scratch(|scratch| linear_task(level, scratch, block, bias, out));
    };
    if tiny { (0..row_tasks * column_tasks).for_each(task) } else { pool.run(row_tasks * column_tasks, task) }
}

multiversion! {
    fn linear_task<S, type E: TokenRows>(s, scratch: &mut Scratch, block: ProductBlock<'_, E>, bias: Option<&[f32]>, out: SharedTiles<'_>) {
        let n = block.w.shape.n;
        product(s, scratch, block, &mut |s: S, row: usize, count: usize, panel: usize, tile: *const f32| {
            let columns = (n - panel * PANEL).min(PANEL);
            for half in 0..columns.div_ceil(LANES) {
                let at = panel * PANEL + half * LANES;
                let lanes = (n - at).min(LANES);
                // SAFETY: `bias` has n elements; rows and columns lie in the output; tasks own disjoint tiles.
                unsafe {
                    let bias = bias.map(|b| s.load_first(lanes, b.as_ptr().add(at), 0.0));
                    for r in 0..count {
                        let mut v = s.load(tile.add(r * PANEL + half * LANES));
                        if let Some(b) = bias {
                            v = s.add(v, b);
                        }
                        let to = (row + r) * n + at;
                        match out {
                            SharedTiles::F32(o) if lanes == LANES => s.store(o.part(to, lanes).as_mut_ptr(), v),
                            SharedTiles::F32(o) => s.store_first(lanes, o.part(to, lanes).as_mut_ptr(), v),
                            SharedTiles::AddF32(o) => {
                                let o = o.part(to, lanes).as_mut_ptr();
                                s.store_first(lanes, o, s.add(s.load_first(lanes, o, 0.0), v));
                            }
                            SharedTiles::Bf16(o) if lanes == LANES => s.store_bf16(o.part(to, lanes).as_mut_ptr(), v),
                            SharedTiles::Bf16(o) => s.store_first_bf16(lanes, o.part(to, lanes).as_mut_ptr(), v),
                        }
                    }
                }
            }
        });
    }
}

/// Scratch of one thread: the packed row panel, and accumulator tiles between k-blocks.
#[derive(Default)]
pub struct Scratch {
    a: Vec<u32>,
    c: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch { a: Vec::new(), c: Vec::new() }) };
}

/// Lends the thread's scratch. Borrowed outside of kernels and passed down, because a closure that the standard library calls
/// inside a kernel would not be compiled for the kernel's instruction set.
pub fn with_scratch<T>(f: impl FnOnce(&mut Scratch) -> T) -> T {
    let mut scratch = SCRATCH.take();
    let result = f(&mut scratch);
    SCRATCH.set(scratch);
    result
}

/// A block of a GEMM: some rows of `x`, some column panels of `w`.
pub struct ProductBlock<'a, E: TokenRows> {
    /// `[rows, k]`
    pub x: &'a [E],
    pub rows: Range<usize>,
    /// Right operand.
    pub w: Packed<'a, E>,
    pub panels: Range<usize>,
}

/// Computes a block; calls `finish(s, first row, rows, panel, tile)` for every tile, row-major with 32 columns (epilogue).
#[inline(always)]
pub fn product<S: Simd, E: TokenRows>(
    s: S,
    scratch: &mut Scratch,
    block: ProductBlock<'_, E>,
    finish: &mut impl FnMut(S, usize, usize, usize, *const f32),
) {
    let ProductBlock { x, rows, w, panels } = block;
    assert!(S::MR <= MAX_ROWS && panels.end <= w.shape.panels() && w.is_whole::<S>());
    let per_unit = E::per_unit::<S>();
    let units = w.shape.units(per_unit);
    let row_panels = rows.len().div_ceil(S::MR);
    if row_panels == 0 || panels.is_empty() {
        return;
    }
    // Equal parts: 15 rows are 8 and 7 rather than 14 and 1.
    let share = rows.len().div_ceil(row_panels);
    let whole = units <= K_BLOCK;
    let slots = if whole { 4 } else { row_panels * panels.len() };
    scratch.a.resize(scratch.a.len().max(MAX_ROWS * K_BLOCK + 2 * LANES), 0);
    scratch.c.resize(scratch.c.len().max(slots * MAX_ROWS * PANEL), 0.0);
    let a: *mut E::Unit = scratch.a.as_mut_ptr().cast();
    for k in (0..units).step_by(K_BLOCK) {
        let depth = (units - k).min(K_BLOCK);
        let last = k + depth == units;
        for i in 0..row_panels {
            let row = rows.start + i * share;
            let count = share.min(rows.end.saturating_sub(row));
            if count == 0 {
                continue;
            }
            // SAFETY: `a` holds MAX_ROWS rows of K_BLOCK units of four bytes.
            unsafe { copy_rows(s, (x, w.shape.k), row..row + count, k..k + depth, a) };
            // Prefetch the rows to be copied next, some with each tile.
            let (next_row, next_k) =
                if i + 1 < row_panels { (row + share, k) } else { (rows.start, k + depth) };
            let next_rows = if next_k < units { share.min(rows.end.saturating_sub(next_row)) } else { 0 };
            let rows_a_tile = next_rows.div_ceil(panels.len());
            let mut j = panels.start;
            while j < panels.end {
                let step = panels_of_tile::<S>(count);
                let step = if j + step <= panels.end { step } else { 1 };
                let slot = if whole { 0 } else { i * panels.len() + (j - panels.start) };
                let op = Operands::<E> {
                    units: depth,
                    a,
                    // SAFETY: panel j at unit k lies in the packed matrix.
                    b: unsafe { w.data.as_ptr().add((j * w.stride + k) * PANEL) },
                    panel_stride: w.stride * PANEL,
                    // SAFETY: slot + step <= slots.
                    c: unsafe { scratch.c.as_mut_ptr().add(slot * MAX_ROWS * PANEL) },
                    c_panel_stride: MAX_ROWS * PANEL,
                    resume: k > 0,
                };
                let first = ((j - panels.start) * rows_a_tile).min(next_rows);
                for r in first..(first + step * rows_a_tile).min(next_rows) {
                    let from = (next_row + r) * w.shape.k + next_k * per_unit;
                    prefetch_run(s, x, from, K_BLOCK * per_unit);
                }
                // SAFETY: the extents are those just described.
                unsafe { tile_of_rows(s, count, step, op) };
                if last {
                    for p in 0..step {
                        // SAFETY: the tiles of this step.
                        let done = unsafe { op.c.add(p * MAX_ROWS * PANEL) };
                        finish(s, row, count, j + p, done);
                    }
                }
                j += step;
            }
        }
    }
}

/// Prefetches `len` elements from `from` on.
#[inline(always)]
fn prefetch_run<S: Simd, E>(s: S, x: &[E], from: usize, len: usize) {
    let at = x.as_ptr().wrapping_add(from).cast::<u8>();
    let mut byte = 0;
    while byte < len * size_of::<E>() {
        s.prefetch(at.wrapping_add(byte));
        byte += 64;
    }
}

/// Copies a k-block of some rows into rows `K_BLOCK` units apart, so that they do not conflict in the cache whatever the row
/// length.
#[inline(always)]
unsafe fn copy_rows<S: Simd, E: TokenRows>(
    s: S,
    (x, k): (&[E], usize),
    rows: Range<usize>,
    units: Range<usize>,
    a: *mut E::Unit,
) {
    let from = units.start * E::per_unit::<S>();
    let len = (units.len() * E::per_unit::<S>()).min(k - from);
    for r in 0..rows.len() {
        let src = &x[(rows.start + r) * k + from..][..len];
        // SAFETY: a row of K_BLOCK units holds these.
        unsafe { E::copy(s, src.as_ptr(), len, a.add(r * K_BLOCK)) };
    }
}

/// Panels of a tile: as many as keep the sums of a few rows in registers.
const fn panels_of_tile<S: Simd>(rows: usize) -> usize {
    match (rows, S::NV) {
        (1, _) | (2..=3, 2) => 4,
        (2, _) => 2,
        _ => 1,
    }
}

/// # Safety
/// As [`tile`], for `rows` rows and [`panels_of_tile`] panels, or one.
#[inline(always)]
unsafe fn tile_of_rows<S: Simd, E: Element>(s: S, rows: usize, panels: usize, op: Operands<E>) {
    macro_rules! arms {
        ($($r:literal)*) => {
            match (rows, panels) {
                (1, 4) => tile::<S, E, 1, 4, K_BLOCK, 1>(s, op),
                (2, 4) if S::NV == 2 => tile::<S, E, 2, 4, K_BLOCK, 1>(s, op),
                (3, 4) if S::NV == 2 => tile::<S, E, 3, 4, K_BLOCK, 1>(s, op),
                (2, 2) if S::NV == 1 => tile::<S, E, 2, 2, K_BLOCK, 1>(s, op),
                $(($r, 1) if $r <= S::MR => tile::<S, E, $r, 1, K_BLOCK, 1>(s, op),)*
                _ => unreachable!("a tile has 1 to {} rows", S::MR),
            }
        };
    }
    // SAFETY: passed on to the caller.
    unsafe { arms!(1 2 3 4 5 6 7 8 9 10 11 12 13 14) }
}

/// Position of an [`accumulate_dw`] call within a sum over tokens that is split into several calls.
pub struct DwChain<'a> {
    /// Partial sums, laid out as `dw`: read if there is an `earlier` part, written if there is a `later` one.
    pub open: Option<&'a mut [f32]>,
    /// Whether earlier tokens have been summed.
    pub earlier: bool,
    /// Whether later tokens will follow.
    pub later: bool,
}

impl DwChain<'_> {
    /// All tokens in one call.
    pub const WHOLE: DwChain<'static> = DwChain { open: None, earlier: false, later: false };
}

/// [`DwChain`], shared by tasks.
#[derive(Clone, Copy)]
struct OpenSums<'a> {
    sums: Option<Disjoint<'a, f32>>,
    earlier: bool,
    later: bool,
}

/// `dw += dyᵀ · x`: `dy` is `[tokens, n]`, `x` packed from `[tokens, k]` by [`pack::pack_tokens`], `dw` is `[n, k]`.
///
/// The sum over the tokens starts from zero and is then added to `dw` once, so the gradients of micro-batches can be computed
/// anywhere and added in order. With a [`DwChain`], several calls give the same bits; `dw` is updated by the last.
pub fn accumulate_dw<E: TokenRows>(
    level: Level,
    pool: &ThreadPool,
    dy: &[E],
    x: Packed<'_, E>,
    chain: DwChain<'_>,
    dw: &mut [f32],
) {
    let PackedShape { n: k, k: tokens } = x.shape;
    let n = dy.len() / tokens;
    assert!(dy.len() == n * tokens && dw.len() == n * k && x.is_all_there());
    assert!(chain.open.is_some() || !(chain.earlier || chain.later));
    assert!(chain.open.as_ref().is_none_or(|open| open.len() == dw.len()));
    let DwChain { open, earlier, later } = chain;
    let chain = OpenSums { sums: open.map(Disjoint::new), earlier, later };
    let mr = tile_rows(level);
    let (row_panels, column_panels) = (n.div_ceil(mr), x.shape.panels());
    let wanted = if pool.threads() == 1 { 1 } else { 8 * pool.threads() };
    let column_chunk = equal_parts(column_panels, MAX_DW_COLUMN_PANELS);
    let column_tasks = column_panels.div_ceil(column_chunk);
    let row_chunk = row_panels.div_ceil(wanted.div_ceil(column_tasks)).clamp(1, MAX_ROW_PANELS);
    let row_tasks = row_panels.div_ceil(row_chunk);
    let dw = Disjoint::new(dw);
    pool.run(row_tasks * column_tasks, |i| {
        let (c, r) = (i / row_tasks, i % row_tasks);
        let rows = r * row_chunk * mr..((r + 1) * row_chunk * mr).min(n);
        let panels = c * column_chunk..((c + 1) * column_chunk).min(column_panels);
        let block = ProductBlock { x: dy, rows, w: x, panels };
        with_scratch(|scratch| dw_task(level, scratch, block, chain, dw));
    });
}

multiversion! {
    fn dw_task<S, type E: TokenRows>(s, scratch: &mut Scratch, block: ProductBlock<'_, E>, chain: OpenSums<'_>, dw: Disjoint<'_, f32>) {
        // The output's rows are columns of `dy`, whose rows are the tokens.
        let ProductBlock { x: dy, rows, w: x, panels } = block;
        let n = dy.len() / x.shape.k;
        let per_unit = E::per_unit::<S>();
        assert!(x.is_whole::<S>());
        let units = x.shape.units(per_unit);
        let row_panels = rows.len().div_ceil(S::MR);
        let slots = row_panels * panels.len();
        let block = K_BLOCK * LANES; // units of a packed row panel
        scratch.a.resize(scratch.a.len().max(row_panels * block), 0);
        scratch.c.resize(scratch.c.len().max(slots * MAX_ROWS * PANEL), 0.0);
        if let (true, Some(open)) = (chain.earlier, chain.sums) {
            each_sum(S::MR, rows.clone(), x.shape.n, panels.clone(), |at, columns, tile| {
                // SAFETY: this task owns these elements.
                scratch.c[tile..tile + columns].copy_from_slice(unsafe { open.part(at, columns) });
            });
        }
        for t in (0..units).step_by(K_BLOCK) {
            let depth = (units - t).min(K_BLOCK);
            // SAFETY: Unit is a plain four-byte type (f32 or u32).
            let a = unsafe { std::slice::from_raw_parts_mut(scratch.a.as_mut_ptr().cast::<E::Unit>(), row_panels * block) };
            // Pack all row panels token by token: contiguous reads.
            pack_panels(s, PanelColumns { x: dy, ld: n, from: rows.start, lanes: rows.len(), first: t, units: depth }, S::MR, block, a);
            // Prefetch the tokens to be packed next, some with each tile.
            let mut next = (t + depth) * per_unit;
            let end = ((t + depth + K_BLOCK) * per_unit).min(x.shape.k);
            let tokens_a_tile = end.saturating_sub(next).div_ceil(slots);
            for i in 0..row_panels {
                for (j, panel) in panels.clone().enumerate() {
                    for _ in 0..tokens_a_tile {
                        prefetch_run(s, dy, next * n + rows.start, rows.len());
                        next += 1;
                    }
                    let op = Operands::<E> {
                        units: depth,
                        a: a[i * block..].as_ptr(),
                        // SAFETY: the panel at unit t lies in the packed matrix.
                        b: unsafe { x.data.as_ptr().add((panel * x.stride + t) * PANEL) },
                        panel_stride: 0,
                        // SAFETY: fewer than `slots`.
                        c: unsafe { scratch.c.as_mut_ptr().add((i * panels.len() + j) * MAX_ROWS * PANEL) },
                        c_panel_stride: 0,
                        resume: t > 0 || chain.earlier,
                    };
                    // SAFETY: the extents are those just described; `a` holds 16 units a step.
                    unsafe {
                        match S::MR {
                            14 => tile::<S, E, 14, 1, 1, LANES>(s, op),
                            6 => tile::<S, E, 6, 1, 1, LANES>(s, op),
                            _ => tile::<S, E, 4, 1, 1, LANES>(s, op),
                        }
                    }
                }
            }
        }
        each_sum(S::MR, rows, x.shape.n, panels, |at, columns, tile| {
            let sums = &scratch.c[tile..tile + columns];
            match chain.sums {
                // SAFETY: this task owns these elements.
                Some(open) if chain.later => unsafe { open.part(at, columns) }.copy_from_slice(sums),
                _ => {
                    // SAFETY: this task owns these elements of dw.
                    let dw = unsafe { dw.part(at, columns) };
                    for (d, c) in dw.iter_mut().zip(sums) {
                        *d += c;
                    }
                }
            }
        });
    }
}

/// Calls `f(element of the matrix, columns, element of the tiles)` for each row of each of a task's tiles.
#[inline(always)]
fn each_sum(
    mr: usize,
    rows: Range<usize>,
    n: usize,
    panels: Range<usize>,
    mut f: impl FnMut(usize, usize, usize),
) {
    for row in rows.clone() {
        let (i, r) = ((row - rows.start) / mr, (row - rows.start) % mr);
        for (j, panel) in panels.clone().enumerate() {
            let columns = (n - panel * PANEL).min(PANEL);
            f(row * n + panel * PANEL, columns, ((i * panels.len() + j) * MAX_ROWS + r) * PANEL);
        }
    }
}
