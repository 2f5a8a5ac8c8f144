//! Values of columns: text, numbers, messages.

use ferrl_engine::chat::text_of;
use ferrl_engine::{Error, Result, nearest};
use serde_json::{Map, Value, json};

use super::{Content, RowFields};
use crate::data::kind;

pub fn column(name: &str) -> String {
    format!("column {name}")
}

pub fn expected(value: &Value, what: &str) -> Error {
    Error::data(format!("got {}, expected {what}", kind(value))).fix("correct the row, or map another column")
}

pub fn wrong(name: &str, value: &Value, what: &str) -> Error {
    expected(value, what).at(column(name))
}

pub fn nth(name: &str, index: usize, e: Error) -> Error {
    e.at(format!("item {}", index + 1)).at(column(name))
}

pub fn array<'v>(name: &str, value: &'v Value) -> Result<&'v [Value]> {
    match value {
        Value::Array(items) if items.is_empty() => {
            Err(Error::data("the list is empty").at(column(name)).fix("drop the row"))
        }
        Value::Array(items) => Ok(items),
        other => Err(wrong(name, other, "a list")),
    }
}

pub fn numbers(name: &str, value: &Value, count: usize) -> Result<Vec<f32>> {
    let items = array(name, value)?;
    if items.len() != count {
        return Err(Error::data(format!("has {} entries for {count} completions", items.len()))
            .at(column(name))
            .fix("give one for each completion"));
    }
    let one = |(i, v): (usize, &Value)| number(v).ok_or_else(|| nth(name, i, no_number(v, "a number")));
    items.iter().enumerate().map(one).collect()
}

/// The error for a value that is no number, or one too large for 32 bits.
pub fn no_number(value: &Value, what: &str) -> Error {
    match value {
        Value::Number(n) => Error::data(format!("got {n}, expected {what} within the range of 32 bits"))
            .fix("correct the row, or scale the column"),
        Value::String(text) if text.trim().parse::<f64>().is_ok() => {
            Error::data(format!("got the text {text:?}, expected {what}"))
                .fix(format!("write {} without quotes", text.trim()))
        }
        other => expected(other, what),
    }
}

pub fn number(value: &Value) -> Option<f32> {
    match value {
        Value::Bool(yes) => Some(f32::from(u8::from(*yes))),
        other => other.as_f64().map(|n| n as f32).filter(|n| n.is_finite()),
    }
}

pub fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        _ => None,
    }
}

pub fn content(value: &Value) -> Result<Content> {
    match value {
        Value::Array(items) if items.is_empty() => {
            Err(Error::data("the list of messages is empty").fix("drop the row"))
        }
        Value::Array(items) => {
            let one = |(i, m)| message(m).map_err(|e| e.at(format!("message {}", i + 1)));
            items.iter().enumerate().map(one).collect::<Result<_>>().map(Content::Messages)
        }
        Value::Object(_) => message(value).map(|m| Content::Messages(vec![m])),
        other => text(other).map(Content::Text).ok_or_else(|| expected(other, "text or a list of messages")),
    }
}

/// A message with a role and content; fields that tables fill with null are left out.
pub fn message(value: &Value) -> Result<Value> {
    let Some(fields) = value.as_object() else {
        return Err(expected(value, "an object with role and content"));
    };
    if let (Some(from), Some(said)) = (fields.get("from").and_then(Value::as_str), fields.get("value")) {
        let role = match from.to_lowercase().as_str() {
            "human" | "user" => "user",
            "gpt" | "chatgpt" | "model" | "bot" | "assistant" | "bing" | "bard" => "assistant",
            "tool" | "function_response" | "observation" => "tool",
            "system" => "system",
            _ => {
                return Err(Error::data(format!("unknown speaker {from:?}"))
                    .at("from")
                    .fix("write \"human\", \"gpt\" or \"system\""));
            }
        };
        let said = text_of(said).map_err(|e| e.at("value"))?;
        let mut message = Map::from_iter([("role".into(), role.into()), ("content".into(), said.into())]);
        message.extend(trained_or_not(fields)?);
        return Ok(Value::Object(message));
    }
    let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
    if !fields.get("role").is_some_and(Value::is_string) {
        return Err(Error::data(format!("has no role; its fields are {}", crate::data::list(&keys)))
            .fix("write messages as {\"role\": \"user\", \"content\": \"...\"}"));
    }
    spelt(fields["role"].as_str().unwrap_or_default())?;
    trained_or_not(fields)?;
    let mut fields = fields.clone();
    let content = fields.get("content").cloned().unwrap_or_default();
    fields.retain(|_, v| !v.is_null());
    fields.values_mut().for_each(without_nulls);
    match content {
        Value::String(_) => {}
        Value::Array(_) => {
            fields.insert("content".into(), text_of(&content)?.into());
        }
        Value::Null if fields.contains_key("tool_calls") => {
            fields.insert("content".into(), Value::Null);
        }
        other => return Err(expected(&other, "text").at("content")),
    }
    Ok(Value::Object(fields))
}

