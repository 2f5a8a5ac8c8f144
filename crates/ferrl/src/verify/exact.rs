//! Exact match of the answer with a column's text.

use super::take::TakeText;
use super::{Entry, Sample, Score, Verifier, f1, required};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub const ENTRY: Entry = Entry {
    name: "exact",
    about: "1 if the answer equals a column's text (exact match), otherwise 0",
    schema: || schema_for!(Exact),
    build: |given| Ok(Box::new(given.read::<Exact>()?)),
};

with_defaults! {
/// The verifier.
pub struct Exact {
    /// Column with the expected text, a list of accepted texts, or SQuAD's {"text": [...]}.
    column: String = "answer".into(),
    /// Where the answer is: whole (the completion), answer (last `<answer>` tag), last_line, auto (the tag, else the completion).
    take: TakeText = TakeText::Whole,
    /// Normalisation: none, or squad (without case, punctuation and articles, as the exact match of SQuAD).
    normalize: Normalize = Normalize::None,
    /// Ignore case.
    ignore_case: bool = false,
    /// Ignore ASCII punctuation.
    ignore_punctuation: bool = false,
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Normalize {
    None,
    Squad,
}

impl Exact {
    /// The text with single spaces and without what the options ignore.
    fn normal(&self, text: &str) -> String {
        if self.normalize == Normalize::Squad {
            return f1::normal(text);
        }
        let kept: String = text
            .chars()
            .filter(|c| !(self.ignore_punctuation && c.is_ascii_punctuation()))
            .flat_map(|c| {
                c.to_lowercase().filter(|_| self.ignore_case).chain((!self.ignore_case).then_some(c))
            })
            .collect();
        kept.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn equals(&self, answer: &str, expected: &Value) -> Option<bool> {
        Some(match expected {
            Value::String(text) => self.normal(text) == answer,
            Value::Number(number) => number.to_string() == answer,
            Value::Bool(flag) => flag.to_string() == answer,
            Value::Array(any) => any.iter().try_fold(false, |hit, v| Some(self.equals(answer, v)? || hit))?,
            Value::Object(_) => self.equals(answer, &f1::golds(expected)?.into())?,
            Value::Null => return None,
        })
    }
}

impl Verifier for Exact {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.take.from(completion).map(|answer| self.normal(answer))
    }
    fn reads(&self) -> &'static [&'static str] {
        self.take.reads()
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let expected = required(sample, &self.column, ENTRY.name)?;
        let answer = self.take.from(sample.completion);
        let found = Some(answer.is_some_and(|a| !a.trim().is_empty()));
        let answer = answer.map(|a| self.normal(a)).unwrap_or_default();
        let equal = self.equals(&answer, expected).ok_or_else(|| {
            sample.error(Error::data(format!("column {:?} must be text, got {expected}", self.column)))
        })?;
        // An empty answer is wrong, even if the column is empty.
        let correct = f64::from(u8::from(equal && !answer.is_empty()));
        Ok(Score { found, ..Score::single("correct", correct) })
    }
}
