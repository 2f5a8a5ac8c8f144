//! Generation: continuous batching over a paged, shared cache, on the weights the trainer reads.
//!
//! The log-probability returned with a token is, bit for bit, the one [`crate::train::stats`] gives for it: every
//! forward result depends on its own sequence alone, so neither what runs beside a sequence, nor chunked prefill,
//! nor shared or recomputed blocks change it. Which token is drawn depends on the request's seed, stream and the
//! token's index alone.

mod cache;
mod params;
mod queue;
mod recorded;
mod request;
mod sampler;
mod scheduler;
mod sequence;
mod stops;

pub use cache::CacheOptions;
pub use params::SamplingParams;
pub use request::{Completion, Event, Id, Request, Stop};
pub use scheduler::{Sampler, Usage};
pub use stops::{StopStream, Stops};
