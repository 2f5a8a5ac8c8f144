//! The settings under `algo`: the algorithm itself says what it accepts, and blame is found by leaving settings out.

use super::keys::nearest_to;
use super::load::filled;
use super::tree::{Path, Tree, describe, dotted};
use super::types::place;
use crate::algo::{self, Entry};
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value};

/// Builds the algorithm of a tree's `algo` to see whether its settings are right. `full` gives a key's full name for
/// errors; `length` is the generation limit, which the recipe fills in.
pub(super) fn check(tree: &Tree, full: &dyn Fn(&[String]) -> Path, length: usize) -> Result<()> {
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
    let empty = Map::new();
    let values = tree.get(&at[..1]).and_then(Value::as_object).unwrap_or(&empty);
    let Err(error) = build(entry, values, length) else { return Ok(()) };
    let message = error.to_string();
    let is_setting = ["unknown field", "unknown variant", "invalid "].iter().any(|w| message.contains(w));
    let blamed = blame(entry, values, length, &message).unwrap_or_default();
    let inner: Path = [vec!["algo".to_string()], blamed].concat();
    let spot = place(tree, &inner);
    let got = tree.get(&inner).filter(|_| is_setting && inner.len() > 1);
    Err(got.map_or(error, |got| explain(name, &message, &full(&inner), got)).at(spot))
}

/// What the reader of settings said, in terms of the recipe.
fn explain(algorithm: &str, message: &str, key: &[String], got: &Value) -> Error {
    let quoted: Vec<&str> = message.split('\n').next().unwrap_or("").split('`').skip(1).step_by(2).collect();
    let (bad, known) = quoted.split_first().map_or(("", &[][..]), |(bad, known)| (*bad, known));
    let near = nearest(bad, known.iter().copied());
    let listed = || format!("known keys here: {}", known.join(", "));
    if message.contains("unknown field") {
        let error = Error::usage(format!("unknown key {}: {algorithm} has no such setting", dotted(key)));
        let beside = |near: &str| dotted(&[&key[..key.len() - 1], &[near.to_string()]].concat());
        // Only where this algorithm has such a setting, and not the one that was written.
        let own = |k: &String| {
            let first = k.split("algo.").nth(1).and_then(|rest| rest.split('.').next());
            known.iter().any(|n| Some(*n) == first) && *k != dotted(key)
        };
        let elsewhere = || nearest_to(key).filter(own);
        return match near.map(beside).or_else(|| known.first().and_then(|_| elsewhere())) {
            Some(near) => error.fix(format!("did you mean {near}?")),
            None if known.is_empty() => error.fix(format!("{algorithm} has no settings here")),
            None => error.fix(listed()),
        };
    }
    if message.contains("unknown variant") {
        let error =
            Error::usage(format!("expected one of {}, got {bad:?}", known.join(", "))).at(dotted(key));
        return match near {
            Some(near) => error.fix(format!("{} = {near:?}", dotted(key))),
            None => error,
        };
    }
    let wanted = message.rsplit("expected ").next().unwrap_or("").split('\n').next().unwrap_or("");
    let wanted = match wanted {
        "f64" => "a number",
        "usize" | "u64" => "a whole number from 0 up",
        "a boolean" => "true or false",
        "a string" | "string or map" => "text",
        w if w.starts_with("struct ") => "a table",
        w => w,
    };
    Error::usage(format!("expected {wanted}, got {}", describe(got))).at(dotted(key))
}

fn build(entry: &Entry, values: &Map<String, Value>, length: usize) -> Result<()> {
    (entry.build)(Value::Object(filled(entry, values, length))).map(|_| ())
}

/// The setting without which the error is not the same.
fn blame(entry: &Entry, values: &Map<String, Value>, length: usize, message: &str) -> Option<Path> {
    let mut paths = Vec::new();
    collect(&Value::Object(values.clone()), &mut Vec::new(), &mut paths);
    paths.into_iter().find(|path| {
        let mut less = Tree::default();
        less.root = Value::Object(values.clone());
        less.take(path);
        let map = less.root.as_object().cloned().unwrap_or_default();
        build(entry, &map, length).err().is_none_or(|e| e.to_string() != message)
    })
}

/// Every path, the innermost first.
fn collect(value: &Value, at: &mut Path, paths: &mut Vec<Path>) {
    if let Value::Object(map) = value {
        for (key, inner) in map {
            at.push(key.clone());
            collect(inner, at, paths);
            paths.push(at.clone());
            at.pop();
        }
    }
}
