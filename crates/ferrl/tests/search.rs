//! Search on a model of six tokens, where everything can be counted and most things enumerated.

#![allow(clippy::unwrap_used)]

#[path = "search/episodes.rs"]
mod episodes;
#[path = "search/expanders.rs"]
mod expanders;
#[path = "search/extractors.rs"]
mod extractors;
#[path = "search/help.rs"]
mod help;
#[path = "search/invariants.rs"]
mod invariants;
#[path = "search/lost.rs"]
mod lost;
#[path = "search/programs.rs"]
mod programs;
#[path = "search/same.rs"]
mod same;
#[path = "search/values.rs"]
mod values;
