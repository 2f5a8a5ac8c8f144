//! Analyses of saved rollouts: advantages, Monte-Carlo values, diversity.

use super::{Table, spread};
use crate::algo::math::mean_std;
use crate::credit::{StepCredit, mean};
use crate::run::Rollouts;
use crate::run::rollouts::steps;
use ferrl_engine::Result;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Rows of the table for evenly spread steps, made by a function of a step's rollouts.
fn by_step(
    run: &Path,
    columns: &[&'static str],
    row: impl Fn(&[Value]) -> Option<Vec<Value>>,
) -> Result<Option<Table>> {
    let (dir, mut table) = (run.join("rollouts"), Table::of(columns));
    for step in spread(&steps(&dir)?) {
        if let Some(cells) = row(&Rollouts::read(&dir, step)?) {
            table.rows.push([vec![json!(step)], cells].concat());
        }
    }
    Ok((!table.rows.is_empty()).then_some(table))
}

fn credit(rollout: &Value) -> Option<StepCredit> {
    serde_json::from_value(rollout.get("credit")?.clone()).ok()
}

/// The value at a fraction of a sorted list.
fn quantile(sorted: &[f64], fraction: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * fraction).round() as usize]
}

pub(super) fn advantages(run: &Path) -> Result<Option<Table>> {
    let columns = ["step", "of", "count", "mean", "std", "min", "q25", "median", "q75", "max", "zero"];
    by_step(run, &columns, |rollouts| {
        let by_steps: Vec<f64> = rollouts.iter().filter_map(credit).flat_map(|c| c.advantages).collect();
        let whole = || rollouts.iter().filter_map(|r| r["advantage"].as_f64()).collect::<Vec<f64>>();
        let (of, mut all) = if by_steps.is_empty() { ("completions", whole()) } else { ("steps", by_steps) };
        if all.is_empty() {
            return None;
        }
        all.sort_by(f64::total_cmp);
        let (mean, std) = mean_std(&all);
        let zero = all.iter().filter(|a| **a == 0.0).count() as f64 / all.len() as f64;
        let mut cells = vec![json!(of), json!(all.len()), json!(mean), json!(std)];
        cells.extend([0.0, 0.25, 0.5, 0.75, 1.0].map(|f| json!(quantile(&all, f))));
        cells.push(json!(zero));
        Some(cells)
    })
}

/// The means of the even and of the odd continuations of a state.
fn halves(rewards: &[f64]) -> Option<(f64, f64)> {
    let half = |odd: usize| rewards.iter().skip(odd).step_by(2).copied().collect::<Vec<f64>>();
    (rewards.len() > 1).then(|| (mean(&half(0)), mean(&half(1))))
}

/// Pearson's correlation; none where one side does not vary.
pub(super) fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    let (xs, ys): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let ((mx, sx), (my, sy)) = (mean_std(&xs), mean_std(&ys));
    let covariance: f64 =
        pairs.iter().map(|(x, y)| (x - mx) * (y - my)).sum::<f64>() / (pairs.len().max(2) - 1) as f64;
    (sx > 0.0 && sy > 0.0).then(|| covariance / (sx * sy))
}

pub(super) fn values(run: &Path) -> Result<Option<Table>> {
    by_step(run, &["step", "states", "continuations", "value", "error", "correlation"], |rollouts| {
        let states: Vec<Vec<f64>> = rollouts.iter().filter_map(credit).flat_map(|c| c.rollouts).collect();
        let pairs: Vec<(f64, f64)> = states.iter().filter_map(|s| halves(s)).collect();
        if pairs.is_empty() {
            return None;
        }
        let n = pairs.len() as f64;
        let drawn = states.iter().map(Vec::len).sum::<usize>() as f64 / states.len() as f64;
        let value = states.iter().map(|s| mean(s)).sum::<f64>() / states.len() as f64;
        let error = pairs.iter().map(|(a, b)| (a - b).abs()).sum::<f64>() / n;
        Some(vec![json!(states.len()), json!(drawn), json!(value), json!(error), json!(correlation(&pairs))])
    })
}

/// Key of a rollout's prompt within a step: its text, and for episodes its number, since the texts of games are equal.
type PromptKey<'a> = (&'a str, Option<u64>);

fn prompt_of(rollout: &Value) -> PromptKey<'_> {
    (rollout["prompt"].as_str().unwrap_or_default(), rollout["group"].as_u64())
}

pub(super) fn ranking(run: &Path) -> Result<Option<Table>> {
    by_step(run, &["step", "pairs", "agreement"], |rollouts| {
        let mut prompts: BTreeMap<PromptKey<'_>, Vec<(f64, f64)>> = BTreeMap::new();
        for rollout in rollouts {
            let Some(first) = credit(rollout).and_then(|c| halves(c.rollouts.get(1)?)) else { continue };
            prompts.entry(prompt_of(rollout)).or_default().push(first);
        }
        let (mut pairs, mut agree) = (0usize, 0.0);
        for states in prompts.values() {
            for (i, a) in states.iter().enumerate() {
                for b in states[i + 1..].iter().filter(|b| b.1 != a.1) {
                    pairs += 1;
                    // Equal estimates rank at chance.
                    agree += if a.0 == b.0 { 0.5 } else { f64::from((a.0 > b.0) == (a.1 > b.1)) };
                }
            }
        }
        (pairs > 0).then(|| vec![json!(pairs), json!(agree / pairs as f64)])
    })
}

