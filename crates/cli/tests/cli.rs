//! Drives the built `ferrl` as a user does.

#![allow(clippy::unwrap_used)]

#[path = "cli/analyze.rs"]
mod analyze;
#[path = "cli/common.rs"]
mod common;
#[path = "cli/data.rs"]
mod data;
#[path = "cli/environments.rs"]
mod environments;
#[path = "cli/errors.rs"]
mod errors;
#[path = "cli/eval.rs"]
mod eval;
#[path = "cli/generate.rs"]
mod generate;
#[path = "cli/interrupt.rs"]
mod interrupt;
#[path = "cli/make.rs"]
mod make;
#[path = "cli/measure.rs"]
mod measure;
#[path = "cli/numbers.rs"]
mod numbers;
#[path = "cli/packages.rs"]
mod packages;
#[path = "cli/plan.rs"]
mod plan;
#[path = "cli/score.rs"]
mod score;
#[path = "cli/search.rs"]
mod search;
#[path = "cli/steps.rs"]
mod steps;
#[path = "cli/verify.rs"]
mod verify;
