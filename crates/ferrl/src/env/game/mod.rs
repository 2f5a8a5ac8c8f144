//! Single-player games with the settings and rewards of GEM's (Liu et al., 2025): actions are in `\boxed{}`, turns are
//! limited, a completion without an action ends the episode with -0.1, an illegal action costs a turn.
//!
//! The texts are Ferrl's, and shorter. With `format = "line"` the action is the first non-empty line of the completion, for small
//! models. A game is a file of this folder and a line in [`GAMES`].

mod fifteen;
mod game_2048;
mod guess;
mod hangman;
mod hanoi;
mod mastermind;
mod minesweeper;
mod sokoban;
mod sudoku;
mod wordle;
mod words;

use super::{Environment, EpisodeEnd, Next, Turn, demonstrate};
use crate::env;
use crate::task::{Entry, Task, TaskExample};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use schemars::{JsonSchema, schema_for};
use serde::{Deserialize, Serialize};
use serde_json::Map;

/// Every game, for the registry of tasks.
pub(crate) const GAMES: &[&Entry] = &[
    &guess::ENTRY,
    &mastermind::ENTRY,
    &wordle::ENTRY,
    &hangman::ENTRY,
    &sudoku::ENTRY,
    &hanoi::ENTRY,
    &game_2048::ENTRY,
    &minesweeper::ENTRY,
    &sokoban::ENTRY,
    &fifteen::ENTRY,
];

/// Reward of a completion without an action.
const NO_ACTION: f64 = -0.1;

/// How actions are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ActionFormat {
    /// In `\boxed{}`; the last one counts.
    #[default]
    Boxed,
    /// The first line that has text.
    Line,
}

impl ActionFormat {
    /// The action of a completion.
    fn action(self, completion: &str) -> Option<&str> {
        let found = match self {
            ActionFormat::Boxed => {
                let from = completion.rfind("\\boxed{")? + "\\boxed{".len();
                completion[from..].split_once('}')?.0
            }
            ActionFormat::Line => completion.lines().find(|line| !line.trim().is_empty())?,
        };
        Some(found.trim()).filter(|action| !action.is_empty())
    }

    /// An action as a completion writes it.
    fn write(self, action: &str) -> String {
        match self {
            ActionFormat::Boxed => format!("\\boxed{{{action}}}"),
            ActionFormat::Line => action.to_string(),
        }
    }

    /// The sentence that asks for the format.
    fn hint(self) -> &'static str {
        match self {
            ActionFormat::Boxed => " Write your action in \\boxed{}.",
            ActionFormat::Line => "",
        }
    }
}

/// The state of a game.
trait Rules: Send {
    /// The task, for the first observation.
    fn instructions(&self) -> String;
    /// An action, without its box.
    fn play(&mut self, action: &str) -> Move;
    /// The reward of the last turn if the game is not over.
    fn at_limit(&self) -> f64 {
        0.0
    }
    fn random(&self, draw: &mut TaskDraw) -> String;
}

/// The result of an action.
#[derive(Clone, Debug, Default, PartialEq)]
struct Move {
    /// The observation.
    pub shown: String,
    pub reward: f64,
    /// Whether the game is over, and whether it was won.
    pub over: Option<bool>,
}

impl Move {
    /// The game continues.
    fn on(shown: impl Into<String>, reward: f64) -> Self {
        Move { shown: shown.into(), reward, over: None }
    }
    /// The action is not allowed, or cannot be read.
    fn illegal(why: impl Into<String>) -> Self {
        Move::on(why, 0.0)
    }
    /// The game is over.
    fn over(shown: impl Into<String>, reward: f64, won: bool) -> Self {
        Move { shown: shown.into(), reward, over: Some(won) }
    }
}

#[derive(Clone, Copy)]
struct GameLimits {
    turns: usize,
    format: ActionFormat,
}

/// A game with its limit of turns.
struct GameEpisode<R> {
    rules: R,
    limits: GameLimits,
    turn: usize,
    draw: TaskDraw,
}

