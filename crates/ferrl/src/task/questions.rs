//! Questions of a file with one answer each: `gsm8k`, `math`, `choice` and `qa` read the columns of those data sets. Without a
//! file they have a few sample rows.

use super::{Entry, Task, TaskExample, options, schema_for};
use crate::data::lines::json_lines;
use crate::data::{Row, columns_of, each_row, object};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Every kind of question, for the registry of tasks.
pub(super) const QUESTIONS: &[&Entry] = &[&GSM8K, &MATH, &CHOICE, &QA];

const GSM8K: Entry = entry("gsm8k", "word problems with whole numbers: rows of GSM8K", |values, seed| {
    build(&KINDS[0], values, seed)
});
const MATH: Entry =
    entry("math", "competition problems: rows of MATH and similar data sets", |values, seed| {
        build(&KINDS[1], values, seed)
    });
const CHOICE: Entry =
    entry("choice", "multiple choice: rows of MMLU, SciQ and similar data sets", |values, seed| {
        build(&KINDS[2], values, seed)
    });
const QA: Entry =
    entry("qa", "short answers, scored by F1: rows of TriviaQA, NQ and similar data sets", |values, seed| {
        build(&KINDS[3], values, seed)
    });

const fn entry(name: &'static str, about: &'static str, build: super::BuildTask) -> Entry {
    Entry { name, about, schema: || schema_for!(Options), build }
}

with_defaults! {
struct Options {
    /// File of questions; unset uses a few built-in ones.
    data: Option<String> = None,
    /// Fraction of the rows, from the end, that is held out for evaluations. [0, 1]
    held_out: f64 = 0.1,
}
}

struct QuestionKind {
    name: &'static str,
    verifier: &'static str,
    /// Settings of the verifier, as JSON.
    settings: &'static str,
    /// Prompt, completion of a demonstration, and the answer for the verifier; `None` if the row is of another kind.
    read: fn(&Row) -> Option<(String, String, Value)>,
    /// Columns that it reads, for messages.
    columns: &'static str,
    /// Sample rows, one JSON object per line.
    samples: &'static str,
}

const KINDS: [QuestionKind; 4] = [
    QuestionKind {
        name: "gsm8k",
        verifier: "gsm8k",
        settings: r#"{"column": "answer"}"#,
        read: |row| {
            let (question, answer) = (text(row, &["question", "prompt"])?, text(row, &["answer"])?);
            Some((question, answer.clone(), json!(answer)))
        },
        columns: "`question` and `answer`",
        samples: r####"{"question": "A box holds 12 eggs. How many eggs are in 3 boxes and 4 loose ones?", "answer": "3 boxes hold 3 * 12 = <<3*12=36>>36 eggs.\nWith the loose ones that is 36 + 4 = <<36+4=40>>40.\n#### 40"}
{"question": "Nora reads 15 pages a day. After how many days has she read 120 pages?", "answer": "120 / 15 = <<120/15=8>>8.\n#### 8"}
{"question": "A shirt costs $20 and is sold at a quarter less. What does it cost now?", "answer": "A quarter of 20 is 20 / 4 = <<20/4=5>>5.\n20 - 5 = <<20-5=15>>15.\n#### 15"}"####,
    },
    QuestionKind {
        name: "math",
        verifier: "math",
        settings: r#"{"column": "answer"}"#,
        read: |row| {
            let question = text(row, &["problem", "question", "prompt"])?;
            let answer = text(row, &["answer"]).or_else(|| text(row, &["solution"]))?;
            let told = text(row, &["solution"]).unwrap_or_else(|| format!("$\\boxed{{{answer}}}$"));
            Some((question, told, json!(answer)))
        },
        columns: "`problem` and `answer` or `solution`",
        samples: r#"{"problem": "What is $\\frac{1}{2} + \\frac{1}{3}$?", "solution": "$\\frac{3}{6} + \\frac{2}{6} = \\boxed{\\frac{5}{6}}$.", "answer": "\\frac{5}{6}"}
{"problem": "Solve $x^2 = 49$ for positive $x$.", "solution": "$x = \\boxed{7}$.", "answer": "7"}
{"problem": "How many subsets does a set of five elements have?", "solution": "Each element is in or out: $2^5 = \\boxed{32}$.", "answer": "32"}"#,
    },
    QuestionKind {
        name: "choice",
        verifier: "choice",
        settings: "{}",
        read: choice,
        columns: "`question`, `choices` (or A, B, C, ...) and `answer`",
        samples: r#"{"question": "Which planet is nearest to the sun?", "choices": ["Venus", "Mercury", "Mars", "Earth"], "answer": 1}
{"question": "Which gas do plants take in?", "choices": ["oxygen", "helium", "carbon dioxide", "neon"], "answer": 2}
{"question": "Which number is prime?", "choices": ["21", "27", "33", "31"], "answer": "D"}"#,
    },
    QuestionKind {
        name: "qa",
        verifier: "f1",
        settings: r#"{"take": "answer"}"#,
        read: |row| {
            let question = text(row, &["question", "prompt"])?;
            let answers = answers(row)?;
            let first = answers.first()?.clone();
            let prompt = format!("{question}\nGive a short answer between <answer> and </answer>.");
            Some((prompt, format!("<answer>{first}</answer>"), json!(answers)))
        },
        columns: "`question` and `answer` (a text, a list, or an object with `aliases`)",
        samples: r#"{"question": "Who wrote the novel Emma?", "answer": ["Jane Austen", "Austen"]}
{"question": "What is the capital of Italy?", "answer": "Rome"}
{"question": "Which metal has the symbol Fe?", "answer": {"value": "iron", "aliases": ["iron", "Fe"]}}"#,
    },
];

