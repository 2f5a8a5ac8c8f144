//! Fields, types, comments and ranges of a recipe's keys, from the JSON Schema of their types.
//!
//! The schema is derived from the types (`schemars`), so that errors, the manual and editors agree with the code.

use super::OFF;
use super::range::Range;
use crate::algo::Entry;
use crate::algo::policy::Policy;
use schemars::{JsonSchema, schema_for};
use serde_json::Value;
use std::sync::LazyLock;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyKind {
    Text,
    /// A whole number of at least 0.
    Whole,
    Number,
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Choice(Vec<String>),
    /// One of several kinds.
    Either(Vec<KeyKind>),
    List(Box<KeyKind>),
    /// A table whose keys are the fields of this type.
    Table(String),
    /// A table with keys of its own.
    Free,
}

impl KeyKind {
    /// Words that follow "expected"; numbers with their range.
    pub fn words(&self, range: Option<Range>) -> String {
        let within = range.map_or(String::new(), |r| format!(" {r}"));
        match self {
            KeyKind::Text => "text".into(),
            KeyKind::Whole => format!("a whole number{within}"),
            KeyKind::Number => format!("a number{within}"),
            KeyKind::Flag => "true or false".into(),
            KeyKind::Choice(words) => {
                format!("one of {}", words.iter().map(|w| format!("{w:?}")).collect::<Vec<_>>().join(", "))
            }
            KeyKind::Either(kinds) => {
                kinds.iter().map(|kind| kind.words(range)).collect::<Vec<_>>().join(" or ")
            }
            KeyKind::List(of) => match **of {
                KeyKind::Text => "a list of texts".into(),
                KeyKind::Number => format!("a list of numbers{within}"),
                KeyKind::Table(_) | KeyKind::Free => "a list of tables".into(),
                _ => "a list".into(),
            },
            KeyKind::Table(_) | KeyKind::Free => "a table".into(),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Field {
    pub name: String,
    pub kind: KeyKind,
    pub optional: bool,
    pub required: bool,
    /// Its default; null if it has none.
    pub default: Value,
    /// The range of the number, or of the numbers of the list.
    pub range: Option<Range>,
    pub about: String,
}

/// The schema of a type and of the types of its fields.
#[derive(Debug)]
pub(super) struct KeySchema {
    /// The type's name.
    pub root: String,
    /// Types by name, with comment and fields.
    tables: Vec<(String, String, Vec<Field>)>,
}

/// The recipe's own types.
pub(super) static RECIPE: LazyLock<KeySchema> = LazyLock::new(KeySchema::of::<super::Recipe>);

/// The settings that the policy-gradient algorithms share.
pub(super) static POLICY: LazyLock<KeySchema> = LazyLock::new(KeySchema::of::<Policy>);

impl KeySchema {
    pub fn of<T: JsonSchema>() -> KeySchema {
        KeySchema::read(&schema_for!(T).to_value())
    }

    pub fn of_algorithm(entry: &Entry) -> KeySchema {
        KeySchema::read(&(entry.schema)().to_value())
    }

    /// Of a type's JSON Schema.
    pub fn read(schema: &Value) -> KeySchema {
        let root = schema["title"].as_str().unwrap_or_default().to_string();
        let own = std::iter::once((&root, schema));
        let others = schema["$defs"].as_object().into_iter().flatten();
        let table = |(name, table): (&String, &Value)| {
            let fields = table["properties"].as_object().into_iter().flatten();
            (name.clone(), text(table), fields.map(|(name, f)| Field::read(name, f, schema)).collect())
        };
        KeySchema { tables: own.chain(others).map(table).collect(), root: root.clone() }
    }

    /// The fields of a type; empty for an unknown type.
    pub fn fields(&self, table: &str) -> &[Field] {
        self.tables.iter().find(|t| t.0 == table).map_or(&[], |t| &t.2)
    }

    /// The field of that path, through tables.
    pub fn field(&self, path: &[String]) -> Option<&Field> {
        let (mut table, mut found) = (self.root.as_str(), None);
        for key in path {
            found = self.fields(table).iter().find(|f| f.name == *key);
            if let KeyKind::Table(inner) = &found?.kind {
                table = inner;
            }
        }
        found
    }

    /// Removes `"off"` values from a table.
    pub fn switch_off(&self, value: &mut Value, table: &str) {
        let Value::Object(map) = value else { return };
        for field in self.fields(table) {
            let Some(inner) = map.get_mut(&field.name) else { continue };
            match (&field.kind, inner) {
                (_, inner) if field.optional && inner == OFF => *inner = Value::Null,
                (KeyKind::Table(table), inner) => self.switch_off(inner, table),
                (KeyKind::List(of), Value::Array(list)) => {
                    if let KeyKind::Table(table) = &**of {
                        list.iter_mut().for_each(|entry| self.switch_off(entry, table));
                    }
                }
                _ => {}
            }
        }
    }

    /// The comment of a type.
    pub fn about(&self, table: &str) -> &str {
        self.tables.iter().find(|t| t.0 == table).map_or("", |t| &t.1)
    }
}

impl Field {
    fn read(name: &str, field: &Value, root: &Value) -> Field {
        let comment = text(field);
        let (about, range) = Range::split(&comment);
        let (kind, optional) = kind(field, root);
        let (default, required) = (field["default"].clone(), field["required"] == true);
        Field { name: name.into(), kind, optional, required, default, range, about: about.into() }
    }
}

/// The comment, as one line.
fn text(schema: &Value) -> String {
    schema["description"].as_str().unwrap_or_default().replace('\n', " ")
}

/// The type that a schema describes, and whether it may be null.
fn kind(schema: &Value, root: &Value) -> (KeyKind, bool) {
    if let Some([inner, null]) = schema["anyOf"].as_array().map(Vec::as_slice)
        && null["type"] == "null"
    {
        return (kind(inner, root).0, true);
    }
    if let Some(name) = schema["$ref"].as_str().and_then(|r| r.strip_prefix("#/$defs/")) {
        let definition = &root["$defs"][name];
        return match words(definition) {
            words if !words.is_empty() => (KeyKind::Choice(words), false),
            _ if definition["anyOf"].is_array() => kind(definition, root),
            _ => (KeyKind::Table(name.into()), false),
        };
    }
    if let Some(kinds) = schema["anyOf"].as_array() {
        return (KeyKind::Either(kinds.iter().map(|one| kind(one, root).0).collect()), false);
    }
    let (of, optional) = match &schema["type"] {
        Value::Array(types) => (&types[0], types.iter().any(|t| t == "null")),
        one => (one, false),
    };
    let kind = match of.as_str() {
        Some("string") => KeyKind::Text,
        Some("integer") => KeyKind::Whole,
        Some("number") => KeyKind::Number,
        Some("boolean") => KeyKind::Flag,
        Some("array") => KeyKind::List(Box::new(kind(&schema["items"], root).0)),
        _ => KeyKind::Free,
    };
    (kind, optional)
}

/// The words of an enum; empty for another type.
fn words(schema: &Value) -> Vec<String> {
    let lists = std::iter::once(schema).chain(schema["oneOf"].as_array().into_iter().flatten());
    let of = |one: &Value| match &one["const"] {
        Value::String(word) => vec![word.clone()],
        _ => one["enum"].as_array().into_iter().flatten().filter_map(|w| Some(w.as_str()?.into())).collect(),
    };
    lists.flat_map(of).collect()
}
