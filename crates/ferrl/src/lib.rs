//! Post-training and reinforcement learning for language models.

pub mod data;
pub mod pack;
