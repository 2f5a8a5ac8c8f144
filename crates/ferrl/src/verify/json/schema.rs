//! JSON Schema, the part of draft 2020-12 that describes plain data: types, numbers, texts, lists, objects, combinations
//! and references within the schema.
//!
//! `format`, titles and other annotations are ignored, as the standard has it; a keyword that asserts something and is not
//! known here is an error, so that no answer passes because of it.

use ferrl_engine::{Error, Result, nearest};
use regex::Regex;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Keywords that are checked.
const KNOWN: &[&str] = &[
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "items", "prefixItems",
    "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "anyOf",
    "allOf", "oneOf", "not", "if", "then", "else", "$ref",
];

/// Keywords that assert nothing.
const ANNOTATIONS: &[&str] = &[
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType",
    "contentSchema", "$vocabulary",
];

const TYPES: &[&str] = &["null", "boolean", "integer", "number", "string", "array", "object"];

/// Steps of one check: references and combinations can multiply.
const MOST_STEPS: usize = 200_000;
const TOO_LONG: &str = "the schema takes too long to check";
/// References within references that lead nowhere end here.
const MOST_DEPTH: usize = 200;

/// A schema that was checked itself.
#[derive(Clone, Debug)]
pub struct Schema {
    root: Value,
    patterns: HashMap<String, Regex>,
}

struct SchemaCheck<'a> {
    schema: &'a Schema,
    steps: usize,
}

/// A problem, or none.
type Verdict = std::result::Result<(), String>;

impl Schema {
    /// A schema whose keywords are all known and well formed.
    pub fn read(value: &Value) -> Result<Schema> {
        let mut schema = Schema { root: value.clone(), patterns: HashMap::new() };
        schema.admit(value, "#", 0)?;
        Ok(schema)
    }

    /// What is wrong with a value; none where it matches.
    pub fn problem(&self, value: &Value) -> Option<String> {
        let mut check = SchemaCheck { schema: self, steps: 0 };
        let verdict = check.value(&self.root, value, "", 0);
        // A part that was given up counts as no match wherever it stands, under `not` as well.
        if check.steps > MOST_STEPS { Some(TOO_LONG.into()) } else { verdict.err() }
    }

    /// Checks a schema within this one, and compiles its patterns.
    fn admit(&mut self, schema: &Value, place: &str, depth: usize) -> Result<()> {
        let fields = match schema {
            Value::Bool(_) => return Ok(()),
            Value::Object(fields) if depth < MOST_DEPTH => fields,
            other => {
                return Err(Error::data(format!("{place} must be a JSON Schema, an object, got {other}")));
            }
        };
        for (key, value) in fields {
            let at = format!("{place}/{key}");
            match key.as_str() {
                key if ANNOTATIONS.contains(&key) && !matches!(key, "$defs" | "definitions") => {}
                "$defs" | "definitions" | "properties" => self.admit_each(value, &at, depth, false)?,
                "patternProperties" => self.admit_each(value, &at, depth, true)?,
                "items"
                | "additionalProperties"
                | "propertyNames"
                | "contains"
                | "not"
                | "if"
                | "then"
                | "else" => {
                    self.admit(value, &at, depth + 1)?;
                }
                "anyOf" | "allOf" | "oneOf" | "prefixItems" => {
                    let list = value.as_array().filter(|list| !list.is_empty());
                    let list = list
                        .ok_or_else(|| Error::data(format!("{at} must be a list of schemas, got {value}")))?;
                    for (n, one) in list.iter().enumerate() {
                        self.admit(one, &format!("{at}/{n}"), depth + 1)?;
                    }
                }
                "$ref" => {
                    let target = value.as_str().unwrap_or_default();
                    if !target.starts_with('#') || self.target(target).is_none() {
                        let error =
                            Error::data(format!("{at} refers to {value}, which is not in the schema"));
                        return Err(error.fix("references lead within the schema: \"#/$defs/name\""));
                    }
                }
                "pattern" => self.compile(value, &at)?,
                "type" => admit_type(value, &at)?,
                key if KNOWN.contains(&key) => admit_plain(key, value, &at)?,
                key => {
                    let error = Error::data(format!("{at}: the keyword {key:?} is not known"));
                    return Err(match nearest(key, KNOWN.iter().copied()) {
                        Some(near) => error.fix(format!("did you mean {near:?}?")),
                        None => error.fix(format!("known are {}", KNOWN.join(", "))),
                    });
                }
            }
        }
        Ok(())
    }

