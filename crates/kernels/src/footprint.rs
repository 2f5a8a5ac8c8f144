//! Memory and speed of a kind of device, for plans made without opening it.

/// Memory and speed constants of a kind of device.
pub struct Footprint {
    /// Whether it has memory separate from the host's.
    pub own_memory: bool,
    /// Bytes derived from an `[n, k]` master in a type of `size` bytes; `backward` if it is trained.
    pub weight: fn(n: usize, k: usize, size: usize, backward: bool) -> usize,
    /// Bytes per weight for a frozen bf16 weight, besides the derived form.
    pub frozen: usize,
    /// Scratch bytes of the head for `rows` rows of `hidden` elements of `size` bytes.
    pub head: fn(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize,
    /// Vocabulary entries per tile of the head.
    pub vocab_tile: usize,
    /// Whether sampling can proceed part by part over a sharded vocabulary; otherwise the logits of a row are gathered.
    pub draws_by_parts: bool,
    /// Prompt tokens that saturate the device in one prefill chunk.
    pub busy_tokens: usize,
    /// Bytes of device memory taken before anything is allocated (context and libraries).
    pub fixed: u64,
    /// Allocator overhead in per cent of the requested bytes: size classes are up to an eighth apart, and freed blocks of one
    /// batch do not all fit the next.
    pub slack: u64,
    /// Fraction of the measured peak that training reaches.
    pub training_share: f64,
    /// The same for sampling.
    pub sampling_share: f64,
}
