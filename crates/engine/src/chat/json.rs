//! JSON as Python's `json.dumps` writes it: models were trained on exactly that spacing.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value as TemplateValue};
use serde_json::{Map, Number, Value};

use crate::tokenizer::GUARDS;

/// Formatting; the fields are `json.dumps` keywords.
pub(super) struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    /// Between items, and between key and value.
    pub separators: (String, String),
    pub sort_keys: bool,
}

impl Style {
    pub fn dump(&self, value: &Value) -> String {
        let mut out = String::new();
        self.write(value, 0, &mut out);
        out
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(true) => out.push_str("true"),
            Value::Bool(false) => out.push_str("false"),
            Value::Number(n) => out.push_str(&number(n)),
            Value::String(s) => self.string(s, out),
            Value::Array(items) if items.is_empty() => out.push_str("[]"),
            Value::Object(items) if items.is_empty() => out.push_str("{}"),
            Value::Array(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    self.between(i, depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push(']');
            }
            Value::Object(items) => {
                let mut items: Vec<_> = items.iter().collect();
                if self.sort_keys {
                    items.sort_by(|a, b| a.0.cmp(b.0));
                }
                out.push('{');
                for (i, (key, item)) in items.into_iter().enumerate() {
                    self.between(i, depth + 1, out);
                    self.string(key, out);
                    out.push_str(&self.separators.1);
                    self.write(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push('}');
            }
        }
    }

    fn between(&self, i: usize, depth: usize, out: &mut String) {
        if i > 0 {
            out.push_str(&self.separators.0);
        }
        self.line(depth, out);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' => escape(c, out),
                // Mark characters are kept; no input contains them.
                c if self.ensure_ascii && c > '\u{7e}' && !GUARDS.contains(&c) => escape(c, out),
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn escape(c: char, out: &mut String) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}"); // writing to a string cannot fail
    }
}

/// A number as Python's `repr`: the shortest digits, an exponent outside 1e-4 to 1e16.
fn number(n: &Number) -> String {
    let value = match n.as_f64() {
        Some(value) if n.is_f64() => value,
        _ => return n.to_string(),
    };
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// A float that Python prints with an exponent, `1e-07`, and minijinja without: templates may print it by `{{ x }}`, `~` or
/// `string`.
#[derive(Debug)]
struct PythonFloat {
    value: f64,
    repr: String,
}

impl Object for PythonFloat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repr)
    }
}

/// Whether a template value is such a float.
pub(super) fn is_exponent(value: &TemplateValue) -> bool {
    value.downcast_object_ref::<PythonFloat>().is_some()
}

/// Converts JSON to a template value; objects keep their order.
pub(super) fn to_template(value: &Value) -> TemplateValue {
    match value {
        Value::Null => TemplateValue::from(()),
        Value::Bool(b) => (*b).into(),
        Value::Number(n) => match (n.as_i64(), n.as_u64(), n.as_f64()) {
            (Some(i), ..) => i.into(),
            (_, Some(u), _) => u.into(),
            (.., Some(f)) => match number(n) {
                // Within these bounds minijinja prints a float as Python does.
                repr if repr.contains('e') => TemplateValue::from_object(PythonFloat { value: f, repr }),
                _ => f.into(),
            },
            _ => n.to_string().into(),
        },
        Value::String(s) => s.as_str().into(),
        Value::Array(items) => items.iter().map(to_template).collect(),
        Value::Object(items) => {
            TemplateValue::from_pairs(items.iter().map(|(k, v)| (k.as_str(), to_template(v))))
        }
    }
}

/// Maximum nesting of lists and objects, the same as the parser's.
const DEPTH: usize = 128;

pub(super) fn from_template(value: &TemplateValue, depth: usize) -> Result<Value, Error> {
    if depth > DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: more than {DEPTH} levels")));
    }
    if let Some(float) = value.downcast_object_ref::<PythonFloat>() {
        return Ok(float.value.into());
    }
    Ok(match value.kind() {
        ValueKind::None => Value::Null,
        ValueKind::Bool => value.is_true().into(),
        ValueKind::Number => match value.as_i64().filter(|_| value.is_integer()) {
            Some(i) => i.into(),
            None if value.is_integer() => u64::try_from(value.clone())?.into(),
            None => f64::try_from(value.clone())?.into(),
        },
        ValueKind::String => value.to_string().into(),
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.map(|v| from_template(&v, depth + 1)).collect::<Result<_, _>>()?
        }
        ValueKind::Map => {
            let mut map = Map::new();
            for key in value.try_iter()? {
                map.insert(key.to_string(), from_template(&value.get_item(&key)?, depth + 1)?);
            }
            Value::Object(map)
        }
        other => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: cannot write {other}")));
        }
    })
}
