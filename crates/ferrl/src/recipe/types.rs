//! Finds unknown keys, wrong types and numbers out of range, at any depth, with place and the most similar name.

use super::keys::{self, nearest_to};
use super::load::all;
use super::schema::{Field, KeyKind, KeySchema, RECIPE};
use super::tree::{KeyPath, Place, ValueTree, describe, dotted};
use super::{OFF, elsewhere};
use ferrl_engine::{Error, Result};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// What keys are checked against.
pub(super) struct TypeRules<'a> {
    /// The types.
    pub schema: &'a KeySchema,
    /// A key's full name, for errors.
    pub full: &'a dyn Fn(&[String]) -> KeyPath,
    /// The error for a key that a type does not have.
    pub unknown: &'a dyn Fn(&ValueTree, &[String], &str) -> Error,
    /// A key's default.
    pub default: &'a dyn Fn(&[String]) -> Value,
    /// Where a value was written.
    pub place: &'a dyn Fn(&ValueTree, &[String]) -> String,
}

/// Findings that do not end the check.
#[derive(Default)]
pub(super) struct CheckFindings {
    /// Single values instead of lists.
    lone: Vec<KeyPath>,
    /// Numbers out of range: all are reported at once.
    pub outside: Vec<Error>,
    /// Unknown keys, likewise.
    pub unknown: Vec<Error>,
}

/// Refuses what the types of a recipe do not allow, and the keys that are unknown already; returns errors for numbers out of
/// range.
pub(super) fn check(tree: &mut ValueTree, unknown_before: Vec<Error>) -> Result<Vec<Error>> {
    let rules = TypeRules {
        schema: &RECIPE,
        full: &|path| path.to_vec(),
        unknown: &unknown,
        default: &|path| keys::find(path).map_or(Value::Null, |k| k.default.clone()),
        place: &place,
    };
    rules.check(tree, unknown_before)
}

/// Reads settings of a type. Unknown keys, wrong types, numbers outside of the range at the end of a comment and missing values are
/// errors; `place` names the settings in them. `"off"` unsets an optional setting, and a single value is a list of one.
pub(crate) fn read_settings<T: DeserializeOwned + JsonSchema>(
    place: &str,
    values: &Map<String, Value>,
) -> Result<T> {
    let schema = KeySchema::of::<T>();
    let rules = TypeRules {
        schema: &schema,
        full: &|path| path.to_vec(),
        unknown: &|_, at, table| {
            let (parent, leaf) = at.split_at(at.len() - 1);
            let beside = |name: &str| dotted(&[parent, &[name.to_string()]].concat());
            let known: Vec<&str> = schema.fields(table).iter().map(|f| f.name.as_str()).collect();
            unknown_key(place, &leaf[0], &known, &beside)
        },
        default: &|path| schema.field(path).map_or(Value::Null, |f| f.default.clone()),
        place: &|_, _| place.to_string(),
    };
    let mut tree = ValueTree::default();
    tree.root = Value::Object(values.clone());
    if let Some(outside) = rules.check(&mut tree, Vec::new())?.into_iter().next() {
        return Err(outside);
    }
    if let Some(missing) =
        schema.fields(&schema.root).iter().find(|f| f.required && !values.contains_key(&f.name))
    {
        return Err(Error::usage(format!("option {:?} is missing", missing.name)).at(place));
    }
    schema.switch_off(&mut tree.root, &schema.root);
    serde_json::from_value(tree.root).map_err(|e| Error::usage(e.to_string()).at(place))
}

/// The error for an unknown key; `full` returns the full name of a key.
pub(crate) fn unknown_key(place: &str, key: &str, known: &[&str], full: &dyn Fn(&str) -> String) -> Error {
    let what = format!("unknown key {:?}, expected one of {}", full(key), known.join(", "));
    let error = Error::usage(what).at(place);
    match ferrl_engine::nearest(key, known.iter().copied()) {
        Some(near) => error.fix(format!("did you mean {:?}?", full(near))),
        None => error,
    }
}

