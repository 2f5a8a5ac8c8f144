//! What of a run goes into its report: enough to see everything, little enough to open.

use crate::run::rollouts::steps;
use crate::run::{Rollouts, StepRecord};
use ferrl_engine::Result;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Most points of a curve.
const POINTS: usize = 4000;
/// Most steps whose rewards are counted.
const REWARD_STEPS: usize = 200;
/// Most steps whose rollouts are shown, and how many of each.
const SHOWN_STEPS: usize = 60;
const SHOWN_OF_STEP: usize = 24;
/// Most characters of a text.
const TEXT: usize = 6000;

/// At most about [`POINTS`] steps, evenly chosen; those with an evaluation stay.
pub(super) fn thin(history: &[StepRecord]) -> Vec<&StepRecord> {
    let stride = history.len().div_ceil(POINTS).max(1);
    let special = |r: &StepRecord| r.metrics.iter().any(|(n, _)| n.starts_with("eval"));
    let keep = |&(i, r): &(usize, &StepRecord)| i % stride == 0 || i + 1 == history.len() || special(r);
    history.iter().enumerate().filter(keep).map(|(_, r)| r).collect()
}

/// Curves, rewards and rollouts, as the page's script expects them.
pub(super) fn page_data(history: &[&StepRecord], rollouts: &Path) -> Result<Value> {
    let mut series: Map<String, Value> = Map::new();
    for (i, record) in history.iter().enumerate() {
        for (name, value) in &record.metrics {
            let column =
                series.entry(name.clone()).or_insert_with(|| json!(vec![Value::Null; history.len()]));
            column[i] = json!(value); // null where it is not finite
        }
    }
    let mut stages: Vec<Value> = Vec::new();
    for (i, record) in history.iter().enumerate() {
        if i == 0 || history[i - 1].stage != record.stage {
            stages.push(json!([record.step, record.stage]));
        }
    }
    let all = steps(rollouts)?;
    let counted = spread(&all, REWARD_STEPS);
    let shown = spread(&counted, SHOWN_STEPS);
    let (mut rewards, mut rows) = (Vec::new(), Vec::new());
    for &step in &counted {
        let list = Rollouts::read(rollouts, step)?;
        let values: Vec<&Value> = list.iter().map(|r| &r["reward"]).filter(|v| v.is_number()).collect();
        rewards.push(json!([step, values]));
        if shown.contains(&step) {
            rows.extend(list.iter().take(SHOWN_OF_STEP).map(|r| row(step, r)));
        }
    }
    Ok(json!({
        "steps": history.iter().map(|r| r.step).collect::<Vec<_>>(),
        "seconds": history.iter().map(|r| r.seconds).collect::<Vec<_>>(),
        "stages": stages,
        "series": series,
        "rewards": rewards,
        "rollouts": rows,
        "rollout_steps": all.len(),
        "shown_steps": shown.len(),
        "shown_of_step": SHOWN_OF_STEP,
    }))
}

fn row(step: u64, rollout: &Value) -> Value {
    let text = |name: &str| {
        let text = rollout[name].as_str().unwrap_or("");
        match text.char_indices().nth(TEXT) {
            None => text.to_string(),
            Some((at, _)) => format!("{}… ({} more bytes)", &text[..at], text.len() - at),
        }
    };
    json!({
        "step": step,
        "prompt": text("prompt"),
        "completion": text("completion"),
        "reward": rollout["reward"],
        "lost": rollout["lost"] == true,
        "components": rollout["components"],
        "advantage": rollout["advantage"],
        "tokens": rollout["tokens"],
        "truncated": rollout["truncated"],
    })
}

/// At most `n` of a list, evenly chosen, with the first and the last.
fn spread(list: &[u64], n: usize) -> Vec<u64> {
    if list.len() <= n {
        return list.to_vec();
    }
    (0..n).map(|i| list[i * (list.len() - 1) / (n - 1)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_both_ends() {
        let list: Vec<u64> = (0..1000).collect();
        let some = spread(&list, 60);
        assert_eq!((some.len(), some[0], some[59]), (60, 0, 999));
        assert_eq!(spread(&list[..7], 60).len(), 7);
    }
}
