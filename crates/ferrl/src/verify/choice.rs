//! Multiple choice: the letter or the text of the option that a completion chooses.
//!
//! The choice is the first found of: the last `\boxed{…}`, the last `<answer>` tag, the text after "the answer is" and similar
//! phrases, the text after `####`, a completion that consists of a choice, the last marked letter (`(B)`, `**B**`, `B)`), the only
//! option whose text occurs in the last sentence. Two different choices at once are no answer.

use super::{Entry, Sample, Score, Verifier, last_answer, last_boxed, required, schema_for};
use ferrl_engine::{Error, Result};
use regex::Regex;
use serde_json::Value;
use std::sync::LazyLock;

pub const ENTRY: Entry = Entry {
    name: "choice",
    about: "1 if the completion chooses the right option (multiple choice), otherwise 0",
    schema: || schema_for!(Choice),
    build: |given| Ok(Box::new(given.read::<Choice>()?)),
};

with_defaults! {
/// The verifier.
pub struct Choice {
    /// Column with the right option: its letter, its text, or its number from 0.
    column: String = "answer".into(),
    /// Column with the options: a list of texts, {"text": [...], "label": [...]}, or {"A": text, ...}; "options" is read too;
    /// optional.
    choices: String = "choices".into(),
}
}

/// The options of a row: letters with their texts, which are empty if unknown.
struct Listed {
    options: Vec<(char, String)>,
    /// The row's labels if they are not letters: some questions of ARC have 1, 2, 3, 4.
    labels: Vec<String>,
    known: bool,
}

impl Listed {
    fn letters() -> Listed {
        Listed { options: LETTERS.map(|c| (c, String::new())).collect(), labels: Vec::new(), known: false }
    }
}

/// Letters of an unknown number of options.
const LETTERS: std::ops::RangeInclusive<char> = 'A'..='J';

const ANNOUNCED: &str = r"(?i)(?:final answer|correct answer|right answer|best answer|answer|correct option|correct choice|right option|best option|option|choice|answer choice)\s*(?:\((?:letter|option)\))?\s*(?:is|was|would be|should be|:|=|：)+\s*(?:therefore|thus|clearly)?,?\s*:?\s*(?:option|choice|letter|answer)?\s*";
static ANNOUNCEMENT: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(ANNOUNCED).ok());
static MARKED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"\(([A-Ja-j])\)|\*\*\(?([A-J])[).:]?\)?\*\*|(?:^|\s)([A-J])\)").ok());

impl Choice {
    fn listed(&self, sample: &Sample<'_>) -> Result<Listed> {
        let other = if self.choices == "choices" { sample.column("options") } else { None };
        let Some(value) = sample.column(&self.choices).or(other) else {
            return Ok(Listed::letters());
        };
        let options = read_options(value).filter(|options| !options.is_empty()).ok_or_else(|| {
            let what =
                format!("column {:?} must hold the options of the question, got {value}", self.choices);
            sample.error(Error::data(what)).fix("a list of texts, such as [\"Paris\", \"Rome\"]")
        })?;
        let labels = value.get("label").and_then(Value::as_array).into_iter().flatten();
        let labels: Vec<String> = labels.filter_map(|l| l.as_str().map(|l| l.trim().to_string())).collect();
        Ok(Listed { options, labels, known: true })
    }

    fn right(&self, sample: &Sample<'_>, listed: &Listed) -> Result<char> {
        let value = required(sample, &self.column, ENTRY.name)?;
        let letter = match value {
            Value::Number(number) => {
                let at = number.as_u64().and_then(|n| usize::try_from(n).ok());
                at.and_then(|at| listed.options.get(at)).map(|(letter, _)| *letter)
            }
            Value::String(text) => listed.one(text),
            _ => None,
        };
        letter.ok_or_else(|| {
            let what = format!("column {:?} must name the right option, got {value}", self.column);
            sample.error(Error::data(what)).fix("its letter, its number from 0, or its text")
        })
    }
}

