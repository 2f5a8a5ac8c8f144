//! Odds ratio preference optimisation (Hong et al., 2024, arXiv 2403.07691): SFT and preference loss in one, without a reference
//! model.
//!
//! Loss: the chosen completions' negative log-likelihood, a mean over tokens, plus the mean over pairs of
//! `-λ log σ(log odds(chosen) - log odds(rejected))` with `odds = p / (1 - p)` and `log p` the mean of the completion's token
//! log-probabilities.
//!
//! Differences from the paper and from TRL:
//! 1. `log(1 - p)` is computed without cancellation for p near 1, and p is at most `1 - 2^-24`: a completion of probability 1 has
//!    infinite odds, and TRL's gradient is NaN there.
//! 2. TRL's likelihood term includes the prompt's tokens; ours has the completion alone, as the paper's formula. For prompts of one
//!    token both are the same.
//! 3. Divided by tokens and pairs of the whole update.
//! 4. `logps/*` are sums over a completion's tokens, as for DPO; TRL's are means.

use super::math::{log_sigmoid, sigmoid};
use super::preference::{self, Pair, Term, log_one_minus_exp};
use super::{Algorithm, Entry, Feed, Needs, json, metrics, schema_for, settings};
use crate::experience::{ByRole, Loss, MicroBatch};
use ferrl_engine::math::exp;
use ferrl_engine::train::Stats;

pub(super) const ENTRY: Entry = Entry {
    name: "orpo",
    about: "odds ratio preference optimisation: SFT and preference loss in one, without a reference",
    paper: "Hong et al., ORPO: Monolithic Preference Optimization without Reference Model, 2024, arXiv 2403.07691",
    source: include_str!("orpo.rs"),
    feed: Feed::Pairs,
    metrics: &[metrics::PAIRED],
    defaults: || json!(Options::default()),
    schema: || schema_for!(Options),
    build: |values| Ok(Box::new(Orpo(settings("orpo", values)?))),
};

with_defaults! {
struct Options {
    /// Weight of the odds-ratio loss; the paper's lambda. [0, 1000]
    beta: f64 = 0.1,
}
}

/// A probability is at most one minus this, the spacing of f32 below 1.
const CERTAIN: f64 = 1.0 / (1 << 24) as f64;

struct Orpo(Options);

impl Orpo {
    fn term(&self, p: &Pair) -> Term {
        let beta = self.0.beta;
        // Log odds, and their derivative by the mean log-probability, 1 / (1 - p).
        let odds = |mean: f64| {
            let mean = mean.min(-CERTAIN);
            let rest = log_one_minus_exp(mean);
            (mean - rest, exp(-rest))
        };
        let ((odds_c, steep_c), (odds_r, steep_r)) = (odds(p.chosen.mean()), odds(p.rejected.mean()));
        let ratio = odds_c - odds_r;
        let slope = -p.share * beta * sigmoid(-ratio);
        Term {
            loss: -p.share * beta * log_sigmoid(ratio),
            chosen: slope * steep_c / p.chosen.tokens,
            rejected: -slope * steep_r / p.rejected.tokens,
            rewards: (beta * p.chosen.mean(), beta * p.rejected.mean()),
        }
        .add_sft(p, 1.0)
    }
}

impl Algorithm for Orpo {
    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn loss(&self, batch: &MicroBatch<'_>, stats: &ByRole<Stats>) -> Loss {
        preference::loss(batch, stats, |p| self.term(p))
    }
}
