//! Monte Carlo tree search over steps.
//!
//! A simulation descends from the root by UCT (Kocsis and Szepesvári, 2006), `q + c √(ln N / n)`, or PUCT (Silver et al.,
//! 2017), `q + c P √N / (1 + n)`, to a leaf. A leaf that was evaluated before is expanded by `branch` sampled steps, and the
//! simulation descends to one of them; nodes with many visits get more steps (progressive widening). The leaf is evaluated by
//! rollouts to the end of the completion, or by the scorer, and the value is backed up to the root. A whole completion is evaluated
//! by its score each time it is reached.
//!
//! `parallel` simulations run concurrently and share a decode batch. Each counts as a loss on its path until its value is known
//! (virtual loss, Chaslot et al., 2008), so that the others descend elsewhere. Of all settings of execution the tree depends only on
//! `parallel`.

use super::super::{ChoiceRule, Expansion, Facts, Prior, Round, Strategy, Tree, Until};
use super::{Common, Entry};
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "mcts",
    about: "Monte Carlo tree search over steps (UCT or PUCT), parallel with virtual loss",
    schema: || schema_for!(Options),
    build: |options, common| Ok(Box::new(Mcts::new(read_settings(ENTRY.name, options)?, common)?)),
};

with_defaults! {
struct Options {
    /// Maximum number of simulations; with --budget the budget decides. [1, 1048576]
    #[schemars(extend("default" = 32))]
    simulations: Option<u64> = None,
    /// Concurrent simulations (virtual loss). [1, 4096]
    parallel: usize = 4,
    /// Steps sampled in an expansion; equal ones are merged. [1, 4096]
    branch: usize = 4,
    /// Selection rule: uct or puct.
    select: Select = Select::Puct,
    /// Exploration constant c. [0, 1000000]
    c: f64 = 1.25,
    /// Progressive widening: a node with N visits gets branch · N^widen samples; 0 disables it. [0, 1]
    widen: f64 = 0.4,
    /// Evaluation of a leaf: rollout (the default), or score, if the scorer can score prefixes.
    evaluate: Option<LeafValue> = None,
    /// Rollouts of a leaf; each is one visit. [1, 4096]
    rollouts: usize = 1,
    /// Prior of a step: logp (softmax of its mean logp), count or uniform.
    prior: Prior = Prior::Logp,
    /// Which whole completion is the result; best with an oracle, weighted with another scorer, vote with logp.
    answer: Option<ChoiceRule> = None,
}
}

/// Consecutive simulations without samples: the relevant part of the tree is exhausted.
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
    /// Number of started simulations.
    begun: u64,
    /// Purpose of each expansion of the last round.
    waiting: Vec<Waiting>,
}

/// Simulations that wait for an expansion of a node.
struct Waiting {
    node: usize,
    /// One for a rollout; for steps all simulations that have reached the node since.
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
            // With a token budget, simulations without samples must also end the search.
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

    /// Lets a simulation wait for the steps of a node.
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

    /// Processes the children of an expansion.
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
            // Continues from the node where it waited.
            tree.set_under_way(waiting.node, false);
            self.simulate_from(tree, waiting.node, work);
        }
    }

    /// Descends from a node to a leaf and evaluates it, or waits for samples.
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

    /// Whether a node with steps gets more of them (progressive widening, Coulom, 2007): without it a search could not escape wrong
    /// first steps.
    fn widens(&self, tree: &Tree, id: usize) -> bool {
        // Rejected draws count: a node whose every step resembles those it has would ask for more without end.
        let drawn: u64 = tree.steps(id).map(|c| tree.node(c).samples).sum::<u64>() + tree.rejected(id);
        let most = self.options.branch as f64 * (tree.node(id).visits.max(1) as f64).powf(self.options.widen);
        drawn > 0 && (drawn + self.options.branch as u64) as f64 <= most
    }

    /// The child with the highest bound, ties going to the first. `None` at a leaf, and at a node that gets more steps.
    fn descend(&self, tree: &Tree, id: usize) -> Option<usize> {
        if self.widens(tree, id) {
            return None;
        }
        let parent = tree.node(id);
        let above = (parent.visits + tree.virtual_loss(id)).max(1) as f64;
        let bound = |c: usize| {
            let n = tree.node(c);
            let visits = (n.visits + tree.virtual_loss(c)) as f64;
            // Running simulations count as losses; unvisited children have their parent's value.
            let q = if visits > 0.0 { n.value * n.visits as f64 / visits } else { parent.value };
            match self.options.select {
                Select::Puct => q + self.options.c * n.prior * above.sqrt() / (1.0 + visits),
                // Unvisited children first, in the order of probability.
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
