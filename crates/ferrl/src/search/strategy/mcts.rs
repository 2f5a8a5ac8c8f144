//! Monte Carlo tree search over steps.
//!
//! A simulation descends from the root by UCT (Kocsis and Szepesvári, 2006), `q + c √(ln N / n)`, or PUCT (Silver et al.,
//! 2017), `q + c P √N / (1 + n)`, to a leaf. A leaf that was evaluated before is expanded by `branch` sampled steps, of which
//! the search descends into one; a node of many visits gets more steps (progressive widening). The leaf is evaluated by rollouts to the end of the completion, or by the scorer, and the
//! value is backed up to the root. A completion that is whole is evaluated by its score each time it is reached.
//!
//! `parallel` simulations are under way at once. Each counts as lost on its path until its value is there (virtual loss,
//! Chaslot et al., 2008), so that the others descend elsewhere, and all share a decode batch. The tree depends on `parallel`
//! and on nothing else of how it was computed.

use super::super::{ChoiceRule, Expansion, Facts, Prior, Round, Strategy, Tree, Until};
use super::{Common, Entry};
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "mcts",
    about: "Monte Carlo tree search over steps (UCT or PUCT), many leaves at once under virtual loss",
    schema: || schema_for!(Options),
    build: |options, common| Ok(Box::new(Mcts::new(read_settings(ENTRY.name, options)?, common)?)),
};

with_defaults! {
struct Options {
    /// Simulations; with --budget as many as it allows. [1, 1048576]
    #[schemars(extend("default" = 32))]
    simulations: Option<u64> = None,
    /// Simulations under way at once (virtual loss). [1, 4096]
    parallel: usize = 4,
    /// Steps sampled where a node is expanded; equal ones are merged. [1, 4096]
    branch: usize = 4,
    /// Bound that chooses the child to descend to.
    select: Select = Select::Puct,
    /// Weight of exploration. [0, 1000000]
    c: f64 = 1.25,
    /// Progressive widening: a node of N visits has branch · N^widen steps drawn; 0 is off. [0, 1]
    widen: f64 = 0.4,
    /// Value of a leaf: rollout, or score where the scorer judges steps; rollout by default.
    evaluate: Option<LeafValue> = None,
    /// Rollouts of a leaf; each is one visit. [1, 4096]
    rollouts: usize = 1,
    /// Prior of a step: logp (softmax of its mean logp), count or uniform.
    prior: Prior = Prior::Logp,
    /// Which whole completion is the result; best with an oracle, weighted with another scorer, vote with logp.
    answer: Option<ChoiceRule> = None,
}
}

/// Simulations in a row that sampled nothing: all that is worth a visit has been sampled.
const FREE: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Select {
    Uct,
    Puct,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LeafValue {
    Rollout,
    Score,
}

struct Mcts {
    options: Options,
    simulations: u64,
    by_score: bool,
    choice: ChoiceRule,
    max_depth: usize,
    budgeted: bool,
    /// Simulations begun.
    begun: u64,
    /// What each expansion of the last round was for.
    waiting: Vec<Waiting>,
}

/// Simulations that wait for an expansion of a node.
struct Waiting {
    node: usize,
    /// For a rollout one; for steps as many as reached the node meanwhile.
    simulations: usize,
    rollout: bool,
}

impl Mcts {
    fn new(options: Options, common: &Common) -> Result<Self> {
        let Facts { budgeted, judges_steps, informed, .. } = common.facts;
        let by_score = options.evaluate == Some(LeafValue::Score);
        if by_score && !judges_steps {
            return Err(Error::usage("evaluate=score needs a scorer of prefixes")
                .at("mcts")
                .fix("--verifier with a model or logp, or evaluate=rollout"));
        }
        let usual = match (informed, judges_steps) {
            (true, false) => ChoiceRule::Best,
            (true, true) => ChoiceRule::Weighted,
            (false, _) => ChoiceRule::Vote,
        };
        Ok(Mcts {
            simulations: options.simulations.unwrap_or(if budgeted { 1 << 20 } else { 32 }),
            by_score,
            choice: options.answer.unwrap_or(usual),
            max_depth: common.depth(),
            budgeted,
            begun: 0,
            waiting: Vec::new(),
            options,
        })
    }
}

impl Strategy for Mcts {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        let tree = &mut *round.tree;
        let mut work = NextRound::default();
        for (waiting, grown) in std::mem::take(&mut self.waiting).into_iter().zip(round.grown) {
            self.absorb(tree, &waiting, grown, &mut work);
        }
        let mut free = 0;
        while self.begun < self.simulations && work.simulations() < self.options.parallel && free < FREE {
            let before = work.simulations();
            self.begun += 1;
            self.simulate_from(tree, 0, &mut work);
            // Where a budget of tokens ends the search, simulations that need none must do so as well.
            free = if self.budgeted && work.simulations() == before { free + 1 } else { 0 };
        }
        let expansions = work.waiting.iter().map(|w| self.expansion(tree, w)).collect();
        self.waiting = work.waiting;
        Ok(expansions)
    }

    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.choice.of(tree)
    }

    fn prior(&self) -> Prior {
        self.options.prior
    }
}

