//! The final number of a text, as in GSM8K: the number after `####`, else the last one.

use super::take::TAG;
use super::{Entry, Sample, Score, Verifier, last_answer, required};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub const ENTRY: Entry = Entry {
    name: "numeric",
    about: "1 if the final number equals the column's (GSM8K), otherwise 0",
    schema: || schema_for!(Numeric),
    build: |given| Ok(Box::new(given.read::<Numeric>()?)),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum TakeNumber {
    Auto,
    Hashes,
    Last,
    Answer,
}

with_defaults! {
/// The verifier.
pub struct Numeric {
    /// Column with a number, or a text with the number after ####.
    column: String = "answer".into(),
    /// Where the answer is: auto (after ####, else the last number), hashes, last, answer (last `<answer>` tag).
    take: TakeNumber = TakeNumber::Auto,
    /// Absolute tolerance; 0 compares decimals exactly. [0, inf)
    tolerance: f64 = 0.0,
}
}

/// The last number of a text without thousands separators, leading and trailing zeros: `$1,250.50` is `1250.5`.
pub fn last_number(text: &str) -> Option<String> {
    numbers(text).pop()
}

/// The first number after the last `####`.
pub fn after_hashes(text: &str) -> Option<String> {
    let (_, tail) = text.rsplit_once("####")?;
    let line = tail.trim_start().lines().next()?;
    numbers(line).into_iter().next()
}

/// All numbers in about the last 4,000 characters.
fn numbers(text: &str) -> Vec<String> {
    let mut from = text.len().saturating_sub(4_000);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let bytes = &text.as_bytes()[from..];
    let digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    let mut found = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        if !(digit(i) || bytes[i] == b'.' && digit(i + 1)) {
            i += 1;
            continue;
        }
        let negative = is_negative(bytes, i);
        let mut whole = String::new();
        while digit(i) {
            whole.push(bytes[i] as char);
            i += 1;
            // A comma belongs to the number when exactly three digits follow it.
            let thousands =
                |i: usize| bytes.get(i) == Some(&b',') && (1..4).all(|k| digit(i + k)) && !digit(i + 4);
            if !digit(i) && thousands(i) {
                i += 1;
            }
        }
        let mut part = String::new();
        if bytes.get(i) == Some(&b'.') && digit(i + 1) {
            i += 1;
            while digit(i) {
                part.push(bytes[i] as char);
                i += 1;
            }
        }
        found.push(normal(negative, &whole, &part));
    }
    found
}

/// Whether the `-` before the number at `start` is a sign and not an operator.
fn is_negative(bytes: &[u8], start: usize) -> bool {
    let mut i = start;
    let mut before = || {
        i = i.checked_sub(1)?;
        Some(bytes[i])
    };
    let mut byte = before();
    if byte == Some(b'$') {
        byte = before();
    }
    byte == Some(b'-') && !before().is_some_and(|b| b.is_ascii_alphanumeric() || b == b')')
}

fn normal(negative: bool, whole: &str, part: &str) -> String {
    let whole = whole.trim_start_matches('0');
    let part = part.trim_end_matches('0');
    let mut text = String::new();
    if negative && !(whole.is_empty() && part.is_empty()) {
        text.push('-');
    }
    text.push_str(if whole.is_empty() { "0" } else { whole });
    if !part.is_empty() {
        text.push('.');
        text.push_str(part);
    }
    text
}

impl Verifier for Numeric {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, text: &str) -> Option<String> {
        match self.take {
            TakeNumber::Auto => after_hashes(text).or_else(|| last_number(text)),
            TakeNumber::Hashes => after_hashes(text),
            TakeNumber::Last => last_number(text),
            TakeNumber::Answer => last_answer(text).and_then(last_number),
        }
    }
    fn reads(&self) -> &'static [&'static str] {
        match self.take {
            TakeNumber::Answer => TAG,
            _ => &[],
        }
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let value = required(sample, &self.column, ENTRY.name)?;
        let expected = match value {
            Value::Number(number) => last_number(&number.to_string()),
            Value::String(text) => after_hashes(text).or_else(|| last_number(text)),
            _ => None,
        };
        let expected = expected.ok_or_else(|| {
            sample.error(Error::data(format!("column {:?} holds no number: {value}", self.column)))
        })?;
        let answer = self.extract(sample.completion);
        let found = Some(answer.is_some());
        let right = answer.is_some_and(|answer| {
            answer == expected
                || self.tolerance > 0.0
                    && match (answer.parse::<f64>(), expected.parse::<f64>()) {
                        (Ok(a), Ok(b)) => (a - b).abs() <= self.tolerance,
                        _ => false,
                    }
        });
        Ok(Score { found, ..Score::single("correct", f64::from(u8::from(right))) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_without_currency_and_separators() {
        for (text, want) in [
            ("the total is $1,250.50.", Some("1250.5")),
            ("5 - 3", Some("3")),
            ("x = -3", Some("-3")),
            ("-$4", Some("-4")),
            ("10-3", Some("3")),
            ("1,2,3", Some("3")),
            ("1,234,567", Some("1234567")),
            ("12,3456", Some("3456")),
            ("007.10", Some("7.1")),
            ("-0.0", Some("0")),
            (".5", Some("0.5")),
            ("42%", Some("42")),
            ("٣ and ４", None),
            ("none", None),
            ("", None),
        ] {
            assert_eq!(last_number(text).as_deref(), want, "{text}");
        }
        assert_eq!(after_hashes("a 1 #### 3\n#### 4 apples 5\n9").as_deref(), Some("4"));
        assert_eq!(after_hashes("####\n"), None);
        assert_eq!(last_number(&"é9".repeat(100_000)).as_deref(), Some("9"));
    }
}
