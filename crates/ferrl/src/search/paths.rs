//! Paths of a tree as training data: filters, aggregators and post-processors, each a line of its registry.
//!
//! A path is the steps from the prompt to the end of a completion, each with its score (the node's value) and its advantage
//! (value minus the parent's). Filters keep some of the paths, aggregators choose among those of one tree, post-processors
//! change scores and advantages of the steps.

mod aggregate;
mod filter;
mod process;

pub use aggregate::AGGREGATORS;
pub use filter::FILTERS;
pub use process::POST_PROCESSORS;

use super::Tree;
use ferrl_engine::{Error, Result, nearest};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PathStep {
    pub node: usize,
    pub text: String,
    pub tokens: Vec<u32>,
    /// The node's value; at the end of the path the score of the completion.
    pub score: f64,
    /// The node's advantage: its value minus the parent's.
    pub advantage: f64,
}

/// One completion of a tree.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TreePath {
    /// From the first step to the last.
    pub steps: Vec<PathStep>,
    /// Whether the completion is right.
    pub correct: bool,
    /// Number of completions of a full tree that it represents: `b^(D - d)` for a path that ended at depth `d` in a tree of depth
    /// `D` and branching factor `b`.
    pub weight: f64,
}

impl TreePath {
    /// Score of the whole completion.
    pub fn score(&self) -> f64 {
        self.steps.last().map_or(0.0, |s| s.score)
    }
    fn advantages(&self) -> impl Iterator<Item = f64> + '_ {
        self.steps.iter().map(|s| s.advantage)
    }
    /// Text of the whole completion.
    pub fn text(&self) -> String {
        self.steps.iter().map(|s| s.text.as_str()).collect()
    }
}

/// The paths of a tree, in the order of their ends. Weights assume the branching factors of the deepest paths.
pub fn paths(tree: &Tree) -> Vec<TreePath> {
    let deepest = tree.terminals().map(|n| n.depth).max().unwrap_or(0);
    // The branching factor at each depth: that of the node with the most children.
    let mut branch = vec![1usize; deepest];
    for n in tree.nodes().iter().filter(|n| n.depth < deepest) {
        branch[n.depth] = branch[n.depth].max(tree.children(n.id).len());
    }
    let step = |id: usize| {
        let n = tree.node(id);
        PathStep {
            node: id,
            text: n.text.clone(),
            tokens: n.tokens.clone(),
            score: n.estimate().unwrap_or(0.0),
            advantage: n.advantage,
        }
    };
    let path = |end: &super::Node| TreePath {
        steps: tree.path(end.id).into_iter().skip(1).map(step).collect(),
        correct: end.correct.unwrap_or(end.estimate() >= Some(1.0)),
        weight: branch[end.depth..].iter().map(|&b| b as f64).product(),
    };
    tree.terminals().map(path).collect()
}

/// A member of one of the three registries.
pub struct Entry<F> {
    pub name: &'static str,
    pub about: &'static str,
    pub apply: F,
}

pub fn find<'a, F>(kind: &str, registry: &'a [Entry<F>], name: &str) -> Result<&'a Entry<F>> {
    registry.iter().find(|e| e.name == name).ok_or_else(|| {
        let names = registry.iter().map(|e| e.name);
        let all = names.clone().collect::<Vec<_>>().join(", ");
        let error = Error::usage(format!("unknown {kind} {name:?}, expected one of {all}"));
        match nearest(name, names) {
            Some(near) => error.fix(format!("did you mean {near:?}?")),
            None => error,
        }
    })
}

/// Filter, aggregator and post-processors of paths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pipeline {
    /// A filter's name.
    pub filter: String,
    /// An aggregator's name and its parameter: a percentage or a number of paths.
    pub aggregator: (String, f64),
    /// Names of post-processors, in their order.
    pub post: Vec<String>,
}

impl Pipeline {
    /// Refuses names that are in no registry.
    pub fn check(&self) -> Result<()> {
        self.run(&Tree::new(0)).map(|_| ())
    }

    /// Filters, aggregates and processes the paths of a tree.
    pub fn run(&self, tree: &Tree) -> Result<Vec<TreePath>> {
        let filter = find("path filter", FILTERS, &self.filter)?;
        let aggregator = find("path aggregator", AGGREGATORS, &self.aggregator.0)?;
        let post = self.post.iter().map(|name| find("path post-processor", POST_PROCESSORS, name));
        let post = post.collect::<Result<Vec<_>>>()?;
        let mut kept: Vec<TreePath> = paths(tree).into_iter().filter(|p| (filter.apply)(p)).collect();
        kept = (aggregator.apply)(kept, self.aggregator.1);
        kept.iter_mut().for_each(|path| post.iter().for_each(|p| (p.apply)(path)));
        kept.retain(|p| !p.steps.is_empty());
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Backup, Node, Prior};
    use super::*;

    /// Two steps off the prompt: the first ends at once, the second has three ends.
    pub(super) fn tree() -> Tree {
        let mut tree = Tree::new(0);
        let end = |text: &str| Node { text: text.into(), terminal: true, ..Default::default() };
        let early = tree.add(0, end("early"));
        let step = tree.add(0, Node { text: "step ".into(), ..Default::default() });
        let ends = ["good", "bad", "good"].map(|t| tree.add(step, end(t)));
        for (id, value) in [(early, 0.0), (ends[0], 1.0), (ends[1], 0.0), (ends[2], 1.0)] {
            tree.evaluate(id, value);
        }
        tree.recompute(Backup::Children, Prior::Logp);
        tree
    }

    #[test]
    fn paths_have_scores_advantages_and_weights() {
        let all = paths(&tree());
        assert_eq!(
            all.iter().map(TreePath::text).collect::<Vec<_>>(),
            ["early", "step good", "step bad", "step good"]
        );
        assert_eq!(
            all.iter().map(|p| p.weight).collect::<Vec<_>>(),
            [3.0, 1.0, 1.0, 1.0],
            "3^(2 - 1) for the early one"
        );
        // Root: mean of 0 and 2/3.
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(all[0].steps[0].advantage, -1.0 / 3.0);
        close(all[1].steps[0].advantage, 1.0 / 3.0);
        close(all[1].steps[1].advantage, 1.0 / 3.0);
        close(all[2].steps[1].advantage, -2.0 / 3.0);
        assert_eq!(all.iter().map(|p| p.correct).collect::<Vec<_>>(), [false, true, false, true]);
    }

    #[test]
    fn a_pipeline_filters_aggregates_and_processes() {
        let pipeline = Pipeline {
            filter: "successful".into(),
            aggregator: ("unique".into(), 0.0),
            post: vec!["keep_first_step_only".into(), "all_advantages_to_one".into()],
        };
        let got = pipeline.run(&tree()).unwrap();
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].text().as_str(), got[0].steps[0].advantage), ("step ", 1.0));
        let wrong = Pipeline { filter: "sucessful".into(), ..pipeline };
        assert!(wrong.run(&tree()).unwrap_err().to_string().contains("\"successful\""));
    }
}
