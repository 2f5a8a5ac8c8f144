//! A sum worked out term by term: of `7+5-3:` the right answer is the lines `7+5=12` and `12-3=9`. Each line is a step
//! that is right or wrong by itself.

use super::{Entry, Sample, Score, Verifier, required, schema_for};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::ops::Range;

pub const ENTRY: Entry = Entry {
    name: "chain",
    about: "1 if every line of a sum worked out term by term is right, otherwise 0",
    schema: || schema_for!(ChainVerifier),
    build: |given| Ok(Box::new(given.read::<ChainVerifier>()?)),
};

/// A sum of terms, worked out one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// Terms in order; those after the first may be negative.
    pub terms: Vec<i64>,
}

impl Chain {
    /// Reads the list of a column.
    pub fn read(value: &Value) -> Option<Chain> {
        let terms: Option<Vec<i64>> = value.as_array()?.iter().map(Value::as_i64).collect();
        terms.filter(|t| t.len() > 1).map(|terms| Chain { terms })
    }

    pub fn prompt(&self) -> String {
        let rest: String = self.terms[1..].iter().map(|t| format!("{t:+}")).collect();
        format!("{}{rest}:", self.terms[0])
    }

    pub fn len(&self) -> usize {
        self.terms.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.terms.len() < 2
    }

    /// The lines of an answer; with `slip` the result of step `slip.0` is off by `slip.1`, and later steps continue from it.
    pub fn lines(&self, slip: Option<(usize, i64)>) -> Vec<String> {
        let mut sum = self.terms[0];
        let line = |(i, term): (usize, &i64)| {
            let before = sum;
            sum += term + slip.filter(|s| s.0 == i).map_or(0, |s| s.1);
            format!("{before}{term:+}={sum}\n")
        };
        self.terms[1..].iter().enumerate().map(line).collect()
    }

    /// The first wrong line, as a range of bytes; missing lines are wrong at the end, additional ones after the last
    /// line.
    pub fn first_wrong(&self, answer: &str) -> Option<Range<usize>> {
        let mut at = 0;
        for want in self.lines(None) {
            if answer[at..].starts_with(&want) {
                at += want.len();
                continue;
            }
            // The last line may lack its end.
            if &answer[at..] == want.trim_end() && at + want.len() > answer.len() {
                at = answer.len();
                continue;
            }
            let end = answer[at..].find('\n').map_or(answer.len(), |n| at + n + 1);
            return Some(at..end);
        }
        (at < answer.len()).then_some(at..answer.len())
    }
}

with_defaults! {
struct ChainVerifier {
    /// Column with the numbers to add up, as a list.
    column: String = "terms".into(),
    /// Partial reward if all lines but the last are right; proportionally less for fewer right lines. [0, inf)
    partial: f64 = 0.0,
}
}

impl ChainVerifier {
    fn chain(&self, sample: &Sample<'_>) -> Result<Chain> {
        let value = required(sample, &self.column, ENTRY.name)?;
        Chain::read(value).ok_or_else(|| {
            sample.error(Error::data(format!(
                "column {:?} must be a list of whole numbers, got {value}",
                self.column
            )))
        })
    }
}

impl Verifier for ChainVerifier {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let chain = self.chain(sample)?;
        let wrong = chain.first_wrong(sample.completion);
        let right_lines =
            wrong.as_ref().map_or(chain.len(), |w| sample.completion[..w.start].lines().count());
        let correct = f64::from(u8::from(wrong.is_none()));
        // Additional lines after the right ones count like a wrong last line.
        let share = (right_lines.min(chain.len() - 1)) as f64 / (chain.len() - 1).max(1) as f64;
        let reward = if wrong.is_none() { 1.0 } else { self.partial * share };
        let components = vec![("correct".into(), correct)];
        let why = wrong.map(|wrong| match sample.completion.get(wrong).map(str::trim) {
            Some(line) if !line.is_empty() => format!("the line {line:?} is wrong"),
            _ => "lines are missing".to_string(),
        });
        Ok(Score { reward, components, score: Some(correct), why, ..Default::default() })
    }
    fn scores_steps(&self) -> bool {
        true
    }
    fn wrong_step(&self, sample: &Sample<'_>) -> Result<Option<Range<usize>>> {
        Ok(self.chain(sample)?.first_wrong(sample.completion))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_wrong_line_is_found() {
        let chain = Chain { terms: vec![7, 5, -3] };
        assert_eq!(chain.prompt(), "7+5-3:");
        assert_eq!(chain.lines(None).concat(), "7+5=12\n12-3=9\n");
        assert_eq!(chain.lines(Some((0, 2))).concat(), "7+5=14\n14-3=11\n");
        let wrong = |answer: &str| chain.first_wrong(answer).map(|r| answer[r].to_string());
        assert_eq!(wrong("7+5=12\n12-3=9\n"), None);
        assert_eq!(wrong("7+5=12\n12-3=9"), None);
        assert_eq!(wrong("7+5=12\n12-3=8\n"), Some("12-3=8\n".into()));
        assert_eq!(wrong("7+5=14\n14-3=11\n"), Some("7+5=14\n".into()));
        assert_eq!(wrong("7+5=12\n"), Some("".into()), "something is missing");
        assert_eq!(wrong("7+5=12\n12-3=9\n9"), Some("9".into()), "nothing may follow");
        assert_eq!(wrong("7+5=12\n12-3=91"), Some("12-3=91".into()));
        assert_eq!(wrong(""), Some("".into()));
    }
}
