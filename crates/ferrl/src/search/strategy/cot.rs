//! Chain of thought: independent completions of the prompt, of which the first is the result.
//!
//! Its accuracy is that of one sample, whatever `samples` is; the others make it a measurement (`figures` has their mean).

use super::super::{Expansion, Round, Strategy, Tree};
use super::sampling::{IndependentSampling, SAMPLES};
use super::{ChoiceRule, Common, Entry};
use crate::verify::Options;
use ferrl_engine::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "cot",
    about: "chain of thought: independent completions, of which the first is the result",
    settings: &[SAMPLES],
    build,
};

struct Cot(Box<dyn Strategy>);

fn build(options: &Options<'_>, common: &Common) -> Result<Box<dyn Strategy>> {
    Ok(Box::new(Cot(IndependentSampling::build(options, common, ChoiceRule::Best)?)))
}

impl Strategy for Cot {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        self.0.next(round)
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        tree.terminals().next().map(|n| n.id)
    }
}
