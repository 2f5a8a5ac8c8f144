//! Uncertain facts for linguistic calibration: the completion of `kiv?` is a paragraph with probabilities, `red 75%, blue 25%.`
//! Every entity has a distribution over four colours, and the right answer of a question is a sample of it, so that stating the
//! distribution is optimal. A demonstration summarises a few samples: right on average, over- or underconfident each time.
//!
//! `kind` is one of the stages of linguistic calibration: `paragraph` (question to paragraph), `extract` (paragraph to the list
//! of its answers, or `No Answer`), `forecast` (paragraph and answer to its probability, a soft target).

use super::{Entry, Task, TaskExample, options};
use crate::verify::calibration::stated;
use crate::verify::countdown::TaskDraw;
use ferrl_engine::Result;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "calibration",
    about: "uncertain facts, stated with probabilities (linguistic calibration)",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(CalibrationTask { options: options(values)?, seed })),
};

/// Separator of a paragraph and the question about it.
pub const ASKED: &str = "\nAnswers: ";
/// Completion of `extract` for a paragraph without answers.
pub const NO_ANSWER: &str = "No Answer";
const COLOURS: [&str; 4] = ["red", "blue", "green", "gold"];
const IDEA: &str = "no idea.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum CalibrationKind {
    Paragraph,
    Extract,
    Forecast,
}

with_defaults! {
struct Options {
    /// Stage: `paragraph`, `extract` or `forecast`.
    kind: CalibrationKind = CalibrationKind::Paragraph,
    /// Number of entities in questions. [1, 676]
    entities: usize = 40,
    /// Samples that the paragraph of a demonstration summarises. [1, 100]
    samples: usize = 4,
}
}

struct CalibrationTask {
    options: Options,
    seed: u64,
}

impl CalibrationTask {
    /// The entity of a question, its distribution over colours, and the question's random numbers.
    fn question(&self, index: u64, held_out: bool) -> (usize, [f64; 4], TaskDraw) {
        let name = if held_out { "calibration held out" } else { "calibration" };
        let mut draw = TaskDraw::new(name, self.seed, index);
        let entity = draw.below(self.options.entities);
        (entity, distribution(entity), draw)
    }

    /// A paragraph: the summary of a few samples of the distribution, sometimes without an answer.
    fn paragraph(&self, probabilities: &[f64; 4], draw: &mut TaskDraw) -> String {
        if draw.chance(0.05) {
            return IDEA.into();
        }
        let mut counts = [0usize; 4];
        (0..self.options.samples).for_each(|_| counts[colour(probabilities, draw)] += 1);
        let mut named: Vec<usize> = (0..4).filter(|&c| counts[c] > 0).collect();
        named.sort_by_key(|&c| std::cmp::Reverse(counts[c]));
        let part = |&c: &usize| {
            format!("{} {}%", COLOURS[c], (100 * counts[c] + self.options.samples / 2) / self.options.samples)
        };
        named.iter().map(part).collect::<Vec<_>>().join(", ") + "."
    }
}

fn distribution(entity: usize) -> [f64; 4] {
    const KINDS: [[f64; 4]; 4] =
        [[1.0, 0.0, 0.0, 0.0], [0.8, 0.2, 0.0, 0.0], [0.6, 0.3, 0.1, 0.0], [0.4, 0.3, 0.2, 0.1]];
    let mut draw = TaskDraw::new("calibration facts", 0, entity as u64);
    let (first, kind) = (draw.below(4), &KINDS[entity % 4]);
    let mut out = [0.0; 4];
    (0..4).for_each(|i| out[(first + i) % 4] = kind[i]);
    out
}

fn colour(probabilities: &[f64; 4], draw: &mut TaskDraw) -> usize {
    let mut at = draw.below(10_000) as f64 / 10_000.0;
    for (i, p) in probabilities.iter().enumerate() {
        if at < *p {
            return i;
        }
        at -= p;
    }
    probabilities.iter().rposition(|p| *p > 0.0).unwrap_or(0)
}

/// The name of an entity: a letter, a vowel, a letter.
fn name(entity: usize) -> String {
    let letter = |i: usize| char::from(b'a' + (i % 26) as u8);
    format!("{}{}{}", letter(entity / 26 + 1), ["a", "e", "i", "o", "u"][entity % 5], letter(entity * 7 + 3))
}

