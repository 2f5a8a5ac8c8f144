//! The command line's words after a recipe: `key=value`, `+key=value`, `~key`, `@overlay.toml`.

use super::OFF;
use super::keys;
use super::load::shorthand;
use super::schema::Kind;
use super::tree::{Path, Place, Tree, dotted};
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Applies one of them.
pub(super) fn apply(tree: &mut Tree, word: &str, order: usize) -> Result<()> {
    let place = Place { order, text: format!("override {word}") };
    let wrong = |what: &str, fix: String| Error::usage(what).at(&place.text).fix(fix);
    if let Some(file) = word.strip_prefix('@') {
        return super::load::overlay(tree, file, order);
    }
    if let Some(key) = word.strip_prefix('~') {
        if let Some((key, _)) = key.split_once('=') {
            return Err(wrong("a deletion takes no value", format!("~{key}")));
        }
        let path = tree.numbered(&read_key(key, &place)?);
        if tree.take(&path).is_none() && keys::find(&path).is_none() {
            let known = keys::nearest_to(&path).unwrap_or_else(|| "a key of the recipe".into());
            let what = format!("there is no {} to delete", dotted(&path));
            return Err(wrong(&what, format!("~{known}")));
        }
        return Ok(());
    }
    let (key, text) = word.split_once('=').ok_or_else(|| {
        wrong("not an override", "key=value, +key=value, ~key or @overlay.toml".to_string())
    })?;
    if text.trim().is_empty() {
        return Err(wrong("no value after =", format!("~{key} deletes, {key}='\"\"' is an empty text")));
    }
    let adds = key.starts_with('+');
    let path = tree.numbered(&read_key(key.trim_start_matches('+'), &place)?);
    let value = read_value(text.trim(), &place)?;
    match value {
        Value::Null if path.ends_with(&["kl".into(), "type".into()]) && !path.contains(&"algo".into()) => {
            tree.set(&path, "null".into(), place)
        }
        // What may have no value has none, whatever its default is.
        Value::Null if keys::find(&path).is_some_and(|k| k.optional) => tree.set(&path, OFF.into(), place),
        Value::Null => {
            tree.take(&path);
            Ok(())
        }
        value if adds => {
            let lone = tree.get(&path).filter(|v| !v.is_array()).cloned();
            if let (Some(lone), Some(Kind::List(_))) = (lone, keys::find(&path).map(|k| &k.kind)) {
                let at = tree.place(&path).cloned().unwrap_or_default();
                tree.set(&path, Value::Array(vec![lone]), at)?;
            }
            tree.push(&path, shorthand(&path, value, true), place)
        }
        value => tree.set(&path, shorthand(&path, value, false), place),
    }
}

/// A dotted key, read as TOML reads it.
fn read_key(key: &str, place: &Place) -> Result<Path> {
    let parsed = Tree::parse(&format!("{key} = 0"), 0, |_| String::new());
    let error =
        || Error::usage(format!("{key:?} is not a dotted key")).at(&place.text).fix("such as optim.lr=1e-6");
    let tree = parsed.map_err(|_| error())?;
    let (mut path, mut at) = (Path::new(), &tree.root);
    while let Value::Object(map) = at {
        let (key, inner) = map.iter().next().filter(|_| map.len() == 1).ok_or_else(error)?;
        path.push(key.clone());
        at = inner;
    }
    Ok(path)
}

/// A value, read as TOML reads it; anything else that does not begin like TOML is text.
fn read_value(text: &str, place: &Place) -> Result<Value> {
    match text {
        "null" | "None" => return Ok(Value::Null),
        "True" => return Ok(Value::Bool(true)),
        "False" => return Ok(Value::Bool(false)),
        _ => {}
    }
    match Tree::parse(&format!("v = {text}"), 0, |_| place.text.clone()) {
        // What is more than one value (a line break in the text) is text.
        Ok(tree) if tree.root.as_object().is_some_and(|m| m.len() == 1) => Ok(tree.root["v"].clone()),
        Err(e) if text.starts_with(['[', '{', '"', '\'']) => {
            Err(e.fix("text in lists and tables needs quotes: 'key=[\"a\", \"b\"]'"))
        }
        Err(e) if ["finite", "out of range"].iter().any(|w| e.to_string().contains(w)) => Err(e),
        _ => match text.parse::<f64>().ok().filter(|n| n.is_finite()) {
            Some(number) => Ok(number.into()),
            None => Ok(Value::String(text.to_string())),
        },
    }
}