    fn admit_each(&mut self, value: &Value, at: &str, depth: usize, patterns: bool) -> Result<()> {
        let Value::Object(schemas) = value else {
            return Err(Error::data(format!("{at} must be an object of schemas, got {value}")));
        };
        for (name, schema) in schemas {
            if patterns {
                self.compile(&name.as_str().into(), at)?;
            }
            self.admit(schema, &format!("{at}/{name}"), depth + 1)?;
        }
        Ok(())
    }

    fn compile(&mut self, pattern: &Value, at: &str) -> Result<()> {
        let Some(text) = pattern.as_str() else {
            return Err(Error::data(format!("{at} must be a text, got {pattern}")));
        };
        let regex = Regex::new(text).map_err(|e| Error::data(format!("{at}: {text:?}: {e}")))?;
        self.patterns.insert(text.to_string(), regex);
        Ok(())
    }

    /// What a reference such as `#/$defs/name` leads to.
    fn target(&self, reference: &str) -> Option<&Value> {
        let path = reference.strip_prefix('#')?;
        self.root.pointer(&path.replace("%24", "$"))
    }
}

fn admit_type(value: &Value, at: &str) -> Result<()> {
    let names: Vec<&Value> = match value {
        Value::Array(list) => list.iter().collect(),
        one => vec![one],
    };
    let odd = names.iter().find(|name| !name.as_str().is_some_and(|name| TYPES.contains(&name)));
    match odd {
        None if !names.is_empty() => Ok(()),
        odd => Err(Error::data(format!(
            "{at} is {}, expected one of {}",
            odd.unwrap_or(&value),
            TYPES.join(", ")
        ))),
    }
}

/// Keywords whose value is a number, a list of names, or anything.
fn admit_plain(key: &str, value: &Value, at: &str) -> Result<()> {
    let (fits, expected) = match key {
        "const" => (true, ""),
        "enum" => (value.is_array(), "a list"),
        "uniqueItems" => (value.is_boolean(), "true or false"),
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => (value.is_number(), "a number"),
        "multipleOf" => (value.as_f64().is_some_and(|n| n > 0.0), "a number above 0"),
        "required" => (names(value).is_some(), "a list of names"),
        "dependentRequired" => (
            value.as_object().is_some_and(|fields| fields.values().all(|list| names(list).is_some())),
            "an object of lists of names",
        ),
        _ => (count(value).is_some(), "a whole number from 0 up"),
    };
    if fits { Ok(()) } else { Err(Error::data(format!("{at} must be {expected}, got {value}"))) }
}

fn names(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}

fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_f64().filter(|n| *n >= 0.0 && n.fract() == 0.0).map(|n| n as u64))
}

/// JSON's equality: numbers by their value, objects without regard to order.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => x == y || x.as_f64() == y.as_f64(),
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(x, y)| same(x, y)),
        (Value::Object(x), Value::Object(y)) => {
            x.len() == y.len() && x.iter().all(|(key, v)| y.get(key).is_some_and(|w| same(v, w)))
        }
        _ => a == b,
    }
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

/// A value in a message: short, whatever it is.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// A part of the answer in a message.
fn named(place: &str) -> &str {
    if place.is_empty() { "the answer" } else { place }
}

