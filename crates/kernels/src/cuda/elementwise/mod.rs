//! Memory-bound kernels: vectors, embeddings, activations, row mixing.

pub(crate) mod activation;
pub(crate) mod embed;
mod experts;
pub(crate) mod vector;
