//! Tool calls in the text of an action, in the formats that models are trained on:
//!
//! - Search-R1: `<search>the query</search>`; every tool has a tag of its name, whose text is the first required argument;
//! - Hermes (Qwen and others): `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`, one or several;
//! - Llama 3: `{"name": "search", "parameters": {"query": "..."}}` as the whole action, after `<|python_tag|>` or without;
//!   `<|python_tag|>` before anything else is code for the tool `python`.
//!
//! A malformed call is answered with an error message for the policy.

use super::{Tool, main_argument};
use ferrl_engine::nearest;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Format of a call, and of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// Search-R1's tags.
    Tag,
    /// `<tool_call>` with JSON.
    Hermes,
    /// Llama 3's JSON.
    Llama,
}

/// A call that can be run.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Index of the tool.
    pub tool: usize,
    pub arguments: Map<String, Value>,
}

/// A call as it stands in an action.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenCall {
    pub format: CallFormat,
    /// Where it begins, in bytes.
    pub at: usize,
    /// The call, or the error message for the policy.
    pub call: Result<ToolCall, String>,
}

/// The calls of an action, in order.
pub fn parse(action: &str, tools: &[Arc<dyn Tool>]) -> Vec<WrittenCall> {
    let mut found = hermes(action, tools);
    // Tags inside a Hermes call belong to its JSON.
    let inside: Vec<(usize, usize)> = found.iter().map(|(written, end)| (written.at, *end)).collect();
    for (number, tool) in tools.iter().enumerate() {
        let tags = tags(action, number, &**tool);
        found.extend(
            tags.into_iter().filter(|(t, _)| !inside.iter().any(|&(from, to)| (from..to).contains(&t.at))),
        );
    }
    if found.is_empty() {
        return llama(action, tools);
    }
    found.sort_by_key(|(written, _)| written.at);
    found.into_iter().map(|(written, _)| written).collect()
}

/// `<name>text</name>` of one tool. The end of the action closes the last one: a stop string may have removed the tag.
fn tags(action: &str, number: usize, tool: &dyn Tool) -> Vec<(WrittenCall, usize)> {
    let (open, close) = (format!("<{}>", tool.name()), format!("</{}>", tool.name()));
    let (mut calls, mut from) = (Vec::new(), 0);
    while let Some(at) = action[from..].find(&open).map(|at| from + at) {
        let start = at + open.len();
        let end = action[start..].find(&close).map_or(action.len(), |end| start + end);
        let text = action[start..end].trim();
        let call = match text.is_empty() {
            true => Err(format!("error: {open} is empty; write {open}{}{close}", main_argument(tool))),
            false => {
                let argument = Value::String(text.into());
                Ok(ToolCall { tool: number, arguments: Map::from_iter([(main_argument(tool), argument)]) })
            }
        };
        from = (end + close.len()).min(action.len());
        calls.push((WrittenCall { format: CallFormat::Tag, at, call }, from));
    }
    calls
}

const HERMES: (&str, &str) = ("<tool_call>", "</tool_call>");

/// `<tool_call>` with one JSON object each, and where each ends.
fn hermes(action: &str, tools: &[Arc<dyn Tool>]) -> Vec<(WrittenCall, usize)> {
    let (mut calls, mut from) = (Vec::new(), 0);
    while let Some(at) = action[from..].find(HERMES.0).map(|at| from + at) {
        let start = at + HERMES.0.len();
        // The end is that of the JSON, whose texts may contain the closing tag.
        let mut values = serde_json::Deserializer::from_str(&action[start..]).into_iter::<Value>();
        let (value, end) = match values.next() {
            Some(Ok(value)) => (Ok(value), start + values.byte_offset()),
            Some(Err(error)) => (Err(error.to_string()), start),
            None => (Err("it is empty".to_string()), start),
        };
        let close = action[end..].find(HERMES.1).map_or(action.len(), |to| end + to + HERMES.1.len());
        let call = match value {
            Ok(value) => call(&value, tools),
            Err(why) => Err(format!("error: the tool call is no JSON: {why}; {}", example(tools))),
        };
        calls.push((WrittenCall { format: CallFormat::Hermes, at, call }, close));
        from = close;
    }
    calls
}

