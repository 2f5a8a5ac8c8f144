//! Demonstrations for SFT before RL: the solution alone or after a few failed attempts; a fraction of them is wrong.

use super::AnswerFormat;
use super::expression::CountdownOp;
use super::puzzle::{Puzzle, TaskDraw, random_expression};
use ferrl_engine::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub struct DemonstrationOptions {
    /// Format of the answer, as the verifier expects it.
    pub format: AnswerFormat,
    /// Maximum number of failed attempts before the answer.
    pub tries: usize,
    /// Fraction of demonstrations whose answer is a random well-formed expression instead of the solution.
    pub noise: f64,
    /// Operations of random expressions.
    pub ops: Vec<CountdownOp>,
}

impl Default for DemonstrationOptions {
    fn default() -> Self {
        DemonstrationOptions {
            format: AnswerFormat::Plain,
            tries: 0,
            noise: 0.0,
            ops: vec![CountdownOp::Add, CountdownOp::Sub, CountdownOp::Mul],
        }
    }
}

impl DemonstrationOptions {
    /// Refuses settings that contradict each other.
    pub fn check(&self) -> Result<()> {
        if !(0.0..=1.0).contains(&self.noise) {
            let what = format!("noise must be 0 to 1, got {}", self.noise);
            return Err(Error::usage(what).at("countdown demonstrations"));
        }
        if self.ops.is_empty() {
            return Err(Error::usage("ops must name at least one of + - * /").at("countdown demonstrations"));
        }
        if self.tries > 0 && self.format == AnswerFormat::Plain {
            return Err(Error::usage("tries need an answer format other than plain")
                .at("countdown demonstrations")
                .fix("data.task.format = \"line\" or \"think_answer\", or data.task.tries = 0"));
        }
        Ok(())
    }
}

/// A completion for a puzzle; `index` makes demonstrations of the same puzzle differ.
pub fn demonstrate(puzzle: &Puzzle, seed: u64, index: u64, options: &DemonstrationOptions) -> Result<String> {
    options.check()?;
    let mut draw = TaskDraw::new("countdown demonstration", seed, index);
    let noisy = draw.chance(options.noise);
    let mut random = || (0..100).find_map(|_| random_expression(&puzzle.numbers, &options.ops, &mut draw));
    let answer = if noisy { random().map(|expr| expr.to_string()) } else { None };
    let answer = answer.unwrap_or_else(|| puzzle.solution.clone());
    let mut tried: Vec<String> = Vec::new();
    for _ in 0..options.tries {
        let Some(expr) = random() else { break };
        let value = expr.value().and_then(|v| v.as_whole());
        let Some(value) = value.filter(|v| *v != puzzle.target) else { continue };
        let line = format!("{expr}={value}");
        if !tried.contains(&line) {
            tried.push(line);
        }
    }
    let tried = tried.join("\n");
    Ok(match options.format {
        AnswerFormat::Plain => answer,
        AnswerFormat::Line if tried.is_empty() => answer,
        AnswerFormat::Line => format!("{tried}\n{answer}"),
        AnswerFormat::Answer if tried.is_empty() => format!("<answer>{answer}</answer>"),
        AnswerFormat::Answer => format!("{tried}\n<answer>{answer}</answer>"),
        AnswerFormat::ThinkAnswer => {
            let thought = if tried.is_empty() { format!("{answer}={}", puzzle.target) } else { tried };
            format!("<think>{thought}</think><answer>{answer}</answer>")
        }
    })
}
