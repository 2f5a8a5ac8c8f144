//! Hangman: find a word letter by letter, or name it whole. Reward: half for the letters of the word that are newly shown,
//! half for the word.

use super::words::LONGER;
use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};

pub(super) const ENTRY: Entry = Entry {
    name: "hangman",
    about: "find a word letter by letter, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal =
            move |draw: &mut TaskDraw| Hangman { word: LONGER[draw.below(LONGER.len())], tried: Vec::new() };
        Ok(Box::new(Games { name: "hangman", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Maximum number of turns of an episode. [1, 1000]
    turns: usize = 12,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

struct Hangman {
    word: &'static str,
    tried: Vec<char>,
}

impl Hangman {
    fn shown(&self) -> String {
        let letter = |c: char| if self.tried.contains(&c) { c } else { '_' };
        self.word.chars().map(letter).collect()
    }

    /// Number of letters that are not shown yet.
    fn hidden(&self) -> usize {
        self.shown().matches('_').count()
    }
}

impl Rules for Hangman {
    fn instructions(&self) -> String {
        format!("Find the word: name a letter, or the whole word. {}", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let guess = action.to_lowercase();
        let all = self.word.len() as f64;
        if guess == self.word {
            return Move::over(self.word, 0.5 * self.hidden() as f64 / all + 0.5, true);
        }
        let mut letters = guess.chars();
        let (Some(letter), None) = (letters.next(), letters.next()) else {
            let why =
                if guess.chars().all(|c| c.is_ascii_lowercase()) { "not the word" } else { "not a letter" };
            return Move::illegal(format!("{why}: {}", self.shown()));
        };
        if !letter.is_ascii_lowercase() || self.tried.contains(&letter) {
            return Move::illegal(format!("not a new letter: {}", self.shown()));
        }
        let before = self.hidden();
        self.tried.push(letter);
        let reward = 0.5 * (before - self.hidden()) as f64 / all;
        if self.hidden() == 0 {
            Move::over(self.shown(), reward + 0.5, true)
        } else {
            Move::on(self.shown(), reward)
        }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        let left: Vec<char> = ('a'..='z').filter(|c| !self.tried.contains(c)).collect();
        left[draw.below(left.len())].to_string()
    }
}
