//! Contamination of test rows by training rows: the same prompt, or 13 consecutive words of it.
//!
//! Prompts are compared without case and white space. Sequences of words (letters and digits) are searched in all texts of a
//! training row. A sequence that many test rows share belongs to a template and is ignored.

use std::collections::HashMap;
use std::ops::Range;

use ferrl_engine::Result;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::{Dataset, Row, portions, strings};

/// Number of consecutive words of an overlap, as for GPT-3.
pub const WORDS: usize = 13;

/// Maximum number of test rows with a word sequence; more make it a template's.
const TEMPLATE: u32 = 10;

/// What is compared of a test row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowMarks {
    exact: Vec<u64>,
    runs: Vec<u64>,
}

impl RowMarks {
    /// Of a prompt as the model reads it and as its row has it, with runs of that many words.
    pub fn of(prompts: &[String], words: usize) -> Self {
        let runs = prompts.iter().flat_map(|p| runs(p, words)).collect();
        RowMarks { exact: prompts.iter().filter_map(|p| exact(p)).collect(), runs }
    }
}

/// How a training row meets a test row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// The number of the test row among those of the index.
    pub row: usize,
    /// Whether the prompts are the same, and not only a run of words.
    pub exact: bool,
}

/// Test rows, to be met.
#[derive(Debug, Default)]
pub struct OverlapIndex {
    exact: HashMap<u64, u32>,
    runs: HashMap<u64, u32>,
    words: usize,
}

impl OverlapIndex {
    /// Of the marks of all test rows, in their order; runs have that many words.
    pub fn new<'a>(rows: impl IntoIterator<Item = &'a RowMarks>, words: usize) -> Self {
        let (mut exact, mut runs) = (Counted::default(), Counted::default());
        let mut count = 0u32;
        for marks in rows {
            marks.exact.iter().for_each(|mark| exact.add(*mark, count));
            marks.runs.iter().for_each(|mark| runs.add(*mark, count));
            count += 1;
        }
        let most = TEMPLATE.min((count / 2).max(1));
        OverlapIndex { exact: exact.rare(most), runs: runs.rare(most), words }
    }

    /// Whether a training row meets a test row: by a prompt, or by a run of words in any of its texts.
    pub fn meets(&self, prompts: &[String], texts: &[String]) -> Option<Meeting> {
        let found = |row: &u32, exact: bool| Meeting { row: *row as usize, exact };
        let same = prompts.iter().filter_map(|p| self.exact.get(&exact(p)?)).min();
        let runs = || texts.iter().flat_map(|text| runs(text, self.words));
        same.map(|row| found(row, true))
            .or_else(|| runs().filter_map(|run| self.runs.get(&run)).min().map(|row| found(row, false)))
    }
}

/// Marks with the first row, the last row and the number of rows that have each.
#[derive(Default)]
struct Counted(HashMap<u64, (u32, u32, u32)>);

impl Counted {
    fn add(&mut self, mark: u64, row: u32) {
        let entry = self.0.entry(mark).or_insert((row, row, 1));
        if entry.1 != row {
            (entry.1, entry.2) = (row, entry.2 + 1);
        }
    }

    /// The marks found in at most `most` rows, each with the first row that has it.
    fn rare(self, most: u32) -> HashMap<u64, u32> {
        let rare = self.0.into_iter().filter(|(_, (.., n))| *n <= most);
        rare.map(|(mark, (row, ..))| (mark, row)).collect()
    }
}

/// A prompt without differences of case and white space; none where it is empty.
fn exact(prompt: &str) -> Option<u64> {
    let mut hash = Xxh3::new();
    for word in prompt.split_whitespace() {
        hash.update(word.to_lowercase().as_bytes());
        hash.update(&[0]);
    }
    (!prompt.trim().is_empty()).then(|| hash.digest())
}

/// Every run of `n` words of a text.
fn runs(text: &str, n: usize) -> Vec<u64> {
    let words = text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty());
    let words: Vec<u64> = words.map(|w| xxhash_rust::xxh3::xxh3_64(w.to_lowercase().as_bytes())).collect();
    let run = |window: &[u64]| {
        let mut hash = Xxh3::new();
        window.iter().for_each(|w| hash.update(&w.to_le_bytes()));
        hash.digest()
    };
    words.windows(n.max(1)).map(run).collect()
}

/// The prompts of a row: those of the usual names, else all its texts.
pub fn prompts(row: &Row) -> Vec<String> {
    let named = named_prompts(row);
    if !named.is_empty() {
        return named;
    }
    let whole = ["messages", "conversations", "text"].iter().find_map(|name| there(row, name));
    vec![whole.unwrap_or_else(|| said(Value::Object(row.clone())))]
}

/// The columns of a row that go by a usual name of a prompt, with and without what a template adds.
pub(crate) fn named_prompts(row: &Row) -> Vec<String> {
    ["prompt", "question", "Question", "problem", "query"]
        .iter()
        .filter_map(|name| there(row, name))
        .collect()
}

fn there(row: &Row, name: &str) -> Option<String> {
    row.get(name).filter(|v| !v.is_null()).map(|v| said(v.clone()))
}

/// The texts of a prompt, without role names.
pub(crate) fn said(value: Value) -> String {
    match value {
        Value::Array(turns) => {
            let content = |turn: Value| match turn {
                Value::Object(mut turn) => {
                    turn.remove("content").or_else(|| turn.remove("value")).unwrap_or(Value::Object(turn))
                }
                other => other,
            };
            turns.into_iter().flat_map(|t| strings(content(t))).collect::<Vec<_>>().join("\n")
        }
        Value::Null => String::new(),
        other => strings(other).join("\n"),
    }
}

