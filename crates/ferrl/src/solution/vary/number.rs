//! Numbers as texts have them: how they are written, and which of a question may vary.

use crate::tool::number::{ExactNumber, evaluate};
use crate::verify::math::Rational;
use regex::Regex;
use std::sync::LazyLock;

/// A number in a text: digits with commas and a point.
pub(super) static NUMBER: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\d[\d,]*\d(?:\.\d+)?|\d(?:\.\d+)?|\.\d+").expect("a regular expression"));

/// Digits after the point of a number that people write.
const DIGITS: usize = 4;

/// Numbers of units and idioms, which are no quantities of the story.
const UNITS: [i64; 13] = [0, 1, 7, 12, 24, 30, 31, 52, 60, 100, 360, 365, 1000];

/// Words that say a number.
const WORDS: [(i64, &[&str]); 16] = [
    (2, &["two", "twice", "half", "double", "both", "pair", "couple", "second"]),
    (3, &["three", "third", "thrice", "triple"]),
    (4, &["four", "quarter"]),
    (5, &["five", "fifth"]),
    (6, &["six"]),
    (7, &["seven", "week"]),
    (8, &["eight"]),
    (9, &["nine"]),
    (10, &["ten"]),
    (11, &["eleven"]),
    (12, &["twelve", "dozen", "year"]),
    (15, &["fifteen"]),
    (20, &["twenty"]),
    (30, &["thirty"]),
    (40, &["forty"]),
    (50, &["fifty"]),
];

/// A number with the way it was written.
#[derive(Clone, Debug)]
pub(super) struct WrittenNumber {
    pub value: Rational,
    text: String,
}

impl WrittenNumber {
    pub fn read(text: &str) -> Option<Self> {
        let digits: String = text.chars().filter(|c| *c != ',').collect();
        let value = evaluate(&digits).ok()?.exact_value()?;
        Some(WrittenNumber { value, text: text.into() })
    }

    /// Another number written in the same way; none where it has no end or too many digits.
    pub fn like(&self, value: &Rational) -> Option<String> {
        if *value == self.value {
            return Some(self.text.clone());
        }
        let text = ExactNumber::exact(value.clone()).text();
        let (whole, digits) = text.split_once('.').unwrap_or((&text, ""));
        if text.contains('/') || digits.len() > DIGITS {
            return None;
        }
        let old = self.text.split_once('.').map_or("", |(_, digits)| digits);
        let whole = match whole {
            "0" if self.text.starts_with('.') && !digits.is_empty() => String::new(),
            _ if self.text.contains(',') => with_commas(whole),
            _ => whole.into(),
        };
        // Cents have two digits.
        let digits = match (old.len(), digits.len()) {
            (2, 1) => format!("{digits}0"),
            (2, 0) if old == "00" => "00".into(),
            _ => digits.into(),
        };
        Some(if digits.is_empty() { whole } else { format!("{whole}.{digits}") })
    }
}

fn with_commas(whole: &str) -> String {
    let mut text = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// All numbers of a text.
pub(super) fn all(text: &str) -> impl Iterator<Item = Rational> {
    NUMBER.find_iter(text).filter_map(|m| WrittenNumber::read(m.as_str())).map(|n| n.value)
}

/// Numbers that need no explanation.
pub(super) fn is_plain(value: &Rational) -> bool {
    value.to_i64().is_some_and(|v| matches!(v, 0 | 1 | 100))
}

/// Whether a number of this value may be a unit's, or one that the question says in words.
pub(super) fn is_constant(value: &Rational, question: &str) -> bool {
    let Some(value) = value.to_i64() else { return false };
    let words = WORDS.iter().filter(|(number, _)| *number == value).flat_map(|(_, words)| words.iter());
    UNITS.contains(&value) || words.into_iter().any(|word| has_word(question, word))
}

/// Whether a text has a word that begins like this.
fn has_word(text: &str, start: &str) -> bool {
    let text = text.to_lowercase();
    text.split(|c: char| !c.is_alphanumeric()).any(|word| word.starts_with(start))
}

/// The numbers of a question that may vary, and whether each is a percentage. A number that occurs twice does not vary, nor does
/// part of a fraction, a time, a range, a year or an ordinal.
pub(super) fn varying(question: &str) -> Vec<(WrittenNumber, bool)> {
    let counted: Vec<Rational> = all(question).collect();
    let may = |m: &regex::Match<'_>| {
        let number = WrittenNumber::read(m.as_str())?;
        let before = question[..m.start()].chars().next_back();
        let (after, rest) = (&question[m.end()..], question[m.end()..].trim_start());
        let mut next = after.chars();
        let (first, second) = (next.next(), next.next());
        let joined = matches!(before, Some('/' | ':' | '-' | '^'))
            || matches!(first, Some('/' | ':' | '^'))
            || (first == Some('-') && second.is_some_and(|c| c.is_ascii_digit()))
            || first.is_some_and(char::is_alphabetic);
        let year = number.value.to_i64().is_some_and(|v| (1900..=2100).contains(&v));
        let once = counted.iter().filter(|v| **v == number.value).count() == 1;
        let percent = first == Some('%') || rest.starts_with("percent");
        (once && !joined && !year && !is_constant(&number.value, question)).then_some((number, percent))
    };
    NUMBER.find_iter(question).filter_map(|m| may(&m)).collect()
}
