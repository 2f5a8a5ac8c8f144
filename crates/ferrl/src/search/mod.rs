//! Search: more than one completion of a prompt, and a way to decide among them.
//!
//! A [`Strategy`] says which prefixes to continue; the [`Driver`] samples the continuations of many questions in the same
//! decode batches, on a KV cache that shares their prefixes, and a [`Scorer`] scores the results. A strategy never sees
//! a model, so a saved [`Tree`] is replayed without one. The random numbers of a step depend on the seed, the question, the
//! path to its node and the number of the draw there: the tree is the same for any number of threads and any decode batch.
//!
//! An environment with several turns is searched the same way: a node is a prefix of an episode, and a child plays the
//! actions of its parent again in a fresh environment ([`crate::episode`]) before the policy goes on.

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
pub use rollout::{Searcher, path_share};
pub use scorer::{Judged, LogpScorer, Oracle, RewardScorer, SCORERS, Scorer, StepOracle};
pub use strategy::{Common, Entry, STRATEGIES, build, find, resolved};
pub use tree::{Backup, DrawnTokens, Node, NodeTurn, Prior, Tree};

use ferrl_engine::Result;

/// How far a continuation goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// To the end of a step: in an episode that of a turn at the latest.
    Step,
    /// To the end of the completion or the episode.
    End,
}

/// Children to sample at a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expansion {
    /// The node to continue.
    pub node: usize,
    /// Children wanted.
    pub samples: usize,
    /// How far each goes.
    pub until: Until,
    /// Whether the children are rollouts that evaluate the node, and not steps.
    pub rollout: bool,
    /// Whether children that are no whole completions are scored too.
    pub score: bool,
    /// Whether equal children become one.
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
    /// The children that each expansion of the last round brought, in order.
    pub grown: &'a [Vec<usize>],
    /// Tokens sampled so far, those of rejected draws and of asked answers included.
    pub spent: u64,
    /// Tokens that may still be sampled; none without a budget.
    pub left: Option<u64>,
}

/// A way to search. One value searches for one question.
pub trait Strategy: Send {
    /// Takes in the last round and says what to sample next; nothing ends the search.
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>>;
    /// The whole completion that is the result. It depends on the tree alone.
    fn answer(&self, tree: &Tree) -> Option<usize>;
    /// How values of inner nodes follow from those below.
    fn backup(&self) -> Backup {
        Backup::Visits
    }
    /// How siblings get their prior.
    fn prior(&self) -> Prior {
        Prior::Logp
    }
}
