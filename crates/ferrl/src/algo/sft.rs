//! Supervised fine-tuning: maximum likelihood of the trained tokens.
//!
//! Loss: `-Σ w_t logp_t`, where `w_t` is one over the number of trained tokens of the update (`token`), over sequences
//! times the sequence's tokens (`sequence`), or over sequences times a fixed length (`constant`).
//!
//! Differences from common implementations:
//! 1. Divisors are counted over the whole update, so neither micro-batches nor packing change the loss.
//! 2. An assistant's turn ends with the token that ends it. In conversations with a `prompt` and a `completion`, TRL also trains what the
//!    template writes behind that token, such as the line break of ChatML, which is never sampled; so do its preference methods.

use super::math::aggregate::{Aggregate, likelihood};
use super::metrics::ENTROPY;
use super::{Algorithm, Entry, Feed, Needs, json, schema_for, settings};
use crate::experience::{ByRole, Loss, MicroBatch};
use ferrl_engine::train::Stats;

pub(super) const ENTRY: Entry = Entry {
    name: "sft",
    about: "supervised fine-tuning: maximum likelihood of demonstrations",
    paper: "Ouyang et al., Training language models to follow instructions with human feedback, 2022, arXiv 2203.02155",
    source: include_str!("sft.rs"),
    feed: Feed::Demonstrations,
    metrics: &[&[ENTROPY]],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(Sft(settings("sft", values)?))),
};

with_defaults! {
struct Options {
    /// Aggregation of token losses.
    aggregate: Aggregate = Aggregate::Token,
    /// Fixed length of `aggregate = "constant"`. [1, 1048576]
    length: usize = 1024,
}
}

struct Sft(Options);

impl Algorithm for Sft {
    fn needs(&self) -> Needs {
        Needs { constant_gradients: true, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        likelihood(batch, stats, (self.0.aggregate, self.0.length), |_, _| 1.0)
    }
}
