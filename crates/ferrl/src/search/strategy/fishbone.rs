//! Fish-bone: one solution is the spine, and at every prefix of it whole completions branch off. The value of a prefix is the
//! mean score of the completions from there, which is VinePPO's estimate (Kazemnejad et al., 2024, arXiv 2410.01679).
//!
//! The spine is sampled step by step; completions branch off the prompt and off every step but the last.

use super::super::{ChoiceRule, Expansion, Round, Strategy, Tree};
use super::sampling::evaluate_terminals;
use super::{Common, Entry};
use crate::verify::{Options, Setting};
use ferrl_engine::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "fishbone",
    about: "one solution, with completions that branch off each of its steps",
    settings: &[
        Setting { name: "branch", default: "4", about: "completions off each step of the spine" },
        Setting { name: "answer", default: "\"weighted\"", about: "best, vote, weighted or visits" },
    ],
    build,
};

struct FishBone {
    branch: usize,
    max_depth: usize,
    choice: ChoiceRule,
    /// Nodes of the spine that are still to be branched off.
    spine: Vec<usize>,
    state: State,
}

enum State {
    Spine,
    Bones,
    Done,
}

fn build(options: &Options<'_>, common: &Common) -> Result<Box<dyn Strategy>> {
    Ok(Box::new(FishBone {
        branch: options.size("branch", 4, 1..=65536)? as usize,
        max_depth: common.max_depth,
        choice: options.choice("answer", ChoiceRule::Weighted, ChoiceRule::ALL)?,
        spine: vec![0],
        state: State::Spine,
    }))
}

impl Strategy for FishBone {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        evaluate_terminals(round);
        let head = round.grown.iter().flatten().copied().next().unwrap_or(0);
        if matches!(self.state, State::Spine) {
            if !round.tree.node(head).terminal {
                if head > 0 {
                    self.spine.push(head);
                }
                let last = round.tree.node(head).depth + 1 >= self.max_depth;
                let step = Expansion::steps(head, 1);
                return Ok(vec![if last { Expansion::completions(head, 1) } else { step }]);
            }
            self.state = State::Bones;
        }
        if matches!(self.state, State::Bones) {
            self.state = State::Done;
            return Ok(self.spine.iter().map(|&id| Expansion::completions(id, self.branch)).collect());
        }
        Ok(Vec::new())
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.choice.of(tree)
    }
}
