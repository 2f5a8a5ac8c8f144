//! The tree of a search: a node is a prefix of a completion or an episode, its tokens are the step from its parent. In episodes
//! they are those of actions and observations.
//!
//! Only evaluations are stored at their nodes (`evaluations`, `evaluation`); visits and values of all nodes are computed from them
//! by [`Tree::recompute`], so that a saved tree can be checked and reused without a model.

use crate::episode::{Played, Prefix};
use crate::experience::Sequence;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its index in the tree.
    pub id: usize,
    /// The node whose prefix it continues; `None` for the root, which is the prompt.
    pub parent: Option<usize>,
    /// Steps from the root.
    pub depth: usize,
    /// Text of its own step.
    pub text: String,
    /// Tokens of its own step.
    pub tokens: Vec<u32>,
    /// Log-probability of the sampled tokens, summed.
    pub logprob: f64,
    /// Prior probability among its siblings: they sum to 1.
    pub prior: f64,
    /// Evaluations of the node and of all nodes below.
    pub visits: u64,
    /// Mean of those evaluations, from 0 to 1, or what [`Backup`] defines instead; 0 if there are none.
    pub value: f64,
    /// The reward of the completion by the task's verifier, at the end of a path.
    pub reward: Option<f64>,
    /// Whether the completion ends here.
    pub terminal: bool,
    /// Whether the completion is right, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct: Option<bool>,
    /// Estimate of the node minus the parent's value; 0 where nothing estimates it ([`Node::estimate`]).
    #[serde(default)]
    pub advantage: f64,
    /// The scorer's score of the prefix, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// The extracted answer of a whole completion, for votes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// Whether the completion was truncated by a limit of tokens or turns.
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
    /// Whether it is a rollout that evaluates its parent: a single node, never selected or expanded.
    #[serde(default, skip_serializing_if = "is_false")]
    pub rollout: bool,
    /// Number of samples with this step, if equal ones are merged.
    #[serde(default = "one")]
    pub samples: u64,
    /// Evaluations of this very node.
    #[serde(default)]
    pub evaluations: u64,
    /// Their sum.
    #[serde(default)]
    pub evaluation: f64,
    /// Number of its tokens that are observations.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub observed: usize,
    /// The turns of an episode that end in this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<NodeTurn>,
    /// Why it is lost, if its environment, the verifier or the scorer failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
    /// Index of the expander's system message of its completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<usize>,
    /// Data of its tokens for training; not saved.
    #[serde(skip)]
    pub drawn: DrawnTokens,
}

/// A turn of an episode, for display.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeTurn {
    pub action: String,
    pub observation: String,
    pub reward: f64,
}

/// How the tokens of a node were sampled. Ignored by equality: saved trees have none.
#[derive(Clone, Debug, Default)]
pub struct DrawnTokens {
    /// Log-probability of each token under the distribution of its sampling.
    pub logp: Vec<f32>,
    /// Version of the policy.
    pub version: u64,
    /// Whether it was sampled at another temperature than the search's.
    pub tempered: bool,
    /// The prefix of an episode that ends here.
    pub(crate) reached: Option<Arc<Reached>>,
}

/// A prefix of an episode, which its children continue.
#[derive(Clone, Debug)]
pub(crate) struct Reached {
    /// State from which branches start.
    pub prefix: Prefix,
    /// The turns so far, with an incomplete action.
    pub played: Played,
    /// Training sequences of a finished episode.
    pub sequences: Vec<Sequence>,
}

impl PartialEq for DrawnTokens {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

/// Data of a node that only a running search needs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct UnderWay {
    /// Key of the random numbers of its children: a function of the path.
    key: u64,
    /// Number of sampled children, rejected and merged ones included.
    draws: u32,
    /// Draws that an expander rejected.
    rejected: u64,
    /// Running simulations below it (virtual loss).
    virtual_loss: u64,
}

