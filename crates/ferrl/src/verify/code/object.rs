//! Python values outside of Python: arguments, return values and expected values.
//!
//! Values are sent as JSON with their type, `["i", "12345678901234567890123"]`, which preserves whole numbers of any size, tuples,
//! sets, and keys that are not texts.

use serde_json::{Value, json};
use std::fmt;

/// A value of one of Python's built-in types.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Object {
    None,
    Bool(bool),
    /// A whole number of any size: its digits, without leading zeros, with `-` where it is negative.
    Int(String),
    Float(f64),
    Complex(f64, f64),
    Str(String),
    Bytes(Vec<u8>),
    List(Vec<Object>),
    Tuple(Vec<Object>),
    Set(Vec<Object>),
    Dict(Vec<(Object, Object)>),
}

/// Largest exact whole number of a JSON row that is parsed to a float.
const EXACT: f64 = 18_446_744_073_709_551_616.0;

impl Object {
    /// A whole number from its digits.
    pub(crate) fn int(digits: &str) -> Option<Object> {
        let (sign, digits) = match digits.strip_prefix('-') {
            Some(rest) => ("-", rest),
            None => ("", digits),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let digits = digits.trim_start_matches('0');
        Some(Object::Int(if digits.is_empty() { "0".into() } else { format!("{sign}{digits}") }))
    }

    /// A value of a data row. Numbers of more than 64 bits are floats there.
    pub(crate) fn from_json(value: &Value) -> Object {
        match value {
            Value::Null => Object::None,
            Value::Bool(b) => Object::Bool(*b),
            Value::Number(n) if n.is_f64() => Object::Float(n.as_f64().unwrap_or(f64::NAN)),
            Value::Number(n) => Object::Int(n.to_string()),
            Value::String(s) => Object::Str(s.clone()),
            Value::Array(list) => Object::List(list.iter().map(Object::from_json).collect()),
            Value::Object(map) => Object::Dict(
                map.iter().map(|(k, v)| (Object::Str(k.clone()), Object::from_json(v))).collect(),
            ),
        }
    }

    /// A float in it that may have been a whole number of more than 64 bits.
    pub(crate) fn rounded(&self) -> Option<f64> {
        match self {
            Object::Float(x) if x.abs() >= EXACT && x.is_finite() => Some(*x),
            Object::List(all) | Object::Tuple(all) | Object::Set(all) => all.iter().find_map(Object::rounded),
            Object::Dict(pairs) => pairs.iter().find_map(|(k, v)| k.rounded().or(v.rounded())),
            _ => None,
        }
    }

    /// The value as it is sent to the sandboxed program.
    pub(crate) fn to_wire(&self) -> Value {
        let list = |all: &[Object]| Value::Array(all.iter().map(Object::to_wire).collect());
        match self {
            Object::None => json!(["n"]),
            Object::Bool(b) => json!(["b", b]),
            Object::Int(digits) => json!(["i", digits]),
            Object::Float(x) => json!(["f", float_text(*x)]),
            Object::Complex(re, im) => json!(["c", float_text(*re), float_text(*im)]),
            Object::Str(s) => json!(["s", s]),
            Object::Bytes(b) => json!(["y", b]),
            Object::List(all) => json!(["l", list(all)]),
            Object::Tuple(all) => json!(["t", list(all)]),
            Object::Set(all) => json!(["S", list(all)]),
            Object::Dict(pairs) => {
                json!(["d", pairs.iter().map(|(k, v)| json!([k.to_wire(), v.to_wire()])).collect::<Vec<_>>()])
            }
        }
    }

    /// Parses a value sent by the sandboxed program; `None` if it is malformed.
    pub(crate) fn from_wire(value: &Value) -> Option<Object> {
        let parts = value.as_array()?;
        let text = |i: usize| parts.get(i).and_then(Value::as_str);
        let all = || parts.get(1)?.as_array()?.iter().map(Object::from_wire).collect::<Option<Vec<_>>>();
        Some(match text(0)? {
            "n" => Object::None,
            "b" => Object::Bool(parts.get(1)?.as_bool()?),
            "i" => Object::int(text(1)?)?,
            "f" => Object::Float(float(text(1)?)?),
            "c" => Object::Complex(float(text(1)?)?, float(text(2)?)?),
            "s" => Object::Str(text(1)?.to_string()),
            "y" => Object::Bytes(
                parts
                    .get(1)?
                    .as_array()?
                    .iter()
                    .map(|b| b.as_u64()?.try_into().ok())
                    .collect::<Option<_>>()?,
            ),
            "l" => Object::List(all()?),
            "t" => Object::Tuple(all()?),
            "S" => Object::Set(all()?),
            "d" => {
                let pair = |pair: &Value| match pair.as_array()?.as_slice() {
                    [k, v] => Some((Object::from_wire(k)?, Object::from_wire(v)?)),
                    _ => None,
                };
                Object::Dict(parts.get(1)?.as_array()?.iter().map(pair).collect::<Option<_>>()?)
            }
            _ => return None,
        })
    }
}

fn float_text(x: f64) -> String {
    // Python parses inf, -inf and nan written in the same way.
    if x.is_nan() { "nan".into() } else { format!("{x:?}") }
}

fn float(text: &str) -> Option<f64> {
    text.parse().ok()
}

/// Python's notation, truncated after about 80 characters, for messages.
impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        self.write(&mut text);
        match text.char_indices().nth(80) {
            Some((at, _)) => write!(f, "{}…", &text[..at]),
            None => f.write_str(&text),
        }
    }
}

