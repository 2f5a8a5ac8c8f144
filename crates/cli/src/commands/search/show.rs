//! Output of `ferrl search`: results as a table or JSON, and the lists of strategies, scorers and path operations.

use ferrl::recipe::{Key, KeyKind, option_keys};
use ferrl::search::expand::{EXPANDER_OPTIONS, EXPANDERS};
use ferrl::search::extract::EXTRACTORS;
use ferrl::search::paths::{AGGREGATORS, FILTERS, POST_PROCESSORS};
use ferrl::search::strategy::STEP_OPTIONS;
use ferrl::search::{Figures, Record, SCORERS, STRATEGIES};
use ferrl_engine::counted;
use serde_json::{Value, json};
use std::fmt::Write;

/// The selection rule of `--choose`, and the number of completions of `--first`.
pub type Rechosen<'a> = (&'a str, Option<usize>);

/// All results as one object; a replay prints the same.
pub fn json(records: &[Record], chosen: Option<Rechosen<'_>>) -> Value {
    let mut line = Figures::of(records).json();
    let first = records.first();
    line.insert("strategy".into(), json!(first.map(|r| &r.strategy)));
    line.insert("options".into(), json!(first.map(|r| &r.options)));
    line.insert("scorer".into(), json!(first.map(|r| &r.scorer)));
    if let Some((rule, first)) = chosen {
        line.insert("choose".into(), json!(rule));
        line.insert("first".into(), json!(first));
    }
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

/// All results as text.
pub fn table(records: &[Record], stats: bool, chosen: Option<Rechosen<'_>>) -> String {
    let f = Figures::of(records);
    let mut out = String::new();
    if let Some(first) = records.first() {
        let rule = match chosen {
            Some((rule, Some(first))) => {
                format!(", result by {rule} of the first {}", counted(first, "completion"))
            }
            Some((rule, None)) => format!(", result by {rule}"),
            None => String::new(),
        };
        let prompts = counted(f.prompts, "prompt");
        let _ = writeln!(out, "{}: {prompts}, scorer {}{rule}", first.strategy, first.scorer);
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
        _ if nothing_left(records) => row("accuracy", format!("unknown: every {} was lost", whole(records))),
        _ => row("accuracy", "unknown: no verifier knows the answers".into()),
    }
    if let (Some(one), Some(any)) = (f.mean_completion, f.any) {
        row("one completion", percent(one));
        row("any completion", percent(any));
    }
    if f.lost > 0 {
        let why = lost(records).and_then(|why| why.lines().next()).unwrap_or_default();
        row("lost", format!("{} (first: {})", counted(f.lost, whole(records)), crate::output::visible(why)));
    }
    if stats {
        let seconds: f64 = records.iter().map(|r| r.seconds).sum();
        let rate = f.generated_tokens as f64 / seconds.max(1e-9);
        row("nodes", f.nodes.to_string());
        row("tokens sampled", format!("{} ({rate:.0} tokens/s)", f.generated_tokens));
        row("prefix shared", format!("{} from the KV cache", counted(f.shared_tokens as usize, "token")));
        row("time", format!("{seconds:.2} s"));
    }
    if let [one] = records {
        let text = one.answer_node.map(|id| one.nodes.text(id)).unwrap_or_default();
        let _ = writeln!(out, "\n{}", crate::output::visible(text.trim_end()));
    }
    out
}

/// What a path of the trees is.
pub fn whole(records: &[Record]) -> &'static str {
    if records.iter().any(|r| r.facts.turns) { "episode" } else { "completion" }
}

/// Why the first lost path was lost.
pub fn lost(records: &[Record]) -> Option<&str> {
    records.iter().flat_map(|r| r.nodes.nodes()).find_map(|n| n.lost.as_deref())
}

/// Whether paths were lost and none is left.
pub fn nothing_left(records: &[Record]) -> bool {
    let whole = |r: &Record| r.nodes.terminals().any(|n| n.lost.is_none());
    lost(records).is_some() && !records.iter().any(whole)
}

/// Strategies, expanders, extractors and scorers.
pub fn list() -> String {
    let mut out = String::new();
    let options = |out: &mut String, keys: Vec<Key>| {
        for key in keys {
            let default = if key.default.is_null() { String::new() } else { format!(" [{}]", key.default) };
            let words = match key.kind {
                KeyKind::Choice(words) => format!(" ({})", words.join(", ")),
                _ => String::new(),
            };
            let _ = writeln!(out, "    {:<14} {}{words}{default}", key.path, key.about);
        }
    };
    for entry in STRATEGIES {
        let _ = writeln!(out, "{}: {}", entry.name, entry.about);
        options(&mut out, option_keys(entry.schema, ""));
    }
    let _ = writeln!(out, "\nevery strategy:");
    options(&mut out, option_keys(STEP_OPTIONS, ""));
    let _ = writeln!(out, "\nexpanders (--option expander=NAME):");
    EXPANDERS.iter().for_each(|e| {
        let _ = writeln!(out, "    {}: {}", e.name, e.about);
    });
    options(&mut out, option_keys(EXPANDER_OPTIONS, ""));
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

/// The registries of path operations: name and description of each member.
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

pub fn list_json() -> String {
    let options = |keys: Vec<Key>| -> Value { keys.iter().map(Key::json).collect() };
    let strategies: Value = STRATEGIES
        .iter()
        .map(|e| json!({ "name": e.name, "about": e.about, "options": options(option_keys(e.schema, "")) }))
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
        "strategies": strategies, "options": options(option_keys(STEP_OPTIONS, "")), "expanders": expanders,
        "expander_options": options(option_keys(EXPANDER_OPTIONS, "")), "extractors": extractors, "scorers": scorers,
    });
    format!("{all}\n")
}
