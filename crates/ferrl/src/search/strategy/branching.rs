//! A tree of steps with a branching factor per depth, as in openrl: one number, or a list. Below the depths of the list nodes have
//! one child, which continues to the end.
//!
//! The score of a leaf is its completion's; that of an inner node is the mean of its children's, so that `advantage` is the
//! child's score minus the parent's.

use super::super::{Backup, ChoiceRule, Expansion, Round, Strategy, Tree, Until};
use super::sampling::evaluate_terminals;
use super::{Entry, MAX_DEPTH, MAX_NODES};
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "tree",
    about: "a tree of steps with a branching factor for each depth",
    schema: || schema_for!(Options),
    build: |options, common| {
        let Options { branch, answer } = read_settings(ENTRY.name, options)?;
        let branch = branch.list()?;
        // With one number the tree has `max_depth` levels: 64 levels of two would never end.
        let max_depth = common.max_depth.unwrap_or(if branch.len() == 1 { 3 } else { MAX_DEPTH });
        let tree = Branching { branch, max_depth, choice: answer, started: false };
        tree.check_size()?;
        Ok(Box::new(tree))
    },
};

with_defaults! {
struct Options {
    /// Branching factors by depth: 3,2,1, or one number for all depths. [1, 65536]
    branch: BranchSchedule = BranchSchedule::Each(vec![3, 2, 1]),
    /// Rule that selects the result among whole completions.
    answer: ChoiceRule = ChoiceRule::Weighted,
}
}

/// Whole numbers of at least 1: one, a list, or `3,2,1`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(untagged)]
enum BranchSchedule {
    One(usize),
    Each(Vec<usize>),
    Text(String),
}

impl BranchSchedule {
    fn list(self) -> Result<Vec<usize>> {
        let (list, shown) = match self {
            BranchSchedule::One(n) => (vec![n], String::new()),
            BranchSchedule::Each(list) => (list, "[]".into()),
            BranchSchedule::Text(text) => {
                let number = |part: &str| part.trim().parse().ok().filter(|n| (1..=65536).contains(n));
                (text.split(',').map(number).collect::<Option<_>>().unwrap_or_default(), text)
            }
        };
        match list.is_empty() {
            false => Ok(list),
            true => Err(Error::usage(format!("branch must be numbers from 1 to 65536, got {shown}"))
                .fix("branch=3,2,1")),
        }
    }
}

struct Branching {
    branch: Vec<usize>,
    max_depth: usize,
    choice: ChoiceRule,
    started: bool,
}

/// Refuses a level with more nodes than a search may request at once.
fn check_level(nodes: f64) -> Result<()> {
    if nodes <= MAX_NODES {
        return Ok(());
    }
    let what = format!("a level of the tree has {nodes:e} nodes, at most {MAX_NODES}");
    Err(Error::usage(what).at("branch").fix("branch=3,2,1, or a smaller max_depth"))
}

impl Branching {
    /// Refuses a schedule whose first two levels are too large. Deeper levels may not be reached, because completions end.
    fn check_size(&self) -> Result<()> {
        let (first, until) = self.at(0);
        let second = if until == Until::Step { self.at(1).0 } else { 1 };
        check_level(first as f64 * second as f64)
    }

    /// Number of children of a node at a depth, and where they end.
    fn at(&self, depth: usize) -> (usize, Until) {
        let last = depth + 1 >= self.max_depth;
        match self.branch.as_slice() {
            [constant] => (*constant, if last { Until::End } else { Until::Step }),
            list if depth + 1 < list.len() && !last => (list[depth], Until::Step),
            list => (list.get(depth).copied().unwrap_or(1), Until::End),
        }
    }
}

impl Strategy for Branching {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        evaluate_terminals(round);
        let root = if self.started { None } else { Some(0) };
        self.started = true;
        let open: Vec<usize> = round.grown.iter().flatten().copied().chain(root).collect();
        let open = open.into_iter().filter(|&id| !round.tree.node(id).terminal);
        let wanted: Vec<Expansion> = open
            .map(|id| {
                let (samples, until) = self.at(round.tree.node(id).depth);
                Expansion { until, ..Expansion::steps(id, samples) }
            })
            .collect();
        check_level(wanted.iter().map(|e| e.samples as f64).sum())?;
        Ok(wanted)
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.choice.of(tree)
    }
    fn backup(&self) -> Backup {
        Backup::Children
    }
}
