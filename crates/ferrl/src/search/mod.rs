//! Search: several completions of a prompt, and the selection of one (test-time search).
//!
//! A [`Strategy`] decides which prefixes to continue; the [`Driver`] samples the continuations of many prompts in the same
//! decode batches, on a KV cache with shared prefixes, and a [`Scorer`] scores the results. A strategy does not use a model, so a
//! saved [`Tree`] is replayed without one. The random numbers of a step depend on the seed, the prompt, the path to its node and
//! the index of the sample: the tree is the same for any number of threads and any decode batch.
//!
//! Environments with several turns are searched the same way: a node is a prefix of an episode, and a child replays the actions of
//! its parent in a fresh environment ([`crate::episode`]) before the policy continues.

mod choose;
mod driver;
pub mod expand;
pub mod extract;
mod grow;
pub mod paths;
mod record;
pub(crate) mod rollout;
mod scorer;
pub mod strategy;
mod tree;
mod turns;

pub use choose::{ChoiceRule, best, majority, most_visited, weighted};
pub use driver::{Driver, SearchBudget, WithSystem};
pub use record::{Facts, Figures, Record, Replayed, has_trees, replay, tree_files};
pub use rollout::{Searcher, path_frequency};
pub use scorer::{Judged, LogpScorer, Oracle, RewardScorer, SCORERS, Scorer, StepOracle};
pub use strategy::{Common, Entry, STRATEGIES, build, find, resolved};
pub use tree::{Backup, DrawnTokens, Node, NodeTurn, Prior, Tree};

use ferrl_engine::Result;

/// Where a continuation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// At the end of a step, or of a turn of an episode.
    Step,
    /// At the end of the completion or the episode.
    End,
}

/// Children to sample at a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expansion {
    /// The node to continue.
    pub node: usize,
    /// Number of children.
    pub samples: usize,
    pub until: Until,
    /// Whether the children are rollouts that evaluate the node, and not steps.
    pub rollout: bool,
    /// Whether children that are not whole completions are scored too.
    pub score: bool,
    /// Whether equal children are merged.
    pub merge: bool,
}

impl Expansion {
    /// Whole completions of a node, as its children.
    pub fn completions(node: usize, samples: usize) -> Self {
        Expansion { node, samples, until: Until::End, rollout: false, score: false, merge: false }
    }
    /// Next steps of a node.
    pub fn steps(node: usize, samples: usize) -> Self {
        Expansion { until: Until::Step, ..Self::completions(node, samples) }
    }
    /// Completions that evaluate a node.
    pub fn rollouts(node: usize, samples: usize) -> Self {
        Expansion { rollout: true, ..Self::completions(node, samples) }
    }
}

/// What a strategy sees between two rounds.
pub struct Round<'a> {
    /// The tree so far. Every whole completion has its score.
    pub tree: &'a mut Tree,
    /// The children of each expansion of the last round, in order.
    pub grown: &'a [Vec<usize>],
    /// Tokens sampled so far, those of rejected draws and of asked answers included.
    pub spent: u64,
    /// Remaining tokens; `None` without a budget.
    pub left: Option<u64>,
}

/// A search strategy. One value searches for one prompt.
pub trait Strategy: Send {
    /// Processes the last round and returns what to sample next; an empty list ends the search.
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>>;
    /// The result: a whole completion, selected from the tree alone.
    fn answer(&self, tree: &Tree) -> Option<usize>;
    /// How values of inner nodes are computed.
    fn backup(&self) -> Backup {
        Backup::Visits
    }
    /// How priors of siblings are computed.
    fn prior(&self) -> Prior {
        Prior::Logp
    }
}
