//! From hidden states to log-probabilities, some rows' logits at a time.
//!
//! Forward and decoding multiply rows with the whole vocabulary at once, so a row's logits are the same product with
//! another number of rows. The backward computes logits again for many rows and a stretch of the vocabulary at a time,
//! turns them into their gradient, and multiplies that into `dx` and `dw` before the next stretch.

use super::Cuda;
use super::launch::{Arg, Grid, args};
use super::linear::{form, forward, input_gradient, weight_gradient};
use super::memory::{Memory, f32_ptr, letter, ptr, u32s};
use super::vector::convert;
use crate::backend::{LogpGrads, LogpHead, LogpStats};
use crate::buffer::{Buffer, DType, Weight};
use crate::error::Result;

/// Tokens a warp folds.
pub(super) const TILE: usize = 1024;
/// Logits that exist at a time in the forward, and in the backward: 1 GiB and 256 MiB. Fewer rows to a product cost
/// it a fifth of its speed.
const FORWARD: usize = 1 << 28;
const BACKWARD: usize = 1 << 26;
/// Rows the backward meets at a time, at most.
const ROWS: usize = 4096;

/// What the kernels know of a head.
pub(super) fn head_args(op: LogpHead) -> [Arg; 3] {
    args![1.0 / op.temperature, op.temperature, op.softcap.unwrap_or(0.0)]
}

/// Raw logits `[rows, width]` of the tokens `from..from + width`, in f32, of rows from `first` on.
pub(super) fn raw_logits(
    cuda: &Cuda,
    x: &Buffer,
    w: &Weight,
    (first, rows): (usize, usize),
    (from, width): (usize, usize),
    out: u64,
) -> Result<()> {
    let size = w.dtype.size();
    let at = |start: u64, row: usize| start + (row * w.k * size) as u64;
    forward(cuda, [rows, width, w.k], at(ptr(x), first), at(form(w), from), w.dtype, None, (out, DType::F32))
}

/// Rows whose logits are in memory at a time when `copies` of them are needed.
pub(super) fn rows_at_a_time(vocab: usize, copies: usize) -> usize {
    let rows = FORWARD / copies / vocab;
    if rows >= 64 { rows / 64 * 64 } else { rows.max(1) }
}

/// Tokens whose logits are wanted, and what is made of them; addresses of the first of the rows.
#[derive(Default, Clone, Copy)]
struct Wanted {
    targets: u64,
    others: u64,
    extra: usize,
    logp: u64,
    entropy: u64,
    other_logp: u64,
}

impl Wanted {
    /// The same from a later row on.
    fn after(self, row: usize) -> Self {
        let at = |start: u64, per_row: usize| if start == 0 { 0 } else { start + (row * per_row * 4) as u64 };
        Wanted {
            targets: at(self.targets, 1),
            others: at(self.others, self.extra),
            extra: self.extra,
            logp: at(self.logp, 1),
            entropy: at(self.entropy, 1),
            other_logp: at(self.other_logp, self.extra),
        }
    }
}

/// Folds rows of raw logits; with `keep` they become scaled ones. Writes `lse`, and what is wanted.
fn fold(
    cuda: &Cuda,
    op: LogpHead,
    logits: u64,
    rows: usize,
    vocab: usize,
    keep: bool,
    wanted: Wanted,
    lse: u64,
) -> Result<()> {
    let tiles = vocab.div_ceil(TILE);
    let folds = cuda.arena.take(rows * tiles * 12)?;
    let found =
        if wanted.targets == 0 { None } else { Some(cuda.arena.take(rows * (1 + wanted.extra) * 4)?) };
    let found = found.as_ref().map_or(0, Memory::ptr);
    let (n_rows, n_vocab, n_tiles, extra) = (rows as u32, vocab as u32, tiles as u32, wanted.extra as u32);
    // Scaling by 1 changes nothing.
    let keep = keep && (op.temperature != 1.0 || op.softcap.is_some());
    let mut all = args![logits, n_rows, n_vocab, n_tiles].to_vec();
    all.extend(head_args(op));
    all.extend(args![keep, wanted.targets, wanted.others, extra, found, &folds]);
    cuda.launch("logp", "fold", Grid::new((rows * tiles).div_ceil(8), 256), &all)?;
    let Wanted { logp, entropy, other_logp, .. } = wanted;
    let all = args![&folds, found, n_rows, n_tiles, extra, logp, entropy, lse, other_logp];
    cuda.launch("logp", "finish", Grid::new(rows.div_ceil(8), 256), &all)
}

/// Folds all rows of `x` without keeping logits.
fn fold_all(cuda: &Cuda, op: LogpHead, x: &Buffer, w: &Weight, wanted: Wanted, lse: u64) -> Result<()> {
    let (rows, step) = (x.len() / w.k, rows_at_a_time(w.n, 1));
    let logits = cuda.arena.take(rows.min(step) * w.n * 4)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        raw_logits(cuda, x, w, (first, count), (0, w.n), logits.ptr())?;
        let lse = lse + (first * 4) as u64;
        fold(cuda, op, logits.ptr(), count, w.n, false, wanted.after(first), lse)?;
    }
    Ok(())
}

/// The log-sum-exp of rows of raw logits.
pub(super) fn lse(cuda: &Cuda, op: LogpHead, logits: u64, rows: usize, vocab: usize, lse: u64) -> Result<()> {
    fold(cuda, op, logits, rows, vocab, false, Wanted::default(), lse)
}

