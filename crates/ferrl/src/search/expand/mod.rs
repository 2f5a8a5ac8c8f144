//! Expanders: how the children of a node are sampled. Each is a line of [`EXPANDERS`].
//!
//! The driver calls an expander until it requests no more samples: it sees the results of the earlier ones and may reject
//! children.

mod bleu;
mod confidence;
mod plain;

use super::{Expansion, Node};
use crate::fixes::unknown;
use ferrl_engine::{Error, Result};
use schemars::{Schema, schema_for};

/// One child to sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChildDraw {
    /// Sampling temperature, if it is not the search's.
    pub temperature: Option<f32>,
    /// Index of the expander's system message; only at the root.
    pub system: Option<usize>,
    /// Whether it continues to the end of the completion even if a step was requested.
    pub to_the_end: bool,
}

/// Samples of a node in this expansion so far.
pub struct Drawn<'a> {
    pub asked: &'a Expansion,
    pub depth: usize,
    /// Number of samples.
    pub draws: usize,
    /// Accepted children; a merged one occurs once per sample.
    pub accepted: &'a [&'a Node],
}

/// Samples children.
pub trait Expander: Send + Sync {
    /// The next samples; empty when the expansion is complete.
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw>;
    /// Whether a sampled step becomes a child.
    fn accepts(&self, _text: &str, _siblings: &[&Node]) -> bool {
        true
    }
    /// The system messages of its samples.
    fn systems(&self) -> &[String] {
        &[]
    }
}

/// An expander's registry entry.
pub struct Entry {
    /// The name of option `expander`.
    pub name: &'static str,
    pub about: &'static str,
    /// Its own among [`ExpanderOptions`].
    pub options: &'static [&'static str],
    build: fn(&ExpanderOptions) -> Result<Box<dyn Expander>>,
}

pub const EXPANDERS: &[Entry] = &[
    Entry { name: "iid", about: "independent samples", options: &[], build: plain::iid },
    Entry {
        name: "efficient_iid",
        about: "the same as iid: samples of a node always share their prefix",
        options: &[],
        build: plain::iid,
    },
    Entry {
        name: "efficient_iid_for_tree",
        about: "the same as iid: children that end the completion are always leaves",
        options: &[],
        build: plain::iid,
    },
    Entry {
        name: "iid_with_max_branching_depth",
        about: "independent samples down to a depth; below it one completion to the end",
        options: &["branch_depth"],
        build: plain::max_depth,
    },
    Entry {
        name: "high_low_temperature_iid",
        about: "half of the samples at a high temperature, the others at a low one",
        options: &["high", "low"],
        build: plain::high_low,
    },
    Entry {
        name: "iid_with_different_system_message",
        about: "samples of the prompt alternate between system messages",
        options: &["systems"],
        build: plain::systems,
    },
    Entry {
        name: "bleu_rejection_sampling_iid",
        about: "resamples steps that are too similar to a sibling (BLEU)",
        options: &["max_bleu", "tries"],
        build: bleu::build,
    },
    Entry {
        name: "confidence_interval_aware_efficient_iid",
        about: "samples completions until the confidence interval of their mean score is narrow",
        options: &["ci_start", "ci_add", "ci_max", "ci_width"],
        build: confidence::build,
    },
];

pub const EXPANDER_OPTIONS: fn() -> Schema = || schema_for!(ExpanderOptions);

with_defaults! {
/// Options of expanders.
pub struct ExpanderOptions {
    /// Of iid_with_max_branching_depth: depth of the last branching. [0, 4096]
    branch_depth: usize = 2,
    /// Of high_low_temperature_iid: the high temperature. [0.0001, 100]
    high: f64 = 1.0,
    /// Of high_low_temperature_iid: the low temperature. [0.0001, 100]
    low: f64 = 0.35,
    /// Of iid_with_different_system_message: the system messages.
    systems: Vec<String> = Vec::new(),
    /// Of bleu_rejection_sampling_iid: maximum BLEU of an accepted step with a sibling. [0, 1]
    max_bleu: f64 = 0.6,
    /// Of bleu_rejection_sampling_iid: maximum number of samples per child. [1, 4096]
    tries: usize = 4,
    /// Of confidence_interval_aware_efficient_iid: initial samples. [1, 65536]
    ci_start: usize = 10,
    /// Of confidence_interval_aware_efficient_iid: samples added at a time. [1, 65536]
    ci_add: usize = 4,
    /// Of confidence_interval_aware_efficient_iid: maximum number of samples. [1, 65536]
    ci_max: usize = 30,
    /// Of confidence_interval_aware_efficient_iid: target width of the interval. [0, 1]
    ci_width: f64 = 0.05,
}
}

/// Refuses options of another expander than the one of that name: they would change nothing.
pub fn check_options<'k>(name: &str, mut given: impl Iterator<Item = &'k String>) -> Result<()> {
    let Some(entry) = EXPANDERS.iter().find(|e| e.name == name) else { return Ok(()) };
    let Some(key) = given.find(|key| !entry.options.contains(&key.as_str())) else { return Ok(()) };
    let own = EXPANDERS.iter().find(|e| e.options.contains(&key.as_str())).map_or(name, |e| e.name);
    let what = format!("{key} is an option of the expander {own}, and changes nothing with {name}");
    Err(Error::usage(what).at(key).fix(format!("expander={own}, or no {key}")))
}

pub fn build(name: &str, options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    let fix = |near: &str| format!("--option expander={near}");
    let found = EXPANDERS.iter().find(|e| e.name == name);
    let entry = found.ok_or_else(|| unknown("expander", name, EXPANDERS.iter().map(|e| e.name), fix))?;
    (entry.build)(options)
}

fn missing(so_far: &Drawn<'_>) -> usize {
    so_far.asked.samples.saturating_sub(so_far.draws)
}
