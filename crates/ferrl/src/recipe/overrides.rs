//! Overrides on the command line: `key=value`, `+key=value`, `~key`, `@overlay.toml`.

use super::load::{latest, shorthand};
use super::schema::KeyKind;
use super::tree::{KeyPath, Place, ValueTree, dotted};
use super::{OFF, elsewhere, keys, rl2};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) fn apply(tree: &mut ValueTree, word: &str, order: usize) -> Result<()> {
    let place = Place { order: latest(order), text: format!("override {word}"), reference: None };
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
    let path = tree.numbered(&rl2::key(read_key(key.trim_start_matches('+'), &place)?));
    let value = read_value(&path, text.trim(), adds, &place)?;
    grow(tree, &path, &place)?;
    match value {
        Value::Null if path.ends_with(&["kl".into(), "type".into()]) && !path.contains(&"algo".into()) => {
            tree.set(&path, "null".into(), place)
        }
        // Deleting a setting that may be unset unsets it, also if it has a default.
        Value::Null if keys::find(&path).is_some_and(|k| k.optional) => tree.set(&path, OFF.into(), place),
        Value::Null => {
            tree.take(&path);
            Ok(())
        }
        value if adds => {
            let lone = tree.get(&path).filter(|v| !v.is_array()).cloned();
            if let (Some(lone), Some(KeyKind::List(_))) = (lone, keys::find(&path).map(|k| &k.kind)) {
                let at = tree.place(&path).cloned().unwrap_or_default();
                tree.set(&path, Value::Array(vec![lone]), at)?;
            }
            tree.push(&path, shorthand(&path, value, true), place)
        }
        value => {
            // A setting of another library may stand where Ferrl has a list, such as `reward.clip_range`.
            let theirs = elsewhere::find(&path).filter(|_| keys::find(&path).is_none());
            let unknown = Error::usage(format!("unknown key {}", dotted(&path))).at(&place.text);
            let set = tree.set(&path, shorthand(&path, value, false), place);
            set.map_err(|e| theirs.map_or(e, |answer| unknown.fix(answer.fix())))
        }
    }
}

/// Lets `reward.0.verifier=x` add the first reward. A stage is not added that way: it would change the meaning of the rest of the
/// recipe.
fn grow(tree: &mut ValueTree, path: &[String], place: &Place) -> Result<()> {
    for depth in 1..path.len() {
        let (list, entry) = (&path[..depth], path[depth].parse::<usize>());
        let Some((KeyKind::List(of), entry)) = keys::find(list).map(|k| &k.kind).zip(entry.ok()) else {
            continue;
        };
        let count = tree.get(list).map_or(Some(0), |v| v.as_array().map(Vec::len));
        if list == ["stage"] && count == Some(0) {
            let what = "the recipe has no stages";
            return Err(Error::usage(what)
                .at(&place.text)
                .fix(format!("{} for the whole run", dotted(&path[2..]))));
        }
        if count == Some(entry) && matches!(**of, KeyKind::Table(_)) {
            tree.push(list, Value::Object(Map::new()), place.clone())?;
        }
    }
    Ok(())
}

/// A dotted key, read as TOML reads it.
fn read_key(key: &str, place: &Place) -> Result<KeyPath> {
    let parsed = ValueTree::parse(&format!("{key} = 0"), 0, |_| String::new());
    let error =
        || Error::usage(format!("{key:?} is not a dotted key")).at(&place.text).fix("such as optim.lr=1e-6");
    let tree = parsed.map_err(|_| error())?;
    let (mut path, mut at) = (KeyPath::new(), &tree.root);
    while let Value::Object(map) = at {
        let (key, inner) = map.iter().next().filter(|_| map.len() == 1).ok_or_else(error)?;
        path.push(key.clone());
        at = inner;
    }
    Ok(path)
}

/// Parses a value by its key's type: a text needs no quotes; anything else is parsed as TOML, or taken as text if that fails.
fn read_value(path: &[String], text: &str, adds: bool, place: &Place) -> Result<Value> {
    let kind = keys::find(path).map(|k| &k.kind);
    let entry = match kind {
        Some(KeyKind::List(of)) => Some(&**of),
        kind => kind,
    };
    let of_text = matches!(entry, Some(KeyKind::Text | KeyKind::Choice(_)));
    let listed = matches!(kind, Some(KeyKind::List(_))) && !adds;
    match text {
        "null" | "None" => return Ok(Value::Null),
        "True" if !of_text => return Ok(Value::Bool(true)),
        "False" if !of_text => return Ok(Value::Bool(false)),
        _ => {}
    }
    let parsed = parse(path, text, place);
    if of_text && !(listed && text.starts_with('[')) {
        return Ok(match parsed {
            Ok(Some(quoted @ Value::String(_))) if text.starts_with(['"', '\'']) => quoted,
            _ => Value::String(text.to_string()),
        });
    }
    match parsed {
        Ok(Some(value)) => Ok(value),
        Err(e)
            if text.starts_with(['[', '{', '"', '\''])
                && !text.starts_with("{{")
                && !text.starts_with("{%") =>
        {
            Err(e.fix(match text.as_bytes() {
                [b'{', ..] => "a table is written 'key={a = 1, b = \"text\"}'",
                [b'[', ..] => "a list is written 'key=[\"a\", \"b\"]': text in it needs quotes",
                _ => "close the quote, or leave quotes out",
            }))
        }
        Err(e) if ["finite", "out of range"].iter().any(|w| e.to_string().contains(w)) => Err(e),
        _ => match text.parse::<f64>().ok().filter(|n| n.is_finite()) {
            Some(number) => Ok(number.into()),
            None => Ok(Value::String(text.to_string())),
        },
    }
}

/// The text as TOML under its key, so that errors name the key; `None` if it is more than one value (a line break).
fn parse(path: &[String], text: &str, place: &Place) -> Result<Option<Value>> {
    let tree = ValueTree::parse(&format!("{} = {text}", dotted(path)), 0, |_| place.text.clone())?;
    let alone =
        |depth: usize| tree.get(&path[..depth]).and_then(Value::as_object).is_some_and(|m| m.len() == 1);
    Ok(tree.get(path).filter(|_| (0..path.len()).all(alone)).cloned())
}
