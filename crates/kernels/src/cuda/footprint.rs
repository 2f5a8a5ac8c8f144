//! What a card takes, for plans.

use crate::footprint::Footprint;

/// Bytes of logits that the head holds at a time, in f32, with their gradient beside them in backward.
const LOGITS: usize = 1 << 30;

/// Measured on one H200 with a model of half a billion weights in bf16: a GRPO step took 28.6 GiB of buffers, 3.4 GiB of
/// blocks between uses and context, and 1.05 and 1.16 s of sampling and training; the plan says 32.1 GiB and 2.2 s.
pub const FOOTPRINT: Footprint = Footprint {
    own_memory: true,
    // One form serves forward and backward.
    weight: |n, k, size, _| n * k * size,
    head,
    busy_tokens: 16384,
    fixed: 600 << 20,
    slack: 17,
    training_share: 0.58,
    sampling_share: 0.16,
};

/// Logits, the rows and their gradients.
fn head(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize {
    LOGITS.min(4 * rows * vocab) + rows * hidden * (4 + 2 * size)
}
