//! Arithmetic questions with a calculator tool.

use super::ToolLimits;
use super::task::{Question, Questions, ToolTask, exact, instructions};
use crate::task::{Entry, options};
use crate::tool;
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use schemars::schema_for;
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "calculator",
    about: "arithmetic questions with a calculator to call, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let signs: Vec<char> = o.ops.chars().filter(|c| !c.is_whitespace()).collect();
        if let Some(c) = signs.iter().find(|c| !"+-*".contains(**c)) {
            let what = format!("unknown operation {c:?}, expected some of + - *");
            return Err(Error::usage(what).at("data.task.ops").fix("data.task.ops = \"+-*\""));
        }
        if signs.is_empty() {
            let none = Error::usage("no operations, expected some of + - *");
            return Err(none.at("data.task.ops").fix("data.task.ops = \"+-*\""));
        }
        let tools: Vec<_> = match o.tool {
            true => vec![tool::build("calculator", &Map::new())?],
            false => Vec::new(),
        };
        Ok(Box::new(ToolTask {
            tools: tools.into(),
            verifier: exact(json!({}))?,
            limits: ToolLimits { max_calls: o.max_calls, ..Default::default() },
            questions: Arithmetic { signs, seed, o },
        }))
    },
};

with_defaults! {
struct Options {
    /// Digits of each operand. [1, 9]
    digits: u32 = 3,
    /// Number of operands of an expression. [2, 8]
    numbers: usize = 2,
    /// Operations, some of `+-*`.
    ops: String = "+-*".into(),
    /// Whether the calculator is available; without it episodes have one turn.
    tool: bool = true,
    /// Maximum number of tool calls per episode. [0, 1000]
    max_calls: usize = 2,
    /// Fraction of demonstrations that call the calculator; the others give the right answer directly. [0, 1]
    demonstrated: f64 = 0.5,
    /// Whether the prompt explains the tool and the answer's form.
    instructions: bool = true,
}
}

struct Arithmetic {
    signs: Vec<char>,
    seed: u64,
    o: Options,
}

impl Questions for Arithmetic {
    fn question(&self, index: u64, held_out: bool) -> Result<Question> {
        let stream = if held_out { "calculator held out" } else { "calculator" };
        let (mut draw, o) = (TaskDraw::new(stream, self.seed, index), &self.o);
        let mut expression = String::new();
        for i in 0..o.numbers {
            if i > 0 {
                expression.push(self.signs[draw.below(self.signs.len())]);
            }
            let low = if o.digits == 1 { 1 } else { 10usize.pow(o.digits - 1) };
            expression += &(low + draw.below(10usize.pow(o.digits) - low)).to_string();
        }
        let answer = tool::calculate(&expression)?;
        let mut prompt = format!("What is {expression}?\n");
        if o.instructions {
            let tools: Vec<_> =
                if o.tool { vec![tool::build("calculator", &Map::new())?] } else { Vec::new() };
            prompt += &instructions(&tools);
        }
        let mut actions = Vec::new();
        if o.tool && draw.chance(o.demonstrated) {
            actions.push(format!("<calculator>{expression}</calculator>"));
        }
        actions.push(format!("<answer>{answer}</answer>"));
        let columns = Map::from_iter([("answer".to_string(), Value::String(answer))]);
        Ok(Question { prompt, columns, actions })
    }
}