const PYTHON_TAG: &str = "<|python_tag|>";

/// Llama 3's calls: JSON objects as the whole action, separated by `;`.
fn llama(action: &str, tools: &[Arc<dyn Tool>]) -> Vec<WrittenCall> {
    let (at, text) = match action.find(PYTHON_TAG) {
        Some(at) => (at, &action[at + PYTHON_TAG.len()..]),
        None => (0, action),
    };
    let (tagged, text) = (text.len() < action.len(), ended(text));
    let written = |call| WrittenCall { format: CallFormat::Llama, at, call };
    if text.starts_with('{') {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        let mut calls = Vec::new();
        let mut rest = text;
        loop {
            match values.next() {
                // An answer may be JSON too: only an object with a name, without text around it, is a call.
                Some(Ok(Value::Object(object)))
                    if tagged || object.get("name").is_some_and(Value::is_string) =>
                {
                    calls.push(written(call(&Value::Object(object), tools)));
                    rest = rest[values.byte_offset()..].trim_start();
                    let Some(next) = rest.strip_prefix(';') else { break };
                    rest = next.trim_start();
                    values = serde_json::Deserializer::from_str(rest).into_iter();
                }
                Some(Err(why)) if tagged || begins_call(text) => {
                    let why = format!("error: the tool call is no JSON: {why}; {}", example(tools));
                    calls.push(written(Err(why)));
                    break;
                }
                _ => break,
            }
        }
        return if tagged || rest.is_empty() || calls.iter().any(|c| c.call.is_err()) {
            calls
        } else {
            Vec::new()
        };
    }
    if !tagged {
        return Vec::new();
    }
    vec![written(code(text, tools))]
}

/// A text without stop tokens at its end.
fn ended(text: &str) -> &str {
    ["<|eom_id|>", "<|eot_id|>"].iter().fold(text.trim(), |text, mark| text.trim_end_matches(mark).trim_end())
}

/// Whether a text that is not JSON looks like a call.
fn begins_call(text: &str) -> bool {
    let squeezed: String = text.chars().filter(|c| !c.is_whitespace()).take(8).collect();
    squeezed == "{\"name\":"
}

/// Text after `<|python_tag|>` that is not JSON: `name.call(query="...")`, or code.
fn code(text: &str, tools: &[Arc<dyn Tool>]) -> Result<ToolCall, String> {
    if let Some((name, rest)) = text.split_once(".call(")
        && let Some(tool) = tools.iter().position(|tool| tool.name() == name.trim())
    {
        let inner = rest.trim_end().strip_suffix(')').unwrap_or(rest);
        let unread = || format!("error: the call cannot be read; {}", example(tools));
        let (argument, value) = inner.split_once('=').ok_or_else(unread)?;
        let value = serde_json::from_str(value.trim()).map_err(|_| unread())?;
        return Ok(ToolCall { tool, arguments: Map::from_iter([(argument.trim().to_string(), value)]) });
    }
    match tools.iter().position(|tool| tool.name() == "python") {
        Some(tool) => {
            let arguments = Map::from_iter([(main_argument(&*tools[tool]), Value::String(text.into()))]);
            Ok(ToolCall { tool, arguments })
        }
        None => Err(format!("error: there is no Python interpreter; {}", example(tools))),
    }
}