fn one() -> u64 {
    1
}
fn is_false(flag: &bool) -> bool {
    !flag
}
fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Node {
    /// Number of its sampled tokens.
    pub fn sampled(&self) -> usize {
        self.tokens.len() - self.observed.min(self.tokens.len())
    }

    /// What is known of its value: its mean evaluation; of a whole completion that was sampled and never visited its score.
    pub fn estimate(&self) -> Option<f64> {
        match self.visits {
            0 => self.score.filter(|_| self.terminal),
            _ => Some(self.value),
        }
    }

    /// Mean log-probability of its own sampled tokens; 0 without any.
    pub fn mean_logprob(&self) -> f64 {
        match self.sampled() {
            0 => 0.0,
            n => self.logprob / n as f64,
        }
    }
}

/// How values of inner nodes are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backup {
    /// Mean over all evaluations below (MCTS).
    #[default]
    Visits,
    /// Mean of the children's values (openrl's trees).
    Children,
    /// Mean over the completions that branch off the node itself, which are all children but the first: VinePPO's estimate.
    Branches,
}

/// How priors of siblings are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Prior {
    /// Softmax of the mean log-probability of their tokens.
    #[default]
    Logp,
    /// Fraction of the samples with the step.
    Count,
    Uniform,
}

/// All nodes; the first is the root.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Node>", into = "Vec<Node>")]
pub struct Tree {
    nodes: Vec<Node>,
    children: Vec<Vec<usize>>,
    under_way: Vec<UnderWay>,
}

impl From<Tree> for Vec<Node> {
    fn from(tree: Tree) -> Self {
        tree.nodes
    }
}

impl TryFrom<Vec<Node>> for Tree {
    type Error = Error;
    fn try_from(nodes: Vec<Node>) -> Result<Self> {
        let wrong = |i: usize, what: &str| Err(Error::data(format!("node {i} {what}")));
        let mut children = vec![Vec::new(); nodes.len()];
        for (i, node) in nodes.iter().enumerate() {
            match node.parent {
                _ if node.id != i => return wrong(i, &format!("has the id {}", node.id)),
                None if i > 0 => return wrong(i, "has no parent, and is not the first"),
                Some(parent) if parent >= i => return wrong(i, "comes before its parent"),
                Some(parent) => children[parent].push(i),
                None => {}
            }
        }
        if nodes.is_empty() {
            return Err(Error::data("a tree without nodes"));
        }
        let under_way = vec![UnderWay::default(); nodes.len()];
        Ok(Tree { nodes, children, under_way })
    }
}

impl Tree {
    /// A tree with only a root. `question` determines the random numbers.
    pub fn new(question: u64) -> Self {
        let root = Node { prior: 1.0, samples: 1, ..Default::default() };
        let under_way = vec![UnderWay { key: question, ..Default::default() }];
        Tree { nodes: vec![root], children: vec![Vec::new()], under_way }
    }

