//! The texts of a row as a model reads them, to train a tokenizer from data.

use ferrl_engine::Result;
use serde_json::Value;

use super::Row;
use super::prompt::{PromptSettings, Prompts};
use super::schema::{self, ColumnNames, Content, RowFields, RowKind};

/// Finds the texts of rows.
pub struct Texts {
    prompts: Prompts,
    columns: ColumnNames,
}

impl Texts {
    /// As the data part of a recipe says.
    pub fn new(settings: &PromptSettings) -> Result<Self> {
        Ok(Texts { prompts: Prompts::new(settings)?, columns: settings.column_map()? })
    }

    /// The names of a row's columns, new ones included.
    pub fn columns<'a>(&'a self, row: &'a Row) -> Vec<&'a str> {
        self.columns.0.iter().map(|(new, _)| new.as_str()).chain(row.keys().map(String::as_str)).collect()
    }

    /// Prompt and responses, each with what stands before it; and whether they are messages.
    pub fn of(&self, row: &Row, kind: RowKind) -> Result<(Vec<String>, bool)> {
        let row = &self.columns.apply(row)?;
        let (prompt, answers) = match schema::parse(row, kind, self.prompts.render(row)?)?.0 {
            RowFields::Text(text) => return Ok((vec![text], false)),
            RowFields::Conversation(turns) => {
                return Ok((said(&Content::Messages(self.prompts.conversation(turns)?)), true));
            }
            RowFields::Completion { prompt, completion }
            | RowFields::Labelled { prompt, completion, .. }
            | RowFields::Target { prompt, completion, .. } => (prompt, vec![completion]),
            RowFields::Pair { prompt, chosen, rejected } => (prompt, vec![chosen, rejected]),
            RowFields::StepPair { prompt, before, chosen, rejected } => {
                (prompt, [before, chosen, rejected].map(Content::Text).into())
            }
            RowFields::Prompt(prompt) => (prompt, Vec::new()),
            RowFields::Group { prompt, completions, .. } => (prompt, completions),
            RowFields::Steps { prompt, steps, .. } => {
                (prompt, steps.into_iter().map(Content::Text).collect())
            }
        };
        let messages = answers.iter().any(|a| matches!(a, Content::Messages(_)));
        let prompt = self.prompts.build(prompt, messages)?;
        let texts = said(&prompt).into_iter().chain(answers.iter().flat_map(said)).collect();
        Ok((texts, matches!(prompt, Content::Messages(_))))
    }
}

fn said(content: &Content) -> Vec<String> {
    match content {
        Content::Text(text) => vec![text.clone()],
        Content::Messages(messages) => {
            let text = |m: &Value| m.get("content").and_then(Value::as_str).map(str::to_owned);
            messages.iter().filter_map(text).collect()
        }
    }
}

/// Every text inside a value; numbers as they are written.
pub fn strings(value: Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(list) => list.into_iter().flat_map(strings).collect(),
        Value::Object(map) => map.into_iter().flat_map(|(_, v)| strings(v)).collect(),
        other => vec![other.to_string()],
    }
}
