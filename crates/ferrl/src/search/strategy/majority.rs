//! Majority vote, or self-consistency (Wang et al., 2022, arXiv 2203.11171): the most frequent answer of independent
//! completions. It needs no scorer.

use super::sampling::{IndependentSampling, Options};
use super::{ChoiceRule, Entry, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "majority",
    about: "the most frequent answer of independent completions (self-consistency)",
    schema: || schema_for!(Options),
    build: |options, common| IndependentSampling::build(ENTRY.name, options, common, ChoiceRule::Vote),
};
