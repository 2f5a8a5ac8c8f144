//! A row as it was published: its columns under any of the names they go by.

use crate::data::Row;
use ferrl_engine::{Error, Result};
use serde_json::Value;

pub(super) struct Published<'a> {
    pub suite: &'static str,
    pub row: &'a Row,
}

impl<'a> Published<'a> {
    /// The first of these columns that is present and not null.
    pub fn find(&self, names: &[&str]) -> Option<&'a Value> {
        names.iter().find_map(|name| self.row.get(*name).filter(|v| !v.is_null()))
    }

    /// The same; its absence is an error that names the columns there are.
    pub fn value(&self, names: &[&str]) -> Result<&'a Value> {
        self.find(names).ok_or_else(|| {
            let have: Vec<&str> = self.row.keys().map(String::as_str).collect();
            Error::data(format!(
                "a row of {} has no column {}: its columns are {}",
                self.suite,
                names.join(" or "),
                if have.is_empty() { "none".into() } else { have.join(", ") }
            ))
            .fix(format!("give the published file, or rename the column to {:?}", names[0]))
        })
    }

    /// A text, or a number as it is written.
    pub fn text(&self, names: &[&str]) -> Result<String> {
        match self.value(names)? {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(plain(number)),
            other => Err(self.wrong(names[0], other, "text")),
        }
    }

    /// A list of texts; one text is a list of one.
    pub fn texts(&self, names: &[&str]) -> Result<Vec<String>> {
        let value = self.value(names)?;
        let one = |v: &Value| match v {
            Value::String(text) => Ok(text.clone()),
            Value::Number(number) => Ok(plain(number)),
            other => Err(self.wrong(names[0], other, "a list of texts")),
        };
        match value {
            Value::Array(list) => list.iter().map(one).collect(),
            other => Ok(vec![one(other)?]),
        }
    }

    /// A value that is not what it has to be.
    pub fn wrong(&self, name: &str, got: &Value, expected: &str) -> Error {
        let mut shown = got.to_string();
        if let Some((end, _)) = shown.char_indices().nth(60) {
            shown.truncate(end);
            shown.push('…');
        }
        Error::data(format!("column {name:?} is {shown}, expected {expected}"))
            .at(self.suite)
            .fix("give the published file")
    }
}

/// A number without the `.0` that a column of floats adds.
fn plain(number: &serde_json::Number) -> String {
    let text = number.to_string();
    text.strip_suffix(".0").map_or(text.clone(), String::from)
}