/// The fields that say whether a message is trained: `weight` of OpenAI, `train` of axolotl, `loss` of ms-swift. A value that is
/// not understood is refused: passed over, it would train what is not to be trained.
fn trained_or_not(fields: &Map<String, Value>) -> Result<Map<String, Value>> {
    let numbers = [json!(0), json!(1), json!(0.0), json!(1.0)];
    let flags = [json!(true), json!(false)];
    let mut found = Map::new();
    for (name, known, words) in [
        ("weight", &numbers[..], "0 or 1"),
        ("train", &flags[..], "true or false"),
        ("loss", &flags[..], "true or false"),
    ] {
        let Some(value) = fields.get(name).filter(|v| !v.is_null()) else { continue };
        if !known.contains(value) {
            return Err(Error::data(format!("got {value}, expected {words}"))
                .at(name)
                .fix("a message is trained (1, true) or not (0, false)"));
        }
        found.insert(name.into(), value.clone());
    }
    Ok(found)
}

/// Roles that templates know.
const ROLES: [&str; 8] =
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "observation"];
/// What other formats call them.
const SPEAKERS: [(&str, &str); 7] = [
    ("human", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bot", "assistant"),
    ("model", "assistant"),
    ("ai", "assistant"),
    ("agent", "assistant"),
];

/// Whether a message has a role that no template is known to treat apart: its turn is never trained.
pub fn is_strange(message: &Value) -> bool {
    message.get("role").and_then(Value::as_str).is_some_and(|role| !ROLES.contains(&role))
}

/// Refuses a role that is nearly one of those that templates know, or another format's word for it: its turn would be
/// neither trained nor shown rightly.
fn spelt(role: &str) -> Result<()> {
    let lower = role.to_lowercase();
    let other = SPEAKERS.iter().find(|(word, _)| *word == lower).map(|(_, role)| *role);
    match other.or_else(|| nearest(&lower, ROLES)) {
        Some(near) if !ROLES.contains(&role) => Err(Error::data(format!("unknown role {role:?}"))
            .at("role")
            .fix(format!("did you mean {near:?}?"))),
        _ => Ok(()),
    }
}

pub fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

pub fn is_assistant(message: Option<&Value>) -> bool {
    message.and_then(|m| m.get("role")).and_then(Value::as_str) == Some("assistant")
}

pub fn ends_wrong(messages: &[Value], whose: &str) -> Error {
    let role = messages.last().and_then(|m| m.get("role")).and_then(Value::as_str).unwrap_or("nobody");
    Error::data(format!("the last message is from {role:?}, expected {whose}")).fix(if role == "assistant" {
        "take the answer out of the prompt"
    } else {
        "add the answer, or drop the row"
    })
}

/// Two texts with a common beginning, which is their prompt.
pub fn split_texts(chosen: &str, rejected: &str) -> RowFields {
    let same = chosen.chars().zip(rejected.chars()).take_while(|(a, b)| a == b);
    let mut cut: usize = same.map(|(c, _)| c.len_utf8()).sum();
    // A space belongs to the word after it.
    if chosen[..cut].ends_with(' ') {
        cut -= 1;
    }
    RowFields::Pair {
        prompt: Content::Text(chosen[..cut].to_owned()),
        chosen: Content::Text(chosen[cut..].to_owned()),
        rejected: Content::Text(rejected[cut..].to_owned()),
    }
}

/// Two conversations with the same beginning, which is their prompt.
pub fn split_messages(chosen: Vec<Value>, rejected: Vec<Value>) -> Result<RowFields> {
    let cut = chosen.iter().zip(&rejected).take_while(|(a, b)| a == b).count();
    if cut == 0 || cut >= chosen.len().min(rejected.len()) {
        let what = if cut == 0 { "have no message in common" } else { "do not differ in an answer" };
        return Err(Error::data(format!("chosen and rejected {what}, so there is no prompt"))
            .at(column("chosen"))
            .fix("give the prompt in a column of its own"));
    }
    Ok(RowFields::Pair {
        prompt: Content::Messages(chosen[..cut].to_vec()),
        chosen: Content::Messages(chosen[cut..].to_vec()),
        rejected: Content::Messages(rejected[cut..].to_vec()),
    })
}
