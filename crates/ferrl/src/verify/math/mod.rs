//! Mathematical equality: whether the answer of a completion is the expected one, however either is written.
//!
//! An answer is found (`extract`), read by a parser of LaTeX, ASCII and Unicode mathematics (`lexer`, `parser`)
//! into a tree (`ast`), and compared with the expected one (`equal`, `compare`): constants in exact normal forms
//! (`form`), expressions with variables at points of exact or certified arithmetic (`eval`, `arith`), sets,
//! equations and inequalities by what satisfies them (`sets`, `relations`). No text is ever run as code, and a
//! budget of steps (`budget`) in place of a clock makes every verdict the same on every machine.

mod arith;
mod ast;
mod budget;
mod compare;
mod conventions;
mod ellipsis;
mod equal;
mod eval;
mod extract;
mod form;
#[cfg(test)]
mod form_tests;
mod functions;
#[cfg(test)]
mod fuzz;
mod integers;
mod language;
mod lexer;
mod linear;
mod modes;
mod names;
mod notation;
mod parser;
mod pointwise;
mod polynomial;
mod relations;
mod scalar;
mod sets;
mod shape;
mod solutions;

pub(crate) use arith::{nat::Nat, rational::Rational};

// Of the modules below, for one another.
use arith::{num::Num, real::MathResult, real::Real};
use ast::{Const, Expr, Func, Join, Rel, SetOp};
use budget::{Budget, Stop};
use lexer::{Commas, Tok};
use {eval::Env, language::units::Unit, names::VariableNames, sets::RealSet};

use super::take::TAG;
use super::{Entry, Sample, Score, Verifier, required};
use extract::Take;
use ferrl_engine::{Error, Result};
use modes::Mode;
use schemars::schema_for;
use serde_json::Value;

pub const ENTRY: Entry = Entry {
    name: "math",
    about: "1 when the answer equals the column's as mathematics (MATH, AIME), otherwise 0",
    schema: || schema_for!(Math),
    build: |given| {
        notation::prepare();
        Ok(Box::new(given.read::<Math>()?))
    },
};

with_defaults! {
/// The verifier.
pub struct Math {
    /// Column with the expected answer, or a solution with it in \boxed{} or after ####; a list of which any will do; where it
    /// is missing, the column solution is read.
    column: String = "answer".into(),
    /// Whose verdicts: equal (mathematical equality), or those of a known grader.
    mode: Mode = Mode::Equal,
    /// The answer: auto (the last box, else what follows "the final answer is", else the answer tag, else what follows ####,
    /// else the last formula or number), boxed, answer (last `<answer>` tag), hashes (after ####), last (the last formula or
    /// number), whole (the completion is the answer).
    take: Take = Take::Auto,
}
}

impl Math {
    /// Whether an answer is as good as the expected one, or any of them; none where the column holds no answer.
    fn equals(&self, answer: &str, expected: &Value, problem: &str) -> Option<bool> {
        let equals = |gold: &str| modes::grade(self.mode, gold, answer, problem);
        match expected {
            Value::String(text) => {
                let gold = extract::expected(text);
                (!gold.is_empty()).then(|| equals(&gold))
            }
            Value::Number(number) => Some(equals(&number.to_string())),
            Value::Array(any) if !any.is_empty() => {
                any.iter().try_fold(false, |hit, one| Some(self.equals(answer, one, problem)? || hit))
            }
            _ => None,
        }
    }
}

impl Verifier for Math {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        extract::answer(completion, self.take)
    }
    fn reads(&self) -> &'static [&'static str] {
        match self.take {
            Take::Tag => TAG,
            _ => &[],
        }
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let expected = match (sample.column(&self.column), sample.column("solution")) {
            (None, Some(solution)) => solution,
            _ => required(sample, &self.column, ENTRY.name)?,
        };
        let problem = sample.column("problem").and_then(Value::as_str).unwrap_or(sample.prompt);
        let answer = self.extract(sample.completion);
        let found = Some(answer.is_some());
        let equal = self.equals(answer.as_deref().unwrap_or_default(), expected, problem);
        let equal = equal.ok_or_else(|| {
            let what = format!("column {:?} must hold an answer, got {expected}", self.column);
            sample
                .error(Error::data(what))
                .fix("a text such as \"\\\\frac{1}{2}\", a number, or a list of them")
        })?;
        // No answer never earns anything, whatever a mode makes of an empty text.
        let right = equal && answer.is_some();
        Ok(Score { found, ..Score::single("correct", f64::from(u8::from(right))) })
    }
}
