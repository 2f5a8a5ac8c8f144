//! Post-training and reinforcement learning for language models.

pub mod verify;
pub mod worker;
