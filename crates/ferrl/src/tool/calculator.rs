//! A calculator: exact results of arithmetic expressions.

use super::{Entry, Tool, number, one_text, text_argument};
use crate::recipe::read_settings;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;

pub(super) const ENTRY: Entry = Entry {
    name: "calculator",
    about: "the exact value of an arithmetic expression",
    schema: || schema_for!(Options),
    build: |values| {
        read_settings::<Options>("env.tool.calculator", values)?;
        Ok(Arc::new(Calculator))
    },
};

/// It has no settings.
#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Options {}

struct Calculator;

const ARGUMENT: &str = "expression";

impl Tool for Calculator {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn about(&self) -> &str {
        "Gives the exact value of an arithmetic expression such as (17*23+5)/4."
    }
    fn parameters(&self) -> Value {
        one_text(ARGUMENT, "numbers, + - * / // % ^, parentheses, sqrt abs floor ceil round min max")
    }
    fn call(&self, arguments: &Map<String, Value>) -> Result<String> {
        let expression = match text_argument(arguments, ARGUMENT) {
            Ok(text) => text.trim_end_matches(['=', ' ']),
            Err(why) => return Ok(why),
        };
        Ok(match number::evaluate(expression) {
            Ok(value) => value.text(),
            Err(why) => format!("error: {why}"),
        })
    }
}

/// The value of a valid expression.
pub(crate) fn calculate(expression: &str) -> Result<String> {
    number::evaluate(expression)
        .map(|value| value.text())
        .map_err(|why| Error::data(format!("{expression}: {why}")))
}
