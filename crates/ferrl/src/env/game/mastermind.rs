//! Mastermind: find a code of distinct digits. A black peg is a digit in its place, a white one a digit elsewhere in the
//! code. Reward: new black pegs over the best guess so far, divided by the code's length.

use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "mastermind",
    about: "find a code of digits from black and white pegs, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| Mastermind {
            code: code(o.length, o.digits, draw),
            digits: o.digits,
            best: 0,
        };
        Ok(Box::new(Games { name: "mastermind", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Length of the code; its digits are distinct.
    length: usize = 2,
    /// Largest digit; the smallest is 1. [2, 9]
    digits: usize = 6,
    /// Maximum number of turns of an episode. [1, 1000]
    turns: usize = 10,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        if o.length == 0 || o.length > o.digits {
            let what = format!("a code of {} different digits out of {}", o.length, o.digits);
            return Err(Error::usage(what).at("data.task.length").fix("data.task.length = 2"));
        }
        Ok(o)
    }
}

/// Distinct digits in random order.
fn code(length: usize, digits: usize, draw: &mut TaskDraw) -> Vec<usize> {
    let mut all: Vec<usize> = (1..=digits).collect();
    (0..length).map(|_| all.swap_remove(draw.below(all.len()))).collect()
}

struct Mastermind {
    code: Vec<usize>,
    digits: usize,
    best: usize,
}

impl Rules for Mastermind {
    fn instructions(&self) -> String {
        format!(
            "Find the code: {} different digits from 1 to {}, such as {}.",
            self.code.len(),
            self.digits,
            {
                let example: Vec<String> = (1..=self.code.len()).map(|d| d.to_string()).collect();
                example.join(" ")
            }
        )
    }

    fn play(&mut self, action: &str) -> Move {
        let guess: Vec<usize> =
            action.chars().filter_map(|c| c.to_digit(10)).map(|digit| digit as usize).collect();
        let other = action.chars().any(|c| !c.is_ascii_digit() && !c.is_whitespace() && c != ',');
        let distinct = guess.iter().enumerate().all(|(i, digit)| !guess[..i].contains(digit));
        let legal = guess.iter().all(|digit| (1..=self.digits).contains(digit));
        if other || guess.len() != self.code.len() || !legal || !distinct {
            return Move::illegal(format!(
                "not {} different digits from 1 to {}",
                self.code.len(),
                self.digits
            ));
        }
        let black = guess.iter().zip(&self.code).filter(|(g, c)| g == c).count();
        let white = guess.iter().filter(|digit| self.code.contains(digit)).count() - black;
        let gain = black.saturating_sub(self.best) as f64 / self.code.len() as f64;
        self.best = self.best.max(black);
        let shown = format!("{black} black, {white} white");
        if black == self.code.len() { Move::over(shown, gain, true) } else { Move::on(shown, gain) }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        let digits: Vec<String> =
            code(self.code.len(), self.digits, draw).iter().map(usize::to_string).collect();
        digits.join(" ")
    }
}
