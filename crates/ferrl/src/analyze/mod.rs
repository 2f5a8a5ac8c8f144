//! Analyses of a finished or running run: from the files of its folder alone, each a function from the folder to a table and a
//! line of [`ANALYSES`]; and those of [`COMPUTED`], which load models of the run and sample.

mod compute;
mod page;
mod rollouts;
mod weights;

pub use compute::{COMPUTED, Computed, Effort};
pub use page::page;

use crate::fixes::unknown;
use crate::run::MetricsLog;
use ferrl_engine::Result;
use serde_json::{Value, json};
use std::path::Path;

/// An entry of the registry.
pub struct Analysis {
    /// Its name on the command line.
    pub name: &'static str,
    pub about: &'static str,
    /// The table of a run; `None` without data.
    pub run: fn(&Path) -> Result<Option<Table>>,
}

pub const ANALYSES: &[Analysis] = &[
    Analysis {
        name: "advantages",
        about: "distribution of advantages: of steps with Monte-Carlo values, otherwise of completions",
        run: rollouts::advantages,
    },
    Analysis {
        name: "values",
        about: "how well half of a state's continuations predict the mean reward of the other half",
        run: rollouts::values,
    },
    Analysis {
        name: "ranking",
        about: "how often two halves of the continuations agree on the ranking of two first steps of a prompt",
        run: rollouts::ranking,
    },
    Analysis {
        name: "diversity",
        about: "fractions of distinct completions of a prompt, and of distinct word bigrams in them",
        run: rollouts::diversity,
    },
    Analysis { name: "kl", about: "divergence from the reference over the run", run: kl },
    Analysis {
        name: "checkpoints",
        about: "evaluations of each stage's initial model and steps, and whether their checkpoints are kept",
        run: checkpoints,
    },
    Analysis {
        name: "weights",
        about: "distance of each stage's final weights from its initial weights",
        run: weights::distance,
    },
];

/// Rows of numbers and words under their columns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Headings.
    pub columns: Vec<&'static str>,
    /// As many values as columns in each.
    pub rows: Vec<Vec<Value>>,
}

impl Table {
    fn of(columns: &[&'static str]) -> Self {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// As objects, for programs.
    pub fn to_json(&self) -> Value {
        let object = |row: &Vec<Value>| {
            Value::Object(self.columns.iter().map(|c| c.to_string()).zip(row.iter().cloned()).collect())
        };
        self.rows.iter().map(object).collect()
    }

    /// Cells as text; numbers with four digits.
    pub fn cells(&self) -> Vec<Vec<String>> {
        let cell = |v: &Value| match v {
            Value::String(text) => text.clone(),
            Value::Number(n) if n.is_f64() => format!("{:.4}", n.as_f64().unwrap_or(f64::NAN)),
            Value::Null => "-".into(),
            other => other.to_string(),
        };
        self.rows.iter().map(|row| row.iter().map(cell).collect()).collect()
    }
}

/// The analyses of these names, or all.
pub fn find(names: &[String]) -> Result<Vec<&'static Analysis>> {
    if names.is_empty() {
        return Ok(ANALYSES.iter().collect());
    }
    let computed = COMPUTED.iter().filter(|c| !ANALYSES.iter().any(|a| a.name == c.name));
    let known = || ANALYSES.iter().map(|a| a.name).chain(computed.clone().map(|c| c.name));
    let one = |name: &String| {
        ANALYSES
            .iter()
            .find(|a| a.name == name)
            .ok_or_else(|| unknown("analysis", name, known(), |near| format!("ferrl analyze RUN {near}")))
    };
    names.iter().map(one).collect()
}

/// At most this many steps are shown, evenly spread.
const SHOWN: usize = 12;

/// Evenly spread entries, the first and the last among them.
fn spread<T: Clone>(all: &[T]) -> Vec<T> {
    if all.len() <= SHOWN {
        return all.to_vec();
    }
    (0..SHOWN).map(|i| all[i * (all.len() - 1) / (SHOWN - 1)].clone()).collect()
}

/// Mean of the KL metrics at evenly spread steps.
fn kl(run: &Path) -> Result<Option<Table>> {
    let log = run.join("metrics.jsonl");
    if !log.is_file() {
        return Ok(None);
    }
    let records = MetricsLog::history(&log)?;
    let measured: Vec<_> = records.iter().filter(|r| r.get("kl").is_some()).collect();
    let mut table = Table::of(&["stage", "step", "kl", "objective/kl", "kl_coef"]);
    for r in spread(&measured) {
        let metric = |name: &str| r.get(name).map_or(Value::Null, |v| json!(v));
        table.rows.push(vec![
            json!(r.stage),
            json!(r.step),
            metric("kl"),
            metric("objective/kl"),
            metric("kl_coef"),
        ]);
    }
    Ok((!table.rows.is_empty()).then_some(table))
}

/// Metrics of an evaluation that are shown, where they were measured.
const EVALUATED: [&str; 5] = ["pass@1", "greedy", "reward", "loss", "accuracy"];

/// What the run evaluated: the baseline of each stage and its steps.
fn checkpoints(run: &Path) -> Result<Option<Table>> {
    let log = run.join("metrics.jsonl");
    if !log.is_file() {
        return Ok(None);
    }
    let mut table = Table::of(&["stage", "step", "kept", "pass@1", "greedy", "reward", "loss", "accuracy"]);
    for r in MetricsLog::history(&log)? {
        for (prefix, step) in [("eval_start", r.step.saturating_sub(1)), ("eval", r.step)] {
            let cells = EVALUATED.map(|name| r.get(&format!("{prefix}/{name}")));
            if cells.iter().all(Option::is_none) {
                continue;
            }
            let kept = run.join(format!("checkpoints/step_{step}")).is_dir();
            let mut row = vec![json!(r.stage), json!(step), json!(if kept { "yes" } else { "no" })];
            row.extend(cells.map(|c| json!(c)));
            table.rows.push(row);
        }
    }
    Ok((!table.rows.is_empty()).then_some(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluations_of_the_baseline_and_of_steps_are_one_table() {
        let dir = tempfile::tempdir().unwrap();
        let lines = [
            json!({ "step": 1, "stage": "tune", "epoch": 0.0, "seconds": 1.0, "eval_start/pass@1": 0.25, "kl": 0.5 }),
            json!({ "step": 2, "stage": "tune", "epoch": 0.0, "seconds": 1.0, "eval/pass@1": 0.5, "eval/greedy": 0.75 }),
        ];
        let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        std::fs::create_dir_all(dir.path().join("checkpoints/step_2")).unwrap();
        let table = checkpoints(dir.path()).unwrap().unwrap();
        assert_eq!(table.rows[0][..4], [json!("tune"), json!(0), json!("no"), json!(0.25)]);
        assert_eq!(table.rows[1][..5], [json!("tune"), json!(2), json!("yes"), json!(0.5), json!(0.75)]);
        assert_eq!(kl(dir.path()).unwrap().unwrap().rows[0][2], json!(0.5));
    }

    #[test]
    fn steps_are_spread_with_first_and_last() {
        let all: Vec<usize> = (0..100).collect();
        let shown = spread(&all);
        assert_eq!((shown.len(), shown[0], shown[11]), (12, 0, 99));
        assert_eq!(spread(&all[..5]).len(), 5);
    }

    #[test]
    fn names_are_found_or_the_nearest_is_told() {
        assert_eq!(find(&[]).unwrap().len(), ANALYSES.len());
        let error = find(&["wieghts".into()]).err().expect("no such name").to_string();
        assert!(error.contains("ferrl analyze RUN weights"), "{error}");
    }
}
