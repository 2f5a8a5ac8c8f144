//! Expanders: how the children of a node are drawn. Each is a line of [`EXPANDERS`].
//!
//! An expander is asked for draws until it wants no more: it sees the results of the earlier ones, may reject a child, and may
//! ask again.

mod bleu;
mod confidence;
mod plain;

use super::{Expansion, Node};
use crate::fixes::unknown;
use ferrl_engine::{Error, Result};
use schemars::{Schema, schema_for};

/// One child to draw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChildDraw {
    /// Sampling temperature, where it is not the search's own.
    pub temperature: Option<f32>,
    /// Which of the expander's system messages the completion has; only at the root.
    pub system: Option<usize>,
    /// Whether it goes to the end of the completion though a step was asked for.
    pub to_the_end: bool,
}

/// What was drawn at a node so far, in this expansion.
pub struct Drawn<'a> {
    /// What is asked for.
    pub asked: &'a Expansion,
    /// Depth of the node.
    pub depth: usize,
    /// Draws so far.
    pub draws: usize,
    /// Children that were accepted; a merged one stands for each of its draws.
    pub accepted: &'a [&'a Node],
}

/// Draws children.
pub trait Expander: Send + Sync {
    /// The draws to make next; none when the expansion is complete.
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw>;
    /// Whether a drawn step becomes a child.
    fn accepts(&self, _text: &str, _siblings: &[&Node]) -> bool {
        true
    }
    /// System messages that its draws refer to.
    fn systems(&self) -> &[String] {
        &[]
    }
}

/// An expander's place in the registry.
pub struct Entry {
    /// The name of option `expander`.
    pub name: &'static str,
    /// One line for people.
    pub about: &'static str,
    /// Its own among [`ExpanderOptions`].
    pub options: &'static [&'static str],
    build: fn(&ExpanderOptions) -> Result<Box<dyn Expander>>,
}

/// Every expander.
pub const EXPANDERS: &[Entry] = &[
    Entry { name: "iid", about: "independent draws", options: &[], build: plain::iid },
    Entry {
        name: "efficient_iid",
        about: "the same: all draws of a node are one batch on one prefix, and may use the whole context",
        options: &[],
        build: plain::iid,
    },
    Entry {
        name: "efficient_iid_for_tree",
        about: "the same; children that end the completion are leaves of the tree",
        options: &[],
        build: plain::iid,
    },
    Entry {
        name: "iid_with_max_branching_depth",
        about: "independent draws down to a depth; below it one completion to the end",
        options: &["branch_depth"],
        build: plain::max_depth,
    },
    Entry {
        name: "high_low_temperature_iid",
        about: "half of the draws at a high temperature, the others at a low one",
        options: &["high", "low"],
        build: plain::high_low,
    },
    Entry {
        name: "iid_with_different_system_message",
        about: "the draws at the prompt take turns among system messages",
        options: &["systems"],
        build: plain::systems,
    },
    Entry {
        name: "bleu_rejection_sampling_iid",
        about: "a step too similar to one of its siblings is drawn again",
        options: &["max_bleu", "tries"],
        build: bleu::build,
    },
    Entry {
        name: "confidence_interval_aware_efficient_iid",
        about: "completions until the interval of their mean score is narrow enough",
        options: &["ci_start", "ci_add", "ci_max", "ci_width"],
        build: confidence::build,
    },
];

/// Options of expanders, as JSON Schema.
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
    /// Of bleu_rejection_sampling_iid: most similar that is kept. [0, 1]
    max_bleu: f64 = 0.6,
    /// Of bleu_rejection_sampling_iid: draws at most, for each child. [1, 4096]
    tries: usize = 4,
    /// Of confidence_interval_aware_efficient_iid: first draws. [1, 65536]
    ci_start: usize = 10,
    /// Of confidence_interval_aware_efficient_iid: draws added each time. [1, 65536]
    ci_add: usize = 4,
    /// Of confidence_interval_aware_efficient_iid: draws at most. [1, 65536]
    ci_max: usize = 30,
    /// Of confidence_interval_aware_efficient_iid: width that is enough. [0, 1]
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

/// The expander of that name.
pub fn build(name: &str, options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    let fix = |near: &str| format!("--option expander={near}");
    let found = EXPANDERS.iter().find(|e| e.name == name);
    let entry = found.ok_or_else(|| unknown("expander", name, EXPANDERS.iter().map(|e| e.name), fix))?;
    (entry.build)(options)
}

/// Draws that are still missing, all alike.
fn missing(so_far: &Drawn<'_>) -> usize {
    so_far.asked.samples.saturating_sub(so_far.draws)
}
