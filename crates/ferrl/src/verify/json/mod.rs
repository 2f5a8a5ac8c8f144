//! JSON output: checks that a completion is JSON and matches a JSON Schema.
//!
//! The schema is an option of the recipe, or a column of the row. `schema` documents the supported part of the standard; unknown
//! keywords are an error instead of being ignored.

mod schema;

use super::take::TAG;
use super::{Entry, Sample, Score, Verifier, group_end, last_answer};
use ferrl_engine::{Error, Result};
use schema::Schema;
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub const ENTRY: Entry = Entry {
    name: "json",
    about: "1 if the completion is JSON that matches a JSON Schema, otherwise 0",
    schema: || schema_for!(Options),
    build: |given| {
        let options: Options = given.read()?;
        let schema = options.schema.clone().map(|s| Schema::read(&s.into()));
        let schema = schema.transpose().map_err(|e| e.at("schema").at(given.verifier))?;
        Ok(Box::new(Json { schema, options }))
    },
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum TakeJson {
    Auto,
    Whole,
    Answer,
}

with_defaults! {
struct Options {
    /// The JSON Schema; without it and without the column any JSON is right.
    schema: Option<Map<String, Value>> = None,
    /// Column with a schema for the row, an object or JSON text.
    schema_column: String = "schema".into(),
    /// Where the JSON is: auto (the whole completion, else the last ```json block, else the last `<answer>` tag, else the last object
    /// or list), whole, answer.
    take: TakeJson = TakeJson::Auto,
    /// Reward of valid JSON that does not match the schema. [0, inf)
    json_reward: f64 = 0.0,
}
}

pub struct Json {
    schema: Option<Schema>,
    options: Options,
}

impl Json {
    /// The part of the completion that should be JSON.
    fn taken<'a>(&self, completion: &'a str) -> Option<&'a str> {
        let is_json = |text: &&str| serde_json::from_str::<Value>(text).is_ok();
        let whole = completion.trim();
        match self.options.take {
            TakeJson::Whole => Some(whole),
            TakeJson::Answer => last_answer(completion).map(unfenced),
            TakeJson::Auto => Some(whole)
                .filter(is_json)
                .or_else(|| last_fence(completion))
                .or_else(|| last_answer(completion).map(unfenced))
                .or_else(|| last_braces(completion).filter(is_json))
                .or(Some(whole)),
        }
    }

    /// The schema of a row; `None` if any JSON is right.
    fn schema(&self, sample: &Sample<'_>) -> Result<Option<std::borrow::Cow<'_, Schema>>> {
        use std::borrow::Cow::{Borrowed, Owned};
        let Some(value) = sample.column(&self.options.schema_column).filter(|v| !v.is_null()) else {
            return Ok(self.schema.as_ref().map(Borrowed));
        };
        let wrong = |e: Error| sample.error(e.at(&self.options.schema_column));
        let text = match value {
            Value::String(text) => serde_json::from_str(text).map_err(|e| {
                wrong(Error::data(format!("is not JSON: {e}")).fix("a JSON Schema, an object or its text"))
            })?,
            other => other.clone(),
        };
        Schema::read(&text).map(|schema| Some(Owned(schema))).map_err(wrong)
    }
}

/// The last block of a text that is fenced as JSON or without a language.
fn last_fence(text: &str) -> Option<&str> {
    let (before, _) = text.rsplit_once("```")?;
    let (_, block) = before.rsplit_once("```")?;
    let block = block.strip_prefix("json").or_else(|| block.strip_prefix("JSON")).unwrap_or(block);
    Some(block.trim()).filter(|block| block.starts_with(['{', '[']))
}

/// A text without the fence around it.
fn unfenced(text: &str) -> &str {
    last_fence(text).unwrap_or(text.trim())
}

