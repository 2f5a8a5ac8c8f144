//! The CPU backend.
pub mod matmul;
pub mod pool;
pub mod simd;
