//! Majority vote, or self-consistency (Wang et al., 2022, arXiv 2203.11171): the most frequent answer of independent
//! completions. It needs no scorer.

use super::sampling::{IndependentSampling, SAMPLES};
use super::{ChoiceRule, Entry};

pub(super) const ENTRY: Entry = Entry {
    name: "majority",
    about: "the most frequent answer of independent completions (self-consistency)",
    settings: &[SAMPLES],
    build: |options, common| IndependentSampling::build(options, common, ChoiceRule::Vote),
};
