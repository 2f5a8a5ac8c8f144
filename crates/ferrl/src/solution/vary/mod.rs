//! New exercises from worked solutions: the same story with other numbers, computed through to the answer.
//!
//! A solution of GSM8K is a program: `<<48/2=24>>` says which numbers a step takes and what it gives. A template is read once
//! from question and solution: it knows of each number whether it comes from the question, from an earlier step, or is a
//! constant. A variant draws other numbers for the question and computes every later one again, in exact arithmetic.
//!
//! What surprises: a number that may stand for several quantities (two steps give 12; the question says "twice" and a step gives
//! 2) is replaced only by draws in which all of them stay equal. So what is unclear keeps its value while the rest varies.

mod draw;
mod number;

use self::draw::{draw, keeps_kind};
use self::number::{NUMBER, WrittenNumber, is_constant};
use crate::tool::number::evaluate;
use crate::verify::countdown::TaskDraw;
use crate::verify::math::Rational;
use regex::{Captures, Regex};
use std::collections::HashSet;
use std::sync::LazyLock;

/// A calculation in a solution: an expression and its value.
static CALCULATION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"<<([^<>=]+)=([^<>=]+)>>").expect("a regular expression"));

/// Draws per variant before giving up; the later ones leave more numbers as they are.
const DRAWS: usize = 300;

/// Up to `copies` variants of an exercise, each another one; the draws depend on the seed and the number of the row alone.
pub fn variants(
    question: &str,
    solution: &str,
    copies: usize,
    (seed, row): (u64, u64),
) -> Result<Vec<(String, String)>, Unvaried> {
    let template = ExerciseTemplate::read(question, solution)?;
    let (mut random, mut all) = (TaskDraw::new("vary", seed, row), Vec::new());
    let mut seen = HashSet::from([question.to_string()]);
    for _ in 0..copies {
        let variant = match template.vary(&mut random) {
            Ok(variant) => variant,
            Err(why) if all.is_empty() => return Err(why),
            Err(_) => break,
        };
        if seen.insert(variant.0.clone()) {
            all.push(variant);
        }
    }
    Ok(all)
}

/// Why the numbers of an exercise cannot vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unvaried {
    /// The solution has no `<<expression=value>>`, or one whose value is another.
    Calculations,
    /// No number of the question enters a calculation, or only such that may be constants.
    Inputs,
    /// The solution has a number that no calculation gives.
    Unexplained,
    /// No draw kept every value positive and whole where it was.
    Draws,
}

impl Unvaried {
    pub fn text(self) -> &'static str {
        match self {
            Unvaried::Calculations => "have no calculations that can be computed again",
            Unvaried::Inputs => "have no number that may vary",
            Unvaried::Unexplained => "have a number that no calculation gives",
            Unvaried::Draws => "have no other numbers that keep every step whole and positive",
        }
    }
}

/// Where a number may come from.
#[derive(Clone, Debug, PartialEq)]
enum Origin {
    /// A number of the question.
    Input(usize),
    /// The value of a calculation.
    Step(usize),
    /// Neither: it stays.
    Constant,
}

/// A stretch of text.
enum TextPiece {
    Text(String),
    Number(WrittenNumber, Vec<Origin>),
}

struct VaryingNumber {
    value: Rational,
    percent: bool,
}

/// One calculation: its expression, its value, and how that is written.
struct Calculation {
    expression: Vec<TextPiece>,
    value: WrittenNumber,
}

/// An exercise whose numbers can vary.
struct ExerciseTemplate {
    inputs: Vec<VaryingNumber>,
    steps: Vec<Calculation>,
    question: Vec<TextPiece>,
    /// Text around the calculations: before the first, between them, behind the last.
    solution: Vec<Vec<TextPiece>>,
}

struct VariantNumbers {
    inputs: Vec<Rational>,
    steps: Vec<Rational>,
}

/// Everything a number of an exercise may be.
struct Origins<'a> {
    question: &'a str,
    inputs: Vec<VaryingNumber>,
    /// VariantNumbers of the calculations, in their order.
    values: Vec<WrittenNumber>,
    /// Numbers of the question and of expressions: one of these may stand anywhere.
    known: Vec<Rational>,
}

impl Origins<'_> {
    /// What a number may be where this many calculations have been made.
    fn of(&self, value: &Rational, steps: usize) -> Vec<Origin> {
        let inputs = self.inputs.iter().enumerate().filter(|(_, i)| i.value == *value);
        let steps = self.values[..steps].iter().enumerate().filter(|(_, v)| v.value == *value);
        let constant = is_constant(value, self.question).then_some(Origin::Constant);
        let inputs = inputs.map(|(i, _)| Origin::Input(i));
        inputs.chain(steps.map(|(i, _)| Origin::Step(i))).chain(constant).collect()
    }

    fn explain(&self, piece: &TextPiece) -> bool {
        match piece {
            TextPiece::Number(n, from) => {
                !from.is_empty() || self.known.contains(&n.value) || number::is_plain(&n.value)
            }
            TextPiece::Text(_) => true,
        }
    }
}