fn text(row: &Row, names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| match row.get(*name)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    })
}

/// Accepted answers: one text, a list, or TriviaQA's object.
fn answers(row: &Row) -> Option<Vec<String>> {
    let value = ["answer", "golden_answers", "answers"].iter().find_map(|name| row.get(*name))?;
    let list = |value: &Value| -> Option<Vec<String>> {
        value.as_array()?.iter().map(|one| one.as_str().map(String::from)).collect()
    };
    match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Number(number) => Some(vec![number.to_string()]),
        Value::Object(object) => {
            let first = object.get("value").and_then(Value::as_str).map(String::from);
            let aliases =
                object.get("aliases").or_else(|| object.get("text")).and_then(list).unwrap_or_default();
            Some(first.into_iter().chain(aliases).collect())
        }
        other => list(other),
    }
    .filter(|all| !all.is_empty())
}

/// Options by letter; the answer is a letter, or the number of an option from 0.
fn choice(row: &Row) -> Option<(String, String, Value)> {
    const LETTERS: [&str; 10] = ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J"];
    let listed = match row.get("choices").or_else(|| row.get("options")) {
        // AI2's data sets put the texts under `text`.
        Some(Value::Object(object)) => object.get("text").cloned(),
        other => other.cloned(),
    };
    let options: Vec<String> = match listed {
        Some(Value::Array(list)) => {
            list.iter().map(|o| o.as_str().map(String::from)).collect::<Option<_>>()?
        }
        Some(_) => return None,
        None => LETTERS.iter().map_while(|letter| text(row, &[letter])).collect(),
    };
    let answer = ["answer", "answerKey", "label"].iter().find_map(|name| row.get(*name))?;
    let number = match answer {
        Value::Number(number) => number.as_u64()? as usize,
        Value::String(word) => LETTERS.iter().position(|letter| letter.eq_ignore_ascii_case(word.trim()))?,
        _ => return None,
    };
    let letter = LETTERS.get(number).filter(|_| number < options.len())?;
    let mut prompt = format!("{}\n", text(row, &["question", "prompt"])?);
    for (letter, option) in LETTERS.iter().zip(&options) {
        prompt += &format!("{letter}. {option}\n");
    }
    prompt += "Give the letter between <answer> and </answer>.";
    Some((prompt, format!("<answer>{letter}</answer>"), json!(letter)))
}

struct QuestionTask {
    kind: &'static QuestionKind,
    rows: Vec<Row>,
    held_out: f64,
    seed: u64,
}

fn build(kind: &'static QuestionKind, values: &Map<String, Value>, seed: u64) -> Result<Box<dyn Task>> {
    let o: Options = options(values)?;
    let mut rows = Vec::new();
    match &o.data {
        Some(path) => {
            let path = Path::new(path);
            each_row(path, |place, row| {
                kind.ask(&row).map_err(|e| e.at(place))?;
                rows.push(row);
                Ok(())
            })?;
            if rows.is_empty() {
                return Err(Error::data("no questions").at(path.display()));
            }
        }
        None => {
            let samples = json_lines(kind.samples.as_bytes(), kind.name);
            rows = samples.map(|(_, row)| row.and_then(object)).collect::<Result<_>>()?;
        }
    }
    Ok(Box::new(QuestionTask { kind, rows, held_out: o.held_out, seed }))
}

