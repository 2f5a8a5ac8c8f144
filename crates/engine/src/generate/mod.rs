//! Generation: continuous batching over a paged, shared cache, on the weights the trainer reads.
//!
//! The log-probability returned with a token is, bit for bit, the one [`crate::train::stats`] gives for it: every
//! forward result depends on its own sequence alone, so neither the other sequences of a batch, nor chunked prefill,
//! nor shared or recomputed blocks change it. Which token is drawn depends on the request's seed, stream and the
//! token's index alone. [`Generator`] is what the rest of Ferrl sees; [`Sampler`] is the one of this process.

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
