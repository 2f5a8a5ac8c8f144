//! Countdown: make a target from given numbers with `+ - * /`, each number once.
//!
//! The answer is parsed and computed in exact fractions; nothing is evaluated as code.

pub mod demonstration;
pub mod expression;
pub mod puzzle;

use super::{Entry, Sample, Score, Verifier, column, last_answer, required};
use expression::{CountdownExpr, Fraction, MAX_BYTES};
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use demonstration::{DemonstrationOptions, demonstrate};
pub(crate) use puzzle::TaskDraw;
pub use puzzle::{CountdownOptions, Puzzle, PuzzleSplit, generate, held_out};

pub const ENTRY: Entry = Entry {
    name: "countdown",
    about: "1 if an expression makes the target from the given numbers, less for its form alone",
    schema: || schema_for!(Countdown),
    build: |given| Ok(Box::new(given.read::<Countdown>()?)),
};

/// Where the answer is in a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnswerFormat {
    /// In the last `<answer>…</answer>`.
    Answer,
    /// Reasoning up to one `</think>`, then one `<answer>…</answer>` and nothing more.
    ThinkAnswer,
    /// On the last line.
    Line,
    /// The whole completion.
    Plain,
}

impl AnswerFormat {
    /// The answer's text, if the completion has this form.
    pub fn answer(self, completion: &str) -> Option<&str> {
        match self {
            AnswerFormat::Answer => last_answer(completion),
            AnswerFormat::ThinkAnswer => {
                let text = completion.trim();
                let (thought, rest) = text.strip_prefix("<think>").unwrap_or(text).split_once("</think>")?;
                let inner = rest.trim().strip_prefix("<answer>")?.strip_suffix("</answer>")?;
                let tags = ["<think>", "</think>", "<answer>", "</answer>"];
                let stray = tags.iter().any(|t| thought.contains(t) || inner.contains(t));
                (!stray && !thought.trim().is_empty()).then(|| inner.trim())
            }
            AnswerFormat::Line => completion.trim_end().lines().last().map(str::trim),
            AnswerFormat::Plain => Some(completion.trim()),
        }
    }
}

/// Whose grading rules to follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CountdownMode {
    /// Ferrl's: exact; malformed answers earn nothing.
    Last,
    /// RL2's: the first `<answer>` that opens and closes on one line.
    First,
    /// TinyZero's: the last `<answer>` of the last line.
    TinyZero,
}

with_defaults! {
/// The verifier.
pub struct Countdown {
    /// Grading rules: last (exact, with the answer at format, which may end in "= target"), first (RL2's: the first `<answer>` on one
    /// line) or tinyzero (TinyZero's: the last `<answer>` on the last line). The latter two give format_reward for any wrong answer,
    /// even if it is not an expression.
    mode: CountdownMode = CountdownMode::Last,
    /// Where the answer is: answer (last `<answer>` tag), think_answer (`</think>` then `<answer>`), line (last line), plain (whole
    /// completion).
    format: AnswerFormat = AnswerFormat::Answer,
    /// Each number must be used exactly once; false: at most once.
    use_all: bool = true,
    /// Reward of a right answer. [0, inf)
    correct_reward: f64 = 1.0,
    /// Reward of a wrong answer that is a well-formed expression. [0, inf)
    format_reward: f64 = 0.1,
    /// Column with the numbers; "numbers" is read too.
    numbers_column: String = "nums".into(),
    /// Column with the target.
    target_column: String = "target".into(),
}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountdownVerdict {
    /// No answer, or one that is not an expression.
    Malformed,
    /// An expression with the wrong numbers or the wrong value.
    Wrong,
    Right,
}

impl Countdown {
    fn answer<'a>(&self, completion: &'a str) -> Option<&'a str> {
        match self.mode {
            CountdownMode::Last => self.format.answer(completion),
            CountdownMode::First => completion.lines().find_map(first_on_line),
            CountdownMode::TinyZero => last_on_line(completion.rsplit('\n').next()?),
        }
    }

    /// The verdict on an answer: the other libraries' graders ignore the right side of an equation, and know only right and wrong.
    fn judged(&self, answer: &str, numbers: &[i64], target: i64) -> CountdownVerdict {
        let verdict = match self.mode {
            CountdownMode::Last => return judge(answer, numbers, target, self.use_all),
            _ if answer.contains('=') => CountdownVerdict::Wrong,
            _ => judge(answer, numbers, target, true),
        };
        if verdict == CountdownVerdict::Right { verdict } else { CountdownVerdict::Wrong }
    }

    fn numbers(&self, sample: &Sample<'_>) -> Result<Vec<i64>> {
        let other = if self.numbers_column == "nums" { column(sample.columns, "numbers") } else { None };
        let value = match column(sample.columns, &self.numbers_column).or(other) {
            Some(value) => value,
            None => required(sample, &self.numbers_column, ENTRY.name)?,
        };
        let numbers: Option<Vec<i64>> =
            value.as_array().and_then(|a| a.iter().map(|v| whole(v).filter(|n| *n >= 0)).collect());
        numbers.filter(|n| !n.is_empty()).ok_or_else(|| {
            let column = &self.numbers_column;
            sample.error(Error::data(format!(
                "column {column:?} must be a list of whole numbers from 0 up, got {value}"
            )))
        })
    }

    fn target(&self, sample: &Sample<'_>) -> Result<i64> {
        let value = required(sample, &self.target_column, ENTRY.name)?;
        whole(value).ok_or_else(|| {
            sample.error(Error::data(format!(
                "column {:?} must be a whole number, got {value}",
                self.target_column
            )))
        })
    }
}

