//! Post-training and reinforcement learning for language models.
//!
//! Prompts become rollouts, rollouts get rewards, rewards become advantages, advantages a loss on numbers per token,
//! and the engine turns the gradients of those numbers into new weights.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))] // both panic when the pipe is closed

#[macro_use]
mod defaults;

pub mod algo;
pub mod analyze;
pub mod api;
pub mod batch;
pub mod credit;
pub mod data;
pub mod env;
pub mod episode;
pub mod evaluate;
pub mod experience;
pub mod fixes;
pub mod health;
mod http;
pub mod interrupt;
pub mod pack;
pub mod parallel;
pub mod partial;
mod place;
pub mod plan;
pub mod preflight;
pub mod program;
mod ranks;
pub mod recipe;
pub mod refill;
pub mod report;
pub mod reward;
pub mod rollout;
pub mod run;
pub mod runner;
pub mod sandbox;
pub mod search;
pub mod secrets;
pub mod setup;
pub mod signal;
pub mod solution;
pub mod source;
pub mod steps;
pub mod suite;
pub mod task;
pub mod teacher;
pub mod tool;
pub mod train;
pub mod trust_region;
pub mod verify;
pub mod warnings;
mod websocket;
pub mod worker;
