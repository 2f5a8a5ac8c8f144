//! The rules by which answers are compared.
//!
//! [`Mode::Equal`] is mathematical equality. The others reproduce public graders with their leniencies and their
//! mistakes, so that figures can be set beside those published with them.

mod hendrycks;
mod math_verify;
mod minerva;
mod plain;
mod prm800k;

use super::{Budget, equal};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How two answers are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Mathematical equality, without tolerance for exact values.
    Equal,
    /// `is_equiv` of Hendrycks et al. (MATH, 2021): about 16 rewrites of the text, then equality of texts.
    Hendrycks,
    /// The grader of PRM800K (Lightman et al., 2023): texts, then element by element with computer algebra.
    Prm800k,
    /// The Minerva-style grader of DeepSeekMath and VinePPO: tolerance 1e-3, factors of 100.
    Minerva,
    /// Math-Verify 0.9: near equality, six decimals, gold inequalities may be answered by intervals.
    MathVerify,
}

/// Longer answers are compared as they stand.
const MOST_BYTES: usize = 6_000;

/// Whether an answer is as good as the expected one.
pub fn grade(mode: Mode, gold: &str, answer: &str, problem: &str) -> bool {
    if gold.len() > MOST_BYTES || answer.len() > MOST_BYTES {
        return gold.trim() == answer.trim();
    }
    let budget = Budget::default();
    match mode {
        Mode::Equal => equal::equal(gold, answer, &budget),
        Mode::Hendrycks => hendrycks::equal(gold, answer),
        Mode::Prm800k => prm800k::equal(gold, answer, &budget),
        Mode::Minerva => minerva::equal(gold, answer, problem, &budget),
        Mode::MathVerify => math_verify::equal(gold, answer, &budget),
    }
}
