//! Values under dotted keys, each with the place where it was written.
//!
//! Files and overrides become trees, which are merged, later over earlier. Merges keep the places, so that an error about a value
//! can name its source.

use ferrl_engine::{Error, Result};
use serde_json::{Map, Number, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use toml::de::{DeTable, DeValue};

/// Keys from the outermost in; entries of lists by their number.
pub(super) type KeyPath = Vec<String>;

/// Where a value was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Place {
    /// Later sources win over earlier ones.
    pub order: usize,
    /// `file:line`, or the override.
    pub text: String,
    /// The reference `${NAME}`, if the value is a variable's.
    pub reference: Option<String>,
}

/// Values and their places.
#[derive(Clone, Debug)]
pub(super) struct ValueTree {
    /// A table; nothing in it is null.
    pub root: Value,
    places: BTreeMap<KeyPath, Place>,
}

impl Default for ValueTree {
    fn default() -> Self {
        ValueTree { root: Value::Object(Map::new()), places: BTreeMap::new() }
    }
}

/// `a.b.0.c`, with quotes around keys that need them.
pub(super) fn dotted(path: &[String]) -> String {
    let bare = |k: &str| !k.is_empty() && k.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let quoted = |k: &String| if bare(k) { k.clone() } else { format!("{k:?}") };
    path.iter().map(quoted).collect::<Vec<_>>().join(".")
}

/// The path of a plain dotted key.
pub(super) fn path(key: &str) -> KeyPath {
    key.split('.').map(String::from).collect()
}

/// A value in words, for "got …".
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".into(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) if s.chars().count() > 40 => {
            format!("the text {:?}…", s.chars().take(40).collect::<String>())
        }
        Value::String(s) => format!("the text {s:?}"),
        Value::Array(_) => "a list".into(),
        Value::Object(_) => "a table".into(),
    }
}

impl ValueTree {
    /// Reads TOML; `name` returns the place of a line.
    pub fn parse(text: &str, order: usize, name: impl Fn(usize) -> String) -> Result<Self> {
        let mut tree = ValueTree::default();
        let document = DeTable::parse(text).map_err(|e| {
            let line = e.span().map_or(1, |s| line_of(&line_starts(text), &s));
            let error = Error::usage(e.message().to_string()).at(name(line));
            match e.message().starts_with("cannot extend value") {
                // For example `algo = "grpo"` with `algo.clip_low = 0.1` below it.
                true => error.fix("write the table whole: algo = { name = \"grpo\", clip_low = 0.1 }"),
                false => error,
            }
        })?;
        let mut reader =
            TomlReader { lines: line_starts(text), order, name: &name, places: &mut tree.places };
        tree.root = reader.table(document.get_ref(), &mut Vec::new())?;
        Ok(tree)
    }

    pub fn get(&self, path: &[String]) -> Option<&Value> {
        path.iter().try_fold(&self.root, |value, key| match value {
            Value::Object(map) => map.get(key),
            Value::Array(list) => list.get(key.parse::<usize>().ok()?),
            _ => None,
        })
    }

    /// The place of the value, or of the nearest that contains it, or of the first within it.
    pub fn place(&self, path: &[String]) -> Option<&Place> {
        let around = (1..=path.len()).rev().find_map(|n| self.places.get(&path[..n]));
        let within = || self.places.range(path.to_vec()..).next().filter(|(p, _)| p.starts_with(path));
        around.or_else(|| within().map(|(_, place)| place))
    }

    /// The references to variables, by path.
    pub fn references(&self) -> impl Iterator<Item = (&KeyPath, &String)> {
        self.places.iter().filter_map(|(path, place)| Some((path, place.reference.as_ref()?)))
    }

    /// The path with list entries by number instead of by their `name`.
    pub fn numbered(&self, path: &[String]) -> KeyPath {
        let mut out: KeyPath = Vec::new();
        for key in path {
            let found = match self.get(&out) {
                Some(Value::Array(list)) => list.iter().position(|e| e["name"] == key.as_str()),
                _ => None,
            };
            out.push(found.map_or_else(|| key.clone(), |i| i.to_string()));
        }
        out
    }

    /// Sets a value, creating the tables of its path.
    pub fn set(&mut self, path: &[String], value: Value, place: Place) -> Result<()> {
        let wrong = |what: String| Err(Error::usage(what).at(&place.text));
        let mut at = &mut self.root;
        for (depth, key) in path.iter().enumerate() {
            at = match at {
                Value::Object(map) => map.entry(key.clone()).or_insert_with(|| Value::Object(Map::new())),
                Value::Array(list) => {
                    let n = list.len();
                    match key.parse::<usize>().ok().and_then(|i| list.get_mut(i)) {
                        Some(entry) => entry,
                        None => {
                            let list = dotted(&path[..depth]);
                            return wrong(format!(
                                "{list} has {n} entries, numbered from 0, and none {key:?}"
                            ));
                        }
                    }
                }
                other => {
                    return wrong(format!("{} is {}, not a table", dotted(&path[..depth]), describe(other)));
                }
            };
        }
        *at = value;
        self.forget(path);
        self.places.insert(path.to_vec(), place);
        Ok(())
    }

    /// Appends to a list, which is created if absent.
    pub fn push(&mut self, path: &[String], value: Value, place: Place) -> Result<()> {
        match self.get(path) {
            None => self.set(path, Value::Array(vec![value]), place),
            Some(Value::Array(list)) => {
                let mut longer = list.clone();
                longer.push(value);
                let entry: KeyPath = path.iter().cloned().chain([list.len().to_string()]).collect();
                let kept: Vec<_> = self.under(path);
                self.set(path, Value::Array(longer), place.clone())?;
                self.places.extend(kept);
                self.places.insert(entry, place);
                Ok(())
            }
            Some(other) => {
                let what = format!("{} is {}, not a list to add to", dotted(path), describe(other));
                Err(Error::usage(what).at(place.text))
            }
        }
    }

