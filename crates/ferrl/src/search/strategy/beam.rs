//! Beam search over steps: of all continuations of the beams, the `width` best are continued (Snell et al., 2024, arXiv
//! 2408.03314, with a verifier; with log-probabilities the classical beam).
//!
//! A whole completion keeps its place among the beams, so a search ends when all of them are whole.

use super::super::{ChoiceRule, Expansion, Round, Strategy, Tree, Until};
use super::{Common, Entry};
use crate::verify::{Options, Setting};
use ferrl_engine::{Error, Result};

pub(super) const ENTRY: Entry = Entry {
    name: "beam",
    about: "beam search over steps",
    settings: &[
        Setting { name: "width", default: "4", about: "beams that are continued" },
        Setting {
            name: "branch",
            default: "",
            about: "continuations of each beam; as many as beams where not given",
        },
        Setting {
            name: "evaluate",
            default: "",
            about: "what ranks beams: score (the scorer on prefixes) or logp; score where the scorer judges steps",
        },
        Setting { name: "answer", default: "\"best\"", about: "best, vote, weighted or visits" },
    ],
    build,
};

struct Beam {
    width: usize,
    branch: usize,
    max_depth: usize,
    by_score: bool,
    choice: ChoiceRule,
    beams: Vec<usize>,
    started: bool,
}

fn build(options: &Options<'_>, common: &Common) -> Result<Box<dyn Strategy>> {
    let width = options.size("width", 4, 1..=65536)? as usize;
    let by_score = options.choice("evaluate", common.judges_steps, &[("score", true), ("logp", false)])?;
    if by_score && !common.judges_steps {
        return Err(Error::usage("evaluate=score needs a scorer of prefixes")
            .at("beam")
            .fix("--verifier with a model, or evaluate=logp"));
    }
    Ok(Box::new(Beam {
        width,
        branch: options.size("branch", width as u64, 1..=65536)? as usize,
        max_depth: common.max_depth,
        by_score,
        choice: options.choice("answer", ChoiceRule::Best, ChoiceRule::ALL)?,
        beams: vec![0],
        started: false,
    }))
}

impl Beam {
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
            // A stable sort: of equal ones the first stay.
            all.sort_by(|&a, &b| self.rank(round.tree, b).total_cmp(&self.rank(round.tree, a)));
            all.truncate(self.width);
            self.beams = all;
        }
        let branch = if self.started { self.branch } else { self.width * self.branch };
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
        self.choice.of(tree)
    }
}
