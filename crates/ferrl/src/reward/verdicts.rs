//! Training data of generative verifiers: completions with rewards become prompts with a verdict.
//!
//! GenRM's loss is `L(verdicts) + lambda L(right completions)`, both the mean of a supervised loss. Rows carry their weight as
//! `advantage`, which `mle` multiplies the loss of a row with: 1 for verdicts, and for right completions `lambda` times the
//! number of verdicts over that of right completions. `query` is the prompt that was judged, by which an evaluation finds rows that
//! the verifier was trained on.

use super::generative::Judgement;
use crate::data::Row;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};
use std::collections::HashSet;

#[derive(Clone, Debug)]
pub struct VerdictOptions {
    /// The question and the two verdicts.
    pub judgement: Judgement,
    /// A completion with at least this reward is right.
    pub threshold: f64,
    /// Weight of right completions in the joint loss; 0 leaves them out.
    pub lambda: f64,
}

/// The training data and its counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdicts {
    /// Rows for `mle`.
    pub rows: Vec<Value>,
    /// Verdicts of each kind.
    pub each: usize,
    /// Right completions among the rows.
    pub correct: usize,
    /// Number of rows whose rationale contradicts the reward.
    pub contradicted: usize,
}

/// A completion with its reward.
struct JudgedCompletion {
    prompt: String,
    completion: String,
    rationale: Option<String>,
    right: bool,
}

/// Converts rows with `prompt`, `completion` and `reward` to verdicts: the same number of good and bad ones, without duplicates. A
/// row's `rationale`, if any, precedes the verdict; rows whose rationale contradicts the reward are left out.
pub fn verdicts(rows: &[(String, Row)], options: &VerdictOptions) -> Result<Verdicts> {
    let (mut seen, mut judged, mut out) = (HashSet::new(), Vec::new(), Verdicts::default());
    for (place, row) in rows {
        let Some(one) = read(row, options.threshold).map_err(|e| e.at(place))? else { continue };
        if !seen.insert((one.prompt.clone(), one.completion.clone(), one.rationale.clone())) {
            continue;
        }
        if one.rationale.as_ref().is_some_and(|r| contradicts(r, one.right, &options.judgement)) {
            out.contradicted += 1;
            continue;
        }
        judged.push(one);
    }
    let count = |right: bool| judged.iter().filter(|j| j.right == right).count();
    out.each = count(true).min(count(false));
    if out.each == 0 {
        let left = match out.contradicted {
            0 => String::new(),
            n => format!(" ({n} left out: the rationale's verdict contradicts the reward)"),
        };
        let what =
            format!("{} right and {} wrong completions{left}, both are needed", count(true), count(false));
        return Err(Error::data(what).fix("rollouts of a model that is sometimes right and sometimes wrong"));
    }
    let (mut left, mut right) = ([out.each; 2], Vec::new());
    for one in &judged {
        let left = &mut left[usize::from(one.right)];
        if *left > 0 {
            *left -= 1;
            out.rows.push(verdict(one, &options.judgement));
        }
        if one.right && options.lambda > 0.0 {
            right.push(one);
        }
    }
    out.correct = right.len();
    let weight = options.lambda * out.rows.len() as f64 / right.len().max(1) as f64;
    out.rows.extend(
        right.iter().map(|o| json!({ "prompt": o.prompt, "completion": o.completion, "advantage": weight })),
    );
    Ok(out)
}

fn verdict(one: &JudgedCompletion, j: &Judgement) -> Value {
    let said = format!("{}{}{}", j.instruction, one.prompt, one.completion);
    let word = if one.right { &j.yes } else { &j.no };
    match &one.rationale {
        None => json!({
            "prompt": format!("{said}{}", j.question), "completion": word, "advantage": 1.0, "query": one.prompt,
        }),
        Some(thought) => json!({
            "prompt": format!("{said}{}", j.rationale),
            "completion": format!("{thought}{}{word}", j.question),
            "advantage": 1.0,
            "query": one.prompt,
        }),
    }
}

