//! Credit recomputed from rows: what `ferrl credit vine` reads and writes, and what a run saves with its rollouts.

use super::{Interval, advantages, estimated_states, interval_width, mean};
use crate::run::rollouts::steps;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// What a row's credit comes to: `values` and `advantages` of its steps; or, for a row with `rewards`, how many of them a
/// confidence interval asks for (`used`), their mean (`value`) and the interval's width (`ci`).
///
/// A row of a run's rollouts has its credit under `credit`.
pub fn recompute(row: &Map<String, Value>) -> Result<Map<String, Value>> {
    let row = row.get("credit").and_then(Value::as_object).unwrap_or(row);
    match row.contains_key("rewards") && !row.contains_key("rollouts") {
        true => interval(row),
        false => vine(row),
    }
}

fn vine(row: &Map<String, Value>) -> Result<Map<String, Value>> {
    let count = match row.get("steps") {
        Some(Value::Array(texts)) => Some(texts.len()),
        Some(number) => number.as_u64().map(|n| n as usize),
        None => None,
    };
    let count = count.filter(|n| (1..=MAX_STEPS).contains(n)).ok_or_else(|| {
        wrong(row, "steps", "a list of texts or their number, at least 1").fix(
            "{\"steps\": 3, \"score\": 1, \"rollouts\": [[1, 0], [1, 1], [0, 0]]}, or rollouts of a run of vineppo",
        )
    })?;
    let score = number(row, "score", None)?;
    let penalty = number(row, "unfinished_penalty", Some(0.0))?;
    let cap = whole(row, "max_steps", Some(MAX_STEPS))?;
    let Some(Value::Array(states)) = row.get("rollouts") else {
        return Err(wrong(row, "rollouts", "a list of rewards for each state, the prompt's first"));
    };
    if states.len() > count {
        let what = format!("has {} lists of rollouts, and {count} steps have {count} states", states.len());
        return Err(Error::data(what).fix("one list for the prompt and one after each step but the last"));
    }
    let wanted = estimated_states(count, cap).min(states.len());
    let value = |(i, list): (usize, &Value)| Ok(mean(&rewards(list, penalty, &format!("rollouts[{i}]"))?));
    let estimated: Vec<f64> = states[..wanted].iter().enumerate().map(value).collect::<Result<_>>()?;
    let (values, advantages) = advantages(count, score, &estimated);
    Ok(Map::from_iter([("values".into(), json!(values)), ("advantages".into(), json!(advantages))]))
}

/// Maximum number of steps, against absurd allocations.
const MAX_STEPS: usize = 1 << 20;

fn interval(row: &Map<String, Value>) -> Result<Map<String, Value>> {
    let rule = Interval {
        start: whole(row, "start", Some(10))?,
        add: whole(row, "add", Some(4))?,
        max: whole(row, "max", Some(30))?,
        threshold: number(row, "threshold", Some(0.05))?,
    };
    let penalty = number(row, "unfinished_penalty", Some(0.0))?;
    let all = rewards(&row["rewards"], penalty, "rewards")?;
    let used = rule.used(&all);
    let drawn = &all[..used];
    Ok(Map::from_iter([
        ("used".into(), used.into()),
        ("value".into(), mean(drawn).into()),
        ("ci".into(), interval_width(drawn).into()),
    ]))
}

/// Rewards of continuations; null is a truncated one.
fn rewards(list: &Value, penalty: f64, place: &str) -> Result<Vec<f64>> {
    let wrong = |got: &Value| {
        Error::data(format!("{place} is {got}, expected a list of numbers, with null for truncated ones"))
    };
    let list_of = list.as_array().ok_or_else(|| wrong(list))?;
    let one = |v: &Value| if v.is_null() { Ok(penalty) } else { v.as_f64().ok_or_else(|| wrong(v)) };
    list_of.iter().map(one).collect()
}

fn number(row: &Map<String, Value>, name: &str, default: Option<f64>) -> Result<f64> {
    match (row.get(name), default) {
        (None | Some(Value::Null), Some(default)) => Ok(default),
        (value, _) => value.and_then(Value::as_f64).ok_or_else(|| wrong(row, name, "a number")),
    }
}

