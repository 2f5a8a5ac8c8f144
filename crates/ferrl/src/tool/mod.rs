//! Tools that a policy may call. Each is a file of this folder and a line in [`TOOLS`].
//!
//! A policy writes a call in one of the formats of [`call`]; the environment runs it, and its result is the next observation.
//! Mistakes of the policy, such as a missing argument, are answered with a text, so that it can try again; an error is a problem of
//! the recipe or the machine and ends the run.

mod calculator;
pub mod call;
pub(crate) mod number;
mod python;
mod search;

pub(crate) use calculator::calculate;
pub(crate) use search::SearchTool;
pub use search::{Document, SearchIndex};

use crate::fixes::unknown;
use ferrl_engine::Result;
use schemars::{Schema, schema_for};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Prefix of the result of a failed call.
pub const ERROR: &str = "error";

pub trait Tool: Send + Sync {
    /// The name in calls.
    fn name(&self) -> &str;
    /// One-line description for the policy.
    fn about(&self) -> &str;
    /// The JSON Schema of its arguments: an object whose first required property is the argument of a plain-text call.
    fn parameters(&self) -> Value;
    /// The result for the policy; deterministic.
    fn call(&self, arguments: &Map<String, Value>) -> Result<String>;
    /// Whether it waits for another process or machine: its episodes then run on separate threads.
    fn waits(&self) -> bool {
        false
    }
}

/// An entry of the registry.
pub struct Entry {
    /// The name in recipes and calls.
    pub name: &'static str,
    pub about: &'static str,
    pub schema: fn() -> Schema,
    /// Builds it from its settings; unknown settings are an error.
    pub build: BuildTool,
}

pub type BuildTool = fn(&Map<String, Value>) -> Result<Arc<dyn Tool>>;

pub const TOOLS: &[&Entry] = &[&calculator::ENTRY, &search::ENTRY, &python::ENTRY];

pub fn find(name: &str) -> Result<&'static Entry> {
    TOOLS.iter().copied().find(|tool| tool.name == name).ok_or_else(|| {
        let fix = |near: &str| format!("env.tools = [{near:?}]");
        unknown("tool", name, TOOLS.iter().map(|tool| tool.name), fix).at("env.tools")
    })
}

pub fn build(name: &str, options: &Map<String, Value>) -> Result<Arc<dyn Tool>> {
    (find(name)?.build)(options)
}

/// The definition of a tool for chat templates.
pub fn definition(tool: &dyn Tool) -> Value {
    json!({
        "type": "function",
        "function": { "name": tool.name(), "description": tool.about(), "parameters": tool.parameters() },
    })
}

/// The argument of a plain-text call: the first required one.
pub(crate) fn main_argument(tool: &dyn Tool) -> String {
    let parameters = tool.parameters();
    let first = parameters["required"][0].as_str();
    first
        .or_else(|| parameters["properties"].as_object()?.keys().next().map(String::as_str))
        .unwrap_or("input")
        .into()
}

/// The schema of a single text argument.
pub(crate) fn one_text(name: &str, about: &str) -> Value {
    json!({
        "type": "object",
        "properties": { name: { "type": "string", "description": about } },
        "required": [name],
    })
}

/// A text argument; if it is missing or not text, the error message for the policy.
pub(crate) fn text_argument<'a>(
    arguments: &'a Map<String, Value>,
    name: &str,
) -> std::result::Result<&'a str, String> {
    match arguments.get(name) {
        Some(Value::String(text)) if !text.trim().is_empty() => Ok(text.trim()),
        Some(Value::String(_)) => Err(format!("error: argument {name:?} is empty")),
        Some(other) => Err(format!("error: argument {name:?} must be a text, got {other}")),
        None => Err(format!("error: argument {name:?} is missing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_tools_get_a_hint() {
        let error = build("calculater", &Map::new()).err().expect("no such tool").to_string();
        assert!(error.contains("env.tools = [\"calculator\"]"), "{error}");
    }

    #[test]
    fn every_tool_describes_itself_and_answers_bad_arguments_in_text() {
        for entry in TOOLS.iter().filter(|entry| entry.name != "search") {
            let tool = build(entry.name, &Map::new()).unwrap();
            assert_eq!(tool.name(), entry.name);
            let definition = definition(&*tool);
            assert_eq!(definition["function"]["parameters"]["type"], "object", "{}", entry.name);
            let main = main_argument(&*tool);
            for bad in [json!({}), json!({ &main: 3 }), json!({ &main: "" }), json!({ &main: null })] {
                let text = tool.call(bad.as_object().unwrap()).unwrap();
                assert!(text.starts_with("error"), "{}: {bad} gave {text}", entry.name);
            }
        }
    }
}
