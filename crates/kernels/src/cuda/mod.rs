//! The backend for NVIDIA cards.
//!
//! One context, one stream, one arena. Kernels are `.cu` text beside their launchers, compiled for the card that is
//! found ([`compile`]) after the same prelude (`prelude.cuh`); products go through cuBLASLt ([`gemm`]). Because all
//! work is on one stream, memory that is freed may be handed out again at once.

pub mod activation;
mod ahead;
pub mod attention;
mod backend;
pub mod compile;
pub mod context;
pub mod embed;
pub mod few;
mod footprint;
pub mod gemm;
mod halves;
pub mod head_norm;
pub mod kl;
pub mod launch;
pub mod libraries;
pub mod linear;
pub mod logp;
pub mod memory;
pub mod norm;
pub mod optim;
pub mod peak;
mod profile;
mod record;
pub mod rotary;
mod rows;
pub mod sample;
mod stream;
mod trace;
mod tune;
pub mod vector;

pub use ahead::settle;
pub use context::Cuda;
pub use footprint::FOOTPRINT;

use crate::backend::Backend;
use crate::error::Result;
use std::sync::Arc;

/// Opens the card of that number.
pub fn open(index: usize) -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Cuda::new(index)?))
}
