//! Questions that a short program answers, with a Python tool.

use super::ToolLimits;
use super::task::{Question, Questions, ToolTask, exact, instructions};
use crate::sandbox::SandboxMode;
use crate::task::{Entry, options};
use crate::tool::{self, Tool};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::Result;
use schemars::schema_for;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

pub(super) const ENTRY: Entry = Entry {
    name: "python",
    about: "questions on whole numbers with a Python interpreter to call, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let tools: Arc<[Arc<dyn Tool>]> =
            vec![tool::build("python", json!({ "sandbox": o.sandbox }).as_object().unwrap_or(&Map::new()))?]
                .into();
        Ok(Box::new(ToolTask {
            tools: tools.clone(),
            verifier: exact(json!({}))?,
            limits: ToolLimits { max_calls: o.max_calls, ..Default::default() },
            questions: Programs { seed, tools, o },
        }))
    },
};

with_defaults! {
struct Options {
    /// Largest number in a question. [20, 100000]
    max_number: usize = 1000,
    /// Maximum number of tool calls per episode. [0, 1000]
    max_calls: usize = 2,
    /// Fraction of demonstrations that call Python; the others give the right answer directly. [0, 1]
    demonstrated: f64 = 0.5,
    /// Whether the prompt explains the tool and the answer's form.
    instructions: bool = true,
    /// Sandbox of the tool: `auto` (every layer that the kernel supports), `on` (an error if a layer is missing) or `off`.
    sandbox: SandboxMode = SandboxMode::Auto,
}
}

struct Programs {
    seed: u64,
    tools: Arc<[Arc<dyn Tool>]>,
    o: Options,
}

/// One question in this many is held out, by a hash of its text.
const HELD_OUT: u64 = 8;

impl Questions for Programs {
    fn question(&self, index: u64, held_out: bool) -> Result<Question> {
        let stream = if held_out { "python held out" } else { "python" };
        let (mut draw, o) = (TaskDraw::new(stream, self.seed, index), &self.o);
        let (question, code, answer) = loop {
            let drawn = draw_question(&mut draw, o.max_number.clamp(20, 100_000));
            if xxh3_64(drawn.0.as_bytes()).is_multiple_of(HELD_OUT) == held_out {
                break drawn;
            }
        };
        let mut prompt = format!("{question}\n");
        if o.instructions {
            prompt += &instructions(&self.tools);
        }
        let mut actions = Vec::new();
        if draw.chance(o.demonstrated) {
            actions.push(format!("<python>{code}</python>"));
        }
        actions.push(format!("<answer>{answer}</answer>"));
        let columns = Map::from_iter([("answer".to_string(), Value::String(answer.to_string()))]);
        Ok(Question { prompt, columns, actions })
    }
}

/// A question, a program that prints its answer, and the answer.
fn draw_question(draw: &mut TaskDraw, most: usize) -> (String, String, u64) {
    let (a, n) = (2 + draw.below(8), 10 + draw.below(most - 9));
    match draw.below(5) {
        0 => (
            format!("How many prime numbers are below {n}?"),
            format!("print(sum(all(p % d for d in range(2, int(p ** 0.5) + 1)) for p in range(2, {n})))"),
            (2..n as u64).filter(|p| (2..).take_while(|d| d * d <= *p).all(|d| !p.is_multiple_of(d))).count()
                as u64,
        ),
        1 => (
            format!("How many steps does the Collatz sequence take from {n} to 1?"),
            format!("n, k={n}, 0\nwhile n != 1: n, k=(n // 2 if n % 2 == 0 else 3 * n + 1), k + 1\nprint(k)"),
            std::iter::successors(Some(n as u64), |x| {
                Some(if x.is_multiple_of(2) { x / 2 } else { 3 * x + 1 })
            })
            .take_while(|x| *x != 1)
            .count() as u64,
        ),
        2 => (
            format!("What is the sum of the squares of all multiples of {a} below {n}?"),
            format!("print(sum(x * x for x in range(0, {n}, {a})))"),
            (0..n as u64).step_by(a).map(|x| x * x).sum(),
        ),
        3 => (
            format!("What is the sum of the digits of all whole numbers below {n}?"),
            format!("print(sum(int(d) for x in range({n}) for d in str(x)))"),
            (0..n as u64).map(|x| x.to_string().bytes().map(|d| u64::from(d - b'0')).sum::<u64>()).sum(),
        ),
        _ => (
            format!("How many divisors does {n} have?"),
            format!("print(sum({n} % d == 0 for d in range(1, {n} + 1)))"),
            (1..=n as u64).filter(|d| (n as u64).is_multiple_of(*d)).count() as u64,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn programs(demonstrated: f64) -> Programs {
        let tools = vec![tool::build("python", &Map::new()).unwrap()].into();
        Programs { seed: 1, tools, o: Options { demonstrated, ..Default::default() } }
    }

    /// The answers were computed here; Python computes them again.
    #[test]
    fn python_finds_the_answers() {
        let programs = programs(1.0);
        for index in 0..12 {
            let question = programs.question(index, false).unwrap();
            let code = question.actions[0].trim_start_matches("<python>").trim_end_matches("</python>");
            let said = programs.tools[0].call(json!({ "code": code }).as_object().unwrap()).unwrap();
            assert_eq!(question.columns["answer"], said.as_str(), "{}", question.prompt);
        }
    }

    #[test]
    fn no_held_out_question_is_trained_on() {
        let programs = programs(0.0);
        let prompt = |index: u64, held_out: bool| programs.question(index, held_out).unwrap().prompt;
        let trained: HashSet<String> = (0..300).map(|i| prompt(i, false)).collect();
        assert!(trained.len() > 200 && (0..300).all(|i| !trained.contains(&prompt(i, true))));
    }
}
