//! F1 of words for question answering, as in SQuAD (Rajpurkar et al., 2016): the maximum over the expected answers.
//!
//! Texts are normalised: lower case, without ASCII punctuation and articles. An empty answer is right only if an expected one is
//! empty too: the question has no answer, as in SQuAD 2.0.

use super::take::TakeText;
use super::{Entry, Sample, Score, Verifier, required, schema_for};
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;

pub const ENTRY: Entry = Entry {
    name: "f1",
    about: "F1 of the answer's words with the best expected answer (SQuAD), from 0 to 1",
    schema: || schema_for!(F1),
    build: |given| Ok(Box::new(given.read::<F1>()?)),
};

with_defaults! {
/// The verifier.
pub struct F1 {
    /// Column with the expected text, a list of texts of which the best counts, or SQuAD's {"text": [...]}.
    column: String = "answer".into(),
    /// Where the answer is: auto (the last `<answer>` tag, else the whole completion), answer, last_line, whole.
    take: TakeText = TakeText::Auto,
}
}

/// A text by SQuAD's normalisation: lower case, without ASCII punctuation and articles, single spaces.
pub fn normal(text: &str) -> String {
    let kept: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let words = kept.split_whitespace().filter(|word| !matches!(*word, "a" | "an" | "the"));
    words.collect::<Vec<_>>().join(" ")
}

/// F1 of the words of two normalised texts.
pub fn overlap(answer: &str, expected: &str) -> f64 {
    let (answer, expected): (Vec<&str>, Vec<&str>) =
        (answer.split(' ').collect(), expected.split(' ').collect());
    if answer == [""] || expected == [""] {
        return f64::from(u8::from(answer == expected));
    }
    let mut free: HashMap<&str, usize> = HashMap::new();
    expected.iter().for_each(|word| *free.entry(word).or_default() += 1);
    let mut common = 0usize;
    for word in &answer {
        if let Some(left) = free.get_mut(word).filter(|left| **left > 0) {
            *left -= 1;
            common += 1;
        }
    }
    if common == 0 {
        return 0.0;
    }
    let (precision, recall) = (common as f64 / answer.len() as f64, common as f64 / expected.len() as f64);
    2.0 * precision * recall / (precision + recall)
}

/// The expected answers of a column; `None` if it has another type.
pub(super) fn golds(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Number(number) => Some(vec![number.to_string()]),
        Value::Bool(flag) => Some(vec![flag.to_string()]),
        // No expected answer: the question has none.
        Value::Array(any) if any.is_empty() => Some(vec![String::new()]),
        Value::Array(any) => any.iter().map(golds).collect::<Option<Vec<_>>>().map(|lists| lists.concat()),
        Value::Object(fields) => {
            ["text", "aliases", "value"].iter().find_map(|name| golds(fields.get(*name)?))
        }
        Value::Null => None,
    }
}

impl Verifier for F1 {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.take.from(completion).map(String::from)
    }
    fn reads(&self) -> &'static [&'static str] {
        self.take.reads()
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let value = required(sample, &self.column, ENTRY.name)?;
        let golds = golds(value).ok_or_else(|| {
            let what = format!("column {:?} must be a text or a list of texts, got {value}", self.column);
            sample.error(Error::data(what))
        })?;
        let taken = self.take.from(sample.completion);
        let answer = normal(taken.unwrap_or_default());
        let found = Some(taken.is_some_and(|text| !text.is_empty()));
        let (mut f1, mut exact) = (0.0f64, false);
        for gold in golds.iter().map(|gold| normal(gold)) {
            f1 = f1.max(overlap(&answer, &gold));
            exact |= answer == gold;
        }
        // A missing answer is not an empty answer.
        let (f1, exact) = if taken.is_none() { (0.0, false) } else { (f1, exact) };
        let components = vec![("f1".into(), f1), ("exact".into(), f64::from(u8::from(exact)))];
        let why = (f1 > 0.0 && f1 < 1.0)
            .then(|| format!("it shares some words with the expected answer, F1 {f1:.3}"));
        Ok(Score { reward: f1, components, score: Some(f1), found, why, ..Default::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn score(take: TakeText, gold: Value, completion: &str) -> Score {
        let row = json!({ "answer": gold });
        let columns = row.as_object().expect("an object").into();
        let f1 = F1 { column: "answer".into(), take };
        f1.score(&Sample { completion, columns, ..Default::default() }).expect("a score")
    }

    #[test]
    fn words_in_common_count() {
        for (gold, completion, want) in [
            (json!("Denver Broncos"), "The Denver Broncos!", 1.0),
            (json!("Denver Broncos"), "Denver", 2.0 / 3.0),
            (json!("Denver Broncos"), "Carolina Panthers", 0.0),
            (json!(["x y", "Denver"]), "denver", 1.0),
            (json!({"text": ["1 2", "3"], "answer_start": [0, 1]}), "3", 1.0),
            (json!("the the the"), "", 1.0),
            (json!([]), "", 1.0),
            (json!([]), "something", 0.0),
            (json!("cat cat dog"), "cat dog dog", 2.0 / 3.0),
            (json!("a"), "<answer>b</answer>", 0.0),
            (json!("b c"), "so <answer>b</answer>", 2.0 / 3.0),
            (json!("naïve café"), "Naïve café", 1.0),
            (json!("it's"), "its", 1.0),
        ] {
            let got = score(TakeText::Auto, gold.clone(), completion);
            assert!((got.reward - want).abs() < 1e-12, "{gold} | {completion}: {got:?}");
        }
        assert_eq!(score(TakeText::Answer, json!([]), "no tag").reward, 0.0);
        assert_eq!(score(TakeText::Auto, json!("x"), "X").components[1], ("exact".into(), 1.0));
    }
}