/// A call as JSON: `name` with `arguments` or `parameters`.
fn call(value: &Value, tools: &[Arc<dyn Tool>]) -> Result<ToolCall, String> {
    let wrong = |what: &str| format!("error: {what}; {}", example(tools));
    let object = value.as_object().ok_or_else(|| wrong("a tool call is a JSON object"))?;
    // OpenAI's form has both under `function`.
    let object = object.get("function").and_then(Value::as_object).unwrap_or(object);
    let name =
        object.get("name").and_then(Value::as_str).ok_or_else(|| wrong("the tool call has no name"))?;
    let Some(tool) = tools.iter().position(|tool| tool.name() == name) else {
        let names = tools.iter().map(|tool| tool.name());
        let hint =
            nearest(name, names.clone()).map_or(String::new(), |near| format!(", did you mean {near}?"));
        let all = names.collect::<Vec<_>>().join(", ");
        return Err(format!("error: there is no tool {name:?}{hint} The tools are: {all}"));
    };
    let arguments = match object.get("arguments").or_else(|| object.get("parameters")) {
        Some(Value::Object(arguments)) => arguments.clone(),
        // Some models write the arguments as JSON in a text.
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(Value::Object(arguments)) => arguments,
            _ => return Err(wrong("the arguments are no JSON object")),
        },
        None => return Err(wrong("the tool call has no arguments")),
        Some(_) => return Err(wrong("the arguments are no JSON object")),
    };
    Ok(ToolCall { tool, arguments })
}

