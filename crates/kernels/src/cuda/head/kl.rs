//! Full-vocabulary KL(p || q), and its gradient with respect to p's logits. The kernels are in `logp_backward.cu`.

use crate::backend::{DivergenceOps, HeadGrads, LogpHead};
use crate::cuda::Cuda;
use crate::cuda::head::logp::{
    RawLogits, TILE, head_args, in_place_kernel, lse, multiply_back, parts, raw_logits, rows_at_a_time,
};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::f32_ptr;
use crate::{Buffer, Result, Weight, shapes};

/// Some rows after their forward: the raw logits of p and of q, and both log-sum-exps.
struct KlRows {
    rows: (usize, usize),
    logits: [u64; 2],
    lse: [u64; 2],
}

/// Computes the KL of every row, some rows at a time, and calls `then` for each such block of rows.
fn each(
    cuda: &Cuda,
    op: LogpHead,
    p: (&Buffer, &Weight),
    q: (&Buffer, &Weight),
    kl: u64,
    mut then: impl FnMut(KlRows) -> Result<()>,
) -> Result<()> {
    let (vocab, rows) = (p.1.n, p.0.len() / p.1.k);
    assert!(q.1.n == vocab && q.0.len() / q.1.k == rows && p.0.dtype() == p.1.compute);
    assert!(q.0.dtype() == q.1.compute);
    let (step, tiles) = (rows_at_a_time(rows, vocab, 2), vocab.div_ceil(TILE));
    let most = rows.min(step);
    let [a, b] = [cuda.arena.take(most * vocab * 4)?, cuda.arena.take(most * vocab * 4)?];
    let sums = [cuda.arena.take(most * 4)?, cuda.arena.take(most * 4)?];
    let sums_of_tiles = cuda.arena.take(most * tiles * 4)?;
    let (logits, sums) = ([a.ptr(), b.ptr()], sums.each_ref().map(|s| s.ptr()));
    for (first, count) in parts(rows, step) {
        for (i, side) in [p, q].into_iter().enumerate() {
            raw_logits(cuda, side, (first, count), logits[i])?;
            lse(cuda, op, RawLogits { at: logits[i], rows: count, vocab }, sums[i])?;
        }
        kl_tiles(cuda, op, [count, vocab], logits, sums, sums_of_tiles.ptr())?;
        kl_finish(cuda, [count, tiles], sums_of_tiles.ptr(), kl + (first * 4) as u64)?;
        then(KlRows { rows: (first, count), logits, lse: sums })?;
    }
    Ok(())
}

/// Tile sums of rows of raw logits of p and of q, given their log-sum-exps.
pub(super) fn kl_tiles(
    cuda: &Cuda,
    op: LogpHead,
    [rows, vocab]: [usize; 2],
    logits: [u64; 2],
    lse: [u64; 2],
    to: u64,
) -> Result<()> {
    let tiles = vocab.div_ceil(TILE);
    let mut all = args![logits[0], logits[1], rows as u32, vocab as u32, tiles as u32].to_vec();
    all.extend(head_args(op));
    all.extend(args![lse[0], lse[1], to]);
    cuda.launch("logp_backward", "kl_tiles", Grid::new((rows * tiles).div_ceil(8), 256), &all)
}

/// Adds the tile sums of each row.
pub(super) fn kl_finish(cuda: &Cuda, [rows, tiles]: [usize; 2], sums: u64, kl: u64) -> Result<()> {
    let all = args![sums, rows as u32, tiles as u32, kl];
    cuda.launch("logp_backward", "kl_finish", Grid::new(rows.div_ceil(8), 256), &all)
}

impl DivergenceOps for Cuda {
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()> {
        shapes::kl(self, p, q, kl)?;
        assert_eq!(kl.len(), p.0.len() / p.1.k);
        each(self, op, p, q, f32_ptr(kl), |_| Ok(()))
    }
    fn kl_backward(
        &self,
        op: LogpHead,
        p: (&Buffer, &Weight),
        q: (&Buffer, &Weight),
        dkl: &Buffer,
        mut to: HeadGrads<'_>,
    ) -> Result<()> {
        shapes::kl_backward(self, p, q, dkl, &to)?;
        let kl = self.arena.take(dkl.len() * 4)?;
        each(self, op, p, q, kl.ptr(), |part| {
            let (first, count) = part.rows;
            let later = |start: u64| start + (first * 4) as u64;
            let mut all = args![part.logits[0], part.logits[1], p.1.n as u32].to_vec();
            all.extend(head_args(op));
            all.extend(args![part.lse[0], part.lse[1], later(kl.ptr()), later(f32_ptr(dkl))]);
            self.launch(
                "logp_backward",
                &in_place_kernel("kl_dlogits", p.1.compute, p.1.n, p.1.n),
                Grid::new(count, 512),
                &all,
            )?;
            multiply_back(self, p, part.rows, part.logits[0], &mut to)
        })
    }
}
