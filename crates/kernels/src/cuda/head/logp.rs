//! From hidden states to log-probabilities, with the logits of some rows at a time.
//!
//! Rows are multiplied with the whole vocabulary at once, in training as in decoding, so a row's logits are the same GEMM with
//! another number of rows. In backward the gradient overwrites the logits and is multiplied into `dx` and `dw` before the next
//! rows. The one-pass head uses forward's logits for backward, too; otherwise they are recomputed.

use crate::backend::{HeadGrads, HeadInput, HeadOps, LogpGrads, LogpHead, LogpStats};
use crate::cuda::Cuda;
use crate::cuda::gemm::linear::{ForwardShape, forward, long_input_gradient, stored, weight_gradient};
use crate::cuda::launch::{Arg, Grid, args};
use crate::cuda::memory::{CardMemory, f32_ptr, letter, ptr, u32s};
use crate::{Buffer, DType, Result, Weight, shapes};

/// Vocabulary entries per tile; one warp each.
pub(crate) const TILE: usize = 1024;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("TILE", TILE)];
/// Maximum logits in memory at a time: 1.25 GiB. Fewer rows per GEMM cost it a fifth of its speed.
const LOGITS: usize = 5 << 26;

/// The kernels' arguments for a head.
pub(crate) fn head_args(op: LogpHead) -> [Arg; 3] {
    args![1.0 / op.temperature, op.temperature, op.softcap.unwrap_or(0.0)]
}

/// Raw logits `[rows, vocab]` in f32 of rows from `first` on.
pub(crate) fn raw_logits(
    cuda: &Cuda,
    (x, w): (&Buffer, &Weight),
    (first, rows): (usize, usize),
    out: u64,
) -> Result<()> {
    let x = ptr(x) + (first * w.k * w.compute.size()) as u64;
    forward(cuda, ForwardShape::of(rows, w), x, stored(w), None, (out, DType::F32))
}

/// Rows whose logits are in memory at a time if `copies` of them are needed: about equal blocks of all rows.
pub(crate) fn rows_at_a_time(rows: usize, vocab: usize, copies: usize) -> usize {
    let most = LOGITS / copies / vocab;
    // Whole tiles of the GEMMs if possible.
    let (most, tile) = if most >= 128 { (most / 128 * 128, 128) } else { (most.max(1), 1) };
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1).next_multiple_of(tile)
}

/// Blocks of `step` rows: (first, count) of each.
pub(crate) fn parts(rows: usize, step: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(step).map(move |first| (first, step.min(rows - first)))
}

/// Requested tokens, and destinations of their logits and log-probabilities; addresses for the first row.
#[derive(Default, Clone, Copy)]
pub(super) struct WantedLogits {
    pub targets: u64,
    pub others: u64,
    pub extra: usize,
    pub logp: u64,
    pub entropy: u64,
    pub other_logp: u64,
}

