//! What hardware does: coarse, exact, deterministic operations. Knows nothing of models.

pub mod error;

pub use error::{Class, Error, Result, nearest};
pub mod cpu;