impl ExerciseTemplate {
    fn read(question: &str, solution: &str) -> Result<Self, Unvaried> {
        let calculations: Vec<Captures<'_>> = CALCULATION.captures_iter(solution).collect();
        let values = calculations.iter().map(|c| calculated(&c[1], &c[2])).collect::<Option<Vec<_>>>();
        let values = values.filter(|v| !v.is_empty()).ok_or(Unvaried::Calculations)?;
        let used: Vec<Rational> = calculations.iter().flat_map(|c| number::all(&c[1])).collect();
        let varying = number::varying(question).into_iter().filter(|(n, _)| used.contains(&n.value));
        let inputs: Vec<VaryingNumber> =
            varying.map(|(n, percent)| VaryingNumber { value: n.value, percent }).collect();
        if inputs.is_empty() {
            return Err(Unvaried::Inputs);
        }
        let known = used.into_iter().chain(number::all(question)).collect();
        let origins = Origins { question, inputs, values, known };
        let solution = texts(solution, &calculations, &origins);
        if !solution.iter().flatten().all(|piece| origins.explain(piece)) {
            return Err(Unvaried::Unexplained);
        }
        let varies = |v: &Rational| origins.inputs.iter().position(|i| i.value == *v);
        let question = pieces(question, |v| varies(v).map(Origin::Input).into_iter().collect());
        let expressions = calculations.iter().enumerate().map(|(i, c)| pieces(&c[1], |v| origins.of(v, i)));
        let steps = expressions
            .zip(&origins.values)
            .map(|(expression, value)| Calculation { expression, value: value.clone() });
        Ok(ExerciseTemplate { steps: steps.collect(), inputs: origins.inputs, question, solution })
    }

    /// Question and solution with other numbers.
    fn vary(&self, random: &mut TaskDraw) -> Result<(String, String), Unvaried> {
        for attempt in 0..DRAWS {
            let kept = if attempt < DRAWS / 3 { 0.2 } else { 0.5 };
            let new = |i: &VaryingNumber, random: &mut TaskDraw| match random.chance(kept) {
                true => i.value.clone(),
                false => draw(&i.value, i.percent, random),
            };
            let inputs: Vec<Rational> = self.inputs.iter().map(|i| new(i, random)).collect();
            if inputs.iter().zip(&self.inputs).all(|(new, old)| *new == old.value) {
                continue;
            }
            if let Some(made) = self.computed(inputs) {
                return Ok(made);
            }
        }
        Err(Unvaried::Draws)
    }

    /// The exercise with these numbers in its question; none where a value would be of another kind.
    fn computed(&self, inputs: Vec<Rational>) -> Option<(String, String)> {
        let mut values = VariantNumbers { inputs, steps: Vec::new() };
        let mut calculations = Vec::new();
        for step in &self.steps {
            let expression = values.written(&step.expression)?;
            let value = evaluate(&plain(&expression)).ok()?.exact_value()?;
            if !keeps_kind(&step.value.value, &value) {
                return None;
            }
            calculations.push(format!("<<{expression}={}>>", step.value.like(&value)?));
            values.steps.push(value);
        }
        let mut solution = String::new();
        for (i, text) in self.solution.iter().enumerate() {
            solution.push_str(&values.written(text)?);
            solution.push_str(calculations.get(i).map_or("", String::as_str));
        }
        Some((values.written(&self.question)?, solution))
    }
}

impl VariantNumbers {
    /// Text with these numbers in it; none where a number may stand for two quantities that differ now.
    fn written(&self, pieces: &[TextPiece]) -> Option<String> {
        let mut text = String::new();
        for piece in pieces {
            match piece {
                TextPiece::Text(t) => text.push_str(t),
                TextPiece::Number(n, from) => text.push_str(&n.like(self.of(n, from)?)?),
            }
        }
        Some(text)
    }

    fn of<'a>(&'a self, n: &'a WrittenNumber, from: &[Origin]) -> Option<&'a Rational> {
        let mut all = from.iter().map(|origin| match origin {
            Origin::Input(i) => Some(&self.inputs[*i]),
            Origin::Step(i) => self.steps.get(*i),
            Origin::Constant => Some(&n.value),
        });
        let first = all.next().unwrap_or(Some(&n.value))?;
        all.all(|other| other == Some(first)).then_some(first)
    }
}

/// The value of a calculation as it is written, if the expression has it. A number alone computes nothing.
fn calculated(expression: &str, value: &str) -> Option<WrittenNumber> {
    NUMBER.find_iter(expression).nth(1)?;
    let written = WrittenNumber::read(value.trim().trim_start_matches('$'))?;
    let computed = evaluate(&plain(expression)).ok()?.exact_value()?;
    (computed == written.value).then_some(written)
}

/// An expression as programs write it.
fn plain(expression: &str) -> String {
    expression.replace(['x', 'X'], "*").replace('$', "")
}

/// The text around calculations.
fn texts(solution: &str, calculations: &[Captures<'_>], origins: &Origins<'_>) -> Vec<Vec<TextPiece>> {
    let (mut all, mut at) = (Vec::new(), 0);
    for (i, calculation) in calculations.iter().enumerate() {
        let span = calculation.get_match();
        // The value may stand before its calculation: "24 clips, for 48/2=<<48/2=24>>24".
        all.push(pieces(&solution[at..span.start()], |v| origins.of(v, i + 1)));
        at = span.end();
    }
    all.push(pieces(&solution[at..], |v| origins.of(v, calculations.len())));
    all
}

/// A text cut into numbers and what stands between them.
fn pieces(text: &str, origins: impl Fn(&Rational) -> Vec<Origin>) -> Vec<TextPiece> {
    let (mut all, mut at) = (Vec::new(), 0);
    for found in NUMBER.find_iter(text) {
        let Some(number) = WrittenNumber::read(found.as_str()) else { continue };
        all.push(TextPiece::Text(text[at..found.start()].into()));
        let from = origins(&number.value);
        all.push(TextPiece::Number(number, from));
        at = found.end();
    }
    all.push(TextPiece::Text(text[at..].into()));
    all
}

#[cfg(test)]
mod tests;
