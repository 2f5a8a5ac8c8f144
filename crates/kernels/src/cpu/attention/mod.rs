//! Causal grouped-query attention: training, scoring, prefill and decoding are one routine.
//!
//! Keys and values are in cache blocks of 32 tokens ([`paged`]); training and scoring first write them to a temporary cache. The
//! query heads of a key head are rows of one problem: row `r` is head `r % group` of new token `r / group`. Tasks take up to 56
//! such rows and iterate over the key blocks in ascending order ([`forward`]). A row's arithmetic depends only on its position,
//! never on the other rows of the batch.
//!
//! Scratch matrices are stored in panels of 32 columns, `[panel][row][32]`: the layout in which the register tile reads its
//! right operand, writes its output, and, 32 columns at a time, reads its left operand.

mod backward;
mod forward;
pub(super) mod paged;
mod shard;

use super::Cpu;
use super::element::Stored;
use super::math::{exp, tanh};
use super::matmul::tile::{Operands, PANEL, tile};
use super::memory::{Plain, Slice, SliceMut, f32s, f32s_mut, floats, floats_mut};
use super::pool::Disjoint;
use super::simd::{LANES, Level, Simd, multiversion};
use crate::backend::{Attention, AttentionOps, AttentionSaved, Heads, RowShard, Segments};
use crate::{Buffer, Result, shapes};
use std::cell::RefCell;

/// Keys per tile, tokens per cache block.
pub const BLOCK: usize = PANEL;
/// Maximum rows per task: four of the largest register tiles.
const ROWS: usize = 56;
/// Elements between panels of a task's matrix.
const STRIDE: usize = ROWS * PANEL;

/// Panels per head.
fn panels(heads: Heads) -> usize {
    heads.head_dim.div_ceil(PANEL)
}

/// Elements of a task's matrix with one row per query row.
fn matrix(heads: Heads) -> usize {
    panels(heads) * STRIDE
}

/// Storage type of activations and cache.
trait Storage: Stored + Plain {
    /// The elements of a buffer of this type.
    fn of(b: &Buffer) -> &[Self];
    /// The elements of a buffer of this type.
    fn of_mut(b: &mut Buffer) -> &mut [Self];
    /// A cache block of one head as f32; of the values, only the first `valid` tokens are converted.
    fn block<'a>(
        level: Level,
        heads: Heads,
        block: &'a [Self],
        valid: usize,
        room: &'a mut [f32],
    ) -> &'a [f32];
}

impl Storage for f32 {
    fn of(b: &Buffer) -> &[f32] {
        f32s(b)
    }
    fn of_mut(b: &mut Buffer) -> &mut [f32] {
        f32s_mut(b)
    }
    fn block<'a>(_: Level, _: Heads, block: &'a [f32], _: usize, _: &'a mut [f32]) -> &'a [f32] {
        block
    }
}

impl Storage for u16 {
    fn of(b: &Buffer) -> &[u16] {
        match floats(b) {
            Slice::Bf16(x) => x,
            Slice::F32(_) => panic!("a buffer of the compute type bf16 was expected"),
        }
    }
    fn of_mut(b: &mut Buffer) -> &mut [u16] {
        match floats_mut(b) {
            SliceMut::Bf16(x) => x,
            SliceMut::F32(_) => panic!("a buffer of the compute type bf16 was expected"),
        }
    }
    fn block<'a>(
        level: Level,
        heads: Heads,
        block: &'a [u16],
        valid: usize,
        room: &'a mut [f32],
    ) -> &'a [f32] {
        let keys = heads.head_dim * BLOCK;
        widen(level, &block[..keys], room);
        for from in (keys..block.len()).step_by(BLOCK * PANEL) {
            widen(level, &block[from..from + valid * PANEL], &mut room[from..]);
        }
        room
    }
}

/// Range of keys that a query row attends to.
#[derive(Clone, Copy, Default)]
struct SeenKeys {
    from: usize,
    to: usize,
}

impl SeenKeys {
    fn at(position: usize, window: Option<usize>) -> Self {
        let to = position + 1;
        SeenKeys { from: window.map_or(0, |w| to.saturating_sub(w)), to }
    }
    /// Its intersection with the block that starts at `key`.
    #[inline(always)]
    fn within(self, key: usize) -> (usize, usize) {
        (self.from.saturating_sub(key).min(BLOCK), self.to.saturating_sub(key).min(BLOCK))
    }
}