/// The first `<answer>…</answer>` of a line.
fn first_on_line(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("<answer>")?;
    rest.split_once("</answer>").map(|(answer, _)| answer.trim())
}

/// The last `<answer>…</answer>` of a line, as a non-greedy regular expression finds it.
fn last_on_line(line: &str) -> Option<&str> {
    let mut last = None;
    let mut rest = line;
    while let Some((_, behind)) = rest.split_once("<answer>") {
        let Some((answer, after)) = behind.split_once("</answer>") else { break };
        last = Some(answer.trim());
        rest = after;
    }
    last
}

/// A whole number, also written `24.0` or `"24"`.
fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        _ => value
            .as_i64()
            .or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && f.abs() < 9.0e15).map(|f| f as i64)),
    }
}

/// Judges the text of an answer, which may end in `= target`.
pub fn judge(answer: &str, numbers: &[i64], target: i64, use_all: bool) -> CountdownVerdict {
    if answer.len() > MAX_BYTES {
        return CountdownVerdict::Malformed;
    }
    let (left, claim) = match answer.split_once('=') {
        Some((left, right)) => (left, Some(right.trim())),
        None => (answer, None),
    };
    let digits = |c: &str| !c.is_empty() && c.bytes().all(|b| b.is_ascii_digit());
    if claim.is_some_and(|c| !digits(c.strip_prefix('-').unwrap_or(c))) {
        return CountdownVerdict::Malformed;
    }
    let Some(expr) = CountdownExpr::parse(left) else { return CountdownVerdict::Malformed };
    let claimed = claim.is_none_or(|c| c.parse() == Ok(target));
    let mut free = numbers.to_vec();
    let given = expr.numbers().into_iter().all(|n| {
        let at = free.iter().position(|&f| f == n);
        at.map(|at| free.swap_remove(at)).is_some()
    });
    let used = given && (free.is_empty() || !use_all);
    let reached = expr.value() == Some(Fraction::whole(target));
    if claimed && used && reached { CountdownVerdict::Right } else { CountdownVerdict::Wrong }
}

impl Verifier for Countdown {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn extract(&self, completion: &str) -> Option<String> {
        self.answer(completion).map(String::from)
    }
    fn reads(&self) -> &'static [&'static str] {
        match (self.mode, self.format) {
            (CountdownMode::Last, AnswerFormat::Line | AnswerFormat::Plain) => &[],
            _ => &["<answer>", "</answer>"],
        }
    }
    fn score(&self, sample: &Sample<'_>) -> Result<Score> {
        let (numbers, target) = (self.numbers(sample)?, self.target(sample)?);
        let answer = self.answer(sample.completion);
        let verdict =
            answer.map_or(CountdownVerdict::Malformed, |answer| self.judged(answer, &numbers, target));
        let (reward, correct, format) = match verdict {
            CountdownVerdict::Malformed => (0.0, 0.0, 0.0),
            CountdownVerdict::Wrong => (self.format_reward, 0.0, 1.0),
            CountdownVerdict::Right => (self.correct_reward, 1.0, 1.0),
        };
        let components = vec![("correct".into(), correct), ("format".into(), format)];
        let found = Some(verdict != CountdownVerdict::Malformed);
        let why = match (verdict, answer) {
            (CountdownVerdict::Malformed, Some(_)) => {
                Some("the answer is not an expression of numbers, + - * / and brackets".into())
            }
            (CountdownVerdict::Wrong, Some(_)) => {
                Some("the answer does not make the target from the given numbers".into())
            }
            _ => None,
        };
        Ok(Score { reward, components, score: Some(correct), found, why, ..Default::default() })
    }
}
