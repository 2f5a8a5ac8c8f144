//! What the types say, read from their source: fields, types, comments. The manual and the checks cannot drift from
//! the code, because both are made of it.

use super::range::Range;
use crate::algo::{ALGORITHMS, Entry};
use std::sync::LazyLock;

/// What a key holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    Text,
    /// A whole number from 0 up.
    Whole,
    /// A number.
    Number,
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Choice(Vec<String>),
    /// A list.
    List(Box<Kind>),
    /// A table whose keys are the fields of this type.
    Table(String),
    /// A table with keys of its own.
    Free,
}

impl Kind {
    /// In words, after "expected"; numbers with the range they must lie in.
    pub fn words(&self, range: Option<Range>) -> String {
        let within = range.map_or(String::new(), |r| format!(" {r}"));
        match self {
            Kind::Text => "text".into(),
            Kind::Whole => format!("a whole number{within}"),
            Kind::Number => format!("a number{within}"),
            Kind::Flag => "true or false".into(),
            Kind::Choice(words) => {
                format!("one of {}", words.iter().map(|w| format!("{w:?}")).collect::<Vec<_>>().join(", "))
            }
            Kind::List(of) => match **of {
                Kind::Text => "a list of texts".into(),
                Kind::Number => format!("a list of numbers{within}"),
                Kind::Table(_) | Kind::Free => "a list of tables".into(),
                _ => "a list".into(),
            },
            Kind::Table(_) | Kind::Free => "a table".into(),
        }
    }
}

/// A field of a type.
#[derive(Clone, Debug)]
pub(super) struct Field {
    pub name: String,
    pub kind: Kind,
    /// Whether it may be left out without having a value then.
    pub optional: bool,
    /// What a number, or the numbers of a list, must lie in.
    pub range: Option<Range>,
    pub about: String,
}

/// Types by name, with their fields in order.
#[derive(Debug, Default)]
pub(super) struct Schema {
    tables: Vec<(String, String, Vec<Field>)>,
}

/// The recipe's own types.
pub(super) static RECIPE: LazyLock<Schema> = LazyLock::new(|| Schema::read(&[include_str!("settings.rs")]));

/// The settings that the policy-gradient algorithms share.
pub(super) static POLICY: LazyLock<Schema> = LazyLock::new(|| Schema::read(SHARED));

/// Where the types are that algorithms share.
const SHARED: &[&str] = &[
    include_str!("../algo/policy.rs"),
    include_str!("../algo/math/aggregate.rs"),
    include_str!("../algo/math/advantage.rs"),
    include_str!("../algo/math/correction.rs"),
    include_str!("../algo/math/kl.rs"),
    include_str!("../algo/math/surrogate.rs"),
];

/// The type of an algorithm's settings, by the names of its fields: `Options` of its own file, the shared type, or
/// `Options` of the algorithm that it is a variant of.
pub(super) fn settings_of(entry: &Entry) -> Option<(Schema, &'static str)> {
    let defaults = (entry.defaults)();
    let wanted: Vec<&String> = defaults.as_object()?.keys().collect();
    let others = ALGORITHMS.iter().map(|e| e.source);
    std::iter::once(entry.source).chain(others).find_map(|source| {
        // The file's own types come first: they may share a name with the common ones.
        let schema = Schema::read(&[&[source], SHARED].concat());
        let fits = |table: &&str| {
            let fields = schema.fields(table);
            fields.len() == wanted.len() && fields.iter().all(|f| wanted.contains(&&f.name))
        };
        ["Options", "Policy"].into_iter().find(fits).map(|table| (schema, table))
    })
}

impl Schema {
    /// The fields of a type; none for a type that is not here.
    pub fn fields(&self, table: &str) -> &[Field] {
        self.tables.iter().find(|t| t.0 == table).map_or(&[], |t| &t.2)
    }

    /// The comment of a type.
    pub fn about(&self, table: &str) -> &str {
        self.tables.iter().find(|t| t.0 == table).map_or("", |t| &t.1)
    }

    pub fn read(sources: &[&str]) -> Schema {
        let choices: Vec<(String, Vec<String>)> = sources.iter().flat_map(|s| enums(s)).collect();
        let mut structs: Vec<String> = Vec::new();
        for line in sources.iter().flat_map(|s| code(s)) {
            structs.extend(block(line, "struct "));
        }
        let mut schema = Schema::default();
        for source in sources {
            let (mut comment, mut inside) = (Vec::new(), false);
            for line in code(source) {
                let text = line.trim();
                if let Some(words) = text.strip_prefix("///") {
                    comment.push(words.trim());
                } else if let Some(name) = block(line, "struct ") {
                    schema.tables.push((name, std::mem::take(&mut comment).join(" "), Vec::new()));
                    inside = true;
                } else if line == "}" {
                    inside = false;
                } else if let (true, Some((name, of))) = (inside, field(text)) {
                    let (kind, optional) = kind(of, &structs, &choices);
                    let comment = std::mem::take(&mut comment).join(" ");
                    let (about, range) = Range::split(&comment);
                    let about = about.to_string();
                    if let Some((_, _, fields)) = schema.tables.last_mut() {
                        fields.push(Field { name: name.into(), kind, optional, range, about });
                    }
                } else if !text.starts_with("#[") {
                    comment.clear();
                }
            }
        }
        schema
    }
}

/// The lines before the tests.
fn code(source: &str) -> impl Iterator<Item = &str> {
    source.lines().take_while(|line| !line.starts_with("#[cfg(test)]"))
}

/// The name of a type whose block opens on this line.
fn block(line: &str, keyword: &str) -> Option<String> {
    seen(line).strip_prefix(keyword)?.strip_suffix(" {").map(String::from)
}

fn field(text: &str) -> Option<(&str, &str)> {
    seen(text).strip_suffix(',')?.split_once(": ")
}

/// Without the words that say who sees it.
fn seen(line: &str) -> &str {
    ["pub ", "pub(super) ", "pub(crate) "].iter().find_map(|p| line.strip_prefix(p)).unwrap_or(line)
}

/// Types that are a choice of words, and the words.
fn enums(source: &str) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    let mut inside = false;
    for line in code(source) {
        if let Some(name) = block(line, "enum ") {
            all.push((name, Vec::new()));
            inside = true;
        } else if line == "}" {
            inside = false;
        } else if let (true, Some(word), Some(last)) = (inside, line.trim().strip_suffix(','), all.last_mut())
        {
            last.1.push(word.to_lowercase());
        }
    }
    all
}

fn kind(text: &str, structs: &[String], choices: &[(String, Vec<String>)]) -> (Kind, bool) {
    let inner = |wrapper: &str| text.strip_prefix(wrapper).and_then(|t| t.strip_suffix('>'));
    if let Some(of) = inner("Option<") {
        return (kind(of, structs, choices).0, true);
    }
    if let Some(of) = inner("Vec<") {
        return (Kind::List(Box::new(kind(of, structs, choices).0)), false);
    }
    let found = match text {
        "f64" | "f32" => Kind::Number,
        "bool" => Kind::Flag,
        "u64" | "usize" | "u32" | "i64" => Kind::Whole,
        "String" | "PathBuf" => Kind::Text,
        other if structs.iter().any(|s| s == other) => Kind::Table(other.into()),
        other => match choices.iter().find(|c| c.0 == other) {
            Some((_, words)) => Kind::Choice(words.clone()),
            None => Kind::Free,
        },
    };
    (found, false)
}
