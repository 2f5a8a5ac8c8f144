//! Description of the algorithms: the manual's page, and text for the terminal.

use super::keys::{self, Key, TABLE_HEAD, is_table, row};
use super::range::short;
use super::{OFF, algorithm_keys};
use crate::algo::metrics::{EVALUATED, Metric, SAMPLED, STEP};
use crate::algo::{ALGORITHMS, Entry, Needs};
use ferrl_engine::Result;
use serde_json::{Map, Value};

/// The page on every algorithm. `figures` has measured results by name: `before`, `after`, `metric` and `command`.
pub fn algorithms_markdown(figures: &Map<String, Value>) -> String {
    let mut page = String::from("# The algorithms\n\n");
    page += "`algo = \"NAME\"` in a recipe chooses one; `ferrl recipe show NAME` prints the section of one of them and the \
             other keys that matter to it. This page is made from the registry and the comments of the code.\n\n";
    page += "The last two columns are measured with its recipe, before and after the last stage; the sections name the metric.\n\n";
    page += "| name | what it is | learns from | before | after |\n|---|---|---|---:|---:|\n";
    for e in ALGORITHMS {
        let figure = |key: &str| figures.get(e.name).and_then(|f| f[key].as_str()).unwrap_or("");
        let (before, after) = (figure("before"), figure("after"));
        let (name, about, feed) = (e.name, e.about, e.feed.words());
        page += &format!("| [`{name}`](#{name}) | {about} | {feed} | {before} | {after} |\n");
    }
    page += &written_by_all();
    for entry in ALGORITHMS {
        page += &section(entry, figures.get(entry.name));
    }
    page
}

/// The metrics of all algorithms.
fn written_by_all() -> String {
    let mut text = String::from("\n## What every run writes\n\n");
    text += "`metrics.jsonl` has a line for each step, TensorBoard the same: beside `step`, `stage`, `epoch` and `seconds` the \
             means below and those of the algorithm, which its section lists. A word in capitals stands for a name.\n";
    for (who, metrics) in [
        ("Every stage:", STEP),
        ("Stages that sample completions, or read completions with rewards:", SAMPLED),
        ("Steps with an evaluation:", EVALUATED),
    ] {
        text += &format!("\n{who}\n\n{}", metrics_table(metrics.iter()));
    }
    text
}

fn metrics_table<'a>(metrics: impl Iterator<Item = &'a Metric>) -> String {
    let row = |m: &Metric| format!("| `{}` | {} |\n", m.name, m.about.replace('|', "\\|"));
    metrics.fold("| metric | meaning |\n|---|---|\n".into(), |table, m| table + &row(m))
}

fn section(entry: &Entry, figures: Option<&Value>) -> String {
    let name = entry.name;
    let mut text = format!("\n## {name}\n\n{}\n\n", header(entry));
    text += &format!("Paper: {}.\n\n", entry.paper);
    text += &format!(
        "Recipe: [`recipes/{name}.toml`](../recipes/{name}.toml), learning from {}.\n",
        entry.feed.words()
    );
    if let Some(measured) = figures {
        let part = |key: &str| match &measured[key] {
            Value::String(words) => words.clone(),
            other => other.to_string(),
        };
        let (before, after, metric, command) =
            (part("before"), part("after"), part("metric"), part("command"));
        text += &format!("\nMeasured with `{command}`: {before} before and {after} after ({metric}).\n");
    }
    let keys = algorithm_keys(entry);
    if !keys.is_empty() {
        text += "\n";
        text += TABLE_HEAD;
        keys.iter().for_each(|k| text += &row(k));
    }
    text + "\n" + &metrics_table(entry.metrics.iter().copied().flatten())
}

/// The module comment of the algorithm's file: formula and differences from the paper.
fn header(entry: &Entry) -> String {
    let lines = entry.source.lines().map_while(|l| l.strip_prefix("//!"));
    lines.map(|l| l.strip_prefix(' ').unwrap_or(l)).collect::<Vec<_>>().join("\n")
}

/// The keys outside of `algo` that an algorithm uses.
pub fn keys_that_matter(entry: &Entry) -> Result<Vec<&'static Key>> {
    let needs = (entry.build)(Value::Object(entry.filled(&Map::new(), 1)))?.needs();
    let matters = |key: &&Key| !is_table(&key.kind) && matters(key.path.split('.').next(), entry, needs);
    Ok(keys::keys().iter().filter(matters).collect())
}

fn matters(table: Option<&str>, entry: &Entry, needs: Needs) -> bool {
    let samples = entry.feed.sampled();
    match table {
        Some("algo" | "stage") => false,
        Some("rollout") => samples,
        Some("reward") => samples && !needs.rewardless,
        Some("critic") => needs.critic,
        Some("teacher") => needs.teacher,
        _ => true,
    }
}

/// A key for the terminal: name, default, type, and its meaning below.
pub fn explained(key: &Key) -> String {
    let default = match &key.default {
        _ if key.required => " (must be given)".into(),
        Value::Null => String::new(),
        Value::Number(n) => format!(" = {}", short(n)),
        Value::Object(map) if map.is_empty() => " = {}".into(),
        value => format!(" = {value}"),
    };
    let off = if key.optional { format!(" or {OFF:?}") } else { String::new() };
    format!("  {}{default}    ({}{off})\n      {}\n", key.path, key.words(), key.about)
}

/// An algorithm's own metrics, for the terminal.
pub fn metrics_explained(entry: &Entry) -> String {
    let line = |m: &Metric| format!("  {}\n      {}\n", m.name, m.about);
    entry.metrics.iter().copied().flatten().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dotted names of everything in a value that is no table.
    fn leaves(at: &str, value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(k, v)| leaves(&format!("{at}.{k}"), v, out)),
            _ => out.push(at.to_string()),
        }
    }

    #[test]
    fn every_setting_of_every_algorithm_has_a_meaning() {
        for entry in ALGORITHMS {
            let keys = algorithm_keys(entry);
            let (mut wanted, mut got) = (Vec::new(), Vec::new());
            leaves("algo", &(entry.defaults)(), &mut wanted);
            keys.iter().for_each(|k| got.push(k.path.clone()));
            wanted.sort();
            got.sort();
            assert_eq!(got, wanted, "{}", entry.name);
            for key in &keys {
                assert!(key.about.len() > 3, "{}: {} has no comment", entry.name, key.path);
                assert!(key.kind != super::super::KeyKind::Free, "{}: {} has no type", entry.name, key.path);
            }
        }
    }

    #[test]
    fn every_file_opens_with_a_formula_and_keys_that_matter_follow_the_needs() {
        for entry in ALGORITHMS {
            assert!(header(entry).lines().count() > 3, "{}", entry.name);
            let keys = keys_that_matter(entry).unwrap();
            let has = |table: &str| keys.iter().any(|k| k.path.starts_with(table));
            assert_eq!(has("rollout."), entry.feed.sampled(), "{}", entry.name);
            assert!(has("optim.lr") && !has("algo"), "{}", entry.name);
        }
    }
}
