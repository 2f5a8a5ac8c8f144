//! Vectors, embeddings and activations: kernels that read every element once.

pub(crate) mod activation;
pub(crate) mod embed;
pub(crate) mod vector;
