//! 2048: slide all tiles; equal ones that meet become one of twice the value, and a new tile appears. Reward: the gain of
//! the largest tile in powers of two, divided by the gain that reaches the target.

use super::{ActionFormat, Direction, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "2048",
    about: "merge tiles up to a target, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| Game::dealt(o.size, o.target, draw);
        Ok(Box::new(Games { name: "2048", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Rows and columns of the board. [2, 16]
    size: usize = 4,
    /// Target tile, a power of two.
    target: u64 = 64,
    /// Maximum number of turns of an episode. [1, 100000]
    turns: usize = 50,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        if !o.target.is_power_of_two() || !(8..=1 << 20).contains(&o.target) {
            return Err(Error::usage(format!("{} is not a power of two of at least 8", o.target))
                .at("data.task.target")
                .fix("data.task.target = 64"));
        }
        Ok(o)
    }
}

/// Powers of two by cell; 0 is an empty cell. New tiles are drawn from the game's own random numbers.
struct Game {
    size: usize,
    cells: Vec<u32>,
    target: u32,
    first: u32,
    draw: TaskDraw,
}

impl Game {
    fn dealt(size: usize, target: u64, draw: &mut TaskDraw) -> Game {
        let own = TaskDraw::new("2048 tiles", u64::from(draw.word()) << 32 | u64::from(draw.word()), 0);
        let mut game =
            Game { size, cells: vec![0; size * size], target: target.ilog2(), first: 0, draw: own };
        game.appear();
        game.appear();
        game.first = game.largest();
        game
    }

    /// A new tile: 2, or 4 in one of ten.
    fn appear(&mut self) {
        let free: Vec<usize> = (0..self.cells.len()).filter(|&i| self.cells[i] == 0).collect();
        if !free.is_empty() {
            let at = free[self.draw.below(free.len())];
            self.cells[at] = if self.draw.chance(0.1) { 2 } else { 1 };
        }
    }

    fn largest(&self) -> u32 {
        self.cells.iter().copied().max().unwrap_or(0)
    }

    /// The cells of line `i` in the order in which tiles slide: the first is the wall's.
    fn line(&self, direction: Direction, i: usize) -> Vec<usize> {
        let n = self.size;
        let at = |j: usize| match direction {
            Direction::Left => i * n + j,
            Direction::Right => i * n + n - 1 - j,
            Direction::Up => j * n + i,
            Direction::Down => (n - 1 - j) * n + i,
        };
        (0..n).map(at).collect()
    }

    /// The board after a slide.
    fn slid(&self, direction: Direction) -> Vec<u32> {
        let mut cells = vec![0; self.cells.len()];
        for i in 0..self.size {
            let line = self.line(direction, i);
            let mut to = 0;
            let mut merges = false; // whether the last tile may still take one in
            for tile in line.iter().map(|&at| self.cells[at]).filter(|&tile| tile > 0) {
                if merges && cells[line[to - 1]] == tile {
                    cells[line[to - 1]] += 1;
                    merges = false;
                } else {
                    cells[line[to]] = tile;
                    to += 1;
                    merges = true;
                }
            }
        }
        cells
    }

    fn shown(&self) -> String {
        let cell = |&power: &u32| if power == 0 { ".".to_string() } else { (1u64 << power).to_string() };
        let row = |cells: &[u32]| cells.iter().map(cell).collect::<Vec<_>>().join(" ");
        self.cells.chunks(self.size).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Rules for Game {
    fn instructions(&self) -> String {
        let target = 1u64 << self.target;
        let rule = "Slide the tiles up, down, left or right; equal tiles that meet merge.";
        format!("{rule} Reach {target}.\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let Some(direction) = Direction::read(action) else {
            return Move::illegal("not one of up, down, left, right");
        };
        let (cells, before) = (self.slid(direction), self.largest());
        if cells == self.cells {
            return Move::illegal(format!("nothing moves\n{}", self.shown()));
        }
        self.cells = cells;
        self.appear();
        let gain = self.largest().min(self.target).saturating_sub(before.min(self.target));
        let reward = f64::from(gain) / f64::from(self.target - self.first);
        if self.largest() >= self.target {
            return Move::over(self.shown(), reward, true);
        }
        let stuck = Direction::ALL.iter().all(|(_, direction)| self.slid(*direction) == self.cells);
        if stuck { Move::over(self.shown(), reward, false) } else { Move::on(self.shown(), reward) }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        Direction::random(draw)
    }
}
