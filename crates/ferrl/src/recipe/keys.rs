//! Every key of a recipe with type, default and meaning, for the manual, help, and suggestions of similar names.

use super::range::{Range, short};
use super::schema::{KeyKind, KeySchema, POLICY, RECIPE};
use super::tree::KeyPath;
use super::{AdapterSettings, InitSettings, OFF, Recipe, RewardSettings, elsewhere, rl2};
use crate::algo::Entry;
use crate::algo::policy::Policy;
use ferrl_engine::nearest;
use serde_json::{Value, json};
use std::sync::LazyLock;

#[derive(Clone, Debug)]
pub struct Key {
    /// Dotted; `N` stands for the number of a list's entry.
    pub path: String,
    pub kind: KeyKind,
    /// Whether `"off"` is allowed.
    pub optional: bool,
    pub required: bool,
    /// The range of its number, or of the numbers of its list.
    pub range: Option<Range>,
    /// Its default; null if it has none.
    pub default: Value,
    pub about: String,
}

impl Key {
    /// Its type, in words.
    pub fn words(&self) -> String {
        self.kind.words(self.range)
    }

    pub fn json(&self) -> Value {
        let (name, about) = (&self.path, &self.about);
        json!({ "name": name, "type": self.words(), "default": self.default, "required": self.required, "about": about })
    }
}

/// Every key of a recipe, in the order of the types; those of `algo` belong to the algorithm.
pub fn keys() -> &'static [Key] {
    static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
        let mut all = Vec::new();
        expand(&RECIPE, "Recipe", "", &json!(Recipe::default()), &mut all);
        all
    });
    &KEYS
}

/// The keys under `algo` that the policy-gradient algorithms share; the defaults are those of `dr_grpo`.
pub fn policy_keys() -> &'static [Key] {
    static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
        let mut all = Vec::new();
        expand(&POLICY, "Policy", "algo.", &json!(Policy::default()), &mut all);
        all
    });
    &KEYS
}

/// The keys under `algo` of one algorithm, with its defaults.
pub fn algorithm_keys(entry: &Entry) -> Vec<Key> {
    let mut all = Vec::new();
    let schema = KeySchema::of_algorithm(entry);
    expand(&schema, &schema.root, "algo.", &(entry.defaults)(), &mut all);
    all.retain(|k| !is_table(&k.kind));
    all
}

fn expand(schema: &KeySchema, table: &str, prefix: &str, defaults: &Value, all: &mut Vec<Key>) {
    for field in schema.fields(table) {
        let path = format!("{prefix}{}", field.name);
        let (kind, optional, required, range) =
            (field.kind.clone(), field.optional, field.required, field.range);
        let (default, about) = (defaults[&field.name].clone(), field.about.clone());
        all.push(Key {
            path: path.clone(),
            kind,
            optional,
            required,
            range,
            default: default.clone(),
            about,
        });
        let (inner, inner_path) = match &field.kind {
            KeyKind::Table(inner) => (inner, format!("{path}.")),
            KeyKind::List(of) => match &**of {
                KeyKind::Table(inner) => (inner, format!("{path}.N.")),
                _ => continue,
            },
            _ => continue,
        };
        // Tables that are absent by default have defaults once they are present.
        let defaults = match inner.as_str() {
            "AdapterSettings" => json!(AdapterSettings::default()),
            "InitSettings" => json!(InitSettings::default()),
            "RewardSettings" => json!(RewardSettings::default()),
            _ => default,
        };
        expand(schema, inner, &inner_path, &defaults, all);
    }
}

/// The key of a path; stages have the keys of a recipe.
pub(super) fn find(path: &[String]) -> Option<&'static Key> {
    let wanted = pattern(path);
    keys().iter().chain(policy_keys()).find(|k| k.path == wanted)
}

/// The path with numbers replaced by `N` and without the stage in front.
fn pattern(path: &[String]) -> String {
    let path = if path.len() > 2 && path[0] == "stage" { &path[2..] } else { path };
    let number = |k: &String| if k.parse::<usize>().is_ok() { "N".into() } else { k.clone() };
    path.iter().map(number).collect::<Vec<String>>().join(".")
}

/// The first key of that name in any table.
pub(super) fn named(leaf: &str) -> Option<&'static str> {
    let mut all = keys().iter().chain(policy_keys()).map(|k| k.path.as_str());
    all.find(|k| k.rsplit('.').next() == Some(leaf))
}

/// Whether the table of a path has a key with a similar name.
pub(super) fn has_namesake(path: &[String]) -> bool {
    let wanted = pattern(path);
    let (parent, leaf) = wanted.rsplit_once('.').unwrap_or(("", &wanted));
    let siblings =
        keys().iter().chain(policy_keys()).map(|k| k.path.rsplit_once('.').unwrap_or(("", k.path.as_str())));
    nearest(leaf, siblings.filter(|k| k.0 == parent).map(|k| k.1)).is_some()
}

