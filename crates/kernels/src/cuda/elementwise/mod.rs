//! Vectors, embeddings, activations and sums of rows: kernels that read every element once.

pub(crate) mod activation;
pub(crate) mod embed;
mod experts;
pub(crate) mod vector;