impl<R: Rules> Environment for GameEpisode<R> {
    fn start(&mut self) -> env::Result<String> {
        let (GameLimits { turns, format }, task) = (self.limits, self.rules.instructions());
        let gap = if task.ends_with('\n') { "" } else { " " };
        Ok(match format {
            ActionFormat::Boxed => format!("{task}{gap}You have {turns} turns.{}\n", format.hint()),
            ActionFormat::Line => format!("{task}{gap}{turns} turns.\n"),
        })
    }

    fn step(&mut self, action: &str) -> env::Result<Turn> {
        self.turn += 1;
        let Some(action) = self.limits.format.action(action) else {
            let shown = Next::Observation("\nNo action found.\n".into());
            let end = Some(EpisodeEnd::Terminated);
            return Ok(Turn { next: shown, reward: NO_ACTION, score: Some(0.0), end, ..Default::default() });
        };
        let mut done = self.rules.play(action);
        if done.over.is_none() && self.turn >= self.limits.turns {
            done.reward += self.rules.at_limit();
            done.over = Some(false);
        }
        Ok(Turn {
            next: Next::Observation(format!("\n{}\n", done.shown)),
            reward: done.reward,
            score: done.over.map(f64::from),
            end: done.over.map(|_| EpisodeEnd::Terminated),
            ..Default::default()
        })
    }

    fn random_action(&mut self) -> Option<String> {
        Some(self.limits.format.write(&self.rules.random(&mut self.draw)))
    }
}

/// Episodes of one game by number.
struct Games<F> {
    name: &'static str,
    seed: u64,
    limits: GameLimits,
    deal: F,
}

impl<F, R> Games<F>
where
    F: Fn(&mut TaskDraw) -> R + Send + Sync,
    R: Rules + 'static,
{
    /// Game `index`, from its own random numbers, which differ between training and `held_out`.
    fn play(&self, index: u64, held_out: bool) -> GameEpisode<R> {
        let stream = if held_out { format!("{} held out", self.name) } else { self.name.to_string() };
        let mut draw = TaskDraw::new(&stream, self.seed, index);
        GameEpisode { rules: (self.deal)(&mut draw), limits: self.limits, turn: 0, draw }
    }
}

impl<F, R> Task for Games<F>
where
    F: Fn(&mut TaskDraw) -> R + Send + Sync,
    R: Rules + 'static,
{
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let columns = Map::from_iter([("episode".to_string(), index.into())]);
        demonstrate(&mut self.play(index, held_out), columns, Environment::random_action)
    }

    fn episode(&self, index: u64, held_out: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(self.play(index, held_out)))
    }
}

/// A whole number of a setting within bounds.
fn within(key: &str, value: usize, least: usize, most: usize) -> Result<usize> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(Error::usage(format!("{value}, expected {least} to {most}")).at(format!("data.task.{key}")))
}

/// The whole numbers of an action, such as `3 1 4` or `(3, 1): 4`; `None` if a word is not a number.
fn numbers(action: &str) -> Option<Vec<usize>> {
    let words = action.split(|c: char| !c.is_alphanumeric() && c != '-').filter(|word| !word.is_empty());
    words.map(|word| word.parse().ok()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
    Left,
    Right,
}

impl Direction {
    const ALL: [(&'static str, Direction); 4] = [
        ("up", Direction::Up),
        ("down", Direction::Down),
        ("left", Direction::Left),
        ("right", Direction::Right),
    ];

    fn read(action: &str) -> Option<Direction> {
        let word = action.to_lowercase();
        Direction::ALL.iter().find(|(name, _)| *name == word).map(|(_, direction)| *direction)
    }

    fn random(draw: &mut TaskDraw) -> String {
        Direction::ALL[draw.below(4)].0.to_string()
    }

    /// The neighbour of a cell, if it is on the board.
    fn from(self, [row, column]: [usize; 2], [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        match self {
            Direction::Up => (row > 0).then(|| [row - 1, column]),
            Direction::Down => (row + 1 < rows).then_some([row + 1, column]),
            Direction::Left => (column > 0).then(|| [row, column - 1]),
            Direction::Right => (column + 1 < columns).then_some([row, column + 1]),
        }
    }
}

#[cfg(test)]
mod tests;
