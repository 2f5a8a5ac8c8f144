//! Choosing a token of each row of logits; only the choices leave the card.

use super::Cuda;
use super::launch::{Grid, args};
use super::memory::f32_ptr;
use crate::buffer::Buffer;
use crate::error::Result;

/// Threads of a block of sample.cu, which has one row.
const THREADS: u32 = 512;

/// See [`crate::Backend::sample`].
pub fn sample(cuda: &Cuda, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
    let rows = uniform.len();
    assert!(lse.len() == rows && logits.len().is_multiple_of(rows.max(1)));
    let vocab = logits.len() / rows.max(1);
    let (draws, chosen) = (cuda.uploaded(uniform)?, cuda.arena.take(rows * 4)?);
    let grid = Grid::new(rows, THREADS).with_shared(vocab.div_ceil(super::logp::TILE) * 4);
    let arguments = args![f32_ptr(logits), f32_ptr(lse), &draws, vocab as u32, &chosen];
    cuda.launch("sample", "sample", grid, &arguments)?;
    let mut ids = vec![0; rows];
    cuda.download(chosen.ptr(), &mut ids)?;
    Ok(ids)
}

/// See [`crate::Backend::argmax`].
pub fn argmax(cuda: &Cuda, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
    let vocab = logits.len() / rows.max(1);
    let chosen = cuda.arena.take(rows * 4)?;
    let arguments = args![f32_ptr(logits), vocab as u32, &chosen];
    cuda.launch("sample", "argmax", Grid::new(rows, THREADS), &arguments)?;
    let mut ids = vec![0; rows];
    cuda.download(chosen.ptr(), &mut ids)?;
    Ok(ids)
}
