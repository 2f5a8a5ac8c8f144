//! Countdown: reach a target from a few numbers, each used once. The prompt is `5,7,12:24=`, the answer `(7-5)*12`.

use super::{DemonstrationKind, Entry, Task, TaskExample, options, schema_for};
use crate::verify::countdown::expression::{CountdownExpr, CountdownOp};
use crate::verify::countdown::{
    AnswerFormat, CountdownOptions, CountdownVerdict, DemonstrationOptions, Puzzle, PuzzleSplit, TaskDraw,
    demonstrate, generate, judge,
};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "countdown",
    about: "reach a target from a few numbers, each used once",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(CountdownTask::new(values, seed)?)),
};

with_defaults! {
struct Options {
    /// Numbers in a puzzle.
    numbers: usize = 3,
    /// Largest number.
    max_number: i64 = 20,
    /// Largest target.
    max_target: i64 = 100,
    /// Operations, such as `+-*`.
    ops: String = "+-*".into(),
    /// Fraction of demonstrations whose answer is a random expression.
    noise: f64 = 0.0,
    /// Maximum number of failed attempts in a demonstration before the answer.
    tries: usize = 0,
    /// Kind of demonstrations: `solutions`, `verdicts` on an expression (GenRM), or `rationales` that compute it before the verdict
    /// (GenRM-CoT). Some of the wrong expressions contain a number that was not given.
    kind: DemonstrationKind = DemonstrationKind::Solutions,
}
}

struct CountdownTask {
    puzzles: CountdownOptions,
    demonstrations: DemonstrationOptions,
    kind: DemonstrationKind,
    seed: u64,
}

/// Fraction of the random expressions of verdicts with a number that was not given.
const FOREIGN: f64 = 0.2;

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
        if o.kind != DemonstrationKind::Solutions && o.tries > 0 {
            return Err(Error::usage("demonstrations of verdicts have no tries")
                .at("data.task.tries")
                .fix("data.task.tries = 0"));
        }
        Ok(CountdownTask { puzzles, demonstrations, kind: o.kind, seed })
    }

    /// An expression, whether it is right, and its rationale: its numbers, its operations in order, and its value next to the
    /// target. Without the target in the rationale a small model answers Yes to everything.
    fn candidate(&self, puzzle: &Puzzle, index: u64) -> Result<(String, bool, String)> {
        let mut draw = TaskDraw::new("countdown candidate", self.seed, index);
        let mut numbers = puzzle.numbers.clone();
        if draw.chance(self.demonstrations.noise * FOREIGN) {
            let changed = draw.below(numbers.len());
            numbers[changed] = 1 + draw.below(self.puzzles.max_number as usize) as i64;
        }
        let foreign = numbers != puzzle.numbers;
        let noise = if foreign { 1.0 } else { self.demonstrations.noise };
        let drawn_from = Puzzle { numbers, ..puzzle.clone() };
        let options = DemonstrationOptions { noise, ..self.demonstrations.clone() };
        let text = demonstrate(&drawn_from, self.seed, index, &options)?;
        let right = judge(&text, &puzzle.numbers, puzzle.target, true) == CountdownVerdict::Right;
        let worked_out = CountdownExpr::parse(&text).and_then(|expr| {
            let used: Vec<String> = expr.numbers().iter().map(i64::to_string).collect();
            let (steps, value) = (expr.steps()?.join("\n"), expr.value()?);
            Some(format!("{}\n{steps}\n{value} for {}", used.join(","), puzzle.target))
        });
        Ok((text, right, worked_out.unwrap_or_default()))
    }
}

impl Task for CountdownTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let split = if held_out { PuzzleSplit::HeldOut } else { PuzzleSplit::Train };
        let puzzle = generate(self.seed, index, &CountdownOptions { split, ..self.puzzles.clone() })?;
        let (prompt, answer) = match self.kind {
            DemonstrationKind::Solutions => {
                (puzzle.short_prompt(), demonstrate(&puzzle, self.seed, index, &self.demonstrations)?)
            }
            kind => {
                let (expression, right, worked_out) = self.candidate(&puzzle, index)?;
                kind.demonstrate(puzzle.short_prompt(), expression, right, &worked_out)
            }
        };
        Ok(TaskExample { prompt, answer, columns: puzzle.columns(), ..Default::default() })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        let format = if self.demonstrations.tries > 0 { "line" } else { "plain" };
        let options = json!({ "format": format, "format_reward": 0.0 });
        Some(("countdown", options.as_object().cloned().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_true_and_rationales_work_the_expression_out() {
        let settings = json!({ "kind": "rationales", "noise": 0.5 });
        let task = CountdownTask::new(settings.as_object().expect("a table"), 3).expect("a task");
        let (mut right, mut foreign) = (0, 0);
        for index in 0..400 {
            let example = task.example(index, false).expect("an example");
            let puzzle = generate(3, index, &task.puzzles).expect("a puzzle");
            let (asked, _) = example.prompt.split_once('\n').expect("a rationale is asked for");
            let expression = asked.strip_prefix(&puzzle.short_prompt()).expect("an expression");
            let verdict = judge(expression, &puzzle.numbers, puzzle.target, true);
            let says_yes = example.answer.ends_with("Yes");
            assert_eq!(says_yes, verdict == CountdownVerdict::Right, "{example:?}");
            let result = CountdownExpr::parse(expression).and_then(|e| e.value()).and_then(|v| v.as_whole());
            let last = example.answer.lines().nth(puzzle.numbers.len() - 1).expect("two operations");
            assert!(last.ends_with(&format!("={}", result.expect("whole"))), "{example:?}");
            right += usize::from(says_yes);
            let used = CountdownExpr::parse(expression).map(|e| e.numbers()).unwrap_or_default();
            foreign += usize::from(used.iter().any(|n| !puzzle.numbers.contains(n)));
        }
        assert!((170..260).contains(&right), "{right} of 400");
        assert!((10..70).contains(&foreign), "{foreign} of 400");
    }
}