/// What the next round samples.
#[derive(Default)]
struct NextRound {
    waiting: Vec<Waiting>,
}

impl NextRound {
    fn simulations(&self) -> usize {
        self.waiting.iter().map(|w| w.simulations).sum()
    }

    /// One more simulation that waits for the steps of a node.
    fn expand(&mut self, node: usize) {
        match self.waiting.iter_mut().find(|w| w.node == node && !w.rollout) {
            Some(w) => w.simulations += 1,
            None => self.waiting.push(Waiting { node, simulations: 1, rollout: false }),
        }
    }
}

impl Mcts {
    fn expansion(&self, tree: &Tree, waiting: &Waiting) -> Expansion {
        if waiting.rollout {
            return Expansion::rollouts(waiting.node, self.options.rollouts);
        }
        let last = tree.node(waiting.node).depth + 1 >= self.max_depth;
        let until = if last { Until::End } else { Until::Step };
        Expansion {
            until,
            score: self.by_score,
            merge: true,
            ..Expansion::steps(waiting.node, self.options.branch)
        }
    }

    /// Takes in what an expansion brought.
    fn absorb(&self, tree: &mut Tree, waiting: &Waiting, grown: &[usize], work: &mut NextRound) {
        if waiting.rollout {
            tree.set_under_way(waiting.node, false);
            for &id in grown {
                let score = tree.node(id).score.unwrap_or(0.0);
                tree.evaluate(id, score);
            }
            return;
        }
        tree.set_priors(waiting.node, self.options.prior);
        for _ in 0..waiting.simulations {
            // It goes on from where it waited.
            tree.set_under_way(waiting.node, false);
            self.simulate_from(tree, waiting.node, work);
        }
    }

    /// Descends from a node to a leaf and evaluates it, or waits for what that needs.
    fn simulate_from(&self, tree: &mut Tree, from: usize, work: &mut NextRound) {
        let mut at = from;
        while let Some(next) = self.descend(tree, at) {
            at = next;
        }
        let node = tree.node(at);
        if node.terminal {
            let score = node.score.unwrap_or(0.0);
            tree.evaluate(at, score);
            return;
        }
        // A node without visits is evaluated first, and expanded when a simulation reaches it again.
        let expanded = tree.steps(at).next().is_some();
        let fresh = at != 0 && !expanded && node.visits + tree.virtual_loss(at) == 0;
        if fresh && self.by_score {
            let score = node.score.unwrap_or(0.0);
            tree.evaluate(at, score);
        } else {
            tree.set_under_way(at, true);
            match fresh {
                true => work.waiting.push(Waiting { node: at, simulations: 1, rollout: true }),
                false => work.expand(at),
            }
        }
    }

    /// Whether a node that has steps gets more of them (progressive widening, Coulom, 2007): without that, a search whose first
    /// steps are all wrong never leaves them.
    fn widens(&self, tree: &Tree, id: usize) -> bool {
        // Rejected draws count: a node whose every step resembles those it has would ask for more without end.
        let drawn: u64 = tree.steps(id).map(|c| tree.node(c).samples).sum::<u64>() + tree.rejected(id);
        let most = self.options.branch as f64 * (tree.node(id).visits.max(1) as f64).powf(self.options.widen);
        drawn > 0 && (drawn + self.options.branch as u64) as f64 <= most
    }

    /// The child to go to: the first of those with the highest bound. None at a leaf, and where more steps are to be drawn.
    fn descend(&self, tree: &Tree, id: usize) -> Option<usize> {
        if self.widens(tree, id) {
            return None;
        }
        let parent = tree.node(id);
        let above = (parent.visits + tree.virtual_loss(id)).max(1) as f64;
        let bound = |c: usize| {
            let n = tree.node(c);
            let visits = (n.visits + tree.virtual_loss(c)) as f64;
            // What is under way counts as lost; what was never looked at is taken for as good as its parent.
            let q = if visits > 0.0 { n.value * n.visits as f64 / visits } else { parent.value };
            match self.options.select {
                Select::Puct => q + self.options.c * n.prior * above.sqrt() / (1.0 + visits),
                // Unvisited children come first, the more probable before the others.
                Select::Uct if visits == 0.0 => 1e9 + n.prior,
                Select::Uct => q + self.options.c * (above.ln() / visits).sqrt(),
            }
        };
        let mut found: Option<(usize, f64)> = None;
        for c in tree.steps(id) {
            let this = bound(c);
            if found.is_none_or(|(_, top)| this > top) {
                found = Some((c, this));
            }
        }
        found.map(|(c, _)| c)
    }
}