/// A list of texts, texts with labels, or an object from letters to texts.
fn read_options(value: &Value) -> Option<Vec<(char, String)>> {
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(flag) => Some(flag.to_string()),
        _ => None,
    };
    let letters = ('A'..='Z').chain('a'..='z');
    match value {
        Value::Array(list) => letters.zip(list).map(|(letter, v)| Some((letter, text(v)?))).collect(),
        Value::Object(fields) => match (fields.get("text"), fields.get("label")) {
            // ARC labels some of its questions 1, 2, 3, 4.
            (Some(Value::Array(texts)), Some(Value::Array(labels))) if texts.len() == labels.len() => {
                let label = |v: &Value| v.as_str().and_then(|l| l.trim().chars().next());
                let letter = |(at, v): (usize, &Value)| {
                    label(v).filter(char::is_ascii_alphabetic).or(('A'..='Z').nth(at))
                };
                let letters = labels.iter().enumerate().map(letter);
                letters.zip(texts).map(|(letter, v)| Some((letter?, text(v)?))).collect()
            }
            _ => fields.iter().map(|(key, v)| Some((single(key)?, text(v)?))).collect(),
        },
        _ => None,
    }
}

/// A letter that stands alone.
fn single(text: &str) -> Option<char> {
    let mut chars = text.trim().chars();
    chars.next().filter(|c| c.is_ascii_alphabetic() && chars.next().is_none())
}

/// A text normalised for comparison: words and numbers in lower case.
fn plain(text: &str) -> String {
    let words: String =
        text.chars().map(|c| if c.is_alphanumeric() || "+-/.^=<>".contains(c) { c } else { ' ' }).collect();
    let words = words.to_lowercase();
    let words = words.split_whitespace().map(|w| w.trim_matches('.')).filter(|w| !w.is_empty());
    words.collect::<Vec<_>>().join(" ")
}

impl Listed {
    fn letter(&self, letter: char) -> Option<char> {
        let exact = self.options.iter().find(|(l, _)| *l == letter);
        let found = exact.or_else(|| self.options.iter().find(|(l, _)| l.eq_ignore_ascii_case(&letter)));
        found.map(|(letter, _)| *letter)
    }

    /// The option that a short text names: `B`, `(B)`, `B. Paris`, `Paris`.
    fn one(&self, text: &str) -> Option<char> {
        let text = undressed(text);
        if let Some(letter) = single(&text) {
            return self.letter(letter);
        }
        let label = self.labels.iter().position(|label| *label == text);
        if let Some((letter, _)) = label.and_then(|at| self.options.get(at)) {
            return Some(*letter);
        }
        if let Some(letter) = self.by_text(&text) {
            return Some(letter);
        }
        // A letter, a mark and an option's text: with the text of another option it is no choice.
        let (letter, rest) = leading(&text)?;
        let others = MARKED.as_ref().is_some_and(|p| p.is_match(rest));
        let joined = ["and ", "or ", "& ", "/ "].iter().any(|word| rest.trim_start().starts_with(word));
        let comma = rest.trim_start().strip_prefix(',').and_then(|r| single(r.trim())).is_some();
        if others || joined || comma { None } else { self.letter(letter) }
    }

    fn by_text(&self, text: &str) -> Option<char> {
        let text = plain(text);
        let mut same = self.options.iter().filter(|(_, option)| !text.is_empty() && plain(option) == text);
        same.next().filter(|_| same.next().is_none()).map(|(letter, _)| *letter)
    }

    /// The only option whose text occurs in a sentence.
    fn mentioned(&self, sentence: &str) -> Option<char> {
        let sentence = format!(" {} ", plain(sentence));
        let stands = |option: &str| {
            let option = plain(option);
            !option.is_empty() && sentence.contains(&format!(" {option} "))
        };
        let there: Vec<&(char, String)> = self.options.iter().filter(|(_, option)| stands(option)).collect();
        // "12" occurs in "12 hours" too: the longest counts if all others are parts of it.
        let longest = there.iter().max_by_key(|(_, option)| plain(option).len())?;
        let whole = plain(&longest.1);
        there.iter().all(|(_, option)| whole.contains(&plain(option))).then_some(longest.0)
    }
}

