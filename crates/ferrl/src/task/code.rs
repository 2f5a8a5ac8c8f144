//! Short Python functions to write, with generated tests.

use super::{Entry, Task, TaskExample, options, schema_for};
use crate::sandbox::SandboxMode;
use crate::verify::countdown::TaskDraw;
use ferrl_engine::Result;
use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64;

pub(super) const ENTRY: Entry = Entry {
    name: "code",
    about: "a short Python function to write, run on test cases in the sandbox",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        Ok(Box::new(CodeTask { seed, o }))
    },
};

with_defaults! {
struct Options {
    /// Number of test cases per function. [1, 100]
    cases: usize = 4,
    /// Reward the fraction of passed cases instead of all or nothing.
    partial: bool = false,
    /// Confinement: `auto`, `on` or `off`, as in the verifier `code`.
    sandbox: SandboxMode = SandboxMode::Auto,
}
}

struct CodeTask {
    seed: u64,
    o: Options,
}

/// One function in this many is held out, by a hash of its prompt.
const HELD_OUT: u64 = 8;

impl Task for CodeTask {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let mut draw = TaskDraw::new(if held_out { "code held out" } else { "code" }, self.seed, index);
        let (function, prompt) = loop {
            let function = Function::drawn(&mut draw);
            let prompt = format!(
                "Write a Python function f(xs) that takes a list of whole numbers and returns {}.\n",
                function.words()
            );
            if xxh3_64(prompt.as_bytes()).is_multiple_of(HELD_OUT) == held_out {
                break (function, prompt);
            }
        };
        let case = |draw: &mut TaskDraw| {
            let list: Vec<i64> = (0..draw.below(8)).map(|_| draw.below(41) as i64 - 20).collect();
            json!({ "args": [&list], "expect": function.value(&list) })
        };
        // One of the cases is the empty list, a common mistake.
        let mut cases = vec![json!({ "args": [[]], "expect": function.value(&[]) })];
        cases.extend((1..self.o.cases.clamp(1, 100)).map(|_| case(&mut draw)));
        let columns = Map::from_iter([("entry".into(), json!("f")), ("cases".into(), cases.into())]);
        let answer = format!("```python\ndef f(xs):\n    return {}\n```", function.code());
        Ok(TaskExample { prompt, answer, columns, ..Default::default() })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        let options = json!({ "partial": self.o.partial, "sandbox": self.o.sandbox });
        Some(("code", options.as_object().cloned().unwrap_or_default()))
    }
}

/// A function on a list: filter, map, fold.
struct Function {
    keep: CodeKeep,
    change: CodeChange,
    end: CodeFold,
}

#[derive(Clone, Copy)]
enum CodeKeep {
    All,
    Even,
    Above(i64),
    Multiples(i64),
    Every(usize),
}

#[derive(Clone, Copy)]
enum CodeChange {
    Nothing,
    Square,
    Times(i64),
    Plus(i64),
}

#[derive(Clone, Copy)]
enum CodeFold {
    List,
    Sum,
    Count,
    Sorted,
    Reversed,
}

impl Function {
    fn drawn(draw: &mut TaskDraw) -> Self {
        let keep = match draw.below(5) {
            0 => CodeKeep::All,
            1 => CodeKeep::Even,
            2 => CodeKeep::Above(draw.below(10) as i64),
            3 => CodeKeep::Multiples(3 + draw.below(5) as i64),
            _ => CodeKeep::Every(2 + draw.below(3)),
        };
        let change = match draw.below(4) {
            0 => CodeChange::Nothing,
            1 => CodeChange::Square,
            2 => CodeChange::Times(2 + draw.below(8) as i64),
            _ => CodeChange::Plus(1 + draw.below(9) as i64),
        };
        let end = [CodeFold::List, CodeFold::Sum, CodeFold::Count, CodeFold::Sorted, CodeFold::Reversed]
            [draw.below(5)];
        Function { keep, change, end }
    }

    fn words(&self) -> String {
        let kept = match self.keep {
            CodeKeep::All => "all numbers".to_string(),
            CodeKeep::Even => "the even numbers".to_string(),
            CodeKeep::Above(n) => format!("the numbers above {n}"),
            CodeKeep::Multiples(n) => format!("the multiples of {n}"),
            CodeKeep::Every(n) => format!("the numbers at positions 0, {n}, {} and so on", 2 * n),
        };
        let changed = match self.change {
            CodeChange::Nothing => kept,
            CodeChange::Square => format!("the squares of {kept}"),
            CodeChange::Times(n) => format!("{n} times each of {kept}"),
            CodeChange::Plus(n) => format!("{kept}, each plus {n}"),
        };
        match self.end {
            CodeFold::List => format!("the list of {changed}"),
            CodeFold::Sum => format!("the sum of {changed}"),
            CodeFold::Count => format!("how many different values there are among {changed}"),
            CodeFold::Sorted => format!("the sorted list of {changed}"),
            CodeFold::Reversed => format!("the list, in reverse order, of {changed}"),
        }
    }

