//! What the registries of verifiers and generated tasks say, as a page of the manual, as text and as JSON.

use super::keys::{Key, TABLE_HEAD, row};
use super::schema::KeySchema;
use crate::task::{self, TASKS};
use crate::verify::{self, Setting, VERIFIERS};
use serde_json::{Value, json};

/// The settings of a generated task: the keys of `data.task`.
pub fn task_keys(entry: &task::Entry) -> Vec<Key> {
    let (schema, defaults) = (KeySchema::read(&(entry.schema)().to_value()), (entry.defaults)());
    let key = |f: &super::schema::Field| Key {
        path: format!("data.task.{}", f.name),
        kind: f.kind.clone(),
        optional: f.optional,
        range: f.range,
        default: defaults[&f.name].clone(),
        about: f.about.clone(),
    };
    schema.fields(&schema.root).iter().map(key).collect()
}

/// The page on verifiers and generated tasks.
pub fn verifiers_markdown() -> String {
    let mut page = String::from("# Verifiers and generated tasks\n\n");
    page += "This page is made from the registries (`ferrl verify --list`, `ferrl env list`). A recipe names a verifier in a \
             `[[reward]]`, with its options; `ferrl verify NAME --input FILE` grades a file of completions with it.\n\n";
    page += "A completion that the length limit cut off is wrong, whatever stands in it, unless its reward says \
             `truncated = \"score\"`. `length` and `python` see it all the same; `length` goes by the number of tokens, and a \
             Python function has a scale of its own and is told in the list `truncated`. It never counts as right in an \
             evaluation.\n";
    for entry in VERIFIERS {
        page += &format!("\n## {}\n\n{}.\n", entry.name, sentence(entry.about));
        page += "\n| option | default | meaning |\n|---|---|---|\n";
        for s in entry.settings {
            let default =
                if s.default.is_empty() { "must be given".into() } else { format!("`{}`", s.default) };
            page += &format!("| `{}` | {default} | {} |\n", s.name, s.about.replace('|', "\\|"));
        }
    }
    page += "\n# Generated tasks\n\n`data.train = [\"task:NAME\"]` learns from one; its settings are keys of `data.task`. Each brings \
             the verifier that fits it, and holds out questions of its own for evaluations.\n";
    for entry in TASKS {
        page += &format!("\n## task:{}\n\n{}.\n\n{TABLE_HEAD}", entry.name, sentence(entry.about));
        task_keys(entry).iter().for_each(|k| page += &row(k));
    }
    page
}

fn sentence(about: &str) -> String {
    let mut letters = about.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// Every verifier for a terminal: what it checks, its options with their defaults.
pub fn verifiers_text() -> String {
    let option = |s: &Setting| {
        let default =
            if s.default.is_empty() { " (must be given)".into() } else { format!(" = {}", s.default) };
        format!("    {}{default}\n        {}\n", s.name, s.about)
    };
    let one = |e: &verify::Entry| {
        format!("{}\n  {}\n{}", e.name, e.about, e.settings.iter().map(option).collect::<String>())
    };
    VERIFIERS.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// The same for machines.
pub fn verifiers_json() -> Value {
    let option = |s: &Setting| json!({ "name": s.name, "default": s.default, "required": s.default.is_empty(), "about": s.about });
    let one = |e: &verify::Entry| json!({ "name": e.name, "about": e.about, "options": e.settings.iter().map(option).collect::<Vec<_>>() });
    VERIFIERS.iter().map(one).collect()
}

/// Every generated task for a terminal.
pub fn tasks_text() -> String {
    let one = |e: &&task::Entry| {
        let keys: String = task_keys(e).iter().map(super::manual::explained).collect();
        format!("task:{}\n  {}\n{keys}", e.name, e.about)
    };
    TASKS.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// The same for machines.
pub fn tasks_json() -> Value {
    let key = |k: &Key| {
        let name = k.path.trim_start_matches("data.task.");
        json!({ "name": name, "type": k.kind.words(k.range), "default": k.default, "about": k.about })
    };
    let one = |e: &&task::Entry| json!({ "name": e.name, "about": e.about, "options": task_keys(e).iter().map(key).collect::<Vec<_>>() });
    TASKS.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_every_task_is_listed_with_its_meaning() {
        for entry in TASKS {
            let (keys, defaults) = (task_keys(entry), (entry.defaults)());
            let listed: Vec<&str> = keys.iter().map(|k| k.path.trim_start_matches("data.task.")).collect();
            let wanted: Vec<&str> = defaults.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(listed, wanted, "{}", entry.name);
            assert!(
                keys.iter().all(|k| k.about.len() > 3 && k.kind != super::super::KeyKind::Free),
                "{}",
                entry.name
            );
            (entry.build)(defaults.as_object().unwrap(), 0).unwrap();
        }
    }
}
