//! A language model to sample from and to train, on one copy of the weights. Knows nothing of recipes and rewards.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))] // both panic when the pipe is closed

pub mod chat;
pub mod checkpoint;
pub mod files;
pub mod generate;
pub mod model;
pub mod tokenizer;
pub mod train;

pub use ferrl_kernels::{Class, Error, Result, counted, math, nearest, plural};
