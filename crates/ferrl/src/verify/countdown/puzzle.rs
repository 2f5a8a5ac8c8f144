//! Countdown puzzles: drawn by counter, always solvable, and split so that none is both trained and tested on.

use super::expression::{CountdownExpr, CountdownOp, Fraction};
use super::solve::combine;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::{name_words, philox4x32};
use serde_json::{Map, Value, json};

/// Which side of the split a puzzle must be on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PuzzleSplit {
    /// Puzzles to learn from.
    Train,
    /// Puzzles that no training set holds, whatever its seed.
    HeldOut,
    /// Both.
    All,
}

/// What puzzles look like.
#[derive(Clone, Debug, PartialEq)]
pub struct CountdownOptions {
    /// Fewest and most numbers in a puzzle, 2 to 6.
    pub numbers: (usize, usize),
    /// Largest number; the smallest is 1.
    pub max_number: i64,
    /// Largest target; the smallest is 1.
    pub max_target: i64,
    /// The operations a solution may need.
    pub ops: Vec<CountdownOp>,
    /// Share of all puzzles that is held out, by a hash of numbers and target.
    pub held_out: f64,
    /// Which side to draw from.
    pub split: PuzzleSplit,
}

impl Default for CountdownOptions {
    fn default() -> Self {
        CountdownOptions {
            numbers: (3, 3),
            max_number: 20,
            max_target: 100,
            ops: vec![CountdownOp::Add, CountdownOp::Sub, CountdownOp::Mul],
            held_out: 0.1,
            split: PuzzleSplit::Train,
        }
    }
}

impl CountdownOptions {
    /// Refuses settings under which there are no puzzles.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::usage(what).at("countdown"));
        let (least, most) = self.numbers;
        if least < 2 || most > 6 || least > most {
            return wrong(format!("numbers must be a range within 2 to 6, got {least} to {most}"));
        }
        if !(1..=1_000_000).contains(&self.max_number) || !(1..=1_000_000_000).contains(&self.max_target) {
            return wrong(format!(
                "max_number must be 1 to 1000000 and max_target 1 to 1000000000, got {} and {}",
                self.max_number, self.max_target
            ));
        }
        if self.ops.is_empty() {
            return wrong("ops must name at least one of + - * /".into());
        }
        if !(0.0..=1.0).contains(&self.held_out) {
            return wrong(format!("held_out must be 0 to 1, got {}", self.held_out));
        }
        Ok(())
    }
}

/// Numbers, a target, and one way from the first to the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Puzzle {
    /// Each is to be used once.
    pub numbers: Vec<i64>,
    /// The value to reach.
    pub target: i64,
    /// An expression that reaches it.
    pub solution: String,
}

impl Puzzle {
    /// The data columns the verifier reads: `nums` and `target`.
    pub fn columns(&self) -> Map<String, Value> {
        let mut columns = Map::new();
        columns.insert("nums".into(), json!(self.numbers));
        columns.insert("target".into(), json!(self.target));
        columns
    }

    /// A prompt of few characters, such as `5,7,12:24=`.
    pub fn short_prompt(&self) -> String {
        let numbers: Vec<String> = self.numbers.iter().map(i64::to_string).collect();
        format!("{}:{}=", numbers.join(","), self.target)
    }
}

/// Whether a puzzle is on the held-out side: by a hash of sorted numbers and target, and nothing else.
pub fn held_out(numbers: &[i64], target: i64, share: f64) -> bool {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let words = name_words(&format!("{sorted:?}={target}"));
    // FNV alone is too regular in its low bits; Philox mixes it.
    let mixed = philox4x32([words[0], words[1], 0, 0], name_words("countdown split"))[0];
    f64::from(mixed) < share * 4_294_967_296.0
}

/// Puzzle `index` of a seed; the same one on every machine.
pub fn generate(seed: u64, index: u64, options: &CountdownOptions) -> Result<Puzzle> {
    options.check()?;
    let mut draw = TaskDraw::new("countdown puzzle", seed, index);
    for _ in 0..10_000 {
        let (least, most) = options.numbers;
        let count = least + draw.below(most - least + 1);
        let numbers: Vec<i64> =
            (0..count).map(|_| 1 + draw.below(options.max_number as usize) as i64).collect();
        let Some(tree) = random_expression(&numbers, &options.ops, &mut draw) else { continue };
        let Some(target) = tree.value().and_then(Fraction::as_whole) else { continue };
        let side = match options.split {
            PuzzleSplit::All => true,
            PuzzleSplit::Train => !held_out(&numbers, target, options.held_out),
            PuzzleSplit::HeldOut => held_out(&numbers, target, options.held_out),
        };
        if side && (1..=options.max_target).contains(&target) {
            return Ok(Puzzle { numbers, target, solution: tree.to_string() });
        }
    }
    Err(Error::usage("found no countdown puzzle in 10000 draws")
        .at("countdown")
        .fix("allow more operations, a larger max_target, or another held_out share"))
}

/// A random expression over all the numbers with whole values on the way, none below zero.
pub(super) fn random_expression(
    numbers: &[i64],
    ops: &[CountdownOp],
    draw: &mut TaskDraw,
) -> Option<CountdownExpr> {
    let mut parts: Vec<(Fraction, CountdownExpr)> =
        numbers.iter().map(|&n| (Fraction::whole(n), CountdownExpr::Number(n))).collect();
    while parts.len() > 1 {
        let left = parts.swap_remove(draw.below(parts.len()));
        let right = parts.swap_remove(draw.below(parts.len()));
        let joined = (0..8).find_map(|_| {
            let op = ops[draw.below(ops.len())];
            // The larger first, so that differences stay above zero and quotients have a chance.
            let (a, b) = if op == CountdownOp::Add || left.0.as_whole() >= right.0.as_whole() {
                (&left, &right)
            } else {
                (&right, &left)
            };
            combine(op, a, b).filter(|(value, _)| value.as_whole().is_some_and(|v| v >= 0))
        })?;
        parts.push(joined);
    }
    parts.pop().map(|(_, tree)| tree)
}

/// Random numbers of one name, seed and index.
pub(crate) struct TaskDraw {
    key: [u32; 2],
    counter: [u32; 4],
    words: [u32; 4],
    used: usize,
}

impl TaskDraw {
    pub(crate) fn new(name: &str, seed: u64, index: u64) -> Self {
        let [stream, _] = name_words(name);
        let counter = [index as u32, (index >> 32) as u32, 0, stream];
        TaskDraw { key: [seed as u32, (seed >> 32) as u32], counter, words: [0; 4], used: 4 }
    }

    pub(crate) fn word(&mut self) -> u32 {
        if self.used == 4 {
            self.words = philox4x32(self.counter, self.key);
            self.counter[2] = self.counter[2].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// A number below `n`, which is at least 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u64::from(self.word()) * n as u64) >> 32) as usize
    }

    /// Yes, with that probability.
    pub(crate) fn chance(&mut self, share: f64) -> bool {
        f64::from(self.word()) < share * 4_294_967_296.0
    }
}
