//! Beam search over steps: the `width` best of all continuations of the beams are continued (Snell et al., 2024, arXiv
//! 2408.03314, with a verifier; with log-probabilities the classical beam search).
//!
//! Whole completions remain beams, so a search ends when all beams are whole completions.

use super::super::{ChoiceRule, Expansion, Round, Strategy, Tree, Until};
use super::{Common, Entry, MAX_NODES};
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};

pub(super) const ENTRY: Entry = Entry {
    name: "beam",
    about: "beam search over steps",
    schema: || schema_for!(Options),
    build: |options, common| Ok(Box::new(Beam::new(read_settings(ENTRY.name, options)?, common)?)),
};

with_defaults! {
struct Options {
    /// Beam width. [1, 65536]
    width: usize = 4,
    /// Continuations of each beam; `width` by default. [1, 65536]
    branch: Option<usize> = None,
    /// How beams are ranked: score (the scorer on prefixes) or logp; score by default if the scorer can score prefixes.
    evaluate: Option<BeamRank> = None,
    /// Rule that selects the result among whole completions.
    answer: ChoiceRule = ChoiceRule::Best,
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum BeamRank {
    Score,
    Logp,
}

struct Beam {
    options: Options,
    branch: usize,
    max_depth: usize,
    by_score: bool,
    beams: Vec<usize>,
    started: bool,
}

impl Beam {
    fn new(options: Options, common: &Common) -> Result<Self> {
        let judges = common.facts.judges_steps;
        let by_score = options.evaluate.map_or(judges, |rank| rank == BeamRank::Score);
        if by_score && !judges {
            return Err(Error::usage("evaluate=score needs a scorer of prefixes")
                .at("beam")
                .fix("--verifier with a model, or evaluate=logp"));
        }
        let (branch, max_depth) = (options.branch.unwrap_or(options.width), common.depth());
        if (options.width * branch) as f64 > MAX_NODES {
            let what = format!("{} beams with {branch} continuations each are too many", options.width);
            return Err(Error::usage(what).at("beam").fix(format!("width times branch up to {MAX_NODES}")));
        }
        Ok(Beam { options, branch, max_depth, by_score, beams: vec![0], started: false })
    }

    fn rank(&self, tree: &Tree, id: usize) -> f64 {
        let (tokens, logprob) = tree.sampled(id);
        match tree.node(id).score.filter(|_| self.by_score) {
            Some(score) => score,
            None => logprob / tokens.max(1) as f64,
        }
    }
}

impl Strategy for Beam {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        let grown: Vec<usize> = round.grown.iter().flatten().copied().collect();
        for &id in &grown {
            if let Some(score) = round.tree.node(id).score {
                round.tree.evaluate(id, score);
            }
        }
        if self.started {
            let whole = self.beams.iter().copied().filter(|&b| round.tree.node(b).terminal);
            let mut all: Vec<usize> = whole.chain(grown).collect();
            // A stable sort: ties go to the first.
            all.sort_by(|&a, &b| self.rank(round.tree, b).total_cmp(&self.rank(round.tree, a)));
            all.truncate(self.options.width);
            self.beams = all;
        }
        let branch = if self.started { self.branch } else { self.options.width * self.branch };
        self.started = true;
        let tree = &round.tree;
        let open = self.beams.iter().copied().filter(|&b| !tree.node(b).terminal);
        Ok(open
            .map(|id| {
                let last = tree.node(id).depth + 1 >= self.max_depth;
                let until = if last { Until::End } else { Until::Step };
                Expansion { until, score: self.by_score, merge: true, ..Expansion::steps(id, branch) }
            })
            .collect())
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.options.answer.of(tree)
    }
}
