//! What a card takes, for plans.

use crate::footprint::Footprint;

/// Bytes of logits that the head holds at a time, in f32, with their gradient beside them in backward.
const LOGITS: usize = 1 << 30;

/// Measured on one H200 with a model of half a billion weights in bf16: a training step of 16 x 1024 tokens takes 21.0 GiB
/// of the card, where the plan says 21.3 GiB (38.3 and 39.7 GiB with three times the weights and 8192 tokens at once).
pub const FOOTPRINT: Footprint = Footprint {
    own_memory: true,
    // One form serves forward and backward; that of bf16 is the upper half of the master.
    weight: |n, k, size, _| if size == 2 { 0 } else { n * k * size },
    frozen: 2,
    head,
    vocab_tile: super::head::logp::TILE,
    draws_by_parts: false,
    busy_tokens: 16384,
    fixed: 600 << 20,
    slack: 8,
    training_share: 0.65,
    sampling_share: 0.18,
};

/// Logits, the rows and their gradients.
fn head(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize {
    LOGITS.min(4 * rows * vocab) + rows * hidden * (4 + 2 * size)
}
