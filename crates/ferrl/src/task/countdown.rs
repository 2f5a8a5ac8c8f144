//! Countdown: reach a target from a few numbers, each used once. The prompt is `5,7,12:24=`, the answer `(7-5)*12`.

use super::{Entry, Task, TaskExample, options};
use crate::verify::countdown::expression::CountdownOp;
use crate::verify::countdown::{
    AnswerFormat, CountdownOptions, DemonstrationOptions, PuzzleSplit, demonstrate, generate,
};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "countdown",
    about: "reach a target from a few numbers, each used once",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(CountdownTask::new(values, seed)?)),
};

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Numbers in a puzzle.
    numbers: usize,
    /// Largest number.
    max_number: i64,
    /// Largest target.
    max_target: i64,
    /// Operations, such as `+-*`.
    ops: String,
    /// Share of demonstrations that answer with a random expression.
    noise: f64,
    /// Combinations tried aloud before the answer.
    tries: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { numbers: 3, max_number: 20, max_target: 100, ops: "+-*".into(), noise: 0.0, tries: 0 }
    }
}

struct CountdownTask {
    puzzles: CountdownOptions,
    demonstrations: DemonstrationOptions,
    seed: u64,
}

impl CountdownTask {
    fn new(values: &Map<String, Value>, seed: u64) -> Result<Self> {
        let o: Options = options(values)?;
        let ops = CountdownOp::listed(&o.ops).map_err(|e: Error| e.at("data.task.ops"))?;
        let format = if o.tries > 0 { AnswerFormat::Line } else { AnswerFormat::Plain };
        let puzzles = CountdownOptions {
            numbers: (o.numbers, o.numbers),
            max_number: o.max_number,
            max_target: o.max_target,
            ops: ops.clone(),
            ..Default::default()
        };
        puzzles.check()?;
        let demonstrations = DemonstrationOptions { format, tries: o.tries, noise: o.noise, ops };
        demonstrations.check()?;
        Ok(CountdownTask { puzzles, demonstrations, seed })
    }
}

impl Task for CountdownTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let split = if held_out { PuzzleSplit::HeldOut } else { PuzzleSplit::Train };
        let puzzle = generate(self.seed, index, &CountdownOptions { split, ..self.puzzles.clone() })?;
        let answer = demonstrate(&puzzle, self.seed, index, &self.demonstrations)?;
        Ok(TaskExample {
            prompt: puzzle.short_prompt(),
            answer,
            columns: puzzle.columns(),
            ..Default::default()
        })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        let format = if self.demonstrations.tries > 0 { "line" } else { "plain" };
        let options = json!({ "format": format, "format_reward": 0.0 });
        Some(("countdown", options.as_object().cloned().unwrap_or_default()))
    }
}