/// A training row and a test row that meet.
#[derive(Clone, Debug, PartialEq)]
pub struct OverlapPair {
    /// File and number of the training row.
    pub train: String,
    /// File and number of the test row.
    pub test: String,
    /// Whether the prompts are the same.
    pub exact: bool,
}

/// What two sets of rows share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlapReport {
    /// Training rows that meet a test row, with the first test row each meets.
    pub pairs: Vec<OverlapPair>,
    pub train_rows: usize,
    pub test_rows: usize,
    /// Test rows that are met.
    pub met: usize,
}

/// Compares all rows of two sets, with all cores.
pub fn between(train: &[Dataset], test: &[Dataset], words: usize) -> Result<OverlapReport> {
    let mut marks = Vec::new();
    let mut places = Vec::new();
    for dataset in test {
        let one = |i: usize| Ok((RowMarks::of(&prompts(&dataset.row(i)?), words), dataset.place(i)));
        let work = |range: Range<usize>| range.map(one).collect::<Result<Vec<_>>>();
        portions(dataset.len(), &work, &mut |part, _| {
            part.into_iter().for_each(|(m, place)| {
                marks.push(m);
                places.push(place);
            });
            Ok(true)
        })?;
    }
    let index = OverlapIndex::new(&marks, words);
    let mut report = OverlapReport { test_rows: marks.len(), ..Default::default() };
    let mut met = vec![false; marks.len()];
    for dataset in train {
        let one = |i: usize| -> Result<Option<(usize, Meeting)>> {
            let row = dataset.row(i)?;
            let own = prompts(&row);
            Ok(index.meets(&own, &strings(Value::Object(row))).map(|m| (i, m)))
        };
        let work = |range: Range<usize>| range.map(one).collect::<Result<Vec<_>>>();
        portions(dataset.len(), &work, &mut |part, _| {
            for (i, m) in part.into_iter().flatten() {
                met[m.row] = true;
                let pair =
                    OverlapPair { train: dataset.place(i), test: places[m.row].clone(), exact: m.exact };
                report.pairs.push(pair);
            }
            Ok(true)
        })?;
        report.train_rows += dataset.len();
    }
    report.met = met.iter().filter(|m| **m).count();
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str =
        "A farmer has seventeen sheep and three dogs, and every dog looks after five sheep at noon.";

    fn index(rows: &[&str]) -> OverlapIndex {
        let marks: Vec<RowMarks> = rows.iter().map(|r| RowMarks::of(&[r.to_string()], WORDS)).collect();
        OverlapIndex::new(&marks, WORDS)
    }

    fn meets(index: &OverlapIndex, prompt: &str, text: &str) -> Option<Meeting> {
        index.meets(&[prompt.to_string()], &[text.to_string()])
    }

    #[test]
    fn prompts_are_met_whatever_their_case_and_white_space() {
        let index = index(&["What is 2 + 3?", "What is 2 - 3?"]);
        assert_eq!(meets(&index, " what IS\n2 + 3?", ""), Some(Meeting { row: 0, exact: true }));
        assert_eq!(meets(&index, "What is 2 * 3?", "What is 2 * 3?"), None, "signs are not white space");
        assert_eq!(meets(&index, "", ""), None, "nothing is not the same as nothing");
    }

    #[test]
    fn thirteen_words_in_a_row_are_met_and_twelve_are_not() {
        let index = index(&[LONG, "something else"]);
        let words: Vec<&str> = LONG.split(' ').collect();
        let inside = |n: usize| format!("Think of it: {} Well?", words[2..2 + n].join(" ").to_uppercase());
        assert_eq!(meets(&index, "x", &inside(13)), Some(Meeting { row: 0, exact: false }));
        assert_eq!(meets(&index, "x", &inside(12)), None);
    }

    /// Was: every prompt with the same instructions met every other.
    #[test]
    fn what_all_test_rows_share_is_a_template() {
        let template =
            "Answer the question below with one number and explain every step of the way you took.";
        let rows: Vec<String> = (0..5).map(|i| format!("{template} Question {i}")).collect();
        let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
        assert_eq!(meets(&index(&rows), "x", &format!("{template} Another one")), None);
    }

    /// Was: the same question was not found where one side has a template's words around it.
    #[test]
    fn a_question_is_met_with_and_without_its_template() {
        let test = serde_json::json!({"prompt": "Why is the sky blue?\nBe brief.", "question": "Why is the sky blue?"});
        let marks = [RowMarks::of(&prompts(test.as_object().expect("an object")), WORDS)];
        let train = serde_json::json!({"id": 1, "question": "why is the sky  blue?", "answer": "air"});
        let own = prompts(train.as_object().expect("an object"));
        assert_eq!(own, ["why is the sky  blue?"]);
        assert!(OverlapIndex::new(&marks, WORDS).meets(&own, &[]).is_some_and(|m| m.exact));
    }

    #[test]
    fn the_prompt_of_a_row_is_found_under_its_usual_names() {
        let text = |row: Value| prompts(row.as_object().expect("an object"));
        assert_eq!(text(serde_json::json!({"messages": [{"role": "user", "content": "hello"}]})), ["hello"]);
        assert_eq!(text(serde_json::json!({"a": "x", "b": "y"})), ["x\ny"]);
    }
}
