//! Ranges of settings, read from the interval at the end of their comments.

use serde_json::{Number, Value};
use std::fmt;

/// An interval of numbers, each end included (`[`, `]`) or excluded (`(`, `)`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
    /// Whether the smallest is excluded.
    pub above: bool,
    /// Whether the largest is excluded.
    pub below: bool,
}

impl Range {
    /// Splits a comment into text and interval, such as `Threads; 0 uses all cores. [0, 1024]`.
    pub(super) fn split(comment: &str) -> (&str, Option<Range>) {
        let read = |(text, interval): (&'_ str, &str)| Some((text.len(), Range::read(interval)?));
        let opens = comment.rfind(['[', '(']).filter(|_| comment.ends_with([']', ')']));
        match opens.and_then(|i| read(comment.split_at(i))) {
            Some((end, range)) => (comment[..end].trim_end(), Some(range)),
            None => (comment, None),
        }
    }

    fn read(text: &str) -> Option<Range> {
        let (above, below) = (text.starts_with('('), text.ends_with(')'));
        let (low, high) = text.get(1..text.len() - 1)?.split_once(", ")?;
        Some(Range { low: low.parse().ok()?, high: high.parse().ok()?, above, below })
    }

    pub fn holds(&self, x: f64) -> bool {
        let low = if self.above { x > self.low } else { x >= self.low };
        low && if self.below { x < self.high } else { x <= self.high }
    }

    /// A value in the range, for a fix: the default if it is in the range, else the end nearest to `got`.
    pub(super) fn remedy(&self, default: &Value, got: f64) -> Option<String> {
        let usual = default.as_number().filter(|n| n.as_f64().is_some_and(|d| self.holds(d)));
        let end = if got < self.low { (self.low, self.above) } else { (self.high, self.below) };
        usual.map(short).or_else(|| (!end.1).then(|| number(end.0)))
    }
}

/// The range as words that follow "a number".
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (number(self.low), number(self.high));
        match (self.above, self.below) {
            (false, true) if self.high == f64::INFINITY => write!(f, "of at least {low}"),
            (true, true) if self.high == f64::INFINITY => write!(f, "above {low}"),
            (false, false) => write!(f, "from {low} to {high}"),
            (true, false) => write!(f, "above {low}, up to {high}"),
            (false, true) => write!(f, "from {low} to below {high}"),
            (true, true) => write!(f, "above {low} and below {high}"),
        }
    }
}

fn number(x: f64) -> String {
    // The largest whole number of TOML rounds up in f64, and down again here.
    let whole = x.fract() == 0.0 && x.abs() <= i64::MAX as f64;
    if whole { (x as i64).to_string() } else { Number::from_f64(x).map_or_else(String::new, |n| short(&n)) }
}

/// A number in its shorter notation: decimal or scientific.
pub(super) fn short(n: &Number) -> String {
    let plain = n.to_string();
    let scientific = n.as_f64().map_or(plain.clone(), |f| format!("{f:e}"));
    if plain.len() > 6 && scientific.len() < plain.len() { scientific } else { plain }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_interval_ends_a_comment() {
        let (text, range) = Range::split("Nucleus sampling; 1 disables it. (0, 1]");
        assert_eq!(text, "Nucleus sampling; 1 disables it.");
        let range = range.unwrap();
        assert_eq!(
            [0.0, 1e-9, 1.0, 1.1, f64::NAN].map(|x| range.holds(x)),
            [false, true, true, false, false]
        );
        assert_eq!(range.to_string(), "above 0, up to 1");
        assert_eq!(Range::split("Half the square (OpenAI, TRL)"), ("Half the square (OpenAI, TRL)", None));
        assert_eq!(Range::split("Threads.").1, None);
        assert_eq!(Range::split("Reward. [0, inf)").1.unwrap().to_string(), "of at least 0");
        assert_eq!(Range::split("Seconds. (0, inf)").1.unwrap().to_string(), "above 0");
        assert_eq!(
            Range::split("Seed. [0, 9223372036854775807]").1.unwrap().to_string(),
            "from 0 to 9223372036854775807"
        );
    }

    #[test]
    fn the_suggested_value_is_within_the_range() {
        let range = Range::split("x [1, 1024]").1.unwrap();
        assert_eq!(range.remedy(&json!(8), 1e18).as_deref(), Some("8"));
        assert_eq!(range.remedy(&json!(0), 1e18).as_deref(), Some("1024"));
        assert_eq!(range.remedy(&Value::Null, -3.0).as_deref(), Some("1"));
        assert_eq!(Range::split("x (0, 1)").1.unwrap().remedy(&Value::Null, -3.0), None);
    }
}