impl WantedLogits {
    /// The same from a later row on.
    pub(super) fn after(self, row: usize) -> Self {
        let at = |start: u64, per_row: usize| if start == 0 { 0 } else { start + (row * per_row * 4) as u64 };
        WantedLogits {
            targets: at(self.targets, 1),
            others: at(self.others, self.extra),
            extra: self.extra,
            logp: at(self.logp, 1),
            entropy: at(self.entropy, 1),
            other_logp: at(self.other_logp, self.extra),
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct RawLogits {
    pub at: u64,
    pub rows: usize,
    pub vocab: usize,
}

/// Statistics of rows of raw logits; with `keep` they become scaled in place. Writes `lse`, and what is requested.
fn fold(
    cuda: &Cuda,
    op: LogpHead,
    logits: RawLogits,
    keep: bool,
    wanted: WantedLogits,
    lse: u64,
) -> Result<()> {
    let (rows, tiles) = (logits.rows, logits.vocab.div_ceil(TILE));
    let folds = cuda.arena.take(rows * tiles * 12)?;
    let found =
        if wanted.targets == 0 { None } else { Some(cuda.arena.take(rows * (1 + wanted.extra) * 4)?) };
    let found = found.as_ref().map_or(0, CardMemory::ptr);
    fold_tiles(cuda, op, logits, keep, wanted, [found, folds.ptr()])?;
    finish(cuda, [rows, tiles], [folds.ptr(), found], wanted, lse)
}

/// Tile statistics of rows of raw logits, and the scaled logits of requested tokens; with `keep` raw logits become scaled in
/// place.
pub(super) fn fold_tiles(
    cuda: &Cuda,
    op: LogpHead,
    logits: RawLogits,
    keep: bool,
    wanted: WantedLogits,
    [found, folds]: [u64; 2],
) -> Result<()> {
    let RawLogits { at: logits, rows, vocab } = logits;
    let tiles = vocab.div_ceil(TILE);
    // Scaling by 1 changes nothing.
    let keep = keep && (op.temperature != 1.0 || op.softcap.is_some());
    let mut all = args![logits, rows as u32, vocab as u32, tiles as u32].to_vec();
    all.extend(head_args(op));
    all.extend(args![keep, wanted.targets, wanted.others, wanted.extra as u32, found, folds]);
    cuda.launch("logp", "fold", Grid::new((rows * tiles).div_ceil(8), 256), &all)
}

/// Combines the tiles of each row: log-sum-exps, and what is requested.
pub(super) fn finish(
    cuda: &Cuda,
    [rows, tiles]: [usize; 2],
    [folds, found]: [u64; 2],
    wanted: WantedLogits,
    lse: u64,
) -> Result<()> {
    let WantedLogits { extra, logp, entropy, other_logp, .. } = wanted;
    let all = args![folds, found, rows as u32, tiles as u32, extra as u32, logp, entropy, lse, other_logp];
    cuda.launch("logp", "finish", Grid::new(rows.div_ceil(8), 256), &all)
}

/// The log-sum-exp of rows of raw logits.
pub(crate) fn lse(cuda: &Cuda, op: LogpHead, logits: RawLogits, lse: u64) -> Result<()> {
    fold(cuda, op, logits, false, WantedLogits::default(), lse)
}

/// Calls `then(rows, their raw logits)` for all rows of `x`, a block at a time, after computing their statistics.
fn fold_all(
    cuda: &Cuda,
    op: LogpHead,
    (x, w): (&Buffer, &Weight),
    wanted: WantedLogits,
    lse: u64,
    mut then: impl FnMut((usize, usize), u64) -> Result<()>,
) -> Result<()> {
    let rows = x.len() / w.k;
    let step = rows_at_a_time(rows, w.n, 1);
    let logits = cuda.arena.take(rows.min(step) * w.n * 4)?;
    for (first, count) in parts(rows, step) {
        raw_logits(cuda, (x, w), (first, count), logits.ptr())?;
        let lse = lse + (first * 4) as u64;
        let these = RawLogits { at: logits.ptr(), rows: count, vocab: w.n };
        fold(cuda, op, these, false, wanted.after(first), lse)?;
        then((first, count), logits.ptr())?;
    }
    Ok(())
}

fn check(head: HeadInput<'_>, stats: &LogpStats) {
    let HeadInput { x, w, targets, .. } = head;
    let rows = x.len() / w.k;
    assert!(x.dtype() == w.compute && targets.len() == rows);
    assert!([&stats.logp, &stats.entropy, &stats.lse].iter().all(|b| b.len() == rows));
    assert!(u32s(targets).iter().all(|&t| (t as usize) < w.n));
}

impl HeadOps for Cuda {
    fn logp(
        &self,
        head: HeadInput<'_>,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()> {
        let listed = others.as_ref().map(|(ids, out)| (*ids, &**out));
        shapes::logp(self, head, listed, stats)?;
        check(head, stats);
        let HeadInput { op, x, w, targets } = head;
        let rows = targets.len();
        let extra = others.as_ref().map_or(0, |(ids, _)| ids.len() / rows.max(1));
        if let Some((ids, out)) = &others {
            assert!(ids.len() == rows * extra && out.len() == ids.len());
            assert!(u32s(ids).iter().all(|&t| (t as usize) < w.n));
        }
        let (others, other_logp) = others.map_or((0, 0), |(ids, out)| (ptr(ids), f32_ptr(out)));
        let (logp, entropy) = (f32_ptr(&stats.logp), f32_ptr(&stats.entropy));
        let wanted = WantedLogits { targets: ptr(targets), others, extra, logp, entropy, other_logp };
        fold_all(self, op, (x, w), wanted, f32_ptr(&stats.lse), |_, _| Ok(()))
    }
    fn logp_backward(
        &self,
        head: HeadInput<'_>,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        mut to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_backward(self, head, others, stats, grads, &to)?;
        check(head, stats);
        let HeadInput { op, x, w, targets } = head;
        let rows = targets.len();
        assert!(others.map_or(0, Buffer::len) == grads.others.map_or(0, Buffer::len));
        let flow = HeadGradients {
            op,
            grads: WantedLogits {
                targets: ptr(targets),
                others: others.map_or(0, ptr),
                extra: others.map_or(0, |o| o.len() / rows.max(1)),
                logp: f32_ptr(grads.logp),
                entropy: grads.entropy.map_or(0, f32_ptr),
                other_logp: grads.others.map_or(0, f32_ptr),
            },
            lse: f32_ptr(&stats.lse),
            entropy: f32_ptr(&stats.entropy),
        };
        let step = rows_at_a_time(rows, w.n, 1);
        let logits = self.arena.take(rows.min(step) * w.n * 4)?;
        for part in parts(rows, step) {
            raw_logits(self, (x, w), part, logits.ptr())?;
            flow.to_gradient(
                self,
                &in_place_kernel("dlogits", w.compute, w.n, w.n),
                w.n,
                part,
                logits.ptr(),
            )?;
            multiply_back(self, (x, w), part, logits.ptr(), &mut to)?;
        }
        Ok(())
    }
    fn logp_one_pass(
        &self,
        head: HeadInput<'_>,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        mut to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::logp_one_pass(self, head, dlogp, stats, &to)?;
        check(head, stats);
        let HeadInput { op, x, w, targets } = head;
        assert_eq!(dlogp.len(), targets.len());
        let (logp, entropy, lse) = (f32_ptr(&stats.logp), f32_ptr(&stats.entropy), f32_ptr(&stats.lse));
        let targets = ptr(targets);
        let grads = WantedLogits { targets, logp: f32_ptr(dlogp), ..WantedLogits::default() };
        let flow = HeadGradients { op, grads, lse, entropy };
        let wanted = WantedLogits { targets, logp, entropy, ..WantedLogits::default() };
        fold_all(self, op, (x, w), wanted, lse, |part, logits| {
            flow.to_gradient(self, &in_place_kernel("dlogits", w.compute, w.n, w.n), w.n, part, logits)?;
            multiply_back(self, (x, w), part, logits, &mut to)
        })
    }
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::logits(self, x, w, [logits, lse])?;
        let rows = x.len() / w.k;
        assert!(x.dtype() == w.compute && logits.len() == rows * w.n && lse.len() == rows);
        raw_logits(self, (x, w), (0, rows), f32_ptr(logits))?;
        let all = RawLogits { at: f32_ptr(logits), rows, vocab: w.n };
        fold(self, op, all, true, WantedLogits::default(), f32_ptr(lse))
    }
}

/// Gradients of the row statistics, and the statistics that they need; addresses of the first row.
pub(super) struct HeadGradients {
    pub op: LogpHead,
    /// Gradients in the place of log-probabilities.
    pub grads: WantedLogits,
    pub lse: u64,
    pub entropy: u64,
}

impl HeadGradients {
    /// Overwrites the raw logits of `rows` rows and `tokens` tokens by their gradient.
    pub(super) fn to_gradient(
        &self,
        cuda: &Cuda,
        kernel: &str,
        tokens: usize,
        (first, rows): (usize, usize),
        logits: u64,
    ) -> Result<()> {
        let WantedLogits { targets, others, extra, logp, entropy, other_logp } = self.grads.after(first);
        let later = |start: u64| start + (first * 4) as u64;
        let mut all = args![logits, tokens as u32].to_vec();
        all.extend(head_args(self.op));
        all.extend(args![targets, others, extra as u32, later(self.lse), later(self.entropy)]);
        all.extend(args![logp, entropy, other_logp]);
        cuda.launch("logp_backward", kernel, Grid::new(rows, 768), &all)
    }
}

/// The in-place gradient kernel; a part of a vocabulary uses the same one as the whole.
pub(crate) fn in_place_kernel(name: &str, compute: DType, tokens: usize, vocab: usize) -> String {
    let per_thread = if tokens.is_multiple_of(8) && vocab.is_multiple_of(8) { 8 } else { 1 };
    format!("{name}_{}{per_thread}", letter(compute))
}

/// Multiplies the gradient of some rows' logits into `dx` and `dw`; the first rows overwrite `dw` unless it is accumulated.
pub(crate) fn multiply_back(
    cuda: &Cuda,
    (x, w): (&Buffer, &Weight),
    (first, rows): (usize, usize),
    grad: u64,
    to: &mut HeadGrads<'_>,
) -> Result<()> {
    let (dx, add) = (&*to.dx, to.add);
    assert!(dx.len() == x.len() && dx.dtype().is_float());
    let (size, sizes) = (w.compute.size(), [rows, w.n, w.k]);
    let grad = (grad, w.n * 4 / size);
    let rows_of_dx = (ptr(dx) + (first * w.k * dx.dtype().size()) as u64, dx.dtype());
    long_input_gradient(cuda, sizes, grad, stored(w), rows_of_dx)?;
    match to.dw.as_deref() {
        Some(dw) => {
            assert_eq!(dw.len(), w.n * w.k);
            let x = (ptr(x) + (first * w.k * size) as u64, w.k);
            weight_gradient(cuda, sizes, grad, x, w.compute, (f32_ptr(dw), add || first > 0))
        }
        None => Ok(()),
    }
}
