//! Wordle: find a word of five letters. Each letter of a guess is marked: G in place, Y elsewhere in the word, X not in it.
//! Reward: half for letters newly in place, half for the word.

use super::words::FIVE;
use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};

pub(super) const ENTRY: Entry = Entry {
    name: "wordle",
    about: "find a word of five letters from marked guesses, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal =
            move |draw: &mut TaskDraw| Wordle { word: FIVE[draw.below(FIVE.len())], placed: [false; 5] };
        Ok(Box::new(Games { name: "wordle", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Maximum number of turns of an episode. [1, 1000]
    turns: usize = 6,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

struct Wordle {
    word: &'static str,
    placed: [bool; 5],
}

/// The marks of a guess. A letter is marked Y as often as the word has it beyond those in place.
fn marks(word: &[u8], guess: &[u8]) -> String {
    let mut left: Vec<u8> = word.iter().zip(guess).filter(|(w, g)| w != g).map(|(w, _)| *w).collect();
    let mut mark = |(w, g): (&u8, &u8)| {
        if w == g {
            return 'G';
        }
        match left.iter().position(|letter| letter == g) {
            Some(at) => {
                left.swap_remove(at);
                'Y'
            }
            None => 'X',
        }
    };
    word.iter().zip(guess).map(&mut mark).collect()
}

impl Rules for Wordle {
    fn instructions(&self) -> String {
        "Find the word of five letters. Each letter of a guess is marked: G in place, Y elsewhere in the word, X not in it."
            .into()
    }

    fn play(&mut self, action: &str) -> Move {
        let guess = action.to_lowercase();
        if guess.len() != 5 || !guess.bytes().all(|b| b.is_ascii_lowercase()) {
            return Move::illegal("not a word of five letters");
        }
        let marked = marks(self.word.as_bytes(), guess.as_bytes());
        let mut gained = 0;
        for (placed, mark) in self.placed.iter_mut().zip(marked.chars()) {
            gained += usize::from(mark == 'G' && !std::mem::replace(placed, *placed || mark == 'G'));
        }
        let reward = 0.5 * gained as f64 / 5.0;
        if guess == self.word { Move::over(marked, reward + 0.5, true) } else { Move::on(marked, reward) }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        FIVE[draw.below(FIVE.len())].to_string()
    }
}

#[test]
fn letters_are_marked_as_often_as_the_word_has_them() {
    assert_eq!(marks(b"apple", b"paper"), "YYGYX");
    assert_eq!(marks(b"apple", b"apple"), "GGGGG");
    assert_eq!(marks(b"river", b"rotor"), "GXXXG");
    assert_eq!(marks(b"bring", b"error"), "XGXXX");
}