/// A text without the LaTeX, markdown, quotes and brackets around it.
fn undressed(text: &str) -> String {
    let mut text = text.trim().to_string();
    for mark in
        ["\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\boxed{", "**", "$", "`", "\"", "\\(", "\\)"]
    {
        text = text.replace(mark, if mark.ends_with('{') { "{" } else { "" });
    }
    let text = text.replace(['{', '}'], "");
    let text = text.trim().trim_end_matches(['.', ',', ';', '!', ':']).trim();
    let lead = ["option ", "choice ", "Option ", "Choice ", "answer ", "Answer "];
    let text = lead.iter().find_map(|lead| text.strip_prefix(lead)).unwrap_or(text).trim();
    let inner = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')).filter(|t| !t.contains(['(', ')']));
    inner.unwrap_or(text).trim().to_string()
}

/// The option's letter at the start of a text, and the rest: `(B) Paris`, `B. Paris`, `B: Paris`, `B`.
fn leading(text: &str) -> Option<(char, &str)> {
    let bracket = text.starts_with('(');
    let body = text.trim_start_matches('(');
    let letter = body.chars().next().filter(char::is_ascii_alphabetic)?;
    let rest = &body[1..];
    match rest.chars().next() {
        None => Some((letter, rest)),
        Some(')') => Some((letter, &rest[1..])),
        Some('.' | ':') if !bracket && letter.is_ascii_uppercase() => Some((letter, &rest[1..])),
        Some(c) if !bracket && letter.is_ascii_uppercase() && (c.is_whitespace() || ",-–—".contains(c)) =>
        {
            // "A train leaves" is a sentence; "B because it is larger" is a choice.
            let word =
                rest.trim_start_matches([' ', ',', '-', '–', '—']).split_whitespace().next().unwrap_or("");
            let reason = ["because", "since", "as", "is", "and", "or", "&", ""].contains(&word);
            (letter != 'A' && letter != 'I' || reason || ",-–—\n".contains(c)).then_some((letter, rest))
        }
        _ => None,
    }
}

/// The last sentence or line with words.
fn last_sentence(text: &str) -> &str {
    let line = text.trim().lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default().trim();
    let body = line.trim_end_matches(['.', '!', ' ']);
    body.rfind(". ").map_or(body, |at| &body[at + 2..])
}

/// Texts that may contain the choice, the most reliable first.
fn places(completion: &str) -> Vec<&str> {
    let text = match completion.rsplit_once("</think>") {
        Some((_, rest)) if !rest.trim().is_empty() => rest,
        _ => completion,
    };
    let mut places: Vec<&str> = last_boxed(text).into_iter().chain(last_answer(text)).collect();
    if let Some(last) = ANNOUNCEMENT.as_ref().and_then(|p| p.find_iter(text).last()) {
        let rest = &text[last.end()..];
        let line = rest.trim_start().lines().next().unwrap_or_default();
        let end = line.find(". ").filter(|at| *at > 1).unwrap_or(line.len());
        places.extend([&line[..end], line]);
    }
    if let Some((_, behind)) = text.rsplit_once("####") {
        places.push(behind.trim().lines().next().unwrap_or_default());
    }
    places
}

fn chosen(completion: &str, listed: &Listed) -> Option<char> {
    // Only the last 16 KiB are searched for the answer.
    let mut from = completion.len().saturating_sub(16 << 10);
    while !completion.is_char_boundary(from) {
        from += 1;
    }
    let text = &completion[from..];
    if let Some(found) = places(text).into_iter().find_map(|place| listed.one(place)) {
        return Some(found);
    }
    let trimmed = text.trim();
    if let Some(found) = listed.one(trimmed).filter(|_| trimmed.len() < 400) {
        return Some(found);
    }
    let marked = MARKED.as_ref()?.captures_iter(last_sentence(text)).last();
    let marked =
        marked.and_then(|m| m.iter().skip(1).flatten().next().and_then(|g| g.as_str().chars().next()));
    if let Some(found) = marked.and_then(|letter| listed.letter(letter)) {
        return Some(found);
    }
    listed.mentioned(last_sentence(text)).filter(|_| listed.known)
}