    fn code(&self) -> String {
        let kept = match self.keep {
            CodeKeep::All => "for x in xs".to_string(),
            CodeKeep::Even => "for x in xs if x % 2 == 0".to_string(),
            CodeKeep::Above(n) => format!("for x in xs if x > {n}"),
            CodeKeep::Multiples(n) => format!("for x in xs if x % {n} == 0"),
            CodeKeep::Every(n) => format!("for x in xs[::{n}]"),
        };
        let changed = match self.change {
            CodeChange::Nothing => format!("[x {kept}]"),
            CodeChange::Square => format!("[x * x {kept}]"),
            CodeChange::Times(n) => format!("[{n} * x {kept}]"),
            CodeChange::Plus(n) => format!("[x + {n} {kept}]"),
        };
        match self.end {
            CodeFold::List => changed,
            CodeFold::Sum => format!("sum({changed})"),
            CodeFold::Count => format!("len(set({changed}))"),
            CodeFold::Sorted => format!("sorted({changed})"),
            CodeFold::Reversed => format!("{changed}[::-1]"),
        }
    }

    fn value(&self, xs: &[i64]) -> Value {
        let kept = xs.iter().copied().enumerate().filter(|(i, x)| match self.keep {
            CodeKeep::All => true,
            CodeKeep::Even => x % 2 == 0,
            CodeKeep::Above(n) => *x > n,
            CodeKeep::Multiples(n) => x % n == 0,
            CodeKeep::Every(n) => i % n == 0,
        });
        let mut all: Vec<i64> = kept
            .map(|(_, x)| match self.change {
                CodeChange::Nothing => x,
                CodeChange::Square => x * x,
                CodeChange::Times(n) => n * x,
                CodeChange::Plus(n) => x + n,
            })
            .collect();
        match self.end {
            CodeFold::List => {}
            CodeFold::Sum => return all.iter().sum::<i64>().into(),
            CodeFold::Count => {
                all.sort_unstable();
                all.dedup();
                return all.len().into();
            }
            CodeFold::Sorted => all.sort_unstable(),
            CodeFold::Reversed => all.reverse(),
        }
        all.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::{self, Outcome, Progress, Sample};
    use std::collections::HashSet;

    fn task() -> Box<dyn Task> {
        (ENTRY.build)(&Map::new(), 1).unwrap()
    }

    /// Was: `"off"` was taken for no value, and refused as no text.
    #[test]
    fn the_sandbox_can_be_switched_off() {
        let task = (ENTRY.build)(json!({ "sandbox": "off" }).as_object().unwrap(), 1).unwrap();
        assert_eq!(task.reward().unwrap().1["sandbox"], "off");
    }

    /// The values were computed here; Python computes them again.
    #[test]
    fn demonstrations_pass_their_tests() {
        let task = task();
        let (name, options) = task.reward().unwrap();
        let verifier = verify::build(name, &options).unwrap();
        let examples: Vec<TaskExample> = (0..30).map(|i| task.example(i, i % 2 == 0).unwrap()).collect();
        let samples: Vec<Sample<'_>> = examples
            .iter()
            .map(|e| Sample { completion: &e.answer, columns: (&e.columns).into(), ..Default::default() })
            .collect();
        for (example, outcome) in
            examples.iter().zip(verifier.score_batch(&samples, Progress::default()).unwrap())
        {
            let Outcome::Scored(score) = outcome else { panic!("{outcome:?}") };
            assert_eq!(score.reward, 1.0, "{}{}: {:?}", example.prompt, example.answer, score.why);
        }
    }

    #[test]
    fn no_held_out_function_is_trained_on() {
        let task = task();
        let prompt = |index: u64, held_out: bool| task.example(index, held_out).unwrap().prompt;
        let trained: HashSet<String> = (0..2000).map(|i| prompt(i, false)).collect();
        assert!(trained.len() > 300, "{}", trained.len());
        assert!((0..300).all(|i| !trained.contains(&prompt(i, true))));
    }
}
