//! Best of n: the completion with the highest score (Cobbe et al., 2021, arXiv 2110.14168), and the weighted form that adds
//! the scores of equal answers before it chooses (Li et al., 2022, arXiv 2206.02336).

use super::sampling::{IndependentSampling, Options};
use super::{ChoiceRule, Entry, schema_for};

pub(super) const ENTRY: Entry = Entry {
    name: "best_of_n",
    about: "the completion with the highest score",
    schema: || schema_for!(Options),
    build: |options, common| IndependentSampling::build(ENTRY.name, options, common, ChoiceRule::Best),
};

pub(super) const WEIGHTED: Entry = Entry {
    name: "weighted_best_of_n",
    about: "the answer whose completions have the largest sum of scores",
    schema: || schema_for!(Options),
    build: |options, common| IndependentSampling::build(WEIGHTED.name, options, common, ChoiceRule::Weighted),
};
