//! KL(p || q) over the whole vocabulary, and its gradient by p's logits. The kernels are in `logp.cu`.

use super::Cuda;
use super::launch::{Grid, args};
use super::logp::{Piece, TILE, head_args, lse, raw_logits, rows_at_a_time, through_vocabulary};
use super::memory::{Memory, f32_ptr, letter};
use crate::backend::LogpHead;
use crate::buffer::{Buffer, Weight};
use crate::error::Result;

/// Per row: log-sum-exp of p and of q.
struct Sums {
    p: Memory,
    q: Memory,
}

/// Writes the divergence of every row.
fn rows(cuda: &Cuda, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: u64) -> Result<Sums> {
    let (vocab, rows) = (p.1.n, p.0.len() / p.1.k);
    assert!(q.1.n == vocab && q.0.len() / q.1.k == rows && p.0.dtype() == p.1.dtype);
    assert!(q.0.dtype() == q.1.dtype);
    let sums = Sums { p: cuda.arena.take(rows * 4)?, q: cuda.arena.take(rows * 4)? };
    let (step, tiles) = (rows_at_a_time(vocab, 2), vocab.div_ceil(TILE));
    let most = rows.min(step);
    let [a, b] = [cuda.arena.take(most * vocab * 4)?, cuda.arena.take(most * vocab * 4)?];
    let parts = cuda.arena.take(most * tiles * 4)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        let later = |start: u64| start + (first * 4) as u64;
        for ((x, w), logits, sum) in [(p, &a, &sums.p), (q, &b, &sums.q)] {
            raw_logits(cuda, x, w, (first, count), (0, vocab), logits.ptr())?;
            lse(cuda, op, logits.ptr(), count, vocab, later(sum.ptr()))?;
        }
        let mut all = args![&a, &b, count as u32, vocab as u32, tiles as u32].to_vec();
        all.extend(head_args(op));
        all.extend(args![later(sums.p.ptr()), later(sums.q.ptr()), &parts]);
        cuda.launch("logp", "kl_tiles", Grid::new((count * tiles).div_ceil(8), 256), &all)?;
        let all = args![&parts, count as u32, tiles as u32, later(kl)];
        cuda.launch("logp", "kl_finish", Grid::new(count.div_ceil(8), 256), &all)?;
    }
    Ok(sums)
}

/// See [`crate::Backend::kl`].
pub fn kl(
    cuda: &Cuda,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    kl: &mut Buffer,
) -> Result<()> {
    assert_eq!(kl.len(), p.0.len() / p.1.k);
    rows(cuda, op, p, q, f32_ptr(kl)).map(drop)
}

/// See [`crate::Backend::kl_backward`].
pub fn kl_backward(
    cuda: &Cuda,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    dkl: &Buffer,
    dx: &mut Buffer,
    dw: Option<&mut Buffer>,
) -> Result<()> {
    let kl = cuda.arena.take(dkl.len() * 4)?;
    let sums = rows(cuda, op, p, q, kl.ptr())?;
    let name = format!("kl_dlogits_{}", letter(p.1.dtype));
    through_vocabulary(cuda, p.0, p.1, dx, dw, 2, |piece, logits, out| {
        let Piece { first, rows, from, width } = piece;
        let second = logits + (rows * width * 4) as u64;
        raw_logits(cuda, p.0, p.1, (first, rows), (from, width), logits)?;
        raw_logits(cuda, q.0, q.1, (first, rows), (from, width), second)?;
        let later = |start: u64| start + (first * 4) as u64;
        let mut all = args![logits, second, width as u32].to_vec();
        all.extend(head_args(op));
        all.extend(args![
            later(sums.p.ptr()),
            later(sums.q.ptr()),
            later(kl.ptr()),
            later(f32_ptr(dkl)),
            out
        ]);
        cuda.launch("logp", &name, Grid::plane(width.div_ceil(1024), rows, 256), &all)
    })
}