/// Whether a rationale ends with the verdict that contradicts the reward.
fn contradicts(rationale: &str, right: bool, j: &Judgement) -> bool {
    let other = if right { &j.no } else { &j.yes };
    rationale.trim_end().trim_end_matches(['.', '!']).ends_with(other.as_str())
}

/// A row with a reward; `None` if the reward was lost.
fn read(row: &Row, threshold: f64) -> Result<Option<JudgedCompletion>> {
    let text = |name: &str| match row.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(Error::data(format!("{name} is {other}, expected text"))),
        None => Err(Error::data(format!("has no {name}, expected prompt, completion and reward"))
            .fix("rollouts of a run, or rows that `ferrl verify` wrote")),
    };
    let reward = match row.get("reward") {
        Some(Value::Null) => return Ok(None),
        Some(value) => value.as_f64(),
        None => None,
    };
    let reward = reward.ok_or_else(|| {
        let what = match row.get("reward") {
            Some(other) => format!("reward is {other}, expected a number"),
            None => "has no reward, expected a number".into(),
        };
        Error::data(what).fix(match row.contains_key("chosen") && row.contains_key("rejected") {
            true => "`ferrl data unpair` makes two labelled completions of each pair",
            false => "rollouts of a run, or rows that `ferrl verify` wrote",
        })
    })?;
    let rationale = row.get("rationale").and_then(Value::as_str).map(String::from);
    Ok(Some(JudgedCompletion {
        prompt: text("prompt")?,
        completion: text("completion")?,
        rationale,
        right: reward >= threshold,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(list: &[Value]) -> Vec<(String, Row)> {
        let row = |(i, v): (usize, &Value)| (format!("rows:{}", i + 1), v.as_object().cloned().unwrap());
        list.iter().enumerate().map(row).collect()
    }

    fn options(lambda: f64) -> VerdictOptions {
        VerdictOptions { judgement: Judgement::default(), threshold: 1.0, lambda }
    }

    #[test]
    fn verdicts_are_balanced_and_right_completions_have_their_weight() {
        let one = |c: &str, r: f64| json!({ "prompt": "1+1=", "completion": c, "reward": r });
        let all = rows(&[
            one("2", 1.0),
            one("2", 1.0),
            one("3", 0.0),
            one("2.", 1.0),
            json!({ "prompt": "p", "completion": "c", "reward": null }),
        ]);
        let made = verdicts(&all, &options(0.5)).unwrap();
        assert_eq!((made.each, made.correct, made.rows.len()), (1, 2, 4));
        assert_eq!(made.rows[0]["prompt"], "1+1=2\nIs the answer correct (Yes/No)? ");
        assert_eq!((&made.rows[0]["completion"], &made.rows[1]["completion"]), (&json!("Yes"), &json!("No")));
        // Two verdicts and two right completions: lambda as it is.
        assert_eq!(made.rows[2], json!({ "prompt": "1+1=", "completion": "2", "advantage": 0.5 }));
        assert_eq!(verdicts(&all, &options(0.0)).unwrap().rows.len(), 2);
    }

    #[test]
    fn rationales_that_contradict_the_reward_are_left_out() {
        let one = |c: &str, r: f64, why: &str| json!({ "prompt": "p", "completion": c, "reward": r, "rationale": why });
        let all = rows(&[
            one("a", 1.0, "all lines hold. Yes"),
            one("b", 1.0, "line 2 is off. No."),
            one("c", 0.0, "line 1 is off"),
        ]);
        let made = verdicts(&all, &options(0.0)).unwrap();
        assert_eq!((made.each, made.contradicted), (1, 1));
        let said = made.rows[1]["completion"].as_str().unwrap();
        assert_eq!(said, "line 1 is off\nIs the answer correct (Yes/No)? No");
        assert!(verdicts(&all[..1], &options(0.0)).unwrap_err().to_string().contains("1 right and 0 wrong"));
        let bad = rows(&[json!({ "prompt": "p", "reward": 1 })]);
        let error = verdicts(&bad, &options(0.0)).unwrap_err().to_string();
        assert!(error.contains("rows:1") && error.contains("has no completion"), "{error}");
    }
}
