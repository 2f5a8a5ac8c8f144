//! The result of a search: one of the whole completions in its tree.

use super::{Node, Tree};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A selection rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChoiceRule {
    /// The highest score.
    Best,
    /// The most frequent answer.
    Vote,
    /// The answer with the largest sum of scores.
    Weighted,
    /// The end of the path with the most visits.
    Visits,
}

impl ChoiceRule {
    /// The selected completion; `None` if there is no whole completion.
    pub fn of(self, tree: &Tree) -> Option<usize> {
        match self {
            ChoiceRule::Best => best(tree),
            ChoiceRule::Vote => majority(tree),
            ChoiceRule::Weighted => weighted(tree),
            ChoiceRule::Visits => most_visited(tree),
        }
    }
}

/// The completion with the highest score; of equal ones the more probable, then the first.
pub fn best(tree: &Tree) -> Option<usize> {
    best_of(tree, tree.terminals())
}

fn best_of<'a>(tree: &Tree, nodes: impl Iterator<Item = &'a Node>) -> Option<usize> {
    let key = |n: &Node| {
        let (tokens, logprob) = tree.sampled(n.id);
        (n.score.unwrap_or(0.0), logprob / tokens.max(1) as f64)
    };
    let mut found: Option<(usize, (f64, f64))> = None;
    for n in nodes {
        let this = key(n);
        let better =
            found.is_none_or(|(_, top)| this.0.total_cmp(&top.0).then(this.1.total_cmp(&top.1)).is_gt());
        if better {
            found = Some((n.id, this));
        }
    }
    found.map(|(id, _)| id)
}

/// The first completion with the most frequent answer; of equally frequent ones the first wins.
pub fn majority(tree: &Tree) -> Option<usize> {
    vote(tree, |_| 1.0)
}

/// The completion with the highest score among those whose answer has the largest sum of scores.
pub fn weighted(tree: &Tree) -> Option<usize> {
    let winner = vote(tree, |n| n.score.unwrap_or(0.0))?;
    let answer = &tree.node(winner).answer;
    best_of(tree, tree.terminals().filter(|n| n.answer == *answer))
}

/// Votes are counted over completions that were not truncated, or over all if every one was.
fn vote(tree: &Tree, weight: impl Fn(&Node) -> f64) -> Option<usize> {
    let whole = tree.terminals().any(|n| !n.truncated && n.answer.is_some());
    let mut votes: BTreeMap<&str, (f64, usize)> = BTreeMap::new();
    for n in tree.terminals().filter(|n| !whole || !n.truncated) {
        let Some(answer) = &n.answer else { continue };
        votes.entry(answer).or_insert((0.0, n.id)).0 += weight(n);
    }
    let first = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1));
    let winner = votes.into_values().max_by(first).map(|(_, id)| id);
    winner.or_else(|| best(tree))
}

/// The end of the path of most visited children from the root, or the best rollout of its last node.
pub fn most_visited(tree: &Tree) -> Option<usize> {
    let mut at = 0;
    while !tree.node(at).terminal {
        let key = |&c: &usize| (tree.node(c).visits, usize::MAX - c);
        match tree.steps(at).max_by_key(key).filter(|&c| tree.node(c).visits > 0) {
            Some(next) => at = next,
            None => break,
        }
    }
    if tree.node(at).terminal {
        return Some(at);
    }
    let below = tree.terminals().filter(|n| tree.path(n.id).contains(&at));
    best_of(tree, below).or_else(|| best(tree))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Completions with an answer, a score and a log-probability of one token.
    fn tree(ends: &[(&str, f64, f64)]) -> Tree {
        let mut tree = Tree::new(0);
        for &(answer, score, logprob) in ends {
            tree.add(
                0,
                Node {
                    answer: Some(answer.into()),
                    score: Some(score),
                    terminal: true,
                    tokens: vec![0],
                    logprob,
                    ..Default::default()
                },
            );
        }
        tree
    }

    #[test]
    fn each_rule_chooses_its_own() {
        let all = tree(&[
            ("a", 0.9, -1.0),
            ("b", 0.5, -1.0),
            ("b", 0.6, -1.0),
            ("c", 0.1, -1.0),
            ("c", 0.1, -2.0),
            ("c", 0.2, -1.0),
        ]);
        assert_eq!(best(&all), Some(1));
        assert_eq!(majority(&all), Some(4), "the first of the most frequent answer");
        assert_eq!(weighted(&all), Some(3), "1.1 for b, of which the better one");
        assert_eq!(
            best(&tree(&[("a", 0.5, -2.0), ("b", 0.5, -1.0)])),
            Some(2),
            "of equal scores the more probable"
        );
        assert_eq!(majority(&tree(&[("a", 0.0, -1.0), ("b", 0.0, -1.0)])), Some(1), "the first of equals");
        assert_eq!(best(&Tree::new(0)), None);
        assert_eq!(most_visited(&Tree::new(0)), None);
    }

    #[test]
    fn what_was_cut_off_does_not_vote() {
        let mut all = tree(&[("x", 0.0, -1.0), ("x", 0.0, -1.0), ("y", 0.0, -1.0)]);
        (all.node_mut(1).truncated, all.node_mut(2).truncated) = (true, true);
        assert_eq!(majority(&all), Some(3));
    }

    #[test]
    fn the_most_visited_path_ends_in_its_best_rollout() {
        let mut all = Tree::new(0);
        let (a, b) = (all.add(0, Node::default()), all.add(0, Node::default()));
        let end =
            |score: f64| Node { score: Some(score), terminal: true, rollout: true, ..Default::default() };
        let ends = [all.add(a, end(1.0)), all.add(b, end(0.3)), all.add(b, end(0.7))];
        ends.iter().for_each(|&e| all.evaluate(e, 0.5));
        assert_eq!(most_visited(&all), Some(ends[2]), "b has two visits");
    }
}
