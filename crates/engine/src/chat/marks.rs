//! Marks around special-token strings in user input, inserted before a template renders and removed afterwards.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::{Map, Value};

use super::{Input, Kwargs};
use crate::tokenizer::GUARDS;
use crate::{Error, Result};

/// Mark characters, which occur in none of the inputs.
pub(super) struct Marks {
    name: (char, char),
    pub generation: (char, char),
}

/// A rendering with the marks removed.
pub(super) struct Marked {
    pub text: String,
    /// Byte spans that are plain text although they spell special tokens; an empty span is a barrier.
    pub plain: Vec<Range<usize>>,
    /// Byte spans of `{% generation %}` blocks.
    pub generation: Vec<Range<usize>>,
}

/// A special-token string that a message, the tools or the documents contain, or end with a prefix of.
pub(super) struct MarkPlace {
    message: Option<usize>,
    pub name: String,
    pub assistant: bool,
    pub label: String,
}

impl Marks {
    /// Picks characters that no input contains, so that marks cannot be forged.
    pub fn choose(source: &str, input: Input<'_>) -> Result<Self> {
        let mut used = [false; GUARDS.len()];
        let mut note = |text: &str| {
            for (i, g) in GUARDS.iter().enumerate() {
                used[i] |= text.contains(*g);
            }
        };
        note(source);
        input
            .messages
            .iter()
            .chain(input.tools)
            .chain(input.kwargs.values())
            .for_each(|v| strings(v, &mut note));
        let free: Vec<char> = GUARDS.iter().zip(used).filter(|(_, used)| !used).map(|(g, _)| *g).collect();
        match free[..] {
            [a, b, c, d, ..] => Ok(Marks { name: (a, b), generation: (c, d) }),
            _ => Err(Error::data("the messages hold too many of the code points U+FDD0 to U+FDD7")
                .fix("remove them; Unicode reserves them as never being characters")),
        }
    }

    /// Copies of the inputs with marks around the strings at `places`.
    pub fn write(&self, input: Input<'_>, places: &[MarkPlace]) -> (Vec<Value>, Option<Value>, Kwargs) {
        let of = |message: Option<usize>| -> Vec<&str> {
            places.iter().filter(|p| p.message == message).map(|p| p.name.as_str()).collect()
        };
        let messages = input.messages.iter().enumerate().map(|(i, m)| self.mark(m, &of(Some(i)))).collect();
        let rest = of(None);
        let mut kwargs = input.kwargs.clone();
        if let Some(documents) = kwargs.get_mut("documents") {
            *documents = self.mark(documents, &rest);
        }
        (messages, input.tools.map(|t| self.mark(t, &rest)), kwargs)
    }

    fn mark(&self, value: &Value, names: &[&str]) -> Value {
        match value {
            _ if names.is_empty() => value.clone(),
            Value::String(text) => self.mark_text(text, names).into(),
            Value::Array(items) => items.iter().map(|v| self.mark(v, names)).collect(),
            Value::Object(items) => {
                let pairs = items.iter().map(|(k, v)| (self.mark_text(k, names), self.mark(v, names)));
                Value::Object(pairs.collect::<Map<_, _>>())
            }
            other => other.clone(),
        }
    }

    fn mark_text(&self, text: &str, names: &[&str]) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            match names.iter().find(|n| rest.starts_with(**n)) {
                Some(name) => {
                    out.push(self.name.0);
                    out.push_str(name);
                    out.push(self.name.1);
                    rest = &rest[name.len()..];
                }
                None if names.iter().any(|n| begins(rest.as_bytes(), n.as_bytes())) => {
                    // Text that follows might complete the string: insert a barrier.
                    out.push_str(rest);
                    out.push(self.name.1);
                    rest = "";
                }
                None => {
                    out.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        out
    }

    /// Removes the marks from a rendering. If the template separated a pair, each lone mark is a barrier.
    pub fn read(&self, rendered: &str, names: &[String]) -> Marked {
        let mut marked = Marked { text: String::new(), plain: Vec::new(), generation: Vec::new() };
        let mut open_blocks = Vec::new();
        let mut rest = rendered;
        while let Some(c) = rest.chars().next() {
            rest = &rest[c.len_utf8()..];
            let at = marked.text.len();
            if c == self.name.0 {
                let name = names
                    .iter()
                    .find(|n| rest.strip_prefix(n.as_str()).is_some_and(|r| r.starts_with(self.name.1)));
                if let Some(name) = name {
                    marked.text.push_str(name);
                    rest = &rest[name.len() + self.name.1.len_utf8()..];
                }
                marked.plain.push(at..marked.text.len());
            } else if c == self.name.1 {
                marked.plain.push(at..at);
            } else if c == self.generation.0 {
                open_blocks.push(at);
            } else if c == self.generation.1 {
                marked.generation.extend(open_blocks.pop().map(|start| start..at));
            } else {
                marked.text.push(c);
            }
        }
        marked
    }
}

/// Where the inputs contain special-token strings; `names` must be sorted longest first.
pub(super) fn places(input: Input<'_>, names: &[String]) -> Vec<MarkPlace> {
    let mut places = Vec::new();
    let mut starts = [false; 256];
    names.iter().filter_map(|n| n.bytes().next()).for_each(|b| starts[b as usize] = true);
    let mut note = |value: &Value, message: Option<usize>| {
        let mut found = BTreeSet::new();
        strings(value, &mut |text| {
            let bytes = text.as_bytes();
            for at in (0..bytes.len()).filter(|&i| starts[bytes[i] as usize]) {
                let rest = &bytes[at..];
                let here = |name: &String| rest.starts_with(name.as_bytes()) || begins(rest, name.as_bytes());
                found.extend((0..names.len()).filter(|&n| here(&names[n])));
            }
        });
        let role = value.get("role").and_then(Value::as_str).unwrap_or("?");
        places.extend(found.into_iter().map(|n| MarkPlace {
            message,
            name: names[n].clone(),
            assistant: message.is_some() && role == "assistant",
            label: message.map_or("tools or documents".into(), |i| format!("message {i} ({role})")),
        }));
    };
    input.messages.iter().enumerate().for_each(|(i, m)| note(m, Some(i)));
    input.tools.into_iter().chain(input.kwargs.get("documents")).for_each(|v| note(v, None));
    places
}

fn begins(rest: &[u8], name: &[u8]) -> bool {
    rest.len() >= 2 && rest.len() < name.len() && name.starts_with(rest)
}

/// Calls `f` with every string and every key in `value`.
fn strings(value: &Value, f: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => f(text),
        Value::Array(items) => items.iter().for_each(|v| strings(v, f)),
        Value::Object(items) => items.iter().for_each(|(k, v)| {
            f(k);
            strings(v, f);
        }),
        _ => {}
    }
}
