//! Whole completions of the prompt: shared code of chain of thought, best of n and majority vote.
//!
//! Without a budget all samples are drawn at once. With one, after a first sample, each round draws as many as the remaining budget
//! allows at the mean length so far, `samples` at most.

use super::super::{ChoiceRule, Expansion, Round, Strategy, Tree};
use super::Common;
use crate::recipe::read_settings;
use ferrl_engine::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Options {
    /// Maximum number of completions; with --budget the budget decides. [1, 65536]
    #[schemars(extend("default" = 8))]
    samples: Option<usize>,
}

/// Independent completions and a rule that selects one.
pub(super) struct IndependentSampling {
    wanted: usize,
    drawn: usize,
    budgeted: bool,
    choice: ChoiceRule,
}

impl IndependentSampling {
    pub fn build(
        name: &str,
        options: &Map<String, Value>,
        common: &Common,
        choice: ChoiceRule,
    ) -> Result<Box<dyn Strategy>> {
        let (options, budgeted): (Options, _) = (read_settings(name, options)?, common.facts.budgeted);
        let wanted = options.samples.unwrap_or(if budgeted { 65536 } else { 8 });
        Ok(Box::new(IndependentSampling { wanted, drawn: 0, budgeted, choice }))
    }
}

impl IndependentSampling {
    /// Number of samples of the next round.
    fn affordable(&self, round: &Round<'_>) -> usize {
        let Some(left) = round.left.filter(|_| self.budgeted) else { return self.wanted };
        match self.drawn {
            0 => 1,
            drawn => (left as usize * drawn / (round.spent as usize).max(1)).max(1),
        }
    }
}

impl Strategy for IndependentSampling {
    fn next(&mut self, round: &mut Round<'_>) -> Result<Vec<Expansion>> {
        evaluate_terminals(round);
        let now = self.affordable(round).min(self.wanted - self.drawn);
        self.drawn += now;
        Ok((now > 0).then(|| Expansion::completions(0, now)).into_iter().collect())
    }
    fn answer(&self, tree: &Tree) -> Option<usize> {
        self.choice.of(tree)
    }
}

/// Backs up the score of every new whole completion.
pub(super) fn evaluate_terminals(round: &mut Round<'_>) {
    for &id in round.grown.iter().flatten() {
        if let (true, Some(score)) = (round.tree.node(id).terminal, round.tree.node(id).score) {
            round.tree.evaluate(id, score);
        }
    }
}
