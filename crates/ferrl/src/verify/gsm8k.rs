//! GSM8K's grader: compares the number after the last `####` of a completion, else its last number, with the data set's answer.
//!
//! Calculator annotations (`<<48/2=24>>`) are removed first. Mode `number` compares values, so that `18` is `18.0` and `$1,250` is
//! `1250`; mode `text` compares texts without commas and case, as the graders of published results do.

use super::numeric::{after_hashes, last_number};
use super::{Entry, Sample, Score, Verifier, required};
use ferrl_engine::{Error, Result};
use regex::Regex;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::LazyLock;

pub const ENTRY: Entry = Entry {
    name: "gsm8k",
    about: "1 if the number after ####, or else the last one, equals the row's (GSM8K), otherwise 0",
    schema: || schema_for!(Gsm8k),
    build: |given| Ok(Box::new(given.read::<Gsm8k>()?)),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Gsm8kMode {
    Number,
    Text,
}

with_defaults! {
/// The verifier.
pub struct Gsm8k {
    /// Column with a GSM8K solution, with its answer after ####, or the answer alone.
    column: String = "answer".into(),
    /// Comparison: number (values), text (texts without commas and case, as VinePPO grades).
    mode: Gsm8kMode = Gsm8kMode::Number,
}
}

/// Calculator annotations of the data set's solutions.
static CALCULATOR: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new("<<[^<>]*>>").ok());

fn without_calculator(text: &str) -> Cow<'_, str> {
    match &*CALCULATOR {
        Some(pattern) => pattern.replace_all(text, ""),
        None => text.into(),
    }
}

impl Gsm8k {
    /// The answer of a worked solution.
    fn answer(&self, text: &str) -> Option<String> {
        let text = without_calculator(text);
        match self.mode {
            Gsm8kMode::Number => after_hashes(&text).or_else(|| last_number(&text)),
            Gsm8kMode::Text => {
                let behind = text.rsplit_once("####").map(|(_, answer)| plain(answer));
                behind.filter(|answer| !answer.is_empty()).or_else(|| last_number(&text))
            }
        }
    }
}

/// Without commas and the space around it, in lower case.
fn plain(text: &str) -> String {
    text.trim().replace(',', "").to_lowercase()
}

impl Verifier for Gsm8k {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.answer(completion)
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let value = required(sample, &self.column, ENTRY.name)?;
        let expected = match value {
            Value::Number(number) => self.answer(&number.to_string()),
            Value::String(text) => self.answer(text),
            _ => None,
        };
        let expected = expected.ok_or_else(|| {
            let what = format!("column {:?} holds no number: {value}", self.column);
            sample.error(Error::data(what)).fix("a number, or a solution that ends in \"#### 18\"")
        })?;
        let answer = self.answer(sample.completion);
        let found = Some(answer.is_some());
        let right = answer.is_some_and(|answer| answer == expected);
        Ok(Score { found, ..Score::single("correct", f64::from(u8::from(right))) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_behind_the_hashes_counts() {
        let grade = |mode, gold: &str, completion: &str| {
            let verifier = Gsm8k { column: "answer".into(), mode };
            let row = serde_json::json!({ "answer": gold });
            let columns = row.as_object().expect("an object").into();
            verifier.score(&Sample { completion, columns, ..Default::default() }).expect("a score").reward
        };
        for (gold, completion, number, text) in [
            ("so 9*2 = <<9*2=18>>18\n#### 18", "It is 18.\n#### 18", 1.0, 1.0),
            ("18", "9*2=<<9*2=18>>18 and that is all", 1.0, 1.0),
            ("#### 1,250", "#### 1250", 1.0, 1.0),
            ("18", "#### 18.0", 1.0, 0.0),
            ("18", "#### $18", 1.0, 0.0),
            ("18", "#### 17\n#### 18", 1.0, 1.0),
            ("18", "18 or so\n#### 19", 0.0, 0.0),
            ("18", "no idea", 0.0, 0.0),
            ("-3", "#### -3", 1.0, 1.0),
        ] {
            assert_eq!(grade(Gsm8kMode::Number, gold, completion), number, "{gold} | {completion}");
            assert_eq!(grade(Gsm8kMode::Text, gold, completion), text, "{gold} | {completion}");
        }
    }
}
