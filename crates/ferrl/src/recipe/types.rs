//! Unknown keys and wrong types, at any depth, with place and nearest name.

use super::OFF;
use super::keys::nearest_to;
use super::schema::{Kind, RECIPE};
use super::tree::{Path, Place, Tree, describe, dotted};
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Refuses what the types do not allow. A lone value where a list is expected becomes a list of one.
pub(super) fn check(tree: &mut Tree) -> Result<()> {
    let mut lone = Vec::new();
    table(tree, &mut Vec::new(), "Recipe", &mut lone)?;
    for path in lone {
        if let Some((value, place)) = tree.take(&path) {
            tree.set(&path, Value::Array(vec![value]), place)?;
        }
    }
    Ok(())
}

fn table(tree: &Tree, at: &mut Path, name: &str, lone: &mut Vec<Path>) -> Result<()> {
    let Some(Value::Object(map)) = tree.get(at) else { return Ok(()) };
    for (key, value) in map {
        at.push(key.clone());
        let field = RECIPE.fields(name).iter().find(|f| f.name == *key);
        let Some(field) = field else { return Err(unknown(tree, at, name)) };
        match key.as_str() {
            _ if field.optional && value == OFF => {}
            "stage" if at.len() == 1 => stages(tree, at, value, lone)?,
            "stage" => {
                let what = "a stage cannot have stages of its own";
                return Err(Error::usage(what).at(dotted(at)).at(place(tree, at)));
            }
            _ => entry(tree, at, &field.kind, value, lone)?,
        }
        at.pop();
    }
    Ok(())
}

/// Takes out what is switched off; the tree has passed [`check`].
pub(super) fn switch_off(value: &mut Value, table: &str) {
    let Value::Object(map) = value else { return };
    for field in RECIPE.fields(table) {
        let Some(inner) = map.get_mut(&field.name) else { continue };
        match (&field.kind, inner) {
            (_, inner) if field.optional && inner == OFF => {
                map.shift_remove(&field.name);
            }
            (Kind::Table(table), inner) => switch_off(inner, table),
            (Kind::List(of), Value::Array(list)) => {
                if let Kind::Table(table) = &**of {
                    list.iter_mut().for_each(|entry| switch_off(entry, table));
                }
            }
            _ => {}
        }
    }
}

fn stages(tree: &Tree, at: &mut Path, value: &Value, lone: &mut Vec<Path>) -> Result<()> {
    let Value::Array(list) = value else {
        return Err(wrong(tree, at, "a list of tables", value).fix("write [[stage]] above each stage"));
    };
    for (i, stage) in list.iter().enumerate() {
        at.push(i.to_string());
        if !stage.is_object() {
            return Err(wrong(tree, at, "a table", stage));
        }
        table(tree, at, "Recipe", lone)?;
        at.pop();
    }
    Ok(())
}

fn entry(tree: &Tree, at: &mut Path, kind: &Kind, value: &Value, lone: &mut Vec<Path>) -> Result<()> {
    let fits = match (kind, value) {
        (Kind::Table(inner), Value::Object(_)) => return table(tree, at, inner, lone),
        (Kind::List(of), Value::Array(list)) => {
            for (i, inner) in list.iter().enumerate() {
                at.push(i.to_string());
                entry(tree, at, of, inner, lone)?;
                at.pop();
            }
            true
        }
        (Kind::List(of), value) => {
            lone.push(at.clone());
            return entry(tree, at, of, value, lone)
                .map_err(|e| if value.is_object() { e } else { wrong(tree, at, &kind.words(), value) });
        }
        (Kind::Text, Value::String(_)) | (Kind::Flag, Value::Bool(_)) => true,
        (Kind::Number, Value::Number(_)) | (Kind::Free, Value::Object(_)) => true,
        (Kind::Whole, Value::Number(n)) => n.is_u64(),
        (Kind::Choice(words), Value::String(s)) => words.contains(s),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    let error = wrong(tree, at, &kind.words(), value);
    Err(match (kind, value) {
        (Kind::Whole, Value::Number(n)) => match n.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0) {
            Some(whole) => error.fix(format!("{} = {whole}", dotted(at))),
            None => error,
        },
        (Kind::Text, Value::Number(_) | Value::Bool(_)) => error.fix(format!("{} = \"{value}\"", dotted(at))),
        (Kind::Number | Kind::Whole | Kind::Flag, Value::String(s)) if s.parse::<f64>().is_ok() => {
            error.fix("write it without quotes")
        }
        _ => error,
    })
}

/// Where the value was written, for people.
pub(super) fn place(tree: &Tree, at: &[String]) -> String {
    tree.place(at).map_or_else(|| "recipe".into(), |p: &Place| p.text.clone())
}

fn wrong(tree: &Tree, at: &[String], expected: &str, got: &Value) -> Error {
    Error::usage(format!("expected {expected}, got {}", describe(got))).at(dotted(at)).at(place(tree, at))
}

fn unknown(tree: &Tree, at: &[String], table: &str) -> Error {
    let error = Error::usage(format!("unknown key {}", dotted(at))).at(place(tree, at));
    let known: Vec<&str> = RECIPE.fields(table).iter().map(|f| f.name.as_str()).collect();
    match nearest_to(at) {
        Some(near) => error.fix(format!("did you mean {near}?")),
        None => error.fix(format!("known keys here: {}", known.join(", "))),
    }
}
