//! Post-training and reinforcement learning for language models.
//!
//! Prompts become rollouts, rollouts get rewards, rewards become advantages, advantages a loss on numbers per token,
//! and the engine turns the gradients of those numbers into new weights.

pub mod algo;
pub mod experience;
pub mod recipe;
pub mod report;
pub mod run;