impl SchemaCheck<'_> {
    fn value(&mut self, schema: &Value, value: &Value, place: &str, depth: usize) -> Verdict {
        self.steps += 1;
        if self.steps > MOST_STEPS || depth > MOST_DEPTH {
            self.steps = MOST_STEPS + 1;
            return Err(TOO_LONG.into());
        }
        let fields = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Object(fields) => fields,
            _ => return Err(format!("{} must not be there", named(place))),
        };
        self.plain(fields, value, place)?;
        match value {
            Value::Number(number) => numbers(fields, number.as_f64().unwrap_or(f64::NAN), value, place)?,
            Value::String(text) => self.text(fields, text, place)?,
            Value::Array(list) => self.list(fields, list, place, depth)?,
            Value::Object(object) => self.object(fields, object, place, depth)?,
            _ => {}
        }
        self.combined(fields, value, place, depth)
    }

    fn plain(&self, fields: &Map<String, Value>, value: &Value, place: &str) -> Verdict {
        let types: Option<Vec<&str>> = match fields.get("type") {
            Some(Value::String(name)) => Some(vec![name]),
            Some(list) => names(list),
            None => None,
        };
        if let Some(types) = types.filter(|types| !types.iter().any(|name| is_type(value, name))) {
            return Err(format!("{} is {}, expected {}", named(place), shown(value), types.join(" or ")));
        }
        if let Some(Value::Array(list)) = fields.get("enum")
            && !list.iter().any(|one| same(one, value))
        {
            let all = Value::Array(list.clone());
            return Err(format!("{} is {}, expected one of {}", named(place), shown(value), shown(&all)));
        }
        match fields.get("const") {
            Some(one) if !same(one, value) => {
                Err(format!("{} is {}, expected {}", named(place), shown(value), shown(one)))
            }
            _ => Ok(()),
        }
    }

    fn text(&self, fields: &Map<String, Value>, text: &str, place: &str) -> Verdict {
        bounds(fields, "Length", "characters", text.chars().count() as u64, place)?;
        let pattern = fields.get("pattern").and_then(Value::as_str);
        match pattern.and_then(|p| self.schema.patterns.get(p)) {
            Some(regex) if !regex.is_match(text) => {
                let value = Value::from(text);
                Err(format!(
                    "{} is {}, which does not match {:?}",
                    named(place),
                    shown(&value),
                    regex.as_str()
                ))
            }
            _ => Ok(()),
        }
    }

    fn list(&mut self, fields: &Map<String, Value>, list: &[Value], place: &str, depth: usize) -> Verdict {
        bounds(fields, "Items", "items", list.len() as u64, place)?;
        let first = fields.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (at, value) in list.iter().enumerate() {
            if let Some(schema) = first.get(at).or(fields.get("items")) {
                self.value(schema, value, &format!("{place}/{at}"), depth + 1)?;
            }
        }
        if fields.get("uniqueItems") == Some(&Value::Bool(true)) {
            for (at, value) in list.iter().enumerate() {
                self.steps += at;
                if self.steps > MOST_STEPS {
                    return Err(TOO_LONG.into());
                }
                if list[..at].iter().any(|other| same(other, value)) {
                    return Err(format!("{} holds {} twice", named(place), shown(value)));
                }
            }
        }
        if let Some(schema) = fields.get("contains") {
            let found =
                list.iter().filter(|value| self.value(schema, value, place, depth + 1).is_ok()).count()
                    as u64;
            let least = fields.get("minContains").and_then(count).unwrap_or(1);
            let most = fields.get("maxContains").and_then(count).unwrap_or(u64::MAX);
            if !(least..=most).contains(&found) {
                return Err(format!("{} holds {found} of the items it must contain", named(place)));
            }
        }
        Ok(())
    }

    fn object(
        &mut self,
        fields: &Map<String, Value>,
        object: &Map<String, Value>,
        place: &str,
        depth: usize,
    ) -> Verdict {
        bounds(fields, "Properties", "properties", object.len() as u64, place)?;
        let missing = |list: &Value| {
            names(list)?.into_iter().find(|name| !object.contains_key(*name)).map(String::from)
        };
        if let Some(name) = fields.get("required").and_then(missing) {
            return Err(format!("{} has no {name:?}", named(place)));
        }
        if let Some(Value::Object(lists)) = fields.get("dependentRequired") {
            for (key, list) in lists.iter().filter(|(key, _)| object.contains_key(*key)) {
                if let Some(name) = missing(list) {
                    return Err(format!("{} has {key:?} and no {name:?}", named(place)));
                }
            }
        }
        let table = |key: &str| fields.get(key).and_then(Value::as_object);
        for (key, value) in object {
            let at = format!("{place}/{key}");
            let mut known = false;
            if let Some(schema) = table("properties").and_then(|p| p.get(key)) {
                known = true;
                self.value(schema, value, &at, depth + 1)?;
            }
            for (pattern, schema) in table("patternProperties").into_iter().flatten() {
                if self.schema.patterns.get(pattern).is_some_and(|regex| regex.is_match(key)) {
                    known = true;
                    self.value(schema, value, &at, depth + 1)?;
                }
            }
            match fields.get("additionalProperties") {
                Some(Value::Bool(false)) if !known => {
                    return Err(format!("{} must not have {key:?}", named(place)));
                }
                Some(schema) if !known => self.value(schema, value, &at, depth + 1)?,
                _ => {}
            }
            if let Some(schema) = fields.get("propertyNames") {
                self.value(schema, &key.as_str().into(), &at, depth + 1)?;
            }
        }
        Ok(())
    }

    fn combined(&mut self, fields: &Map<String, Value>, value: &Value, place: &str, depth: usize) -> Verdict {
        let list = |key: &str| fields.get(key).and_then(Value::as_array);
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let schema = self.schema;
            let target =
                schema.target(reference).ok_or_else(|| format!("{reference} is not in the schema"))?;
            self.value(target, value, place, depth + 1)?;
        }
        for schema in list("allOf").into_iter().flatten() {
            self.value(schema, value, place, depth + 1)?;
        }
        if let Some(any) = list("anyOf") {
            let mut first = None;
            let fits = any.iter().any(|schema| match self.value(schema, value, place, depth + 1) {
                Ok(()) => true,
                Err(why) => {
                    first.get_or_insert(why);
                    false
                }
            });
            if !fits {
                let why = first.unwrap_or_default();
                return Err(format!("{} matches none of {} alternatives: {why}", named(place), any.len()));
            }
        }
        if let Some(one) = list("oneOf") {
            let fits =
                one.iter().filter(|schema| self.value(schema, value, place, depth + 1).is_ok()).count();
            if fits != 1 {
                return Err(format!(
                    "{} matches {fits} of {} alternatives, expected 1",
                    named(place),
                    one.len()
                ));
            }
        }
        if let Some(schema) = fields.get("not")
            && self.value(schema, value, place, depth + 1).is_ok()
        {
            return Err(format!("{} is {}, which is excluded", named(place), shown(value)));
        }
        let Some(condition) = fields.get("if") else { return Ok(()) };
        let branch = if self.value(condition, value, place, depth + 1).is_ok() { "then" } else { "else" };
        fields.get(branch).map_or(Ok(()), |schema| self.value(schema, value, place, depth + 1))
    }
}