impl Verifier for Choice {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        chosen(completion, &Listed::letters()).map(String::from)
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let listed = self.listed(sample)?;
        let right = self.right(sample, &listed)?;
        let answer = chosen(sample.completion, &listed);
        let found = Some(answer.is_some());
        let extracted = Some(answer.map_or(Value::Null, |letter| letter.to_string().into()));
        let correct = f64::from(u8::from(answer == Some(right)));
        Ok(Score { found, extracted, ..Score::single("correct", correct) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn choose(row: Value, completion: &str) -> Option<char> {
        let choice = Choice { column: "answer".into(), choices: "choices".into() };
        let columns = row.as_object().expect("an object").into();
        let sample = Sample { completion, columns, ..Default::default() };
        chosen(completion, &choice.listed(&sample).expect("options"))
    }

    #[test]
    fn choices_are_found_in_many_phrasings() {
        let row = json!({"choices": ["Paris", "London", "New York", "York"], "answer": "B"});
        for (completion, want) in [
            ("B", Some('B')),
            ("b", Some('B')),
            ("(B)", Some('B')),
            ("B.", Some('B')),
            ("B) London", Some('B')),
            ("B. London", Some('B')),
            ("The answer is B.", Some('B')),
            ("The answer is (B).", Some('B')),
            ("The correct answer is **B**.", Some('B')),
            ("**Answer: B**", Some('B')),
            ("Answer: (b)", Some('B')),
            ("So the final answer is option B because it rains there.", Some('B')),
            ("I think it is A. No: the answer is $\\boxed{\\text{B}}$.", Some('B')),
            ("\\boxed{B. London}", Some('B')),
            ("\\boxed{London}", Some('B')),
            ("<think>A or C?</think><answer>B</answer>", Some('B')),
            ("<answer>london</answer>", Some('B')),
            ("#### B", Some('B')),
            ("London", Some('B')),
            ("It must be London.", Some('B')),
            ("After A and C are ruled out, only (B) is left.", Some('B')),
            ("The capital of France is in Europe.\nAnswer: C) New York", Some('C')),
            ("The best option is New York.", Some('C')),
            ("It is New York.", Some('C')),
            ("The answer is A or B.", None),
            ("<answer>A, B</answer>", None),
            ("Paris or London, who knows", None),
            ("I do not know.", None),
            ("A city is larger than a village.", None),
            ("E", None),
            ("", None),
        ] {
            assert_eq!(choose(row.clone(), completion), want, "{completion}");
        }
        assert_eq!(choose(json!({"answer": "E"}), "Answer: E"), Some('E'));
        assert_eq!(choose(json!({"answer": "A"}), "A train leaves at noon."), None);
    }

    #[test]
    fn the_right_option_may_be_a_letter_a_number_or_a_text() {
        let arc = json!({"text": ["red", "blue"], "label": ["1", "2"]});
        for (row, want) in [
            (json!({"choices": ["red", "blue"], "answer": "B"}), 1.0),
            (json!({"choices": ["red", "blue"], "answer": 1}), 1.0),
            (json!({"choices": ["red", "blue"], "answer": "blue"}), 1.0),
            (json!({"choices": ["red", "blue"], "answer": "A"}), 0.0),
            (json!({"options": {"A": "red", "B": "blue"}, "answer": "B"}), 1.0),
            (json!({"choices": arc, "answer": "B"}), 1.0),
            (json!({"choices": arc, "answer": "2"}), 1.0),
        ] {
            let choice = Choice { column: "answer".into(), choices: "choices".into() };
            let columns = row.as_object().expect("an object").into();
            let sample = Sample { completion: "The answer is blue.", columns, ..Default::default() };
            assert_eq!(choice.score(&sample).expect("a score").reward, want, "{row}");
        }
        let choice = Choice { column: "answer".into(), choices: "choices".into() };
        for row in [
            json!({"choices": [], "answer": "A"}),
            json!({"choices": ["x"], "answer": "B"}),
            json!({"answer": null}),
        ] {
            let columns = row.as_object().expect("an object").into();
            assert!(
                choice.score(&Sample { completion: "A", columns, ..Default::default() }).is_err(),
                "{row}"
            );
        }
    }
}
