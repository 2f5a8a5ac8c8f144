//! Content in parts, and content that a template drops.
//!
//! Message content is a string or a list of parts. Most templates read strings, some read parts, and given the other form they
//! silently render garbage: a list as its Python repr, or a string as nothing. So content is passed in the form that the
//! template has been found to read.

use serde_json::{Value, json};

use super::{ChatTemplate, Input, Kwargs};
use crate::{Error, Result};

/// The text of a message's content: a string, or the concatenation of its text parts. Parts other than text are refused.
pub fn text_of(content: &Value) -> Result<String> {
    let Value::Array(parts) = content else {
        return content.as_str().map(str::to_owned).ok_or_else(|| {
            Error::data(format!("content is {content}, expected text or a list of parts"))
                .fix("write {\"role\": ..., \"content\": \"...\"}")
        });
    };
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        let kind = part.get("type").and_then(Value::as_str);
        match (part, part.get("text").and_then(Value::as_str)) {
            (Value::String(words), _) => text.push_str(words),
            (_, Some(words)) if kind.is_none_or(|k| matches!(k, "text" | "input_text" | "output_text")) => {
                text.push_str(words)
            }
            _ => {
                let keys: Vec<&str> =
                    part.as_object().into_iter().flatten().map(|(k, _)| k.as_str()).collect();
                let what = kind
                    .map_or(format!("has the fields {}", keys.join(", ")), |k| format!("is of type {k:?}"));
                return Err(Error::data(format!("part {} of the content {what}, expected text", i + 1)).fix(
                    "Ferrl trains models of text alone: leave out rows with images, audio and the like",
                ));
            }
        }
    }
    Ok(text)
}

const PROBE: &str = "ferrl";

/// Whether a template shows content only as a list of parts.
pub(super) fn wanted(template: &ChatTemplate) -> bool {
    let (messages, kwargs) = ([json!({ "role": "user", "content": PROBE })], Kwargs::new());
    let input = Input { messages: &messages, tools: None, add_generation_prompt: false, kwargs: &kwargs };
    let shows = |parts| template.render_as(input, None, parts).is_ok_and(|text| text.contains(PROBE));
    !shows(false) && shows(true)
}

/// See [`ChatTemplate::shows_all`]. Dropped content is found by rendering without it: the output does not change.
pub(super) fn refuse_dropped(template: &ChatTemplate, input: Input<'_>) -> Result<()> {
    let calls = |m: &Value| {
        let several = m.get("tool_calls").is_some_and(|c| c.as_array().is_some_and(|c| !c.is_empty()));
        several || m.get("function_call").is_some_and(Value::is_object)
    };
    let usual = |m: &Value| matches!(m.get("role").and_then(Value::as_str), Some("user" | "assistant"));
    // Templates drop the reasoning of earlier turns on purpose.
    let reasons = |m: &Value| {
        ["reasoning_content", "reasoning", "thinking"]
            .into_iter()
            .find(|key| m.get(*key).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty()))
    };
    let last = input.messages.last().and_then(reasons);
    if input.tools.is_none() && last.is_none() && input.messages.iter().all(|m| usual(m) && !calls(m)) {
        return Ok(());
    }
    let whole = template.render_input(input, None)?;
    let same = |messages: &[Value], tools: Option<&Value>| {
        template.render_input(Input { messages, tools, ..input }, None).is_ok_and(|text| text == whole)
    };
    let dropped = |what: String, index: usize| {
        let role = input.messages[index].get("role").and_then(Value::as_str).unwrap_or("?");
        Err(Error::data(format!("the chat template leaves out {what}"))
            .at(format!("message {} ({role})", index + 1))
            .fix("use a model whose chat template shows it, or leave the row out"))
    };
    if let (Some(key), Some(i)) = (last, input.messages.len().checked_sub(1)) {
        let mut changed = input.messages.to_vec();
        changed[i].as_object_mut().map(|m| m.remove(key));
        if same(&changed, input.tools) {
            return dropped(format!("its {key}"), i);
        }
    }
    for (i, message) in input.messages.iter().enumerate() {
        let mut changed = input.messages.to_vec();
        if calls(message) {
            changed[i].as_object_mut().map(|m| [m.remove("tool_calls"), m.remove("function_call")]);
            if same(&changed, input.tools) {
                let key = if message.get("tool_calls").is_some() { "tool_calls" } else { "function_call" };
                return dropped(format!("its {key}"), i);
            }
        } else if !usual(message) {
            let text = message.get("content").map(text_of).transpose()?.unwrap_or_default();
            if text.trim().is_empty() || whole.contains(text.trim()) {
                continue;
            }
            changed[i]["content"] = format!("{text} {PROBE}").into();
            if same(&changed, input.tools) {
                return dropped("what it says".into(), i);
            }
        }
    }
    if input.tools.is_some() && same(input.messages, None) {
        return Err(Error::data("the chat template leaves out the tools")
            .at("tools")
            .fix("use a model whose chat template shows tools, or leave the column out"));
    }
    Ok(())
}