    /// Every node, parents before children.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }
    pub fn node(&self, id: usize) -> &Node {
        &self.nodes[id]
    }
    pub(super) fn node_mut(&mut self, id: usize) -> &mut Node {
        &mut self.nodes[id]
    }
    /// Ids of the nodes that continue a node.
    pub fn children(&self, id: usize) -> &[usize] {
        &self.children[id]
    }
    /// The children that are steps, without rollouts.
    pub fn steps(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        self.children[id].iter().copied().filter(|&c| !self.nodes[c].rollout)
    }
    /// Whole completions.
    pub fn terminals(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|n| n.terminal)
    }

    /// Adds a node below another and returns its id.
    pub fn add(&mut self, parent: usize, node: Node) -> usize {
        let id = self.nodes.len();
        let depth = self.nodes[parent].depth + 1;
        self.nodes.push(Node { id, parent: Some(parent), depth, samples: node.samples.max(1), ..node });
        self.children.push(Vec::new());
        self.under_way.push(UnderWay::default());
        self.children[parent].push(id);
        id
    }

    /// The same for a node sampled with a key.
    pub(super) fn add_drawn(&mut self, parent: usize, node: Node, key: u64) -> usize {
        let id = self.add(parent, node);
        self.under_way[id].key = key;
        id
    }

    /// The number of the prompt.
    pub(super) fn question(&self) -> u64 {
        self.under_way[0].key
    }

    /// Draws at a node that an expander rejected.
    pub(super) fn rejected(&self, id: usize) -> u64 {
        self.under_way[id].rejected
    }

    /// Counts a draw that an expander rejected.
    pub(super) fn reject(&mut self, id: usize) {
        self.under_way[id].rejected += 1;
    }

    /// Running simulations below a node.
    pub(super) fn virtual_loss(&self, id: usize) -> u64 {
        self.under_way[id].virtual_loss
    }

    /// Adds or removes a running simulation on the path to a node.
    pub(super) fn set_under_way(&mut self, id: usize, begins: bool) {
        for i in self.path(id) {
            let loss = &mut self.under_way[i].virtual_loss;
            *loss = if begins { *loss + 1 } else { loss.saturating_sub(1) };
        }
    }

    /// The nodes from the root to this one.
    pub fn path(&self, id: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(id), |&i| self.nodes[i].parent).collect();
        path.reverse();
        path
    }

    /// Index of the expander's system message on the path to this node.
    pub fn system(&self, id: usize) -> Option<usize> {
        self.path(id).iter().find_map(|&i| self.nodes[i].system)
    }

    /// Tokens from the prompt's end to this node.
    pub fn tokens(&self, id: usize) -> Vec<u32> {
        self.path(id).iter().flat_map(|&i| self.nodes[i].tokens.iter().copied()).collect()
    }

    /// Text from the prompt's end to this node.
    pub fn text(&self, id: usize) -> String {
        self.path(id).iter().map(|&i| self.nodes[i].text.as_str()).collect()
    }

    /// Sampled tokens of the path and the sum of their log-probabilities.
    pub fn sampled(&self, id: usize) -> (usize, f64) {
        self.path(id)
            .iter()
            .map(|&i| &self.nodes[i])
            .fold((0, 0.0), |(tokens, logprob), n| (tokens + n.sampled(), logprob + n.logprob))
    }

    /// The key of the random numbers of the next child and its descendants.
    pub(super) fn draw_key(&mut self, id: usize) -> u64 {
        let UnderWay { key, draws, .. } = self.under_way[id];
        self.under_way[id].draws += 1;
        // The words of a name separate these keys from other uses of the generator.
        let counter = [draws, self.nodes[id].depth as u32, 0x7365_6172, 0x6368];
        let words = philox4x32(counter, [key as u32, (key >> 32) as u32]);
        u64::from(words[0]) << 32 | u64::from(words[1])
    }

    /// Backs up a value from a node to the root.
    pub fn evaluate(&mut self, id: usize, value: f64) {
        let value = value.clamp(0.0, 1.0);
        self.nodes[id].evaluations += 1;
        self.nodes[id].evaluation += value;
        let mut at = Some(id);
        while let Some(i) = at {
            let n = &mut self.nodes[i];
            n.visits += 1;
            n.value += (value - n.value) / n.visits as f64;
            at = n.parent;
        }
    }

    /// Computes visits, values, priors and advantages from the evaluations and log-probabilities.
    pub fn recompute(&mut self, backup: Backup, prior: Prior) {
        for id in (0..self.nodes.len()).rev() {
            let below = self.children[id].iter().map(|&c| &self.nodes[c]).filter(|c| c.visits > 0);
            let (visits, sum, means, count) =
                below.fold((0, 0.0, 0.0, 0usize), |(visits, sum, means, count), c| {
                    (visits + c.visits, sum + c.value * c.visits as f64, means + c.value, count + 1)
                });
            let branches = self.branches(id);
            let n = &mut self.nodes[id];
            n.visits = n.evaluations + visits;
            n.value = match (backup, branches) {
                _ if n.visits == 0 => 0.0,
                (Backup::Children, _) if count > 0 => means / count as f64,
                (Backup::Branches, Some(mean)) => mean,
                _ => (n.evaluation + sum) / n.visits as f64,
            }
            .clamp(0.0, 1.0);
        }
        for id in 0..self.nodes.len() {
            self.set_priors(id, prior);
            // Without an estimate, 0 would count as the worst value, and a step that was never looked at as a mistake.
            let above = self.nodes[id].parent.and_then(|p| self.nodes[p].estimate());
            let own = self.nodes[id].estimate();
            self.nodes[id].advantage = own.zip(above).map_or(0.0, |(own, above)| own - above);
        }
    }

    /// Mean evaluation of the children but the first; none where they have no evaluation.
    fn branches(&self, id: usize) -> Option<f64> {
        let ends = self.children[id].iter().skip(1).map(|&c| &self.nodes[c]);
        let (count, sum) = ends.fold((0, 0.0), |(k, sum), c| (k + c.evaluations, sum + c.evaluation));
        (count > 0).then(|| sum / count as f64)
    }

    /// Drops data that only a running search needs.
    pub(super) fn finish(&mut self) {
        self.under_way.fill(UnderWay::default());
    }

    /// Sets the priors of a node's children, whose sum is 1: those of its steps, or of its rollouts if there is no step.
    pub(super) fn set_priors(&mut self, id: usize, prior: Prior) {
        let all = self.children[id].clone();
        let steps: Vec<usize> = self.steps(id).collect();
        let shared = if steps.is_empty() { &all } else { &steps };
        let best = shared.iter().map(|&c| self.nodes[c].mean_logprob()).fold(f64::NEG_INFINITY, f64::max);
        let weight = |n: &Node| match prior {
            Prior::Logp => (n.mean_logprob() - best).exp(),
            Prior::Count => n.samples as f64,
            Prior::Uniform => 1.0,
        };
        let weights: Vec<f64> = shared.iter().map(|&c| weight(&self.nodes[c])).collect();
        let total: f64 = weights.iter().sum();
        all.iter().for_each(|&c| self.nodes[c].prior = 0.0);
        shared.iter().zip(weights).for_each(|(&c, w)| self.nodes[c].prior = w / total);
    }

    /// Refuses a tree whose numbers contradict each other.
    pub fn check(&self, backup: Backup, prior: Prior) -> Result<()> {
        let mut again = self.clone();
        again.recompute(backup, prior);
        for (n, want) in self.nodes.iter().zip(&again.nodes) {
            let numbers = |n: &Node| [n.value, n.prior, n.advantage];
            let off = numbers(n).iter().zip(numbers(want)).any(|(a, b)| (a - b).abs() > 1e-9 || a.is_nan());
            if n.visits != want.visits || off {
                let told = |n: &Node| {
                    format!(
                        "visits {}, value {}, prior {}, advantage {}",
                        n.visits, n.value, n.prior, n.advantage
                    )
                };
                let what = format!("node {}: {}, but its evaluations give {}", n.id, told(n), told(want));
                return Err(Error::data(what).fix("save the tree again: this one was changed by hand"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(state: &mut u64, n: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % n
    }

    /// Backups one by one, in any order and anywhere, are what follows from the evaluations.
    #[test]
    fn backups_add_up_in_random_trees() {
        let mut state = 1;
        for _ in 0..200 {
            let mut tree = Tree::new(7);
            for _ in 0..1 + random(&mut state, 30) {
                let parent = random(&mut state, tree.nodes().len() as u64) as usize;
                let logprob = -(random(&mut state, 100) as f64) / 10.0;
                tree.add(parent, Node { logprob, tokens: vec![1], ..Default::default() });
            }
            for _ in 0..random(&mut state, 60) {
                let id = random(&mut state, tree.nodes().len() as u64) as usize;
                tree.evaluate(id, random(&mut state, 11) as f64 / 10.0);
            }
            let mut again = tree.clone();
            again.recompute(Backup::Visits, Prior::Logp);
            for (one, other) in tree.nodes().iter().zip(again.nodes()) {
                assert_eq!(one.visits, other.visits);
                assert!((one.value - other.value).abs() < 1e-12, "{} {}", one.value, other.value);
            }
            again.check(Backup::Visits, Prior::Logp).unwrap();
            let back: Tree = serde_json::from_value(serde_json::to_value(&again).unwrap()).unwrap();
            back.check(Backup::Visits, Prior::Logp).unwrap();
        }
    }

    /// Was: 0 as the value of a right completion that no simulation had reached, and so a negative advantage.
    #[test]
    fn a_completion_that_was_never_visited_has_the_advantage_of_its_score() {
        let mut tree = Tree::new(0);
        let end = |score| Node { score: Some(score), terminal: true, tokens: vec![1], ..Default::default() };
        let (seen, right, wrong) = (tree.add(0, end(0.5)), tree.add(0, end(1.0)), tree.add(0, end(0.0)));
        let step = tree.add(0, Node { tokens: vec![1], score: Some(0.9), ..Default::default() });
        let below = tree.add(step, end(1.0));
        tree.evaluate(seen, 0.5);
        tree.recompute(Backup::Visits, Prior::Logp);
        let advantages = [seen, right, wrong, step, below].map(|id| tree.node(id).advantage);
        assert_eq!(advantages, [0.0, 0.5, -0.5, 0.0, 0.0], "a step without visits has no estimate");
        assert_eq!(tree.node(right).value, 0.0, "the mean of no evaluations");
    }

    /// Was: the mean over everything below a prefix, completions that branch off its later steps among them.
    #[test]
    fn a_prefix_of_a_spine_has_the_value_of_its_own_branches() {
        let mut tree = Tree::new(0);
        let end = || Node { terminal: true, tokens: vec![1], ..Default::default() };
        let spine = tree.add(0, Node { tokens: vec![1], ..Default::default() });
        let last = tree.add(spine, end());
        let off = [(0, [1.0, 1.0, 0.0, 1.0]), (spine, [0.0, 1.0, 0.0, 0.0])];
        for (node, scores) in off {
            for score in scores {
                let id = tree.add(node, end());
                tree.evaluate(id, score);
            }
        }
        tree.evaluate(last, 0.0);
        tree.recompute(Backup::Branches, Prior::Logp);
        let of = |id: usize| (tree.node(id).visits, tree.node(id).value, tree.node(id).advantage);
        assert_eq!([of(0), of(spine), of(last)], [(9, 0.75, 0.0), (5, 0.25, -0.5), (1, 0.0, -0.25)]);
    }

    #[test]
    fn priors_sum_to_one() {
        let mut tree = Tree::new(0);
        let step = |logprob: f64, n: usize| Node { logprob, tokens: vec![0; n], ..Default::default() };
        let (a, b) = (tree.add(0, step(-2.0, 2)), tree.add(0, Node { samples: 3, ..step(-6.0, 2) }));
        let rollout = tree.add(0, Node { rollout: true, ..step(0.0, 1) });
        let priors = |tree: &Tree| [a, b, rollout].map(|id| tree.node(id).prior);
        tree.set_priors(0, Prior::Logp);
        // exp(-1) and exp(-3), normalised.
        let want = 1.0 / (1.0 + (-2.0f64).exp());
        assert!((priors(&tree)[0] - want).abs() < 1e-12 && priors(&tree)[2] == 0.0);
        tree.set_priors(0, Prior::Count);
        assert_eq!(priors(&tree), [0.25, 0.75, 0.0]);
        tree.set_priors(0, Prior::Uniform);
        assert_eq!(priors(&tree), [0.5, 0.5, 0.0]);
    }

    #[test]
    fn random_numbers_belong_to_the_path() {
        let mut tree = Tree::new(3);
        let keys: Vec<u64> = (0..4).map(|_| tree.draw_key(0)).collect();
        let child = tree.add_drawn(0, Node::default(), keys[1]);
        let below = tree.draw_key(child);
        let mut other = Tree::new(3);
        let again: Vec<u64> = (0..4).map(|_| other.draw_key(0)).collect();
        assert_eq!(keys, again);
        let node = other.add_drawn(0, Node::default(), keys[1]);
        assert_eq!(other.draw_key(node), below, "whatever else is in the tree");
        let mut all = [keys, vec![below, Tree::new(4).draw_key(0)]].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }
}