fn whole(row: &Map<String, Value>, name: &str, default: Option<usize>) -> Result<usize> {
    match (row.get(name), default) {
        (None | Some(Value::Null), Some(default)) => Ok(default),
        (value, _) => match value.and_then(Value::as_u64) {
            Some(n) => Ok(n as usize),
            None => Err(wrong(row, name, "a whole number, 0 or more")),
        },
    }
}

fn wrong(row: &Map<String, Value>, name: &str, expected: &str) -> Error {
    match row.get(name) {
        None => Error::data(format!("has no {name}, expected {expected}")),
        Some(value) => Error::data(format!("{name} is {value}, expected {expected}")),
    }
}

/// Files to read rows from: a file is itself; of a run folder, or its `rollouts`, the files of all steps in order.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.into()]);
    }
    let inner = path.join("rollouts");
    let dir = if inner.is_dir() { inner } else { path.into() };
    let found: Vec<PathBuf> =
        steps(&dir)?.into_iter().map(|step| dir.join(format!("step_{step}.jsonl"))).collect();
    match found.is_empty() {
        true => Err(Error::data("has no rollouts, expected step_N.jsonl")
            .at(dir.display())
            .fix("a run folder, its rollouts folder, or a file of rows")),
        false => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(row: Value) -> Result<Map<String, Value>> {
        recompute(row.as_object().expect("an object"))
    }

    #[test]
    fn rows_are_recomputed_with_caps_and_penalties() {
        let row = |steps: Value, cap: Value| {
            json!({ "steps": steps, "score": 1, "rollouts": [[1, 0], [null, 0.5], [1, 1]], "max_steps": cap,
                    "unfinished_penalty": -0.5 })
        };
        let got = of(row(json!(3), Value::Null)).unwrap();
        assert_eq!(got["values"], json!([0.5, 0.0, 1.0, 0.0]));
        assert_eq!(got["advantages"], json!([-0.5, 1.0, 0.0]));
        assert_eq!(of(row(json!(["a", "b", "c"]), Value::Null)).unwrap(), got);
        let capped = of(row(json!(4), json!(0))).unwrap();
        assert_eq!(capped["values"], json!([0.5, 1.0, 1.0, 1.0, 0.0]));
        assert_eq!(capped["advantages"], json!([0.5, 0.0, 0.0, 0.0]));
        let nested = of(json!({ "prompt": "x", "credit": row(json!(3), Value::Null) })).unwrap();
        assert_eq!(nested, got);
    }

    #[test]
    fn intervals_use_ten_or_thirty() {
        let mixed: Vec<u8> = (0..40).map(|i| u8::from(i % 2 == 0)).collect();
        let got =
            of(json!({ "rewards": mixed, "start": 10, "add": 4, "max": 30, "threshold": 0.05 })).unwrap();
        assert_eq!((&got["used"], &got["value"]), (&json!(30), &json!(0.5)));
        let ci = got["ci"].as_f64().unwrap();
        assert!((ci - 2.0 * 1.96 * (0.25f64 / 30.0).sqrt()).abs() < 1e-12);
        let got = of(json!({ "rewards": vec![1; 40] })).unwrap();
        assert_eq!((&got["used"], &got["ci"]), (&json!(10), &json!(0.0)));
    }

    #[test]
    fn mistakes_are_named() {
        for (row, words) in [
            (json!({}), "has no steps"),
            (json!({ "steps": 0, "score": 1, "rollouts": [] }), "steps is 0"),
            (json!({ "steps": 1e18, "score": 1, "rollouts": [] }), "steps is 1e"),
            (json!({ "steps": 2, "rollouts": [] }), "has no score"),
            (json!({ "steps": 2, "score": 1 }), "has no rollouts"),
            (json!({ "steps": 1, "score": 1, "rollouts": [[1], [1]] }), "has 2 lists"),
            (json!({ "steps": 1, "score": 1, "rollouts": [["x"]] }), "rollouts[0]"),
            (json!({ "rewards": [1], "add": -1 }), "add is -1"),
        ] {
            let error = of(row.clone()).expect_err("a mistake").to_string();
            assert!(error.contains(words), "{row}: {error}");
        }
    }
}