    /// Removes a value and the tables that become empty; returns it with its place.
    pub fn take(&mut self, path: &[String]) -> Option<(Value, Place)> {
        let (last, parents) = path.split_last()?;
        let mut at = &mut self.root;
        for key in parents {
            at = match at {
                Value::Object(map) => map.get_mut(key)?,
                Value::Array(list) => list.get_mut(key.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        let value = match at {
            Value::Object(map) => map.shift_remove(last)?,
            Value::Array(list) => {
                let i = last.parse::<usize>().ok().filter(|&i| i < list.len())?;
                list.remove(i)
            }
            _ => return None,
        };
        let emptied = at.as_object().is_some_and(Map::is_empty) && !parents.is_empty();
        let place = self.place(path).cloned().unwrap_or_default();
        self.forget(path);
        if emptied {
            self.take(parents);
        }
        Some((value, place))
    }

    /// Merges another tree over this one: tables are merged, other values replaced.
    pub fn merge(&mut self, over: &ValueTree) -> Result<()> {
        let Value::Object(map) = &over.root else { return Ok(()) };
        map.iter().try_for_each(|(key, value)| self.merge_at(vec![key.clone()], value, over))
    }

    fn merge_at(&mut self, path: KeyPath, value: &Value, over: &ValueTree) -> Result<()> {
        if let (Some(Value::Object(_)), Value::Object(map)) = (self.get(&path), value) {
            return map.iter().try_for_each(|(key, value)| {
                let inner = path.iter().cloned().chain([key.clone()]).collect();
                self.merge_at(inner, value, over)
            });
        }
        let place = over.place(&path).cloned().unwrap_or_default();
        self.set(&path, value.clone(), place)?;
        self.places.extend(over.under(&path));
        Ok(())
    }

    /// The tree below a key, with relative paths.
    pub fn below(&self, path: &[String]) -> ValueTree {
        let root = self.get(path).cloned().unwrap_or(Value::Object(Map::new()));
        let places =
            self.under(path).into_iter().map(|(p, place)| (p[path.len()..].to_vec(), place)).collect();
        ValueTree { root, places }
    }

    /// Puts a tree below a key.
    pub fn graft(&mut self, path: &[String], tree: ValueTree) -> Result<()> {
        let place = self.place(path).cloned().unwrap_or_default();
        self.set(path, tree.root, place)?;
        let whole = |p: KeyPath| path.iter().cloned().chain(p).collect::<KeyPath>();
        self.places
            .extend(tree.places.into_iter().filter(|(p, _)| !p.is_empty()).map(|(p, at)| (whole(p), at)));
        Ok(())
    }

    fn under(&self, path: &[String]) -> Vec<(KeyPath, Place)> {
        let range = self.places.range(path.to_vec()..);
        range.take_while(|(p, _)| p.starts_with(path)).map(|(p, place)| (p.clone(), place.clone())).collect()
    }

    fn forget(&mut self, path: &[String]) {
        self.places.retain(|p, _| !p.starts_with(path));
    }
}

/// Converts TOML's values and stores their lines.
struct TomlReader<'a> {
    /// Where each line begins.
    lines: Vec<usize>,
    order: usize,
    name: &'a dyn Fn(usize) -> String,
    places: &'a mut BTreeMap<KeyPath, Place>,
}

impl TomlReader<'_> {
    fn table(&mut self, table: &DeTable<'_>, at: &mut KeyPath) -> Result<Value> {
        let mut map = Map::new();
        for (key, value) in table {
            at.push(key.get_ref().to_string());
            self.note(at, &key.span());
            map.insert(key.get_ref().to_string(), self.value(value.get_ref(), &value.span(), at)?);
            at.pop();
        }
        Ok(Value::Object(map))
    }

    fn value(&mut self, value: &DeValue<'_>, span: &Range<usize>, at: &mut KeyPath) -> Result<Value> {
        let place = (self.name)(line_of(&self.lines, span));
        let wrong = |what: String| Error::usage(what).at(dotted(at)).at(place);
        Ok(match value {
            DeValue::String(s) => Value::String(s.to_string()),
            DeValue::Boolean(b) => Value::Bool(*b),
            DeValue::Datetime(d) => Value::String(d.to_string()),
            DeValue::Integer(i) => {
                let parsed = i64::from_str_radix(i.as_str(), i.radix());
                parsed.map_err(|_| wrong(format!("the whole number {i} is out of range")))?.into()
            }
            DeValue::Float(f) => {
                let number = f.as_str().parse().ok().and_then(Number::from_f64);
                number.ok_or_else(|| wrong(format!("{f} is not a finite number")))?.into()
            }
            DeValue::Array(list) => {
                let mut out = Vec::new();
                for (i, entry) in list.iter().enumerate() {
                    at.push(i.to_string());
                    self.note(at, &entry.span());
                    out.push(self.value(entry.get_ref(), &entry.span(), at)?);
                    at.pop();
                }
                Value::Array(out)
            }
            DeValue::Table(table) => self.table(table, at)?,
        })
    }

    fn note(&mut self, at: &KeyPath, span: &Range<usize>) {
        let text = (self.name)(line_of(&self.lines, span));
        self.places.insert(at.clone(), Place { order: self.order, text, reference: None });
    }
}

fn line_starts(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect()
}

/// The number of the line, from 1.
fn line_of(starts: &[usize], span: &Range<usize>) -> usize {
    starts.partition_point(|start| *start <= span.start)
}