/// An example of a valid call.
fn example(tools: &[Arc<dyn Tool>]) -> String {
    let Some(tool) = tools.first() else { return "there are no tools".into() };
    format!("expected {{\"name\": {:?}, \"arguments\": {{{:?}: ...}}}}", tool.name(), main_argument(&**tool))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tool::{Document, SearchIndex, search};
    use serde_json::json;

    struct Python;
    impl Tool for Python {
        fn name(&self) -> &str {
            "python"
        }
        fn about(&self) -> &str {
            "runs code"
        }
        fn parameters(&self) -> Value {
            super::super::one_text("code", "the program")
        }
        fn call(&self, _: &Map<String, Value>) -> ferrl_engine::Result<String> {
            Ok(String::new())
        }
    }

    fn tools() -> Vec<Arc<dyn Tool>> {
        let index = SearchIndex::new(vec![Document { title: String::new(), text: "a".into() }]);
        let search = search::SearchTool::over(Arc::new(index), 1);
        vec![Arc::new(search), super::super::build("calculator", &Map::new()).unwrap(), Arc::new(Python)]
    }

    fn calls(action: &str) -> Vec<(CallFormat, usize, Value)> {
        let parsed = parse(action, &tools()).into_iter();
        parsed.map(|w| w.call.map(|c| (w.format, c.tool, json!(c.arguments))).expect("a call")).collect()
    }

    fn wrong(action: &str) -> String {
        let mut parsed = parse(action, &tools());
        assert_eq!(parsed.len(), 1, "{action}: {parsed:?}");
        parsed.remove(0).call.expect_err("no call")
    }

    #[test]
    fn search_r1_tags() {
        let action = "<think>I lack who wrote it.</think>\n<search> author of Emma </search>";
        assert_eq!(calls(action), [(CallFormat::Tag, 0, json!({ "query": "author of Emma" }))]);
        // A stop string may have cut off the closing tag.
        assert_eq!(calls("<search>author"), [(CallFormat::Tag, 0, json!({ "query": "author" }))]);
        let two = "<calculator>1+1</calculator> and <search>b</search>";
        assert_eq!(
            calls(two),
            [
                (CallFormat::Tag, 1, json!({ "expression": "1+1" })),
                (CallFormat::Tag, 0, json!({ "query": "b" }))
            ]
        );
        assert!(wrong("<search> </search>").contains("<search>query</search>"));
        assert!(calls("I would search. </search> <answer>4</answer>").is_empty());
    }

    #[test]
    fn hermes_calls_one_and_several() {
        let action = "<tool_call>\n{\"name\": \"search\", \"arguments\": {\"query\": \"a </tool_call> b\"}}\n</tool_call>\n\
                      <tool_call>{\"name\": \"calculator\", \"arguments\": \"{\\\"expression\\\": \\\"2*3\\\"}\"}</tool_call>";
        assert_eq!(
            calls(action),
            [
                (CallFormat::Hermes, 0, json!({ "query": "a </tool_call> b" })),
                (CallFormat::Hermes, 1, json!({ "expression": "2*3" }))
            ]
        );
        let nested = r#"<tool_call>{"name": "search", "arguments": {"query": "<calculator>1</calculator>"}}</tool_call>"#;
        assert_eq!(calls(nested).len(), 1);
        let wrapped =
            r#"<tool_call>{"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}"#;
        assert_eq!(calls(wrapped), [(CallFormat::Hermes, 0, json!({ "query": "x" }))]);
    }

    #[test]
    fn what_is_wrong_with_a_hermes_call_is_said() {
        for (action, part) in [
            ("<tool_call>{\"name\": \"search\", \"arguments\": {\"query\": }</tool_call>", "no JSON"),
            ("<tool_call></tool_call>", "no JSON"),
            ("<tool_call>", "empty"),
            ("<tool_call>[1]</tool_call>", "JSON object"),
            ("<tool_call>{\"arguments\": {}}</tool_call>", "no name"),
            ("<tool_call>{\"name\": \"serch\", \"arguments\": {}}</tool_call>", "did you mean search?"),
            ("<tool_call>{\"name\": \"search\"}</tool_call>", "no arguments"),
            ("<tool_call>{\"name\": \"search\", \"arguments\": 3}</tool_call>", "no JSON object"),
        ] {
            let why = wrong(action);
            assert!(why.starts_with("error: ") && why.contains(part), "{action}: {why}");
        }
        let one = parse(
            "<tool_call>{</tool_call><tool_call>{\"name\":\"search\",\"arguments\":{}}</tool_call>",
            &tools(),
        );
        assert!(one.len() == 2 && one[0].call.is_err() && one[1].call.is_ok());
    }

    #[test]
    fn llama_json_with_the_tag_and_without() {
        let json_call = "{\"name\": \"search\", \"parameters\": {\"query\": \"x\"}}";
        let want = [(CallFormat::Llama, 0, json!({ "query": "x" }))];
        assert_eq!(calls(json_call), want);
        assert_eq!(calls(&format!("<|python_tag|>{json_call}<|eom_id|>")), want);
        assert_eq!(calls(&format!("{json_call}; {json_call}")).len(), 2);
        assert_eq!(calls("<|python_tag|>search.call(query=\"x\")"), want);
        assert_eq!(
            calls("<|python_tag|>print(1 + 1)<|eom_id|>"),
            [(CallFormat::Llama, 2, json!({ "code": "print(1 + 1)" }))]
        );
        assert!(wrong("{\"name\": \"search\", \"parameters\": {").contains("no JSON"));
        assert!(wrong("<|python_tag|>{\"x\": 1}").contains("no name"));
        // JSON that is an answer, and a call that other text follows, are no calls.
        for answer in
            ["{\"answer\": 3}", "{3}", "7", "{\"name\": \"search\", \"parameters\": {}} is how one calls"]
        {
            assert!(parse(answer, &tools()).is_empty(), "{answer}");
        }
    }

    #[test]
    fn random_texts_never_panic() {
        let parts = [
            "<search>", "</search>", "<tool_call>", "</tool_call>", "{", "}", "\"name\"", ":", "\"search\"",
            "é", ";", "<|python_tag|>", "\"arguments\"", ",", " ", "<answer>", ".call(", "=",
        ];
        let (tools, mut draw) = (tools(), crate::verify::countdown::TaskDraw::new("call fuzz", 1, 0));
        for _ in 0..20_000 {
            let text: String = (0..draw.below(14)).map(|_| parts[draw.below(parts.len())]).collect();
            parse(&text, &tools);
        }
    }
}
