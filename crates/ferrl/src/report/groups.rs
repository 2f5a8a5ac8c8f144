//! Which runs of a comparison are the same recipe with another seed, and in what the others differ.

use super::Run;
use crate::recipe::Recipe;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

pub(super) struct Groups {
    pub names: Vec<String>,
    pub of_run: Vec<usize>,
    /// Keys whose values differ between groups, with the value of each.
    pub differences: Vec<Value>,
}

/// Two runs of one folder name get their parents' names, too.
pub(super) fn name_apart(runs: &mut [Run], dirs: &[PathBuf]) {
    let names: Vec<String> = runs.iter().map(|r| r.name.clone()).collect();
    for (i, run) in runs.iter_mut().enumerate() {
        if names.iter().filter(|n| **n == names[i]).count() > 1 {
            run.name = dirs[i].display().to_string();
        }
    }
}

/// The settings of a run by their dotted keys; `recipe.toml` as lines where it is not TOML.
fn settings(run: &Run) -> Map<String, Value> {
    let mut out = Map::new();
    // A stage's settings are resolved over what the recipe says for all stages.
    let stages = Recipe::parse(&run.recipe, "recipe.toml", "", &[]).map(|r| r.stages).unwrap_or_default();
    for stage in &stages {
        let prefix = if stage.staged { format!("{}: ", stage.name) } else { String::new() };
        let value = serde_json::to_value(&stage.recipe).unwrap_or_default();
        flatten(&value, &prefix, "", &mut out);
    }
    if stages.is_empty() {
        out.insert("recipe".into(), run.recipe.clone().into());
    }
    out
}

fn flatten(value: &Value, prefix: &str, path: &str, out: &mut Map<String, Value>) {
    let mut inside = |key: &str, inner: &Value| {
        let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
        flatten(inner, prefix, &path, out);
    };
    match value {
        Value::Object(object) if !object.is_empty() => object.iter().for_each(|(key, v)| inside(key, v)),
        // The entries of `[[reward]]` and the like, numbered as on the command line.
        Value::Array(list) if list.iter().any(Value::is_object) => {
            list.iter().enumerate().for_each(|(i, v)| inside(&i.to_string(), v));
        }
        Value::Null => {}
        other => drop(out.insert(format!("{prefix}{path}"), other.clone())),
    }
}

fn is_seed(key: &str) -> bool {
    ["seed", "name"].iter().any(|k| key == *k || key.ends_with(&format!(": {k}")))
}

/// The seed of a run, null where its recipe cannot be read.
pub(super) fn seed(run: &Run) -> Value {
    let found = settings(run).into_iter().find(|(k, _)| k == "seed" || k.ends_with(": seed"));
    found.map_or(Value::Null, |f| f.1)
}

pub(super) fn group(runs: &[Run]) -> Groups {
    let mut all: Vec<Map<String, Value>> = runs.iter().map(settings).collect();
    all.iter_mut().for_each(|s| s.retain(|key, _| !is_seed(key)));
    let mut members: Vec<Vec<usize>> = Vec::new();
    for i in 0..runs.len() {
        match members.iter_mut().find(|m| all[m[0]] == all[i]) {
            Some(group) => group.push(i),
            None => members.push(vec![i]),
        }
    }
    let of_run =
        (0..runs.len()).map(|i| members.iter().position(|m| m.contains(&i)).unwrap_or_default()).collect();
    let first = |group: &Vec<usize>| &all[group[0]];
    let mut keys: Vec<&String> = members.iter().flat_map(|m| first(m).keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let mut differences = Vec::new();
    for key in keys {
        let values: Vec<&Value> = members.iter().map(|m| first(m).get(key).unwrap_or(&Value::Null)).collect();
        if values.iter().any(|v| *v != values[0]) {
            differences.push(json!([key, values]));
        }
    }
    let names = members.iter().map(|m| name(runs, m)).collect();
    Groups { names, of_run, differences }
}

/// A group's name: what its runs' names begin with.
fn name(runs: &[Run], members: &[usize]) -> String {
    let first = &runs[members[0]].name;
    let [_, others @ ..] = members else { return first.clone() };
    if others.is_empty() {
        return first.clone();
    }
    let shared = |other: &str| first.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    let length = others.iter().map(|&i| shared(&runs[i].name)).min().unwrap_or(0);
    let prefix: String = first.chars().take(length).collect();
    match prefix.trim_end_matches(['-', '_', '.', ' ', '/']) {
        "" => format!("{first} and {} more", others.len()),
        name => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, recipe: &str) -> Run {
        Run { name: name.into(), recipe: recipe.into(), history: Vec::new(), log: Vec::new() }
    }

    #[test]
    fn runs_that_differ_in_the_seed_alone_are_one_group() {
        let base = "model.path = \"m\"\ndata.train = [\"task:countdown\"]\n";
        let with = |name: &str, more: &str| run(name, &format!("{base}{more}\n"));
        let runs = [
            with("grpo-0", "algo = \"grpo\"\nseed = 0"),
            with("rloo-0", "algo = \"rloo\""),
            with("grpo-1", "algo = \"grpo\"\nseed = 1"),
        ];
        let groups = group(&runs);
        assert_eq!((groups.names, groups.of_run), (vec!["grpo".to_string(), "rloo-0".into()], vec![0, 1, 0]));
        let differences = json!(groups.differences);
        let rewards = |weight: f64| format!("[[reward]]\nverifier = \"numeric\"\nweight = {weight:?}");
        let weighted = group(&[with("a", &rewards(1.0)), with("b", &rewards(2.0))]);
        assert_eq!(
            json!(weighted.differences),
            json!([["reward.0.weight", [1.0, 2.0]]]),
            "was: the whole list"
        );
        assert!(differences.to_string().contains("[\"algo.name\",[\"grpo\",\"rloo\"]]"), "{differences}");
        assert_eq!(seed(&runs[2]), json!(1));
    }
}