impl QuestionKind {
    fn ask(&self, row: &Row) -> Result<TaskExample> {
        let Some((mut prompt, told, answer)) = (self.read)(row) else {
            let what = format!("{} needs {}; the row has {}", self.name, self.columns, columns_of(row));
            return Err(Error::data(what));
        };
        prompt.push('\n');
        let mut columns = row.clone();
        columns.insert("answer".into(), answer);
        Ok(TaskExample { prompt, answer: told, columns, turns: Vec::new() })
    }
}

impl Task for QuestionTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let count = self.rows.len();
        let kept = (((1.0 - self.held_out) * count as f64).round() as usize).clamp(1, count);
        let number = match held_out && kept < count {
            true => kept + index as usize % (count - kept),
            false => TaskDraw::new(self.kind.name, self.seed, index).below(kept),
        };
        self.kind.ask(&self.rows[number])
    }

    fn of_row(&self, row: &Row) -> Option<Result<TaskExample>> {
        Some(self.kind.ask(row))
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        Some((self.kind.verifier, serde_json::from_str(self.kind.settings).unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env;
    use crate::task::find;

    #[test]
    fn the_demonstration_is_right_and_nonsense_is_not() {
        for entry in QUESTIONS {
            let task = (entry.build)(&Map::new(), 3).unwrap();
            for index in 0..9 {
                for held_out in [false, true] {
                    let example = task.example(index, held_out).unwrap();
                    assert_eq!(example, task.example(index, held_out).unwrap());
                    let row = example.columns.clone();
                    for (action, reward) in
                        [(example.answer.as_str(), 1.0), ("<answer>no idea</answer>", 0.0)]
                    {
                        let mut episode = env::open_row(entry.name, &Map::new(), 3, &row).unwrap();
                        assert_eq!(episode.start().unwrap(), example.prompt);
                        let turn = episode.step(action).unwrap();
                        assert_eq!(
                            (turn.reward, turn.end.is_some()),
                            (reward, true),
                            "{}: {action}",
                            entry.name
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn rows_come_in_the_forms_that_are_published() {
        let ask = |name: &str, row: Value| {
            let task = (find(name).unwrap().build)(&Map::new(), 3).unwrap();
            task.of_row(row.as_object().unwrap()).unwrap()
        };
        let letters = ask("choice", json!({ "question": "q", "A": "x", "B": "y", "answer": "b" })).unwrap();
        assert_eq!(
            (letters.prompt.as_str(), &letters.columns["answer"]),
            ("q\nA. x\nB. y\nGive the letter between <answer> and </answer>.\n", &json!("B"))
        );
        let ai2 = ask(
            "choice",
            json!({ "question": "q", "choices": { "text": ["x", "y"], "label": ["A", "B"] }, "answerKey": "A" }),
        );
        assert_eq!(ai2.unwrap().columns["answer"], json!("A"));
        assert!(ask("choice", json!({ "question": "q", "choices": ["x"], "answer": 3 })).is_err());
        let squad = ask("qa", json!({ "question": "q", "answers": { "text": ["x", "y"] } })).unwrap();
        assert_eq!(squad.columns["answer"], json!(["x", "y"]));
        let error = ask("gsm8k", json!({ "text": "q" })).unwrap_err().to_string();
        assert!(error.contains("`question` and `answer`; the row has text"), "{error}");
    }

    #[test]
    fn a_file_is_split_and_a_bad_row_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q.jsonl");
        let row = |i: usize| format!("{{\"question\": \"q{i}\", \"answer\": \"#### {i}\"}}\n");
        std::fs::write(&path, (0..10).map(row).collect::<String>()).unwrap();
        let options = json!({ "data": path, "held_out": 0.2 });
        let task = (find("gsm8k").unwrap().build)(options.as_object().unwrap(), 3).unwrap();
        let asked = |held_out| -> std::collections::BTreeSet<String> {
            (0..100).map(|i| task.example(i, held_out).unwrap().prompt).collect()
        };
        assert_eq!(asked(true).into_iter().collect::<Vec<_>>(), ["q8\n", "q9\n"]);
        assert!(asked(false).len() == 8 && asked(false).is_disjoint(&asked(true)));
        std::fs::write(&path, format!("{}{{\"q\": 1}}\n", row(0))).unwrap();
        let error =
            (find("gsm8k").unwrap().build)(options.as_object().unwrap(), 3).err().unwrap().to_string();
        assert!(error.contains("q.jsonl:2"), "{error}");
    }
}
