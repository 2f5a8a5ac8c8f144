//! Typed access to the fields of a `config.json`, with errors that name the field.

use serde_json::{Map, Value};

use crate::{Error, Result, nearest};

#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    place: &'static str,
}

/// Upper bound of a dimension; a larger number means a broken file.
const LARGEST: u64 = 1 << 24;

impl<'a> Fields<'a> {
    /// The top level of a `config.json`.
    pub(crate) fn new(json: &'a Value) -> Result<Self> {
        match json.as_object() {
            Some(map) => Ok(Fields { map, place: "config.json" }),
            None => Err(Error::model("not a JSON object").at("config.json")),
        }
    }

    /// Every field.
    pub(crate) fn all(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// An object inside another; `None` when absent, null or empty.
    pub(crate) fn object(&self, key: &str, place: &'static str) -> Result<Option<Fields<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields { map, place })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// Whether the field is present, even if null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The value of a field; `None` if absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// An error about this object.
    pub(crate) fn error(&self, what: impl Into<String>) -> Error {
        Error::model(what).at(self.place)
    }

    fn wrong(&self, key: &str, expected: &str, got: &Value) -> Error {
        self.error(format!("{key} must be {expected}, got {got}"))
    }

    /// A required size, under the first of several names that is present.
    pub(crate) fn size(&self, keys: &[&str]) -> Result<usize> {
        for key in keys {
            if let Some(n) = self.opt_size(key)? {
                return Ok(n);
            }
        }
        let e = self.error(format!("field {} is missing", keys[0]));
        Err(match nearest(keys[0], self.map.keys().map(String::as_str)) {
            Some(near) => e.fix(format!("check the spelling; the nearest field there is {near}")),
            None => e.fix("use the config.json that was published with the weights"),
        })
    }

    /// A size that may be absent or null.
    pub(crate) fn opt_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n @ 1..=LARGEST) => Ok(Some(n as usize)),
            _ => Err(self.wrong(key, &format!("a whole number from 1 to {LARGEST}"), value)),
        }
    }

    /// A number that may be absent or null.
    pub(crate) fn opt_number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.wrong(key, "a number", value)),
        }
    }

    /// A number above zero that may be absent or null.
    pub(crate) fn opt_positive(&self, key: &str) -> Result<Option<f64>> {
        match self.opt_number(key)? {
            Some(x) if x <= 0.0 => Err(self.error(format!("{key} must be above 0, got {x}"))),
            x => Ok(x),
        }
    }

    /// A required number above zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64> {
        self.opt_positive(key)?.ok_or_else(|| self.error(format!("field {key} is missing")))
    }

    /// A boolean, with its default.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// A string that may be absent or null.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// A list of strings that may be absent or null.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().and_then(|l| l.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| self.wrong(key, "a list of strings", value))
    }

    /// A list of whole numbers below a bound; empty if absent or null.
    pub(crate) fn indices(&self, key: &str, bound: usize) -> Result<Vec<usize>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let index = |x: &Value| x.as_u64().map(|x| x as usize).filter(|&x| x < bound);
        let list = value.as_array().and_then(|l| l.iter().map(index).collect());
        list.ok_or_else(|| self.wrong(key, &format!("a list of whole numbers below {bound}"), value))
    }

    /// A required list of `count` numbers above zero.
    pub(crate) fn positives(&self, key: &str, count: usize) -> Result<Vec<f64>> {
        let list: Option<Vec<f64>> = self
            .get(key)
            .and_then(Value::as_array)
            .and_then(|l| l.iter().map(|x| x.as_f64().filter(|x| x.is_finite() && *x > 0.0)).collect());
        match list {
            Some(list) if list.len() == count => Ok(list),
            Some(list) => Err(self.error(format!("{key} must hold {count} numbers, got {}", list.len()))),
            None => Err(self.error(format!("{key} must be a list of {count} numbers above 0"))),
        }
    }

    /// Whether a field is set to something: not absent, null, false, zero or empty.
    pub(crate) fn is_active(&self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Bool(true)) => true,
            Some(Value::Number(n)) => n.as_f64() != Some(0.0),
            Some(Value::String(s)) => !s.is_empty(),
            Some(Value::Array(l)) => !l.is_empty(),
            Some(Value::Object(o)) => !o.is_empty(),
        }
    }

    /// Refuses a config in which any of these fields is set.
    pub(crate) fn refuse(&self, keys: &[&str]) -> Result<()> {
        match keys.iter().find(|k| self.is_active(k)) {
            None => Ok(()),
            Some(key) => Err(self
                .error(format!("{key} changes the computation in a way Ferrl does not support"))
                .fix("use a model without it; quantized weights must be converted to bf16 first")),
        }
    }
}
