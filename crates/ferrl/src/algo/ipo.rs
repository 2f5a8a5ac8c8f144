//! Identity preference optimisation (Azar et al., 2023, arXiv 2310.12036).
//!
//! Loss, the mean over pairs: `(h - 1 / (2 τ))^2` with `h = Δ_chosen - Δ_rejected`: the target margin is finite. With `average`, Δ is
//! the mean over a completion's tokens, otherwise the sum.
//!
//! Differences from the paper:
//! 1. `average` is on by default: the formula has whole completions' log-probabilities, but the authors' runs averaged over
//!    tokens, as TRL reports after asking them. Off is the formula as printed.
//! 2. Divided by the pairs of the whole update.
//! 3. `rewards/*` are what the loss compares, τ times the mean with `average`; TRL's are β times the sum.

use super::preference::{self, Pair, Term};
use super::{Algorithm, Entry, Feed, Needs, json, metrics, schema_for, settings};
use crate::experience::{ByRole, Loss, MicroBatch};
use ferrl_engine::train::Stats;

pub(super) const ENTRY: Entry = Entry {
    name: "ipo",
    about: "identity preference optimisation: a margin of fixed size, which bounds the distance from the reference",
    paper: "Azar et al., A General Theoretical Paradigm to Understand Learning from Human Preferences, 2023, arXiv 2310.12036",
    source: include_str!("ipo.rs"),
    feed: Feed::Pairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(Ipo(settings("ipo", values)?))),
};

with_defaults! {
struct Options {
    /// Strength of regularisation: the target margin is 1 / (2 tau). (0, 1000]
    tau: f64 = 0.1,
    /// Use the mean log-probability per token instead of the sum.
    average: bool = true,
}
}

struct Ipo(Options);

impl Ipo {
    fn term(&self, p: &Pair) -> Term {
        let (n_c, n_r) = if self.0.average { (p.chosen.tokens, p.rejected.tokens) } else { (1.0, 1.0) };
        let (good, bad) = (p.chosen.gain() / n_c, p.rejected.gain() / n_r);
        let error = good - bad - 0.5 / self.0.tau;
        let slope = 2.0 * p.share * error;
        Term {
            loss: p.share * error * error,
            chosen: slope / n_c,
            rejected: -slope / n_r,
            rewards: (self.0.tau * good, self.0.tau * bad),
        }
    }
}

impl Algorithm for Ipo {
    fn needs(&self) -> Needs {
        Needs { reference: true, ..Default::default() }
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        preference::loss(batch, stats, |p| self.term(p))
    }
}