pub(super) fn diversity(run: &Path) -> Result<Option<Table>> {
    by_step(run, &["step", "prompts", "completions", "different", "different pairs of words"], |rollouts| {
        let mut prompts: BTreeMap<PromptKey<'_>, Vec<&str>> = BTreeMap::new();
        for r in rollouts {
            if let (true, Some(completion)) = (r["prompt"].is_string(), r["completion"].as_str()) {
                prompts.entry(prompt_of(r)).or_default().push(completion);
            }
        }
        let (mut different, mut bigrams, mut with_pairs) = (0.0, 0.0, 0usize);
        for said in prompts.values() {
            different += said.iter().collect::<HashSet<_>>().len() as f64 / said.len() as f64;
            let words: Vec<Vec<&str>> = said.iter().map(|s| s.split_whitespace().collect()).collect();
            let all: Vec<&[&str]> = words.iter().flat_map(|w| w.windows(2)).collect();
            if !all.is_empty() {
                bigrams += all.iter().collect::<HashSet<_>>().len() as f64 / all.len() as f64;
                with_pairs += 1;
            }
        }
        let n = prompts.len();
        let pairs = (with_pairs > 0).then(|| bigrams / with_pairs as f64);
        (n > 0).then(|| vec![json!(n), json!(rollouts.len()), json!(different / n as f64), json!(pairs)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("rollouts")).unwrap();
        let row = |prompt: &str, completion: &str, first: [u8; 4]| {
            let credit = json!({ "steps": ["a", "b"], "score": 1.0, "rollouts": [[1.0, 0.0, 1.0, 0.0], first.map(f64::from)],
                "max_steps": 25, "values": [0.5, 0.5, 0.0], "advantages": [0.0, 0.5] });
            json!({ "prompt": prompt, "completion": completion, "advantage": 0.25, "credit": credit })
        };
        let rows = [
            row("p", "one two three", [1, 1, 1, 1]),
            row("p", "one two four", [0, 0, 1, 0]),
            row("p", "one two four", [0, 0, 1, 0]),
        ];
        let text: String = rows.iter().map(|r| format!("{r}\n")).collect();
        std::fs::write(dir.path().join("rollouts/step_3.jsonl"), text).unwrap();
        dir
    }

    #[test]
    fn tables_follow_from_the_rows() {
        let dir = run();
        let table = advantages(dir.path()).unwrap().unwrap();
        assert_eq!(table.rows[0][..4], [json!(3), json!("steps"), json!(6), json!(0.25)]);
        assert_eq!(table.rows[0].last(), Some(&json!(0.5)));
        let table = values(dir.path()).unwrap().unwrap();
        assert_eq!(table.rows[0][..3], [json!(3), json!(6), json!(4.0)]);
        let table = ranking(dir.path()).unwrap().unwrap();
        assert_eq!(
            table.rows[0],
            [json!(3), json!(2), json!(1.0)],
            "the pair of equal truths is not compared"
        );
        let table = diversity(dir.path()).unwrap().unwrap();
        let different = table.rows[0][3].as_f64().unwrap();
        assert!((different - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(table.rows[0][4], json!(0.5), "3 of 6 pairs of words");
        assert_eq!(table.cells()[0][1], "1");
    }

    /// Was: all games of a step were one prompt, as they begin with the same words.
    #[test]
    fn episodes_with_equal_first_states_are_prompts_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("rollouts")).unwrap();
        let row =
            |group: u64| json!({ "prompt": "guess", "completion": "3", "group": group }).to_string() + "\n";
        std::fs::write(dir.path().join("rollouts/step_1.jsonl"), [0, 0, 1].map(row).concat()).unwrap();
        let table = diversity(dir.path()).unwrap().unwrap();
        assert_eq!(table.rows[0][1..4], [json!(2), json!(3), json!(0.75)], "a half and a whole");
    }

    #[test]
    fn a_run_without_rollouts_has_no_tables() {
        let dir = tempfile::tempdir().unwrap();
        for analysis in super::super::ANALYSES {
            assert_eq!((analysis.run)(dir.path()).unwrap(), None, "{}", analysis.name);
        }
    }

    #[test]
    fn correlation_is_pearsons() {
        assert!((correlation(&[(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]).unwrap() - 1.0).abs() < 1e-12);
        assert!((correlation(&[(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]).unwrap() + 1.0).abs() < 1e-12);
        assert_eq!(correlation(&[(1.0, 3.0), (1.0, 2.0)]), None);
    }
}
