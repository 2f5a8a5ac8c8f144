//! Unknown keys, wrong types and numbers out of range, at any depth, with place and nearest name.

use super::keys::{self, nearest_to};
use super::schema::{Field, KeyKind, KeySchema, RECIPE};
use super::tree::{Path, Place, ValueTree, describe, dotted};
use super::{OFF, elsewhere};
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// What the keys below a type are checked against.
pub(super) struct TypeRules<'a> {
    /// The types.
    pub schema: &'a KeySchema,
    /// A key's full name, for errors.
    pub full: &'a dyn Fn(&[String]) -> Path,
    /// The error for a key that a type does not have.
    pub unknown: &'a dyn Fn(&ValueTree, &[String], &str) -> Error,
    /// A key's value where the recipe says nothing.
    pub default: &'a dyn Fn(&[String]) -> Value,
    /// Where a value was written.
    pub place: &'a dyn Fn(&ValueTree, &[String]) -> String,
}

/// What was found beside errors that end the search.
#[derive(Default)]
pub(super) struct CheckFindings {
    /// Lone values where a list is expected.
    lone: Vec<Path>,
    /// Numbers out of range: all are reported at once.
    pub outside: Vec<Error>,
}

/// Refuses what the types do not allow; gives the numbers that are out of range. A lone value where a list is expected
/// becomes a list of one.
pub(super) fn check(tree: &mut ValueTree) -> Result<Vec<Error>> {
    let rules = TypeRules {
        schema: &RECIPE,
        full: &|path| path.to_vec(),
        unknown: &unknown,
        default: &|path| keys::find(path).map_or(Value::Null, |k| k.default.clone()),
        place: &place,
    };
    let mut found = CheckFindings::default();
    rules.table(tree, &mut Vec::new(), "Recipe", &mut found)?;
    for path in found.lone {
        if let Some((value, place)) = tree.take(&path) {
            tree.set(&path, Value::Array(vec![value]), place)?;
        }
    }
    Ok(found.outside)
}

/// Refuses settings with unknown keys, wrong types or numbers out of range; `place` names them in errors.
pub(crate) fn check_settings<T: schemars::JsonSchema>(place: &str, values: &Value) -> Result<()> {
    let schema = KeySchema::of::<T>();
    let mut tree = ValueTree::default();
    tree.root = values.clone();
    let rules = TypeRules {
        schema: &schema,
        full: &|path| path.to_vec(),
        unknown: &|_, at, table| {
            let (parent, leaf) = at.split_at(at.len() - 1);
            let known: Vec<&str> = schema.fields(table).iter().map(|f| f.name.as_str()).collect();
            let beside = |near: &str| dotted(&[parent, &[near.to_string()]].concat());
            let error =
                Error::usage(format!("unknown key {:?}, expected one of {}", dotted(at), known.join(", ")));
            match ferrl_engine::nearest(&leaf[0], known.iter().copied()) {
                Some(near) => error.at(place).fix(format!("did you mean {:?}?", beside(near))),
                None => error.at(place),
            }
        },
        default: &|_| Value::Null,
        place: &|_, _| place.to_string(),
    };
    let mut found = CheckFindings::default();
    rules.table(&tree, &mut Vec::new(), &schema.root, &mut found)?;
    found.outside.into_iter().next().map_or(Ok(()), Err)
}

impl TypeRules<'_> {
    /// Checks the table there, whose keys are the fields of a type.
    pub fn table(
        &self,
        tree: &ValueTree,
        at: &mut Path,
        name: &str,
        found: &mut CheckFindings,
    ) -> Result<()> {
        let Some(Value::Object(map)) = tree.get(at) else { return Ok(()) };
        for (key, value) in map {
            at.push(key.clone());
            let field = self.schema.fields(name).iter().find(|f| f.name == *key);
            let Some(field) = field else { return Err((self.unknown)(tree, at, name)) };
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
        at: &mut Path,
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
        at: &mut Path,
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

    /// The error for a value of another type, with a fix where it is plain what was meant.
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

/// Takes out what is switched off; the tree has passed [`check`].
pub(super) fn switch_off(value: &mut Value, table: &str) {
    let Value::Object(map) = value else { return };
    for field in RECIPE.fields(table) {
        let Some(inner) = map.get_mut(&field.name) else { continue };
        match (&field.kind, inner) {
            (_, inner) if field.optional && inner == OFF => {
                map.shift_remove(&field.name);
            }
            (KeyKind::Table(table), inner) => switch_off(inner, table),
            (KeyKind::List(of), Value::Array(list)) => {
                if let KeyKind::Table(table) = &**of {
                    list.iter_mut().for_each(|entry| switch_off(entry, table));
                }
            }
            _ => {}
        }
    }
}

/// Where the value was written, for people.
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
