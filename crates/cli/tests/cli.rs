//! Drives the built `ferrl` as a user does.

#![allow(clippy::unwrap_used)]

#[path = "cli/common.rs"]
mod common;
#[path = "cli/errors.rs"]
mod errors;
#[path = "cli/generate.rs"]
mod generate;
#[path = "cli/make.rs"]
mod make;
#[path = "cli/measure.rs"]
mod measure;
#[path = "cli/score.rs"]
mod score;
