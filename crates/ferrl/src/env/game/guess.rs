//! Guess the number: the player names one and hears whether the secret is larger or smaller. Reward 1 on a hit; at the
//! last turn `1 - distance / (max - min)`.
//!
//! Halving the interval finds the secret in 4 turns out of 10 numbers (3.1 at best on average).

use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "guess",
    about: "guess a number from hints, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| {
            let secret = o.min + draw.below((o.max - o.min + 1) as usize) as i64;
            Guess { min: o.min, max: o.max, secret, last: None, format: o.format }
        };
        Ok(Box::new(Games { name: "guess", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Smallest number.
    min: i64 = 1,
    /// Largest number.
    max: i64 = 10,
    /// Maximum number of turns of an episode. [1, 1000]
    turns: usize = 4,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        if o.max <= o.min || o.max.abs_diff(o.min) >= 1 << 31 {
            let what = format!("numbers between {} and {}", o.min, o.max);
            return Err(Error::usage(what).at("data.task").fix("data.task.min = 1, data.task.max = 10"));
        }
        Ok(o)
    }
}

struct Guess {
    min: i64,
    max: i64,
    secret: i64,
    last: Option<i64>,
    format: ActionFormat,
}

impl Rules for Guess {
    fn instructions(&self) -> String {
        match self.format {
            ActionFormat::Boxed => format!("Guess a number between {} and {}.", self.min, self.max),
            ActionFormat::Line => format!("between {} and {},", self.min, self.max),
        }
    }

    fn play(&mut self, action: &str) -> Move {
        let Ok(guess) = action.parse::<i64>() else { return Move::illegal("not a number") };
        self.last = Some(guess);
        if guess == self.secret {
            return Move::over("right", 1.0, true);
        }
        let hint = if guess < self.secret { "larger" } else { "smaller" };
        Move::on(hint, 0.0)
    }

    fn at_limit(&self) -> f64 {
        match self.last.filter(|guess| (self.min..=self.max).contains(guess)) {
            Some(guess) => 1.0 - guess.abs_diff(self.secret) as f64 / (self.max - self.min) as f64,
            None => 0.0,
        }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        (self.min + draw.below((self.max - self.min + 1) as usize) as i64).to_string()
    }
}