fn numbers(fields: &Map<String, Value>, number: f64, value: &Value, place: &str) -> Verdict {
    let limit = |key: &str| fields.get(key).and_then(Value::as_f64);
    let says =
        |words: &str, limit: f64| Err(format!("{} is {value}, expected {words} {limit}", named(place)));
    match (limit("minimum"), limit("maximum"), limit("exclusiveMinimum"), limit("exclusiveMaximum")) {
        (Some(least), ..) if number < least => says("at least", least),
        (_, Some(most), ..) if number > most => says("at most", most),
        (_, _, Some(least), _) if number <= least => says("more than", least),
        (.., Some(most)) if number >= most => says("less than", most),
        _ => match limit("multipleOf") {
            Some(step)
                if (number / step - (number / step).round()).abs()
                    > 1e-9 * (number / step).abs().max(1.0) =>
            {
                says("a multiple of", step)
            }
            _ => Ok(()),
        },
    }
}

/// `minItems` and its like.
fn bounds(fields: &Map<String, Value>, what: &str, words: &str, got: u64, place: &str) -> Verdict {
    let limit = |side: &str| fields.get(&format!("{side}{what}")).and_then(count);
    match (limit("min"), limit("max")) {
        (Some(least), _) if got < least => {
            Err(format!("{} has {got} {words}, expected at least {least}", named(place)))
        }
        (_, Some(most)) if got > most => {
            Err(format!("{} has {got} {words}, expected at most {most}", named(place)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