impl TypeRules<'_> {
    /// Checks a whole tree; returns errors for numbers out of range. A single value instead of a list becomes a list of one.
    fn check(&self, tree: &mut ValueTree, unknown: Vec<Error>) -> Result<Vec<Error>> {
        let mut found = CheckFindings { unknown, ..Default::default() };
        self.table(tree, &mut Vec::new(), &self.schema.root, &mut found)?;
        all(found.unknown)?;
        for path in found.lone {
            if let Some((value, place)) = tree.take(&path) {
                tree.set(&path, Value::Array(vec![value]), place)?;
            }
        }
        Ok(found.outside)
    }

    /// Checks the table at a path, whose keys are the fields of a type.
    pub fn table(
        &self,
        tree: &ValueTree,
        at: &mut KeyPath,
        name: &str,
        found: &mut CheckFindings,
    ) -> Result<()> {
        let Some(Value::Object(map)) = tree.get(at) else { return Ok(()) };
        for (key, value) in map {
            at.push(key.clone());
            let field = self.schema.fields(name).iter().find(|f| f.name == *key);
            let Some(field) = field else {
                found
                    .unknown
                    .extend(unknown_keys(value, at).iter().map(|key| (self.unknown)(tree, key, name)));
                at.pop();
                continue;
            };
            match key.as_str() {
                _ if field.optional && (value == OFF || value.is_null()) => {}
                "stage" if at.len() == 1 => self.stages(tree, at, value, found)?,
                "stage" => {
                    let what = "a stage cannot have stages of its own";
                    return Err(Error::usage(what).at(dotted(at)).at(place(tree, at)));
                }
                _ => self.entry(tree, at, (field, &field.kind), value, found)?,
            }
            at.pop();
        }
        Ok(())
    }

    fn stages(
        &self,
        tree: &ValueTree,
        at: &mut KeyPath,
        value: &Value,
        found: &mut CheckFindings,
    ) -> Result<()> {
        let Value::Array(list) = value else {
            return Err(self
                .wrong(tree, at, "a list of tables", value)
                .fix("write [[stage]] above each stage"));
        };
        for (i, stage) in list.iter().enumerate() {
            at.push(i.to_string());
            if !stage.is_object() {
                return Err(self.wrong(tree, at, "a table", stage));
            }
            self.table(tree, at, "Recipe", found)?;
            at.pop();
        }
        Ok(())
    }

    fn entry(
        &self,
        tree: &ValueTree,
        at: &mut KeyPath,
        (field, kind): (&Field, &KeyKind),
        value: &Value,
        found: &mut CheckFindings,
    ) -> Result<()> {
        let fits = match (kind, value) {
            (KeyKind::Table(inner), Value::Object(_)) => return self.table(tree, at, inner, found),
            (KeyKind::List(of), Value::Array(list)) => {
                for (i, inner) in list.iter().enumerate() {
                    at.push(i.to_string());
                    self.entry(tree, at, (field, of), inner, found)?;
                    at.pop();
                }
                true
            }
            (KeyKind::List(of), value) => {
                found.lone.push(at.clone());
                let words = kind.words(field.range);
                return self
                    .entry(tree, at, (field, of), value, found)
                    .map_err(|e| if value.is_object() { e } else { self.wrong(tree, at, &words, value) });
            }
            (KeyKind::Either(kinds), value) => {
                for kind in kinds {
                    let mut own = CheckFindings::default();
                    let tried = self.entry(tree, &mut at.clone(), (field, kind), value, &mut own);
                    if tried.is_ok() && own.lone.is_empty() && own.unknown.is_empty() {
                        found.outside.extend(own.outside);
                        return Ok(());
                    }
                }
                false
            }
            (KeyKind::Text, Value::String(_)) | (KeyKind::Flag, Value::Bool(_)) => true,
            (KeyKind::Number, Value::Number(_)) | (KeyKind::Free, Value::Object(_)) => true,
            (KeyKind::Whole, Value::Number(n)) => n.is_u64(),
            (KeyKind::Choice(words), Value::String(s)) => words.contains(s),
            _ => false,
        };
        let words = kind.words(field.range);
        match (field.range, value.as_f64()) {
            (Some(range), Some(number)) if fits && !range.holds(number) => {
                let error = self.wrong(tree, at, &words, value);
                found.outside.push(match range.remedy(&(self.default)(at), number) {
                    Some(good) => error.fix(format!("{} = {good}", dotted(&(self.full)(at)))),
                    None => error,
                });
            }
            _ if fits => {}
            _ => return Err(self.misfit(tree, at, kind, &words, value)),
        }
        Ok(())
    }

    /// The error for a value of another type, with a fix if the intention is clear.
    fn misfit(&self, tree: &ValueTree, at: &[String], kind: &KeyKind, words: &str, value: &Value) -> Error {
        let (error, key) = (self.wrong(tree, at, words, value), dotted(&(self.full)(at)));
        match (kind, value) {
            (KeyKind::Whole, Value::Number(n)) => {
                match n.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0) {
                    Some(whole) if whole < 1e15 => error.fix(format!("{key} = {whole}")),
                    _ => error,
                }
            }
            (KeyKind::Text, Value::Number(_) | Value::Bool(_)) => error.fix(format!("{key} = \"{value}\"")),
            (KeyKind::Number | KeyKind::Whole | KeyKind::Flag, Value::String(s))
                if s.parse::<f64>().is_ok() =>
            {
                error.fix("write it without quotes")
            }
            (KeyKind::Choice(known), Value::String(s)) => {
                match ferrl_engine::nearest(s, known.iter().map(String::as_str)) {
                    Some(near) => error.fix(format!("{key} = {near:?}")),
                    None => error,
                }
            }
            _ => error,
        }
    }

    fn wrong(&self, tree: &ValueTree, at: &[String], expected: &str, got: &Value) -> Error {
        let reference = tree.place(at).and_then(|p| p.reference.as_ref());
        let got = reference.map_or_else(|| describe(got), |r| format!("the value of {r}"));
        let what = format!("expected {expected}, got {got}");
        Error::usage(what).at(dotted(&(self.full)(at))).at((self.place)(tree, at))
    }
}

/// The unknown key itself, or the settings of another library in a table that has no similar name here.
pub(super) fn unknown_keys(value: &Value, at: &[String]) -> Vec<KeyPath> {
    let mut leaves = Vec::new();
    if value.is_object() && !keys::has_namesake(at) {
        super::load::leaves(value, &mut at.to_vec(), &mut leaves);
    }
    if leaves.iter().any(|leaf| elsewhere::find(leaf).is_some()) { leaves } else { vec![at.to_vec()] }
}

pub(super) fn place(tree: &ValueTree, at: &[String]) -> String {
    tree.place(at).map_or_else(|| "recipe".into(), |p: &Place| p.text.clone())
}

fn unknown(tree: &ValueTree, at: &[String], table: &str) -> Error {
    let error = Error::usage(format!("unknown key {}", dotted(at))).at(place(tree, at));
    let known: Vec<&str> = RECIPE.fields(table).iter().map(|f| f.name.as_str()).collect();
    if let Some(advice) = elsewhere::advice(at) {
        return error.fix(advice);
    }
    match nearest_to(at) {
        Some(near) => error.fix(format!("did you mean {near}?")),
        None => error.fix(format!("known keys here: {}", known.join(", "))),
    }
}
