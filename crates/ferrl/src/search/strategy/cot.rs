//! Chain of thought: independent completions of the prompt, of which the first is the result.
//!
//! Its accuracy is that of one sample for any `samples`; further samples reduce the variance of the mean in `figures`.

use super::super::{Expansion, Round, Strategy, Tree};
use super::sampling::{IndependentSampling, Options};
use super::{ChoiceRule, Entry, schema_for};
use ferrl_engine::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "cot",
    about: "chain of thought: independent completions, of which the first is the result",
    schema: || schema_for!(Options),
    build: |options, common| {
        Ok(Box::new(Cot(IndependentSampling::build(ENTRY.name, options, common, ChoiceRule::Best)?)))
    },
};

struct Cot(Box<dyn Strategy>);

impl Strategy for Cot {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        self.0.next(round)
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        tree.terminals().next().map(|n| n.id)
    }
}
