//! The training loop on models small enough to train in a test.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[path = "stage/api.rs"]
mod api;
#[path = "stage/best.rs"]
mod best;
#[path = "stage/branches.rs"]
mod branches;
#[path = "stage/episodes.rs"]
mod episodes;
#[path = "stage/evaluation.rs"]
mod evaluation;
#[path = "stage/generator.rs"]
mod generator;
#[path = "stage/graded.rs"]
mod graded;
#[path = "stage/help.rs"]
mod help;
#[path = "stage/implicit.rs"]
mod implicit;
#[path = "stage/lag.rs"]
mod lag;
#[path = "stage/one_pass.rs"]
mod one_pass;
#[path = "stage/packing.rs"]
mod packing;
#[path = "stage/partial.rs"]
mod partial;
#[path = "stage/research.rs"]
mod research;
#[path = "stage/reward_model.rs"]
mod reward_model;
#[path = "stage/signal.rs"]
mod signal;
#[path = "stage/stops.rs"]
mod stops;
#[path = "stage/trees.rs"]
mod trees;
#[path = "stage/verdicts.rs"]
mod verdicts;
#[path = "stage/vine.rs"]
mod vine;
