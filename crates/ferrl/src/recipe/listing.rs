//! Verifiers and generated tasks with their options, as a page of the manual, as text and as JSON.

use super::keys::{Key, TABLE_HEAD, row};
use super::manual::explained;
use super::schema::{Field, KeySchema};
use crate::task::{self, TASKS};
use crate::verify::VERIFIERS;
use schemars::Schema;
use serde_json::{Value, json};

/// The options of a member of a registry, from their JSON Schema, with `prefix` before their names.
pub fn option_keys(schema: fn() -> Schema, prefix: &str) -> Vec<Key> {
    let schema = KeySchema::read(&schema().to_value());
    let key = |f: &Field| Key {
        path: format!("{prefix}{}", f.name),
        kind: f.kind.clone(),
        optional: f.optional,
        required: f.required,
        range: f.range,
        default: f.default.clone(),
        about: f.about.clone(),
    };
    schema.fields(&schema.root).iter().map(key).collect()
}

/// The settings of a generated task: the keys of `data.task`.
pub fn task_keys(entry: &task::Entry) -> Vec<Key> {
    option_keys(entry.schema, "data.task.")
}

pub fn verifiers_markdown() -> String {
    let mut page = String::from("# Verifiers and generated tasks\n\n");
    page += "This page is made from the registries (`ferrl verify --list`, `ferrl env list`). A recipe names a verifier in a \
             `[[reward]]`, with its options; `ferrl verify NAME --input FILE` grades a file of completions with it.\n\n";
    page += "A completion that the length limit cut off is wrong, whatever stands in it, unless its reward says \
             `truncated = \"score\"`. `length` and `python` see it all the same; `length` goes by the number of tokens, and a \
             Python function has a scale of its own and is told in the list `truncated`. It never counts as right in an \
             evaluation.\n";
    for entry in VERIFIERS {
        page += &format!("\n## {}\n\n{}.\n\n{TABLE_HEAD}", entry.name, sentence(entry.about));
        option_keys(entry.schema, "").iter().for_each(|k| page += &row(k));
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

/// Every verifier with its options and defaults, for the terminal.
pub fn verifiers_text() -> String {
    let all = VERIFIERS.iter().map(|e| text(e.name, e.about, &option_keys(e.schema, "")));
    all.collect::<Vec<_>>().join("\n")
}

pub fn verifiers_json() -> Value {
    VERIFIERS.iter().map(|e| json(e.name, e.about, &option_keys(e.schema, ""))).collect()
}

pub fn tasks_text() -> String {
    let all = TASKS.iter().map(|e| text(&format!("task:{}", e.name), e.about, &task_keys(e)));
    all.collect::<Vec<_>>().join("\n")
}

pub fn tasks_json() -> Value {
    TASKS.iter().map(|e| json(e.name, e.about, &option_keys(e.schema, ""))).collect()
}

fn text(name: &str, about: &str, options: &[Key]) -> String {
    format!("{name}\n  {about}\n{}", options.iter().map(explained).collect::<String>())
}

fn json(name: &str, about: &str, options: &[Key]) -> Value {
    let options: Vec<Value> = options.iter().map(Key::json).collect();
    json!({ "name": name, "about": about, "options": options })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_of_every_task_is_listed_with_its_meaning() {
        for entry in TASKS {
            let keys = task_keys(entry);
            let told = |k: &Key| k.about.len() > 3 && k.kind != super::super::KeyKind::Free;
            assert!(!keys.is_empty() && keys.iter().all(told), "{}", entry.name);
            let given = keys.iter().filter(|k| !k.default.is_null());
            let given =
                given.map(|k| (k.path.trim_start_matches("data.task.").to_string(), k.default.clone()));
            (entry.build)(&given.collect(), 0).unwrap();
        }
    }
}
