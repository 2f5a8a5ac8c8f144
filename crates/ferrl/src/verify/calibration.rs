//! Calibration: a completion states answers with probabilities, `red 75%, blue 25%`, and is rewarded by a proper scoring rule, which
//! calibrated probabilities maximise (Band et al., Linguistic Calibration, 2024, arXiv 2404.00474).
//!
//! `R = log max(p(y*), 1e-4) - lambda |sum_k p_k - 1| + constant`, where `y*` is the right answer and `p` its stated probability, 0
//! if it is not named. `rule = "brier"` has `1 - sum_k (p_k - [k = y*])^2` in place of the logarithm.

use super::{Entry, Sample, Score, Verifier, required};
use ferrl_engine::Result;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub const ENTRY: Entry = Entry {
    name: "calibration",
    about: "a proper scoring rule on answers with stated probabilities (calibration)",
    schema: || schema_for!(Calibration),
    build: |given| Ok(Box::new(given.read::<Calibration>()?)),
};

/// Minimum probability in the logarithm.
const LEAST: f64 = 1e-4;

/// The decision-based reward of linguistic calibration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// Weight of `|sum - 1|`.
    pub lambda: f64,
    /// Added to every reward.
    pub constant: f64,
}

impl Decision {
    /// `log max(p, 1e-4) - lambda |sum - 1| + constant`: `p` of the right answer, the sum over all that are named.
    pub fn reward(&self, p: f64, sum: f64) -> f64 {
        ferrl_engine::math::ln(p.max(LEAST)) + self.rest(sum)
    }
    fn rest(&self, sum: f64) -> f64 {
        self.constant - self.lambda * (sum - 1.0).abs()
    }
}

/// Answers with their stated probabilities, in order; repeated answers count once.
pub fn stated(text: &str) -> Vec<(String, f64)> {
    let mut all: Vec<(String, f64)> = Vec::new();
    for part in text.split([',', ';', '.', '\n', '(', ')']) {
        let Some((before, _)) = part.split_once('%') else { continue };
        let digits = before.trim_end().chars().rev().take_while(char::is_ascii_digit).count();
        let (name, number) = before.trim_end().split_at(before.trim_end().len() - digits);
        let name = name.trim().to_lowercase();
        let Some(percent) = number.parse::<f64>().ok().filter(|p| *p <= 100.0 && !name.is_empty()) else {
            continue;
        };
        if !all.iter().any(|(other, _)| *other == name) {
            all.push((name, percent / 100.0));
        }
    }
    all
}

pub(crate) fn is_answer(name: &str, truth: &Value) -> bool {
    match truth {
        Value::Array(all) => all.iter().any(|one| is_answer(name, one)),
        Value::String(text) => text.trim().eq_ignore_ascii_case(name.trim()),
        other => {
            let text = other.to_string();
            text == name.trim()
        }
    }
}

/// The largest stated probability, and whether its answer (the first of equals) is right.
pub(crate) fn top(all: &[(String, f64)], truth: &Value) -> (f64, bool) {
    let best = all.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1));
    best.map_or((0.0, false), |(name, p)| (*p, is_answer(name, truth)))
}

with_defaults! {
struct Calibration {
    /// Column with the right answer: a text or a list of texts.
    column: String = "answer".into(),
    /// Scoring rule.
    rule: ScoringRule = ScoringRule::Log,
    /// Weight of the penalty on a sum of probabilities other than 1. [0, inf)
    lambda: f64 = 5.0,
    /// Added to every reward.
    constant: f64 = 5.0,
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ScoringRule {
    Log,
    Brier,
}

impl Verifier for Calibration {
    fn name(&self) -> &str {
        ENTRY.name
    }
    /// 0 is not the reward of a wrong answer.
    fn judges_truncated(&self) -> bool {
        true
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let truth = required(sample, &self.column, ENTRY.name)?;
        let all = stated(sample.completion);
        let sum: f64 = all.iter().map(|(_, p)| p).sum();
        let p: f64 = all.iter().filter(|(name, _)| is_answer(name, truth)).map(|(_, p)| p).sum();
        let (confidence, right) = top(&all, truth);
        let correct = f64::from(u8::from(right));
        let decision = Decision { lambda: self.lambda, constant: self.constant };
        let reward = match self.rule {
            ScoringRule::Log => decision.reward(p, sum),
            ScoringRule::Brier => {
                let named: f64 = all
                    .iter()
                    .map(|(name, p)| (p - f64::from(u8::from(is_answer(name, truth)))).powi(2))
                    .sum();
                let missing = f64::from(u8::from(p == 0.0 && !all.iter().any(|(n, _)| is_answer(n, truth))));
                1.0 - named - missing + decision.rest(sum)
            }
        };
        let components = [
            ("calibration", reward),
            ("correct", correct),
            ("confidence", confidence),
            ("brier", (confidence - correct).powi(2)),
        ];
        Ok(Score {
            reward,
            components: components.map(|(name, value)| (name.to_string(), value)).into(),
            score: Some(correct),
            found: Some(!all.is_empty()),
            extracted: all
                .first()
                .map(|_| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().into()),
            why: all.is_empty().then(|| "no answer with a probability, such as `red 75%`".to_string()),
            ..Default::default()
        })
    }
    fn extract(&self, completion: &str) -> Option<String> {
        let all = stated(completion);
        let best = all.iter().rev().max_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(best.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    #[test]
    fn answers_are_read_with_their_probabilities() {
        let read = |text: &str| stated(text);
        assert_eq!(read("red 75%, blue 25%."), [("red".to_string(), 0.75), ("blue".into(), 0.25)]);
        assert_eq!(read("Probably dark red (no) Red 60 % sure"), [("red".to_string(), 0.6)]);
        assert_eq!(read("red 60%, red 40%"), [("red".to_string(), 0.6)], "once");
        assert!(read("red, blue 250%, 30%, no idea.").is_empty());
    }

    #[test]
    fn the_reward_is_the_papers_formula_and_honest_confidence_is_best() {
        let row = json!({ "answer": "red" }).as_object().cloned().unwrap();
        let columns = (&row).into();
        let verifier = super::super::build("calibration", &Map::new()).unwrap();
        let score =
            |completion| verifier.score(&Sample { completion, columns, ..Default::default() }).unwrap();
        let got = score("red 75%, blue 20%.");
        assert!((got.reward - (0.75f64.ln() - 5.0 * 0.05 + 5.0)).abs() < 1e-9, "{got:?}");
        assert_eq!(got.score, Some(1.0));
        assert!((score("blue 100%.").reward - (1e-4f64.ln() + 5.0)).abs() < 1e-9);
        assert!((score("no idea").reward - (1e-4f64.ln() - 5.0 + 5.0)).abs() < 1e-9);
        // Where red is right three times in four, no other statement earns more than 75 %.
        let d = Decision { lambda: 5.0, constant: 5.0 };
        let mean = |p: f64| 0.75 * d.reward(p, 1.0) + 0.25 * d.reward(1.0 - p, 1.0);
        assert!((1..100).all(|p| p == 75 || mean(f64::from(p) / 100.0) < mean(0.75)));
        let options = json!({ "rule": "brier", "constant": 0.0 }).as_object().cloned().unwrap();
        let brier = super::super::build("calibration", &options).unwrap();
        let got = brier.score(&Sample { completion: "red 75%, blue 25%.", columns, ..Default::default() });
        assert!((got.unwrap().reward - (1.0 - 0.0625 - 0.0625)).abs() < 1e-9);
    }
}
