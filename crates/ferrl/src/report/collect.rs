//! The curves of a run as the page's script expects them.

use super::Run;
use crate::algo::ALGORITHMS;
use crate::algo::metrics::{EVALUATED, Metric, SAMPLED, STEP, TRUST};
use crate::recipe::Recipe;
use crate::run::StepRecord;
use serde_json::{Map, Value, json};

/// Maximum number of points of a curve.
const POINTS: usize = 4000;

/// Steps, seconds, sampled tokens, stages and every metric, thinned to about [`POINTS`] steps.
pub(super) fn run_data(run: &Run) -> Value {
    let history = thin(&run.history);
    let mut series: Map<String, Value> = Map::new();
    for (i, (_, record)) in history.iter().enumerate() {
        for (name, value) in &record.metrics {
            let column =
                series.entry(name.clone()).or_insert_with(|| json!(vec![Value::Null; history.len()]));
            column[i] = json!(value); // null where it is not finite
        }
    }
    let sampled = sampled_tokens(&run.history);
    json!({
        "name": run.name,
        "group": 0,
        "steps": history.iter().map(|(_, r)| r.step).collect::<Vec<_>>(),
        "seconds": history.iter().map(|(_, r)| r.seconds).collect::<Vec<_>>(),
        "tokens": sampled.map(|all| history.iter().map(|(i, _)| all[*i]).collect::<Vec<_>>()),
        "stages": stages(run),
        "series": series,
    })
}

/// Leaves out what has the same value at every step of every run, and rounds the rest to what a chart can show.
pub(super) fn condense(runs: &mut [Value]) {
    let values = |run: &Value, name: &str| run["series"][name].as_array().cloned().unwrap_or_default();
    let names: std::collections::BTreeSet<String> =
        runs.iter().filter_map(|r| r["series"].as_object()).flat_map(|s| s.keys().cloned()).collect();
    for name in names {
        let mut all = runs.iter().flat_map(|r| values(r, &name));
        let first = all.next();
        let constant = all.all(|v| Some(&v) == first.as_ref());
        for run in runs.iter_mut() {
            let Some(series) = run["series"].as_object_mut() else { continue };
            match series.get_mut(&name).and_then(Value::as_array_mut) {
                Some(list) if !constant => list.iter_mut().for_each(round),
                _ => {
                    series.remove(&name);
                }
            }
        }
    }
}

/// To five significant digits.
fn round(value: &mut Value) {
    if let Some(x) = value.as_f64() {
        *value = format!("{x:.4e}").parse::<f64>().map_or(Value::Null, |x| json!(x));
    }
}

/// At most about [`POINTS`] steps, evenly chosen, with their places; those with an evaluation stay.
fn thin(history: &[StepRecord]) -> Vec<(usize, &StepRecord)> {
    let stride = history.len().div_ceil(POINTS).max(1);
    let evaluated = |r: &StepRecord| r.metrics.iter().any(|(n, _)| n.starts_with("eval"));
    let keep = |&(i, r): &(usize, &StepRecord)| i % stride == 0 || i + 1 == history.len() || evaluated(r);
    history.iter().enumerate().filter(keep).collect()
}

/// Tokens of completions up to each step; `None` where nothing is sampled.
fn sampled_tokens(history: &[StepRecord]) -> Option<Vec<f64>> {
    let mut total = 0.0;
    let sum = |r: &StepRecord| {
        total += r.get("completions/total_tokens").filter(|t| t.is_finite()).unwrap_or(0.0);
        total
    };
    let all: Vec<f64> = history.iter().map(sum).collect();
    (total > 0.0).then_some(all)
}

/// First step, name and algorithm of each stage; the algorithm is null where the recipe cannot be read.
fn stages(run: &Run) -> Vec<Value> {
    let recipe = Recipe::parse(&run.recipe, "recipe.toml", "", &[]).ok();
    let algorithm = |stage: &str| {
        let stages = recipe.iter().flat_map(|r| &r.stages);
        stages.filter(|s| s.name == stage).map(|s| s.recipe.algorithm_name().to_string()).next()
    };
    let history = &run.history;
    let starts = (0..history.len()).filter(|&i| i == 0 || history[i - 1].stage != history[i].stage);
    starts.map(|i| json!([history[i].step, history[i].stage, algorithm(&history[i].stage)])).collect()
}

/// What each metric of these runs is, by its name, from the lists the manual is made of.
pub(super) fn descriptions(runs: &[&Run]) -> Value {
    let groups = ALGORITHMS.iter().flat_map(|entry| entry.metrics.iter().copied());
    let known: Vec<&Metric> = [STEP, SAMPLED, EVALUATED, TRUST].into_iter().chain(groups).flatten().collect();
    let mut out = Map::new();
    for (name, _) in runs.iter().flat_map(|r| &r.history).flat_map(|r| &r.metrics) {
        if !out.contains_key(name) {
            // "eval/METRIC" would describe every evaluation; an exact name is better.
            let found =
                known.iter().find(|m| m.name == name).or_else(|| known.iter().find(|m| m.covers(name)));
            out.insert(name.clone(), json!(found.map_or("", |m| m.about)));
        }
    }
    out.into()
}
