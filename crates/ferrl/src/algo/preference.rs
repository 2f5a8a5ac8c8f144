//! Shared code of the preference methods: from the log-probabilities of both completions to the loss and its derivatives.
//!
//! Each method is a function from one [`Pair`] to one [`Term`]; sums, divisors and the gradients of a completion's tokens are
//! computed here.

use crate::experience::{ByRole, Loss, Metrics, MicroBatch, Role, Sequence};
use ferrl_engine::math::{exp, ln};
use ferrl_engine::train::Stats;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PairSide {
    /// Log-probability of the completion: the sum over its tokens.
    pub logp: f64,
    /// The same under the reference; 0 without a reference.
    pub reference: f64,
    pub tokens: f64,
}

impl PairSide {
    /// Log-ratio of policy to reference.
    pub fn gain(&self) -> f64 {
        self.logp - self.reference
    }
    /// Log-probability per token.
    pub fn mean(&self) -> f64 {
        self.logp / self.tokens
    }
}

/// A chosen and a rejected completion of the same prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub chosen: PairSide,
    pub rejected: PairSide,
    /// Weight of the pair in a mean over the update's pairs.
    pub share: f64,
    /// Weight of a token of the chosen completion in a mean over all such tokens.
    pub token_share: f64,
}

/// A pair's part of the loss.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Term {
    /// The loss, already divided.
    pub loss: f64,
    /// d loss / d log-probability of the chosen completion.
    pub chosen: f64,
    /// d loss / d log-probability of the rejected completion.
    pub rejected: f64,
    /// Implicit rewards of the chosen and the rejected completion.
    pub rewards: (f64, f64),
}

impl Term {
    /// Adds `coef` times the negative log-likelihood of the chosen completion, a mean over tokens.
    pub fn add_sft(mut self, pair: &Pair, coef: f64) -> Self {
        self.loss -= coef * pair.token_share * pair.chosen.logp;
        self.chosen -= coef * pair.token_share;
        self
    }
}

pub(super) fn loss(batch: &MicroBatch<'_>, stats: &ByRole<Stats>, term: impl Fn(&Pair) -> Term) -> Loss {
    let stats = stats.get(Role::Policy).expect("the policy was computed");
    let mut grads = Loss::zeros(batch.len());
    let (mut value, mut metrics) = (0.0, Metrics::default());
    let side = |row: usize, s: &Sequence| PairSide {
        logp: completion_logp(stats, row, s),
        reference: if s.ref_logp.is_empty() { 0.0 } else { s.sum(&s.ref_logp) },
        tokens: s.action_count() as f64,
    };
    for [(row_c, chosen), (row_r, rejected)] in batch.pairs() {
        let weight = chosen.weight as f64;
        let pair = Pair {
            chosen: side(row_c, chosen),
            rejected: side(row_r, rejected),
            share: weight / batch.counts.pairs,
            token_share: weight / batch.counts.chosen_tokens,
        };
        let t = term(&pair);
        value += t.loss;
        chosen.actions().for_each(|i| grads.logp[row_c + i] = t.chosen as f32);
        rejected.actions().for_each(|i| grads.logp[row_r + i] = t.rejected as f32);
        let (good, bad) = t.rewards;
        metrics.add("rewards/chosen", good);
        metrics.add("rewards/rejected", bad);
        metrics.add("rewards/margins", good - bad);
        metrics.add("rewards/accuracies", f64::from(good > bad));
        metrics.add("logps/chosen", pair.chosen.logp);
        metrics.add("logps/rejected", pair.rejected.logp);
    }
    Loss::policy(value, grads, metrics)
}

/// Log-probability of a completion: the sum over its tokens.
pub(super) fn completion_logp(stats: &Stats, row: usize, s: &Sequence) -> f64 {
    s.actions().map(|i| stats.logp[row + i] as f64).sum()
}

/// `log(1 - e^x)` for `x < 0`, exact also where `e^x` is nearly 1 or nearly 0 (Mächler, 2012).
pub(super) fn log_one_minus_exp(x: f64) -> f64 {
    if x > -std::f64::consts::LN_2 {
        // 1 - e^x with Kahan's correction: the rounding of u = e^x cancels between u - 1 and ln(u).
        let u = exp(x);
        let less = if u == 1.0 { -x } else { (1.0 - u) * (x / ln(u)) };
        ln(less)
    } else {
        ln(1.0 - exp(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_one_minus_exp_is_exact_at_both_ends() {
        // log(1 - e^x) = log(-x) + x/2 + x^2/24 + ... for small x.
        for x in [-1e-12f64, -1e-9, -6e-8, -1e-4] {
            let want = (-x).ln() + x / 2.0 + x * x / 24.0;
            assert!((log_one_minus_exp(x) - want).abs() < 1e-13 * want.abs(), "{x}");
        }
        // The naive formula takes 1 - p for a tenth too much there.
        let naive = (1.0 - (-2e-16f64).exp()).ln();
        assert!((naive - (2e-16f64).ln()).abs() > 0.05);
        assert!((log_one_minus_exp(-2e-16) - (2e-16f64).ln()).abs() < 1e-12);
        for x in [-0.5f64, -0.7, -2.0, -30.0] {
            let want = (-x.exp()).ln_1p();
            assert!((log_one_minus_exp(x) - want).abs() < 1e-15, "{x}");
        }
    }
}