/// The last object or list of a text that is not part of another.
fn last_braces(text: &str) -> Option<&str> {
    let end = text.rfind(['}', ']'])?;
    let (open, close) = if text.as_bytes()[end] == b'}' { (b'{', b'}') } else { (b'[', b']') };
    // Searches backwards for the opening bracket; the parser decides about brackets in strings.
    let mut depth = 0usize;
    for at in (0..=end).rev() {
        match text.as_bytes()[at] {
            byte if byte == close => depth += 1,
            byte if byte == open => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[at..=end]);
        }
    }
    // A bracket in a string misled the search: start from the first bracket.
    let start = text.find('{')?;
    group_end(text, start).map(|end| &text[start..=end])
}

impl Verifier for Json {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.taken(completion).map(String::from)
    }
    fn reads(&self) -> &'static [&'static str] {
        match self.options.take {
            TakeJson::Answer => TAG,
            _ => &[],
        }
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let schema = self.schema(sample)?;
        let parsed = match self.taken(sample.completion) {
            Some(text) => serde_json::from_str::<Value>(text).map_err(|e| format!("is not JSON: {e}")),
            None => Err("no answer tag was found in it".to_string()),
        };
        let is_json = parsed.is_ok();
        let why = match (&parsed, &schema) {
            (Err(why), _) => Some(why.clone()),
            (Ok(value), Some(schema)) => schema.problem(value),
            (Ok(_), None) => None,
        };
        let part = |right: bool| f64::from(u8::from(right));
        let right = part(why.is_none());
        let reward = if is_json && why.is_some() { self.options.json_reward } else { right };
        let components = vec![("json".into(), part(is_json)), ("schema".into(), right)];
        Ok(Score { reward, components, score: Some(right), found: Some(is_json), why, ..Default::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::build;
    use serde_json::json;

    fn score(options: Value, row: Value, completion: &str) -> Result<Score> {
        let verifier = build("json", options.as_object().expect("an object")).expect("a verifier");
        let columns = row.as_object().expect("an object").into();
        verifier.score(&Sample { completion, columns, ..Default::default() })
    }

    #[test]
    fn json_is_found_where_it_stands() {
        for (completion, want) in [
            ("{\"a\": 1}", 1.0),
            (" [1, 2] \n", 1.0),
            ("Here it is:\n```json\n{\"a\": 1}\n```\nDone.", 1.0),
            ("```\n{\"a\": 1}\n```", 1.0),
            ("<answer>{\"a\": 1}</answer>", 1.0),
            ("The result is {\"a\": {\"b\": [1]}} as asked.", 1.0),
            ("{\"a\": 1", 0.0),
            ("{'a': 1}", 0.0),
            ("{\"a\": 1,}", 0.0),
            ("nothing", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(
                score(json!({}), json!({}), completion).expect("a score").reward,
                want,
                "{completion}"
            );
        }
        assert_eq!(score(json!({"take": "whole"}), json!({}), "x {\"a\": 1}").expect("a score").reward, 0.0);
    }

    #[test]
    fn the_schema_is_an_option_or_a_column() {
        let schema = json!({"type": "object", "required": ["a"]});
        let options = json!({ "schema": schema, "json_reward": 0.25 });
        assert_eq!(score(options.clone(), json!({}), "{\"a\": 1}").expect("a score").reward, 1.0);
        let wrong = score(options, json!({}), "{\"b\": 1}").expect("a score");
        assert_eq!((wrong.reward, wrong.score), (0.25, Some(0.0)));
        assert!(wrong.why.as_ref().is_some_and(|why| why.contains("\"a\"")), "{wrong:?}");
        for column in [schema.clone(), json!(schema.to_string())] {
            let row = json!({ "schema": column });
            assert_eq!(score(json!({}), row.clone(), "{\"a\": 1}").expect("a score").reward, 1.0);
            assert_eq!(score(json!({}), row, "{}").expect("a score").reward, 0.0);
        }
        for bad in [json!({"schema": {"type": "txt"}}), json!({"schema": "{"}), json!({"schema": 3})] {
            assert!(score(json!({}), bad.clone(), "{}").is_err(), "{bad}");
        }
    }
}
