//! What hardware does: coarse, exact, deterministic operations. Knows nothing of models.

pub mod error;
pub mod mmap;
pub mod philox;

pub use error::{Class, Error, Result, nearest};
pub mod cpu;