/// See [`crate::Backend::logp`].
pub fn logp(
    cuda: &Cuda,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    targets: &Buffer,
    others: Option<(&Buffer, &mut Buffer)>,
    stats: &mut LogpStats,
) -> Result<()> {
    let rows = x.len() / w.k;
    assert!(x.dtype() == w.dtype && targets.len() == rows);
    assert!([&stats.logp, &stats.entropy, &stats.lse].iter().all(|b| b.len() == rows));
    assert!(u32s(targets).iter().all(|&t| (t as usize) < w.n));
    let extra = others.as_ref().map_or(0, |(ids, _)| ids.len() / rows.max(1));
    if let Some((ids, out)) = &others {
        assert!(ids.len() == rows * extra && out.len() == ids.len());
        assert!(u32s(ids).iter().all(|&t| (t as usize) < w.n));
    }
    let (others, other_logp) = others.map_or((0, 0), |(ids, out)| (ptr(ids), f32_ptr(out)));
    let (logp, entropy) = (f32_ptr(&stats.logp), f32_ptr(&stats.entropy));
    let wanted = Wanted { targets: ptr(targets), others, extra, logp, entropy, other_logp };
    fold_all(cuda, op, x, w, wanted, f32_ptr(&stats.lse))
}

/// See [`crate::Backend::logits`].
pub fn logits(
    cuda: &Cuda,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    logits: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let rows = x.len() / w.k;
    assert!(x.dtype() == w.dtype && logits.len() == rows * w.n && lse.len() == rows);
    raw_logits(cuda, x, w, (0, rows), (0, w.n), f32_ptr(logits))?;
    fold(cuda, op, f32_ptr(logits), rows, w.n, true, Wanted::default(), f32_ptr(lse))
}

/// See [`crate::Backend::logp_backward`].
pub fn logp_backward(
    cuda: &Cuda,
    op: LogpHead,
    x: &Buffer,
    w: &Weight,
    targets: &Buffer,
    others: Option<&Buffer>,
    stats: &LogpStats,
    grads: &LogpGrads<'_>,
    dx: &mut Buffer,
    dw: Option<&mut Buffer>,
) -> Result<()> {
    let rows = targets.len();
    let extra = others.map_or(0, |o| o.len() / rows.max(1));
    assert!(x.dtype() == w.dtype && x.len() == rows * w.k);
    assert!(others.map_or(0, Buffer::len) == grads.others.map_or(0, Buffer::len));
    let wanted = Wanted {
        targets: ptr(targets),
        others: others.map_or(0, ptr),
        extra,
        logp: f32_ptr(grads.logp),
        entropy: grads.entropy.map_or(0, f32_ptr),
        other_logp: grads.others.map_or(0, f32_ptr),
    };
    let (lse, entropy) = (f32_ptr(&stats.lse), f32_ptr(&stats.entropy));
    let name = format!("dlogits_{}", letter(w.dtype));
    through_vocabulary(cuda, x, w, dx, dw, 1, |piece, logits, out| {
        let Piece { first, rows, from, width } = piece;
        raw_logits(cuda, x, w, (first, rows), (from, width), logits)?;
        let Wanted { targets, others, logp, entropy: dentropy, other_logp, .. } = wanted.after(first);
        let later = |start: u64| start + (first * 4) as u64;
        let mut all = args![logits, rows as u32, from as u32, width as u32].to_vec();
        all.extend(head_args(op));
        all.extend(args![targets, others, extra as u32, later(lse), later(entropy)]);
        all.extend(args![logp, dentropy, other_logp, out]);
        cuda.launch("logp", &name, Grid::plane(width.div_ceil(1024), rows, 256), &all)
    })
}

/// Some rows and a stretch of the vocabulary.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// First row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// First token.
    pub from: usize,
    /// Tokens.
    pub width: usize,
}

/// Runs `fill(piece, room for `copies` times its logits in f32, its gradient)` for every piece, in an order that the
/// number of rows decides, and multiplies each gradient into `dx` and `dw`.
pub(super) fn through_vocabulary(
    cuda: &Cuda,
    x: &Buffer,
    w: &Weight,
    dx: &mut Buffer,
    dw: Option<&mut Buffer>,
    copies: usize,
    fill: impl Fn(Piece, u64, u64) -> Result<()>,
) -> Result<()> {
    let rows = x.len() / w.k;
    if rows == 0 {
        return Ok(());
    }
    assert!(dx.len() == rows * w.k && dx.dtype() != DType::U32);
    assert!(dw.as_ref().is_none_or(|dw| dw.len() == w.n * w.k));
    let dw = dw.map(|dw| f32_ptr(dw));
    let size = w.dtype.size();
    let step = rows.min(ROWS);
    let stretch = (BACKWARD / copies / step / TILE * TILE).max(TILE).min(w.n);
    let logits = cuda.arena.take(copies * step * stretch * 4)?;
    // In f32 the gradient takes the place of the logits.
    let grad = if w.dtype == DType::F32 { None } else { Some(cuda.arena.take(step * stretch * size)?) };
    let grad = grad.as_ref().map_or(logits.ptr(), Memory::ptr);
    let sums = cuda.arena.take(step * w.k * 4)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        let row = |start: u64, size: usize| start + (first * w.k * size) as u64;
        for from in (0..w.n).step_by(stretch) {
            let width = stretch.min(w.n - from);
            fill(Piece { first, rows: count, from, width }, logits.ptr(), grad)?;
            let part = |start: u64, size: usize| start + (from * w.k * size) as u64;
            let sizes = [count, width, w.k];
            let to = (sums.ptr(), DType::F32);
            input_gradient(cuda, sizes, grad, part(form(w), size), w.dtype, to, from > 0)?;
            if let Some(dw) = dw {
                weight_gradient(cuda, sizes, grad, row(ptr(x), size), w.dtype, part(dw, 4))?;
            }
        }
        let to = (row(ptr(dx), dx.dtype().size()), dx.dtype());
        convert(cuda, (sums.ptr(), DType::F32), to, count * w.k)?;
    }
    Ok(())
}
