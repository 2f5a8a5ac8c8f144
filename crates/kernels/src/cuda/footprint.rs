//! Memory and speed constants of a GPU, for plans.

use super::head::logp::rows_at_a_time;
use crate::footprint::Footprint;

/// Measured on one H200 in bf16, when weights, gradients and moments were still rounded up by 1/50: a training step of 16 x 1024
/// tokens of a 0.5B model took 21.0 GiB of device memory, and of a model three times as large with 8192 tokens 38.3 GiB. The plan
/// says 20.9 and 38.0 GiB.
pub const FOOTPRINT: Footprint = Footprint {
    own_memory: true,
    // One copy serves forward and backward; in bf16 it is the upper half of the master.
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

/// Logits in f32, overwritten by their gradient in backward; the rows and their gradients.
fn head(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize {
    4 * rows.min(rows_at_a_time(rows, vocab, 1)) * vocab + rows * hidden * (4 + 2 * size)
}
