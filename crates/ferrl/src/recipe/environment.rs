//! `${NAME}` in a recipe's values: the variable of the environment, or of `.env`. `$${NAME}` is the text `${NAME}`.
//!
//! The recipe in a run folder has the variable's name, not its value; a resumed run reads the variable again.

use super::keys;
use super::schema::KeyKind;
use super::tree::{KeyPath, Place, ValueTree, dotted};
use crate::secrets;
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Looks up every variable that a value of the tree refers to.
pub(super) fn expand(tree: &mut ValueTree) -> Result<()> {
    let mut found = Vec::new();
    collect(&tree.root, &mut Vec::new(), &mut found);
    for (path, text) in found {
        let place = tree.place(&path).cloned().unwrap_or_default();
        let filled = fill(&text).map_err(|e| e.at(dotted(&path)).at(&place.text))?;
        // The name of a run is the name of its folder.
        if path.last().is_some_and(|key| key == "name")
            && filled != text
            && secrets::redact(&filled) != filled
        {
            let what = "a name cannot hold a secret: it is written to disk";
            return Err(Error::usage(what)
                .at(dotted(&path))
                .at(&place.text)
                .fix("name it without the variable"));
        }
        if filled != text {
            let value = typed(&path, filled);
            tree.set(&path, value, Place { reference: Some(text), ..place })?;
        }
    }
    Ok(())
}

/// Every text that may refer to a variable.
fn collect(value: &Value, at: &mut KeyPath, found: &mut Vec<(KeyPath, String)>) {
    let mut inner = |key: String, value: &Value, found: &mut Vec<(KeyPath, String)>| {
        at.push(key);
        collect(value, at, found);
        at.pop();
    };
    match value {
        Value::String(text) if text.contains("${") => found.push((at.clone(), text.clone())),
        Value::Object(map) => map.iter().for_each(|(key, value)| inner(key.clone(), value, found)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, value)| inner(i.to_string(), value, found))
        }
        _ => {}
    }
}

/// The text with its variables replaced.
pub(super) fn fill(text: &str) -> Result<String> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("${") {
        let (before, after) = (&rest[..at], &rest[at + 2..]);
        let Some(name) = after.split_once('}').map(|(name, _)| name).filter(|n| secrets::is_name(n)) else {
            let named = |c: char| c.is_ascii_alphabetic() || c == '_' || c == '}';
            if before.ends_with('$') || !after.starts_with(named) {
                out += &rest[..at + 2];
                rest = after;
                continue;
            }
            let shown: String = rest[at..].chars().take(20).collect();
            return Err(Error::usage(format!("{shown:?} is not a variable"))
                .fix("${NAME} is the variable NAME; $${ is the text ${"));
        };
        rest = &after[name.len() + 1..];
        if let Some(before) = before.strip_suffix('$') {
            out += &format!("{before}${{{name}}}");
            continue;
        }
        let missing = || {
            Error::usage(format!("the variable {name} is not set, or empty")).fix(format!(
                "export {name}=..., or a line {name}=... in {}; $${{{name}}} is the text itself",
                secrets::FILE
            ))
        };
        out += before;
        out += &secrets::get(name)?.ok_or_else(missing)?;
    }
    Ok(out + rest)
}

/// The text as a value of the key's type: variables are texts, settings may be numbers.
fn typed(path: &[String], text: String) -> Value {
    let kind = keys::find(path).map(|k| &k.kind);
    let list = path.split_last().and_then(|(_, list)| keys::find(list)).map(|k| &k.kind);
    let is_text = |kind: &KeyKind| match kind {
        KeyKind::Text | KeyKind::Choice(_) => true,
        KeyKind::List(of) => matches!(**of, KeyKind::Text),
        _ => false,
    };
    if kind.or(list).is_some_and(is_text) {
        return Value::String(text);
    }
    let number = text.trim().parse::<i64>().map(Value::from).ok();
    let number =
        number.or_else(|| text.trim().parse::<f64>().ok().filter(|f| f.is_finite()).map(Value::from));
    number.or_else(|| text.trim().parse::<bool>().map(Value::from).ok()).unwrap_or(Value::String(text))
}
