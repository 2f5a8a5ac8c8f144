//! What a kind of device takes for the same work, in memory and in time: for plans that are made without it.

/// How a kind of device uses memory and time.
pub struct Footprint {
    /// Whether it computes in memory of its own, and not in the machine's.
    pub own_memory: bool,
    /// Bytes of what is derived from an `[n, k]` matrix of numbers of `size` bytes; `backward` where it is trained.
    pub weight: fn(n: usize, k: usize, size: usize, backward: bool) -> usize,
    /// Bytes of a weight of bf16 that is not trained, beside what is derived from it.
    pub frozen: usize,
    /// Bytes that the head needs beside its result for `rows` rows of `hidden` numbers of `size` bytes.
    pub head: fn(rows: usize, hidden: usize, vocab: usize, size: usize) -> usize,
    /// Tokens of the vocabulary that the head folds at a time.
    pub vocab_tile: usize,
    /// Whether draws go through a vocabulary that ranks share part by part; elsewhere the logits of a row are put together.
    pub draws_by_parts: bool,
    /// Tokens of prompts that are read at once.
    pub busy_tokens: usize,
    /// Bytes that are taken before anything is computed, where it has memory of its own.
    pub fixed: u64,
    /// Overhead of the allocator in per cent of the bytes requested: sizes come in classes up to an eighth apart, and some of
    /// what one batch frees does not fit the next.
    pub slack: u64,
    /// Share of the measured peak that training reaches.
    pub training_share: f64,
    /// The same for sampling.
    pub sampling_share: f64,
}
