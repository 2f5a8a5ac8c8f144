//! Generation: continuous batching over a paged KV cache, on the weights the trainer reads.
//!
//! A token's log-probability is, bit for bit, what [`crate::train::stats`] computes: every forward result depends only on its
//! own sequence, so neither the other sequences of a batch, nor chunked prefill, nor shared or recomputed blocks change it. The
//! sampled token depends only on the request's seed and stream and on the token's index. Users see the trait [`Generator`];
//! [`Sampler`] is the local implementation.

mod cache;
mod choose;
mod generator;
mod graphs;
mod params;
mod request;
mod sampler;
mod scheduler;
mod sequence;
mod shared;
mod step;
mod stops;
mod team;

pub use cache::CacheOptions;
pub use generator::Generator;
pub use params::SamplingParams;
pub use request::{Completion, Event, GenerationRequest, Id, StopReason};
pub use sampler::{Sampler, Usage};
pub use stops::{StopStream, Stops};
pub use team::dismiss;