/// The valid key most similar to a path.
pub(super) fn nearest_to(path: &[String]) -> Option<String> {
    let wanted = pattern(path);
    let (parent, leaf) = wanted.rsplit_once('.').unwrap_or(("", &wanted));
    let all = || keys().iter().chain(policy_keys()).map(|k| k.path.as_str());
    let split = |k: &'static str| k.rsplit_once('.').unwrap_or(("", k));
    let near_here = nearest(leaf, all().map(split).filter(|k| k.0 == parent).map(|k| k.1));
    let stage: KeyPath = if wanted.len() < path.join(".").len() && path[0] == "stage" {
        vec![path[0].clone(), path[1].clone()]
    } else {
        Vec::new()
    };
    // Entries of a list keep their number.
    let mut numbers = path[stage.len()..].iter().filter(|k| k.parse::<usize>().is_ok());
    let mut whole = |key: &str| {
        let mut number = |part: &str| match part {
            "N" => numbers.next().map_or("0", String::as_str).to_string(),
            part => part.to_string(),
        };
        let parts: Vec<String> = key.split('.').map(&mut number).collect();
        stage.iter().cloned().chain(parts).collect::<Vec<_>>().join(".")
    };
    if let Some(key) = elsewhere::key(path) {
        return Some(whole(key));
    }
    if let Some(key) = all().find(|k| split(k).1 == leaf) {
        return Some(whole(key));
    }
    if let Some(near) = near_here {
        return Some(whole(&if parent.is_empty() { near.to_string() } else { format!("{parent}.{near}") }));
    }
    // RL2's names have tables: a word alone is none of them.
    let theirs = rl2::names().filter(|_| !parent.is_empty());
    if let Some(near) = nearest(&wanted, theirs.chain(all())) {
        return Some(whole(near));
    }
    let near = nearest(leaf, all().map(|k| split(k).1))?;
    all().find(|k| split(k).1 == near).map(whole)
}

/// The manual's page: every key, table by table.
pub fn keys_markdown() -> String {
    let mut page = String::from("# Keys of a recipe\n");
    page +=
        &format!("\n{OFF:?} unsets a setting, also one with a default or with a value from a base recipe.\n");
    let table_of = |key: &'static Key| key.path.rsplit_once('.').map_or("", |p| p.0);
    let mut tables: Vec<&str> = Vec::new();
    for table in keys().iter().filter(|k| !is_table(&k.kind)).map(table_of) {
        if !tables.contains(&table) {
            tables.push(table);
        }
    }
    for table in tables {
        page += &heading(table);
        let own = keys().iter().filter(|k| !is_table(&k.kind) && table_of(k) == table);
        own.for_each(|k| page += &row(k));
    }
    page += "\n## `[algo]` of the policy-gradient algorithms\n\n";
    page += "Defaults differ between algorithms; these are those of `dr_grpo`.\n\n";
    page += TABLE_HEAD;
    policy_keys().iter().filter(|k| !is_table(&k.kind)).for_each(|k| page += &row(k));
    page
}

pub(super) const TABLE_HEAD: &str = "| key | type | default | meaning |\n|---|---|---|---|\n";

pub(super) fn is_table(kind: &KeyKind) -> bool {
    match kind {
        KeyKind::Table(_) => true,
        KeyKind::List(of) => matches!(**of, KeyKind::Table(_)),
        _ => false,
    }
}

fn heading(table: &str) -> String {
    let title = match table.strip_suffix(".N") {
        _ if table.is_empty() => "At the top".to_string(),
        Some(list) => format!("`[[{list}]]`"),
        None => format!("`[{table}]`"),
    };
    let about = keys().iter().find(|k| k.path == table.trim_end_matches(".N")).map_or("", |k| &k.about);
    let about = if about.is_empty() { RECIPE.about("Recipe") } else { about };
    format!("\n## {title}\n\n{about}\n\n{TABLE_HEAD}")
}

/// A line of a page's table.
pub(super) fn row(key: &Key) -> String {
    let default = match &key.default {
        _ if key.required => "must be given".into(),
        Value::Null => String::new(),
        Value::Array(list) if list.is_empty() => "`[]`".into(),
        Value::Object(map) if map.is_empty() => String::new(),
        Value::Number(n) => format!("`{}`", short(n)),
        value => format!("`{value}`"),
    };
    let off = if key.optional { format!(" or {OFF:?}") } else { String::new() };
    let (kind, about) = (key.words(), key.about.replace('|', "\\|"));
    format!("| `{}` | {kind}{off} | {default} | {about} |\n", key.path)
}
