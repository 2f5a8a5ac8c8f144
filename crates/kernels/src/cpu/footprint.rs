//! Memory and speed constants of the CPU, for plans.

use super::logp::TILE;
use super::matmul::tile::PANEL;
use super::simd::{Level, bf16_per_unit};
use crate::footprint::Footprint;

/// Logits (or their gradients) that the head materialises at a time.
const VOCAB_CHUNK: usize = 4 << 20;

/// Measured with small models. `docs/performance.md` has 8725 tokens/s in bf16 and 5142 in f32 for a model of 32.8 million FLOP
/// per token, 61 and 71 % of the peaks given there; sampling, 21893 and 12384 tokens/s at 10.2 million FLOP per token, 47 and
/// 54 %.
pub const FOOTPRINT: Footprint = Footprint {
    own_memory: false,
    weight,
    frozen: 4,
    head,
    vocab_tile: TILE,
    draws_by_parts: true,
    busy_tokens: 2048,
    fixed: 0,
    slack: 18,
    training_share: 0.6,
    sampling_share: 0.45,
};

/// Bytes of a packed element: bf16 is widened where the CPU has no bf16 dot product.
fn packed(size: usize) -> usize {
    let level = Level::from_env().unwrap_or(Level::PORTABLE);
    if size == 2 { 4 / bf16_per_unit(level) } else { size }
}

/// One packed copy for forward, one for backward.
fn weight(n: usize, k: usize, size: usize, backward: bool) -> usize {
    let size = packed(size);
    let form = |rows: usize, cols: usize| size * rows.next_multiple_of(PANEL) * cols;
    form(n, k) + if backward { form(k, n) } else { 0 }
}

/// Logits of a vocabulary range, gradients of the rows, and their packed form.
fn head(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize {
    let vocab_chunk = (VOCAB_CHUNK / rows.max(1) / TILE).clamp(1, 8) * TILE;
    rows * (size * vocab_chunk.min(vocab) + 4 * hidden + (2 * size + packed(size)) * hidden)
}
