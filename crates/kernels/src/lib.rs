//! What hardware does: coarse, exact, deterministic operations. Knows nothing of models.

pub mod backend;
pub mod buffer;
pub mod cpu;
pub mod error;
pub mod mmap;
pub mod philox;

pub use backend::Backend;
pub use buffer::{Buffer, DType, Weight};
pub use error::{Class, Error, Result, nearest};
