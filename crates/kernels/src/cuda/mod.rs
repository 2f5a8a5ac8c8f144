//! The backend for NVIDIA cards.
//!
//! One context, one stream, one arena (`handles` says who ends what). Kernels are `.cu` text beside their launchers, compiled for the card that is
//! found ([`compile`]) after the same prelude (`prelude.cuh`); products go through cuBLASLt (`gemm`). Because all
//! work is on one stream, memory that is freed may be handed out again at once.

// Operations have one way in from outside, the trait `Backend`: it checks what they are given.
mod activation;
mod ahead;
mod attention;
mod backend;
pub mod compile;
mod context;
mod embed;
mod few;
mod footprint;
mod gemm;
mod halves;
mod handles;
mod head_norm;
mod kl;
mod launch;
mod libraries;
mod linear;
mod logp;
mod memory;
mod norm;
mod optim;
mod peak;
mod profile;
mod record;
mod rotary;
mod rows;
mod sample;
mod stream;
mod trace;
mod tune;
mod vector;

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