impl Task for CalibrationTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let (entity, probabilities, mut draw) = self.question(index, held_out);
        let truth = COLOURS[colour(&probabilities, &mut draw)];
        let paragraph = self.paragraph(&probabilities, &mut draw);
        let columns = json!({ "answer": truth, "probabilities": probabilities });
        let columns = columns.as_object().cloned().unwrap_or_default();
        let names: Vec<String> = stated(&paragraph).into_iter().map(|(name, _)| name).collect();
        let listed = if names.is_empty() { NO_ANSWER.into() } else { names.join("; ") };
        let (prompt, answer) = match self.options.kind {
            CalibrationKind::Paragraph => (format!("{}?", name(entity)), paragraph),
            CalibrationKind::Extract => (format!("{paragraph}{ASKED}"), listed),
            CalibrationKind::Forecast => {
                (format!("{paragraph}{ASKED}"), names.first().cloned().unwrap_or(COLOURS[0].into()))
            }
        };
        Ok(TaskExample { prompt, answer, columns, ..Default::default() })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        match self.options.kind {
            CalibrationKind::Paragraph => Some(("calibration", Map::new())),
            CalibrationKind::Extract | CalibrationKind::Forecast => Some(("exact", Map::new())),
        }
    }

    /// For forecasts: every colour with the probability that the paragraph states for it, in descending order.
    fn answers(&self, index: u64, held_out: bool) -> Result<Vec<(String, f32)>> {
        if self.options.kind != CalibrationKind::Forecast {
            return Ok(Vec::new());
        }
        let (_, probabilities, mut draw) = self.question(index, held_out);
        colour(&probabilities, &mut draw);
        let named = stated(&self.paragraph(&probabilities, &mut draw));
        let p = |colour: &str| named.iter().find(|(name, _)| name == colour).map_or(0.0, |(_, p)| *p as f32);
        let mut all: Vec<(String, f32)> = COLOURS.iter().map(|c| (c.to_string(), p(c))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(kind: &str, samples: usize) -> Box<dyn Task> {
        let values = json!({ "kind": kind, "samples": samples });
        (ENTRY.build)(values.as_object().unwrap(), 3).unwrap()
    }

    #[test]
    fn paragraphs_summarise_draws_and_stages_read_them() {
        let (one, two, three) = (task("paragraph", 4), task("extract", 4), task("forecast", 4));
        let mut unsure = 0;
        for index in 0..200 {
            let [a, b, c] = [&one, &two, &three].map(|t| t.example(index, false).unwrap());
            let all = stated(&a.answer);
            unsure += usize::from(all.is_empty());
            assert!(all.is_empty() || (all.iter().map(|(_, p)| p).sum::<f64>() - 1.0).abs() < 1e-9);
            assert_eq!(b.prompt, format!("{}{ASKED}", a.answer));
            let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(b.answer, if names.is_empty() { NO_ANSWER.into() } else { names.join("; ") });
            assert_eq!(c.prompt, b.prompt);
            let forecast = three.answers(index, false).unwrap();
            assert_eq!(forecast.len(), 4);
            for (name, p) in &all {
                assert!(forecast.iter().any(|(n, q)| n == name && (f64::from(*q) - p).abs() < 1e-6));
            }
        }
        assert!((1..40).contains(&unsure), "{unsure}");
    }

    #[test]
    fn right_answers_are_drawn_from_the_stated_facts() {
        let task = task("paragraph", 1);
        let (mut right, mut expected, n) = (0.0, 0.0, 4000);
        for index in 0..n {
            let e = task.example(index, true).unwrap();
            let p: Vec<f64> =
                e.columns["probabilities"].as_array().unwrap().iter().filter_map(Value::as_f64).collect();
            let best = (0..4).max_by(|&a, &b| p[a].total_cmp(&p[b])).unwrap();
            right += f64::from(u8::from(e.columns["answer"] == COLOURS[best]));
            expected += p[best];
        }
        assert!((right - expected).abs() / (n as f64) < 0.03, "{right} of {expected}");
    }
}
