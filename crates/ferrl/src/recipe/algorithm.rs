//! Checks the settings under `algo` against the algorithm's types and ranges, then by building the algorithm. If that fails, the
//! setting to blame is found by leaving out one after the other.

use super::elsewhere;
use super::keys::nearest_to;
use super::load::all;
use super::schema::KeySchema;
use super::tree::{KeyPath, ValueTree, describe, dotted, path};
use super::types::{CheckFindings, TypeRules, place};
use crate::algo::{self, Entry};
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};

/// Refuses wrong settings of a tree's `algo`. `full` returns a key's full name for errors; `length` is the limit of generation,
/// the default of `algo.length`; numbers out of range are added to `outside`.
pub(super) fn check(
    tree: &ValueTree,
    full: &dyn Fn(&[String]) -> KeyPath,
    length: usize,
    outside: &mut Vec<Error>,
) -> Result<()> {
    let at = vec!["algo".to_string(), "name".to_string()];
    let name = match tree.get(&at) {
        None => super::DEFAULT_ALGORITHM,
        Some(Value::String(name)) => name,
        Some(other) => {
            let what = format!("expected text, got {}", describe(other));
            return Err(Error::usage(what).at(dotted(&full(&at))).at(place(tree, &at)));
        }
    };
    let entry = algo::find(name).map_err(|e| e.at(dotted(&full(&at))).at(place(tree, &at)))?;
    let found = settings(tree, entry, full)?;
    if !found.outside.is_empty() {
        outside.extend(found.outside);
        return Ok(());
    }
    let empty = Map::new();
    let values = tree.get(&at[..1]).and_then(Value::as_object).unwrap_or(&empty);
    let Err(error) = build(entry, values, length) else { return Ok(()) };
    let message = error.to_string();
    let blamed = blame(entry, values, length, &message).unwrap_or_default();
    let inner: KeyPath = [vec!["algo".to_string()], blamed].concat();
    Err(error.at(place(tree, &inner)))
}

/// Names, types and ranges, as the algorithm's types say them.
fn settings(tree: &ValueTree, entry: &Entry, full: &dyn Fn(&[String]) -> KeyPath) -> Result<CheckFindings> {
    let schema = KeySchema::of_algorithm(entry);
    let defaults = (entry.defaults)();
    let rules = TypeRules {
        schema: &schema,
        full,
        unknown: &|tree, at, table| unknown(tree, entry, &full(at), at, schema_names(&schema, table)),
        default: &|at| at[1..].iter().fold(&defaults, |value, key| &value[key]).clone(),
        place: &place,
    };
    let mut own = tree.clone();
    own.take(&["algo".to_string(), "name".to_string()]);
    let mut found = CheckFindings::default();
    rules.table(&own, &mut vec!["algo".to_string()], &schema.root, &mut found)?;
    all(std::mem::take(&mut found.unknown))?;
    Ok(found)
}

fn schema_names<'a>(schema: &'a KeySchema, table: &str) -> Vec<&'a str> {
    schema.fields(table).iter().map(|f| f.name.as_str()).collect()
}

fn unknown(tree: &ValueTree, entry: &Entry, key: &[String], at: &[String], known: Vec<&str>) -> Error {
    let what = format!("unknown key {}: {} has no such setting", dotted(key), entry.name);
    let error = Error::usage(what).at(place(tree, at));
    let leaf = key.last().map_or("", String::as_str);
    let near = nearest(leaf, known.iter().copied());
    let beside = |near: &str| dotted(&[&key[..key.len() - 1], &[near.to_string()]].concat());
    // Only a key that this algorithm has, and not the one that was written.
    let own = |k: &String| {
        let first = k.split("algo.").nth(1).and_then(|rest| rest.split('.').next());
        known.iter().any(|n| Some(*n) == first) && *k != dotted(key)
    };
    // Not if it names the key that this algorithm lacks.
    if let Some(advice) = elsewhere::advice(key).filter(|a| !a.contains(&dotted(key))) {
        return error.fix(advice);
    }
    // A setting of another library that this algorithm has, or that is no setting of an algorithm.
    let there = |here: &str| match path(here).split_first() {
        Some((table, rest)) if table == "algo" => KeySchema::of_algorithm(entry).field(rest).is_some(),
        _ => true,
    };
    if let Some(near) = elsewhere::key(key).filter(|here| there(here)).and_then(|_| nearest_to(key)) {
        return error.fix(format!("did you mean {near}?"));
    }
    // The same word one level down is nearer than another word on this level.
    let inside = nearest_to(key).filter(own);
    let same_word = inside.clone().filter(|k| k.rsplit('.').next() == Some(leaf));
    match same_word.or(near.map(beside)).or(inside) {
        Some(near) => error.fix(format!("did you mean {near}?")),
        None if known.is_empty() => error.fix(format!("{} has no settings here", entry.name)),
        None => error.fix(format!("known keys here: {}", known.join(", "))),
    }
}

fn build(entry: &Entry, values: &Map<String, Value>, length: usize) -> Result<()> {
    (entry.build)(Value::Object(entry.filled(values, length))).map(|_| ())
}

/// The setting whose removal changes the error.
fn blame(entry: &Entry, values: &Map<String, Value>, length: usize, message: &str) -> Option<KeyPath> {
    let mut paths = Vec::new();
    paths_of(&Value::Object(values.clone()), &mut Vec::new(), &mut paths);
    paths.into_iter().find(|path| {
        let mut less = ValueTree::default();
        less.root = Value::Object(values.clone());
        less.take(path);
        let map = less.root.as_object().cloned().unwrap_or_default();
        build(entry, &map, length).err().is_none_or(|e| e.to_string() != message)
    })
}

/// Every path, the innermost first.
fn paths_of(value: &Value, at: &mut KeyPath, paths: &mut Vec<KeyPath>) {
    if let Value::Object(map) = value {
        for (key, inner) in map {
            at.push(key.clone());
            paths_of(inner, at, paths);
            paths.push(at.clone());
            at.pop();
        }
    }
}
