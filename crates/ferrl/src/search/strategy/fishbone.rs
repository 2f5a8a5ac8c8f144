//! Fish-bone: one solution (the spine), with whole completions from each of its prefixes. The value of a prefix is the mean score
//! of its completions, which is VinePPO's estimate (Kazemnejad et al., 2024, arXiv 2410.01679). The spine itself and completions
//! from its later prefixes do not count: they all share the spine's next step.
//!
//! The spine is sampled step by step; completions start from the prompt and from every step but the last.

use super::super::{Backup, ChoiceRule, Expansion, Round, Strategy, Tree};
use super::sampling::evaluate_terminals;
use super::{Entry, schema_for};
use crate::recipe::read_settings;
use ferrl_engine::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "fishbone",
    about: "one solution, with completions from each of its steps (as VinePPO)",
    schema: || schema_for!(Options),
    build: |options, common| {
        let (options, max_depth) = (read_settings(ENTRY.name, options)?, common.depth());
        Ok(Box::new(FishBone { options, max_depth, spine: vec![0], stage: FishBoneStage::Spine }))
    },
};

with_defaults! {
struct Options {
    /// Completions from each step of the spine. [1, 65536]
    branch: usize = 4,
    /// Rule that selects the result among whole completions.
    answer: ChoiceRule = ChoiceRule::Weighted,
}
}

struct FishBone {
    options: Options,
    max_depth: usize,
    /// Nodes of the spine without completions yet.
    spine: Vec<usize>,
    stage: FishBoneStage,
}

enum FishBoneStage {
    Spine,
    Bones,
    Done,
}

impl Strategy for FishBone {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        evaluate_terminals(round);
        let head = round.grown.iter().flatten().copied().next().unwrap_or(0);
        if matches!(self.stage, FishBoneStage::Spine) {
            if !round.tree.node(head).terminal {
                if head > 0 {
                    self.spine.push(head);
                }
                let last = round.tree.node(head).depth + 1 >= self.max_depth;
                let step = Expansion::steps(head, 1);
                return Ok(vec![if last { Expansion::completions(head, 1) } else { step }]);
            }
            self.stage = FishBoneStage::Bones;
        }
        if matches!(self.stage, FishBoneStage::Bones) {
            self.stage = FishBoneStage::Done;
            return Ok(self
                .spine
                .iter()
                .map(|&id| Expansion::completions(id, self.options.branch))
                .collect());
        }
        Ok(Vec::new())
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.options.answer.of(tree)
    }
    fn backup(&self) -> Backup {
        Backup::Branches
    }
}