impl Object {
    fn write(&self, out: &mut String) {
        if out.len() > 400 {
            return; // truncated
        }
        match self {
            Object::None => out.push_str("None"),
            Object::Bool(true) => out.push_str("True"),
            Object::Bool(false) => out.push_str("False"),
            Object::Int(digits) => out.push_str(digits),
            Object::Float(x) => out.push_str(&float_text(*x)),
            Object::Complex(re, im) => out.push_str(&format!("({}{im:+?}j)", float_text(*re))),
            Object::Str(s) => out.push_str(&format!("{s:?}")),
            Object::Bytes(b) => out.push_str(&format!("b\"{}\"", b.escape_ascii())),
            Object::List(all) => write_all(all, "[", "]", out),
            Object::Tuple(all) if all.len() == 1 => write_all(all, "(", ",)", out),
            Object::Tuple(all) => write_all(all, "(", ")", out),
            Object::Set(all) if all.is_empty() => out.push_str("set()"),
            Object::Set(all) => write_all(all, "{", "}", out),
            Object::Dict(pairs) => {
                out.push('{');
                for (i, (k, v)) in pairs.iter().enumerate() {
                    out.push_str(if i > 0 { ", " } else { "" });
                    k.write(out);
                    out.push_str(": ");
                    v.write(out);
                }
                out.push('}');
            }
        }
    }
}

fn write_all(all: &[Object], open: &str, close: &str, out: &mut String) {
    out.push_str(open);
    for (i, one) in all.iter().enumerate() {
        out.push_str(if i > 0 { ", " } else { "" });
        one.write(out);
    }
    out.push_str(close);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_from_the_wire_as_they_were() {
        let big = Object::int("-000123456789012345678901234567890").unwrap();
        assert_eq!(big, Object::Int("-123456789012345678901234567890".into()));
        let values = [
            Object::None,
            Object::Bool(true),
            big.clone(),
            Object::Float(0.1),
            Object::Float(f64::INFINITY),
            Object::Complex(1.0, -2.5),
            Object::Str("a\"\u{1F600}\0".into()),
            Object::Bytes(vec![0, 255]),
            Object::Tuple(vec![Object::List(vec![]), Object::Set(vec![Object::Int("1".into())])]),
            Object::Dict(vec![(Object::Int("1".into()), big)]),
        ];
        for value in values {
            assert_eq!(Object::from_wire(&value.to_wire()), Some(value));
        }
        for nonsense in [
            json!(1),
            json!([]),
            json!(["i", "1x"]),
            json!(["z"]),
            json!(["d", [[["n"]]]]),
            json!(["y", [256]]),
        ] {
            assert_eq!(Object::from_wire(&nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn values_are_shown_as_python_writes_them() {
        let value = Object::Tuple(vec![Object::Str("a".into()), Object::Float(2.0), Object::None]);
        assert_eq!(value.to_string(), "(\"a\", 2.0, None)");
        assert_eq!(Object::Str("x".repeat(100)).to_string().chars().count(), 81);
    }
}
