//! Simple preference optimisation (Meng et al., 2024, arXiv 2405.14734): DPO without a reference, per token.
//!
//! Loss, the mean over pairs: `-log σ(β mean_t logp(chosen) - β mean_t logp(rejected) - γ)`.
//!
//! Differences from the paper:
//! 1. β = 2 and γ = 1, from the ranges it searched (2 to 2.5 and 0.3 to 1.6); it says to tune both.
//! 2. `sft_coef` adds the chosen completions' negative log-likelihood, as for DPO; the paper has none.
//! 3. `logps/*` are sums over a completion's tokens, as for DPO; those of TRL's `CPOTrainer` are means.

use super::math::{log_sigmoid, sigmoid};
use super::preference::{self, Pair, Term};
use super::{Algorithm, Entry, Feed, Needs, json, metrics, schema_for, settings};
use crate::experience::{ByRole, Loss, MicroBatch};
use ferrl_engine::train::Stats;

pub(super) const ENTRY: Entry = Entry {
    name: "simpo",
    about: "simple preference optimisation: mean log-probability as the reward, a target margin, no reference",
    paper: "Meng et al., SimPO: Simple Preference Optimization with a Reference-Free Reward, 2024, arXiv 2405.14734",
    source: include_str!("simpo.rs"),
    feed: Feed::Pairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(SimPo(settings("simpo", values)?))),
};

with_defaults! {
struct Options {
    /// Scale of the reward, which is the mean log-probability of a completion's tokens. (0, 1000]
    beta: f64 = 2.0,
    /// Target reward margin between chosen and rejected completion. [0, 1000]
    gamma: f64 = 1.0,
    /// Weight of the SFT loss on the chosen completion. [0, 1000]
    sft_coef: f64 = 0.0,
}
}

struct SimPo(Options);

impl SimPo {
    fn term(&self, p: &Pair) -> Term {
        let o = &self.0;
        let rewards = (o.beta * p.chosen.mean(), o.beta * p.rejected.mean());
        let margin = rewards.0 - rewards.1 - o.gamma;
        let slope = -p.share * o.beta * sigmoid(-margin);
        Term {
            loss: -p.share * log_sigmoid(margin),
            chosen: slope / p.chosen.tokens,
            rejected: -slope / p.rejected.tokens,
            rewards,
        }
        .add_sft(p, o.sft_coef)
    }
}

impl Algorithm for SimPo {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        preference::loss(batch, stats, |p| self.term(p))
    }
}
