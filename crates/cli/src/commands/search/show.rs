//! What a search says: a table or JSON of its results, and the lists of what there is.

use ferrl::search::expand::{self, EXPANDERS};
use ferrl::search::extract::EXTRACTORS;
use ferrl::search::paths::{AGGREGATORS, FILTERS, POST_PROCESSORS};
use ferrl::search::strategy::COMMON;
use ferrl::search::{Figures, Record, SCORERS, STRATEGIES};
use ferrl::verify::Setting;
use serde_json::{Value, json};
use std::fmt::Write;

/// All results as one object. A replay gives the same one.
pub fn json(records: &[Record]) -> Value {
    let mut line = Figures::of(records).json();
    let first = records.first();
    line.insert("strategy".into(), json!(first.map(|r| &r.strategy)));
    line.insert("options".into(), json!(first.map(|r| &r.options)));
    line.insert("scorer".into(), json!(first.map(|r| &r.scorer)));
    line.insert("seed".into(), json!(first.map(|r| r.seed)));
    line.insert("seconds".into(), json!(records.iter().map(|r| r.seconds).sum::<f64>()));
    let row = |r: &Record| {
        json!({
            "index": r.index, "prompt": r.prompt, "answer": r.answer, "reward": r.reward, "correct": r.correct,
            "answer_node": r.answer_node, "nodes": r.nodes.nodes().len(), "root_value": r.nodes.node(0).value,
            "root_visits": r.nodes.node(0).visits, "generated_tokens": r.generated_tokens,
            "shared_tokens": r.shared_tokens, "seconds": r.seconds,
        })
    };
    line.insert("results".into(), records.iter().map(row).collect());
    Value::Object(line)
}

/// The same for people.
pub fn table(records: &[Record], stats: bool) -> String {
    let f = Figures::of(records);
    let mut out = String::new();
    if let Some(first) = records.first() {
        let _ = writeln!(out, "{}: {} prompts, scorer {}", first.strategy, f.prompts, first.scorer);
    }
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let mut row = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<18} {value}");
    };
    match (f.accuracy, f.interval) {
        (Some((value, _)), Some((low, high))) => {
            row(
                "accuracy",
                format!("{} (95 % interval {} to {})", percent(value), percent(low), percent(high)),
            );
        }
        _ => row("accuracy", "unknown: no verifier knows the answers".into()),
    }
    if let (Some(one), Some(any)) = (f.mean_completion, f.any) {
        row("one completion", percent(one));
        row("any completion", percent(any));
    }
    if f.lost > 0 {
        row("lost", format!("{} episodes: their environment failed", f.lost));
    }
    if stats {
        let seconds: f64 = records.iter().map(|r| r.seconds).sum();
        let rate = f.generated_tokens as f64 / seconds.max(1e-9);
        row("nodes", f.nodes.to_string());
        row("tokens sampled", format!("{} ({rate:.0} tokens/s)", f.generated_tokens));
        row("prefix shared", format!("{} tokens were in the KV cache", f.shared_tokens));
        row("time", format!("{seconds:.2} s"));
    }
    if let [one] = records {
        let text = one.answer_node.map(|id| one.nodes.text(id)).unwrap_or_default();
        let _ = writeln!(out, "\n{}", crate::output::visible(text.trim_end()));
    }
    out
}

/// Strategies, expanders, extractors and scorers.
pub fn list() -> String {
    let mut out = String::new();
    let settings = |out: &mut String, all: &[Setting]| {
        for s in all {
            let default = if s.default.is_empty() { String::new() } else { format!(" [{}]", s.default) };
            let _ = writeln!(out, "    {:<14} {}{default}", s.name, s.about);
        }
    };
    for entry in STRATEGIES {
        let _ = writeln!(out, "{}: {}", entry.name, entry.about);
        settings(&mut out, entry.settings);
    }
    let _ = writeln!(out, "\nevery strategy:");
    settings(&mut out, COMMON);
    let _ = writeln!(out, "\nexpanders (--option expander=NAME):");
    EXPANDERS.iter().for_each(|e| {
        let _ = writeln!(out, "    {}: {}", e.name, e.about);
    });
    settings(&mut out, expand::SETTINGS);
    let _ = writeln!(out, "\nextractors (--option extractor=NAME):");
    EXTRACTORS.iter().for_each(|e| {
        let _ = writeln!(out, "    {}: {}", e.name, e.about);
    });
    for (title, members) in paths() {
        let _ = writeln!(out, "\n{title}:");
        members.iter().for_each(|(name, about)| {
            let _ = writeln!(out, "    {name}: {about}");
        });
    }
    let _ = writeln!(out, "\nscorers (--verifier NAME), besides verifiers and folders of reward models:");
    SCORERS.iter().for_each(|(name, about)| {
        let _ = writeln!(out, "    {name}: {about}");
    });
    out
}

/// What can be done with paths: registries with the names and lines of their members.
fn paths() -> [(&'static str, Vec<(&'static str, &'static str)>); 3] {
    [
        ("path filters (--filter NAME)", FILTERS.iter().map(|e| (e.name, e.about)).collect()),
        ("path aggregators (--aggregate NAME[=N])", AGGREGATORS.iter().map(|e| (e.name, e.about)).collect()),
        (
            "path post-processors (--post NAME,...)",
            POST_PROCESSORS.iter().map(|e| (e.name, e.about)).collect(),
        ),
    ]
}

/// The same for machines.
pub fn list_json() -> String {
    let settings = |all: &[Setting]| -> Value {
        all.iter().map(|s| json!({ "name": s.name, "default": s.default, "about": s.about })).collect()
    };
    let strategies: Value = STRATEGIES
        .iter()
        .map(|e| json!({ "name": e.name, "about": e.about, "options": settings(e.settings) }))
        .collect();
    let expanders: Value = EXPANDERS.iter().map(|e| json!({ "name": e.name, "about": e.about })).collect();
    let extractors: Value = EXTRACTORS.iter().map(|e| json!({ "name": e.name, "about": e.about })).collect();
    let scorers: Value =
        SCORERS.iter().map(|(name, about)| json!({ "name": name, "about": about })).collect();
    let members = |i: usize| -> Value {
        paths()[i].1.iter().map(|(name, about)| json!({ "name": name, "about": about })).collect()
    };
    let all = json!({
        "path_filters": members(0), "path_aggregators": members(1), "path_post_processors": members(2),
        "strategies": strategies, "options": settings(COMMON), "expanders": expanders,
        "expander_options": settings(expand::SETTINGS), "extractors": extractors, "scorers": scorers,
    });
    format!("{all}\n")
}
