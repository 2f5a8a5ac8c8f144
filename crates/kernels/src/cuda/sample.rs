//! Choosing a token of each row of logits; only the choices leave the card.

use super::Cuda;
use super::launch::{Grid, args};
use super::memory::f32_ptr;
use crate::backend::Choice;
use crate::buffer::Buffer;
use crate::error::Result;

/// Threads of a block of sample.cu, which has one row.
const THREADS: u32 = 512;

/// As the kernel writes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Chosen {
    token: u32,
    logit: f32,
    lse: f32,
}

/// One kernel, one copy. A negative draw asks for the largest.
fn run(
    cuda: &Cuda,
    logits: &Buffer,
    lse: Option<&Buffer>,
    draws: &[f32],
    rows: usize,
) -> Result<Vec<Chosen>> {
    assert!(logits.len().is_multiple_of(rows.max(1)) && lse.is_none_or(|l| l.len() == rows));
    let vocab = logits.len() / rows.max(1);
    let (draws, chosen) = (cuda.uploaded(draws)?, cuda.arena.take(rows * size_of::<Chosen>())?);
    let grid = Grid::new(rows, THREADS).with_shared(vocab.div_ceil(super::logp::TILE) * 4);
    let arguments = args![f32_ptr(logits), lse.map_or(0, f32_ptr), &draws, vocab as u32, &chosen];
    cuda.launch("sample", "choose", grid, &arguments)?;
    let mut result = vec![Chosen::default(); rows];
    cuda.download(chosen.ptr(), &mut result)?;
    Ok(result)
}

/// See [`crate::Backend::sample`].
pub fn sample(cuda: &Cuda, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
    assert!(uniform.iter().all(|&u| u >= 0.0));
    let chosen = run(cuda, logits, Some(lse), uniform, uniform.len())?;
    Ok(chosen.into_iter().map(|c| c.token).collect())
}

/// See [`crate::Backend::argmax`].
pub fn argmax(cuda: &Cuda, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
    Ok(run(cuda, logits, None, &[], rows)?.into_iter().map(|c| c.token).collect())
}

/// See [`crate::Backend::choose`].
pub fn choose(cuda: &Cuda, logits: &Buffer, lse: &Buffer, uniform: &[Option<f32>]) -> Result<Vec<Choice>> {
    let draws: Vec<f32> = uniform.iter().map(|u| u.unwrap_or(-1.0)).collect();
    let chosen = run(cuda, logits, Some(lse), &draws, draws.len())?;
    Ok(chosen.into_iter().map(|Chosen { token, logit, lse }| Choice { token, logit, lse }).collect())
}