/// Some query rows of one sequence and key head.
struct QueryRows {
    count: usize,
    seen: [SeenKeys; ROWS],
    /// Per row: index among the sequence's new tokens, and query head.
    place: [(usize, usize); ROWS],
}

impl QueryRows {
    /// Rows `first..first + count` of a problem whose first token has this position.
    fn new(op: &Attention, kv_head: usize, position: usize, first: usize, count: usize) -> Self {
        let group = op.heads.heads / op.heads.kv_heads;
        let mut rows = QueryRows { count, seen: [SeenKeys::default(); ROWS], place: [(0, 0); ROWS] };
        let (mut token, mut head) = (first / group, first % group);
        for r in 0..count {
            rows.seen[r] = SeenKeys::at(position + token, op.window);
            rows.place[r] = (token, kv_head * group + head);
            head += 1;
            if head == group {
                (token, head) = (token + 1, 0);
            }
        }
        rows
    }
    /// Blocks that any row attends to.
    fn blocks(&self) -> std::ops::Range<usize> {
        self.seen[0].from / BLOCK..self.seen[self.count - 1].to.div_ceil(BLOCK)
    }
    /// The rows that attend to the block that starts at `key`; later rows attend to later keys.
    fn seeing(&self, key: usize) -> std::ops::Range<usize> {
        let seen = &self.seen[..self.count];
        let start = seen.iter().take_while(|s| s.to <= key).count();
        let len = seen[start..].iter().take_while(|s| s.from < key + BLOCK).count();
        start..start + len
    }
    /// Offsets of the rows in an array of token rows: `base + token * width + head * head_dim`.
    fn offsets(&self, base: usize, width: usize, head_dim: usize) -> [usize; ROWS] {
        self.offsets_from(0, base, width, head_dim)
    }
    /// The same if token `first` is at `base`.
    fn offsets_from(&self, first: usize, base: usize, width: usize, head_dim: usize) -> [usize; ROWS] {
        let mut at = [0; ROWS];
        for (at, (token, head)) in at.iter_mut().zip(self.place).take(self.count) {
            *at = base + (token - first) * width + head * head_dim;
        }
        at
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct ScoreLine(#[allow(dead_code)] [f32; LANES]);

thread_local! {
    static SCRATCH: RefCell<Vec<ScoreLine>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` aligned elements of the thread's scratch, uninitialised.
fn with_scratch<T>(len: usize, f: impl FnOnce(&mut [f32]) -> T) -> T {
    let mut lines = SCRATCH.take();
    if lines.len() * LANES < len {
        lines.resize(len.div_ceil(LANES), ScoreLine([0.0; LANES]));
    }
    // SAFETY: a line is sixteen f32 without padding.
    let scratch = unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), len) };
    let result = f(scratch);
    SCRATCH.set(lines);
    result
}

/// Splits `len` elements, a multiple of sixteen, off the front.
fn cut<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    debug_assert!(len.is_multiple_of(LANES));
    let (front, back) = std::mem::take(rest).split_at_mut(len);
    *rest = back;
    front
}

/// `c (+)= a · b`; each element is one FMA chain over the units in ascending order.
struct Product<'a> {
    rows: usize,
    units: usize,
    /// Panels of `b` and `c`.
    panels: usize,
    a: &'a [f32],
    /// Contiguous units of `a`, and elements between such pieces.
    piece: usize,
    a_stride: usize,
    /// 32 columns per unit.
    b: &'a [f32],
    b_stride: usize,
    c: &'a mut [f32],
    c_stride: usize,
    /// Whether to accumulate into `c`.
    resume: bool,
}

multiversion! {
    /// Element (row, unit) of a piece of `a` is at `row * A_ROW + unit * A_STEP`.
    fn multiply<S, const A_ROW: usize, const A_STEP: usize>(s, p: Product<'_>) {
        let Product { rows, units, panels, piece, .. } = p;
        if rows == 0 {
            return;
        }
        assert!(units > 0 && panels > 0 && piece > 0);
        let last = (units - 1) / piece;
        let inner = if last > 0 { piece - 1 } else { units - 1 };
        assert!(p.a.len() > (rows - 1) * A_ROW + last.saturating_sub(1) * p.a_stride + inner * A_STEP);
        assert!(p.a.len() > (rows - 1) * A_ROW + last * p.a_stride + (units - 1 - last * piece) * A_STEP);
        assert!(p.b.len() >= (panels - 1) * p.b_stride + units * PANEL);
        assert!(p.c.len() >= (panels - 1) * p.c_stride + rows * PANEL);
        let share = rows.div_ceil(rows.div_ceil(S::MR));
        let mut row = 0;
        while row < rows {
            let count = share.min(rows - row);
            let mut panel = 0;
            while panel < panels {
                // Fewer rows leave registers for more columns.
                let step = if count > 3 || panels - panel == 1 { 1 } else if panels - panel < 4 { 2 } else { 4 };
                let mut unit = 0;
                while unit < units {
                    let n = piece.min(units - unit);
                    // SAFETY: the extents were asserted above.
                    unsafe {
                        let op = Operands::<f32> {
                            units: n,
                            a: p.a.as_ptr().add(row * A_ROW + unit / piece * p.a_stride),
                            b: p.b.as_ptr().add(panel * p.b_stride + unit * PANEL),
                            panel_stride: p.b_stride,
                            c: p.c.as_mut_ptr().add(panel * p.c_stride + row * PANEL),
                            c_panel_stride: p.c_stride,
                            resume: p.resume || unit > 0,
                        };
                        tile_of::<S, A_ROW, A_STEP>(s, count, step, op);
                    }
                    unit += n;
                }
                panel += step;
            }
            row += count;
        }
    }
}

/// # Safety
/// As [`tile`], for `rows` rows and `panels` panels.
#[inline(always)]
unsafe fn tile_of<S: Simd, const A_ROW: usize, const A_STEP: usize>(
    s: S,
    rows: usize,
    panels: usize,
    op: Operands<f32>,
) {
    macro_rules! arms {
        ($($r:literal)*) => {
            match (rows, panels) {
                (1, 2) => tile::<S, f32, 1, 2, A_ROW, A_STEP>(s, op),
                (2, 2) => tile::<S, f32, 2, 2, A_ROW, A_STEP>(s, op),
                (3, 2) => tile::<S, f32, 3, 2, A_ROW, A_STEP>(s, op),
                (1, 4) => tile::<S, f32, 1, 4, A_ROW, A_STEP>(s, op),
                (2, 4) => tile::<S, f32, 2, 4, A_ROW, A_STEP>(s, op),
                (3, 4) => tile::<S, f32, 3, 4, A_ROW, A_STEP>(s, op),
                $(($r, 1) if $r <= S::MR => tile::<S, f32, $r, 1, A_ROW, A_STEP>(s, op),)*
                _ => unreachable!("a tile has 1 to {} rows", S::MR),
            }
        };
    }
    // SAFETY: passed on to the caller.
    unsafe { arms!(1 2 3 4 5 6 7 8 9 10 11 12 13 14) }
}

/// `c = a · b`: rows of `a` (a task's matrix, from row `first`) times the 32 columns of `b` (`[head_dim][32]`).
fn scores(level: Level, heads: Heads, rows: std::ops::Range<usize>, a: &[f32], b: &[f32], c: &mut [f32]) {
    let product = Product {
        rows: rows.len(),
        units: heads.head_dim,
        panels: 1,
        a: &a[rows.start * PANEL..],
        piece: PANEL,
        a_stride: STRIDE,
        b,
        b_stride: 0,
        c: &mut c[rows.start * BLOCK..],
        c_stride: 0,
        resume: false,
    };
    multiply::<PANEL, 1>(level, product);
}

/// Scale and soft cap of the scores.
#[derive(Clone, Copy)]
struct Scoring {
    scale: f32,
    softcap: Option<f32>,
}

impl Scoring {
    fn of(op: &Attention) -> Self {
        Scoring { scale: op.scale, softcap: op.softcap }
    }
    /// The score, and the derivative of the soft cap.
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, dot: S::V) -> (S::V, S::V) {
        let z = s.mul(dot, s.splat(self.scale));
        let one = s.splat(1.0);
        match self.softcap {
            None => (z, one),
            Some(cap) => {
                let t = tanh(s, s.mul(z, s.splat(1.0 / cap)));
                (s.mul(t, s.splat(cap)), s.sub(one, s.mul(t, t)))
            }
        }
    }
}

/// `x` in the lanes `from..to`, counted from `lane`; `y` elsewhere.
#[inline(always)]
fn select_between<S: Simd>(s: S, lane: usize, (from, to): (usize, usize), x: S::V, y: S::V) -> S::V {
    let x = s.select_first(to.saturating_sub(lane).min(LANES), x, y);
    s.select_first(from.saturating_sub(lane).min(LANES), y, x)
}

multiversion! {
    /// One online-softmax step: turns scores of a key block into weights, and rescales maxima, sums and unnormalised outputs to
    /// the new maximum. Every row attends to some key of the block.
    fn softmax_step<S>(s, op: Scoring, keys: (usize, &[SeenKeys]), p: &mut [f32], totals: (&mut [f32], &mut [f32]), output: (&mut [f32], usize)) {
        let ((key, seen), (max, sum), (o, panels)) = (keys, totals, output);
        let rows = seen.len();
        assert!(rows <= ROWS && p.len() >= rows * BLOCK && max.len() >= rows && sum.len() >= rows);
        assert!(o.len() >= (panels - 1) * STRIDE + rows * PANEL);
        let lowest = s.splat(f32::NEG_INFINITY);
        // decay = e^(old maximum - new maximum)
        let mut decay = [0f32; ROWS + LANES];
        // SAFETY: a row of `p` is two vectors, a row of a panel of `o` too; `decay` has room for whole vectors.
        unsafe {
            for r in 0..rows {
                let row = p.as_mut_ptr().add(r * BLOCK);
                let (mut a, _) = op.apply(s, s.load(row));
                let (mut b, _) = op.apply(s, s.load(row.add(LANES)));
                let range = seen[r].within(key);
                if range != (0, BLOCK) {
                    a = select_between(s, 0, range, a, lowest);
                    b = select_between(s, LANES, range, b, lowest);
                }
                s.store(row, a);
                s.store(row.add(LANES), b);
                let here = s.largest(s.max(a, b));
                let new = if max[r] > here { max[r] } else { here };
                decay[r] = max[r] - new;
                max[r] = new;
            }
            for r in (0..rows).step_by(LANES) {
                let at = decay.as_mut_ptr().add(r);
                s.store(at, exp(s, s.load(at)));
            }
            for r in 0..rows {
                let row = p.as_mut_ptr().add(r * BLOCK);
                let m = s.splat(max[r]);
                let a = exp(s, s.sub(s.load(row), m));
                let b = exp(s, s.sub(s.load(row.add(LANES)), m));
                s.store(row, a);
                s.store(row.add(LANES), b);
                sum[r] = sum[r] * decay[r] + s.sum(s.add(a, b));
                // A factor of 1 changes nothing.
                if decay[r] != 1.0 {
                    let d = s.splat(decay[r]);
                    for panel in 0..panels {
                        let at = o.as_mut_ptr().add(panel * STRIDE + r * PANEL);
                        s.store(at, s.mul(s.load(at), d));
                        s.store(at.add(LANES), s.mul(s.load(at.add(LANES)), d));
                    }
                }
            }
        }
    }
}

multiversion! {
    /// Turns scores into weights (`p`), and gradients of weights (`dp`) into gradients of scores.
    fn softmax_backward<S>(s, op: Scoring, key: usize, seen: &[SeenKeys], stats: (&[f32], &[f32]), tiles: (&mut [f32], &mut [f32])) {
        let ((lse, delta), (p, dp)) = (stats, tiles);
        let rows = seen.len();
        assert!(p.len() >= rows * BLOCK && dp.len() >= rows * BLOCK && lse.len() >= rows && delta.len() >= rows);
        let (zero, scale) = (s.splat(0.0), s.splat(op.scale));
        for r in 0..rows {
            let range = seen[r].within(key);
            let (lse, delta) = (s.splat(lse[r]), s.splat(delta[r]));
            for lane in [0, LANES] {
                // SAFETY: a row is two vectors.
                unsafe {
                    let (at, grad) = (p.as_mut_ptr().add(r * BLOCK + lane), dp.as_mut_ptr().add(r * BLOCK + lane));
                    let (score, slope) = op.apply(s, s.load(at));
                    let mut weight = exp(s, s.sub(score, lse));
                    let through = s.mul(weight, s.sub(s.load(grad), delta));
                    let mut dot = s.mul(s.mul(through, slope), scale);
                    if range != (0, BLOCK) {
                        weight = select_between(s, lane, range, weight, zero);
                        dot = select_between(s, lane, range, dot, zero);
                    }
                    s.store(at, weight);
                    s.store(grad, dot);
                }
            }
        }
    }
}

multiversion! {
    /// Loads rows of `dims` elements into f32 panels; the last panel is zero-padded.
    fn gather<S, type T: Stored>(s, x: &[T], offsets: &[usize], dims: usize, out: &mut [f32], stride: usize) {
        let width = dims.next_multiple_of(PANEL);
        for r in 0..offsets.len() {
            let row = &x[offsets[r]..offsets[r] + dims];
            for d in (0..width).step_by(LANES) {
                let to = &mut out[d / PANEL * stride + r * PANEL + d % PANEL..][..LANES];
                // SAFETY: as many elements as are left in the row; sixteen are writable at `to`.
                unsafe {
                    let v = if d < dims { T::get(s, (dims - d).min(LANES), row.as_ptr().add(d)) } else { s.splat(0.0) };
                    s.store(to.as_mut_ptr(), v);
                }
            }
        }
    }
}

multiversion! {
    /// Stores rows of panels, each times its factor, as rows of `dims` elements. Stores -0 as +0: masked products of zero may
    /// have given sums either sign.
    fn scatter<S, type T: Stored>(s, panels: (&[f32], usize), factors: &[f32], offsets: &[usize], dims: usize, out: TaskRows<'_, T>) {
        let (x, stride) = panels;
        for r in 0..offsets.len() {
            let factor = s.splat(factors[r]);
            // SAFETY: the maker of `out` promises that the rows lie in it and are this task's alone.
            let row = unsafe { out.0.part(offsets[r], dims) };
            for d in (0..dims).step_by(LANES) {
                let from = &x[d / PANEL * stride + r * PANEL + d % PANEL..][..LANES];
                // SAFETY: sixteen elements are readable at `from`; as many are written as are left in the row.
                unsafe {
                    let v = s.add(s.mul(s.load(from.as_ptr()), factor), s.splat(0.0));
                    T::put(s, (dims - d).min(LANES), row.as_mut_ptr().add(d), v);
                }
            }
        }
    }
}

/// Rows that only the holder's task writes.
struct TaskRows<'a, T>(Disjoint<'a, T>);

impl<'a, T> TaskRows<'a, T> {
    /// # Safety
    /// The rows that will be written lie within the array and belong to this task alone.
    unsafe fn new(all: Disjoint<'a, T>) -> Self {
        TaskRows(all)
    }
}

multiversion! {
    /// Row-wise dot products of two of a task's matrices.
    fn row_dots<S>(s, a: &[f32], b: &[f32], panels: usize, out: &mut [f32]) {
        for r in 0..out.len() {
            let mut sum = s.splat(0.0);
            for panel in 0..panels {
                for lane in [0, LANES] {
                    let at = panel * STRIDE + r * PANEL + lane;
                    // SAFETY: slices of sixteen elements.
                    unsafe {
                        let (x, y) = (s.load(a[at..][..LANES].as_ptr()), s.load(b[at..][..LANES].as_ptr()));
                        sum = s.fma(x, y, sum);
                    }
                }
            }
            out[r] = s.sum(sum);
        }
    }
}

multiversion! {
    /// bf16 to f32; the length is a multiple of sixteen.
    fn widen<S>(s, x: &[u16], out: &mut [f32]) {
        assert!(x.len().is_multiple_of(LANES) && out.len() >= x.len());
        for i in (0..x.len()).step_by(LANES) {
            // SAFETY: both have sixteen elements at i.
            unsafe { s.store(out.as_mut_ptr().add(i), s.load_bf16(x.as_ptr().add(i))) }
        }
    }
}

/// `out[d * 32 + j] = x[offset of row j + d]`.
fn transpose<T: Copy>(x: &[T], rows: impl Fn(usize) -> usize, count: usize, dims: usize, out: &mut [T]) {
    // Writes at most 16 KiB at a time, to stay in the L1 cache.
    for from in (0..dims).step_by(4 * PANEL) {
        let n = (dims - from).min(4 * PANEL);
        for j in 0..count {
            let row = &x[rows(j) + from..][..n];
            for (to, v) in out[from * BLOCK + j..].chunks_mut(BLOCK).zip(row) {
                to[0] = *v;
            }
        }
    }
}

impl AttentionOps for Cpu {
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::attention(self, &op, qkv, segments, [out, lse])?;
        forward::attention(self, op, qkv, segments, out, lse)
    }
    fn attention_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_backward(self, &op, saved, dout, segments, dqkv)?;
        backward::attention_backward(self, op, saved, dout, segments, dqkv)
    }
    fn attention_shard(
        &self,
        op: Attention,
        shard: RowShard<'_>,
        (q, kv): (&Buffer, &Buffer),
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard(self, &op, shard, (q, kv), [out, lse])?;
        shard::attention_shard(self, op, shard, (q, kv), out, lse)
    }
    fn attention_shard_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        shard: RowShard<'_>,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_shard_backward(self, &op, saved, dout, shard, dqkv)?;
        shard::attention_shard_backward(self, op, saved, dout, shard, dqkv)
    }
}
