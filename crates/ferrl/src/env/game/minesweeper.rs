//! Minesweeper: reveal every cell without a mine. A revealed cell shows the number of mines around it, and its neighbours
//! are revealed too where that is 0. Mines are laid at the first action, none under it. Reward: revealed cells divided by
//! all safe cells; a mine earns nothing and ends the game.

use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, numbers, schema_for};
use crate::task::{Entry, options};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "minesweeper",
    about: "reveal the cells of a field without its mines, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| MineField::new(o.size, o.mines, draw);
        Ok(Box::new(Games { name: "minesweeper", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Rows and columns of the field. [2, 64]
    size: usize = 5,
    /// Number of mines.
    mines: usize = 5,
    /// Maximum number of turns of an episode. [1, 100000]
    turns: usize = 25,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        if o.mines == 0 || o.mines >= o.size * o.size {
            let what = format!("{} mines in {} cells", o.mines, o.size * o.size);
            return Err(Error::usage(what).at("data.task.mines").fix("data.task.mines = 5"));
        }
        Ok(o)
    }
}

struct MineField {
    size: usize,
    count: usize,
    /// Empty before the first action.
    mines: Vec<bool>,
    revealed: Vec<bool>,
    draw: TaskDraw,
}

impl MineField {
    fn new(size: usize, count: usize, draw: &mut TaskDraw) -> MineField {
        let own = TaskDraw::new("mines", u64::from(draw.word()) << 32 | u64::from(draw.word()), 0);
        MineField { size, count, mines: Vec::new(), revealed: vec![false; size * size], draw: own }
    }

    fn lay(&mut self, first: usize) {
        let mut free: Vec<usize> = (0..self.size * self.size).filter(|&cell| cell != first).collect();
        self.mines = vec![false; self.size * self.size];
        for _ in 0..self.count {
            let mine = free.swap_remove(self.draw.below(free.len()));
            self.mines[mine] = true;
        }
    }

    fn around(&self, cell: usize) -> Vec<usize> {
        let (row, column) = (cell / self.size, cell % self.size);
        let near = |i: usize| i.saturating_sub(1)..(i + 2).min(self.size);
        let cells = near(row).flat_map(|r| near(column).map(move |c| (r, c)));
        cells.map(|(r, c)| r * self.size + c).filter(|&other| other != cell).collect()
    }

    fn mines_around(&self, cell: usize) -> usize {
        self.around(cell).into_iter().filter(|&other| self.mines[other]).count()
    }

    /// Cells that became visible.
    fn reveal(&mut self, cell: usize) -> usize {
        let (mut open, mut count) = (vec![cell], 0);
        while let Some(cell) = open.pop() {
            if std::mem::replace(&mut self.revealed[cell], true) {
                continue;
            }
            count += 1;
            if self.mines_around(cell) == 0 {
                open.extend(self.around(cell));
            }
        }
        count
    }

    fn shown(&self) -> String {
        let cell = |i: usize| match self.revealed[i] {
            true => self.mines_around(i).to_string(),
            false => ".".to_string(),
        };
        let row = |r: usize| (0..self.size).map(|c| cell(r * self.size + c)).collect::<Vec<_>>().join(" ");
        (0..self.size).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Rules for MineField {
    fn instructions(&self) -> String {
        let (last, mines) = (self.size - 1, self.count);
        let rule = format!(
            "Reveal every cell without a mine: {mines} of {} cells have one. An action is row and column, 0 to {last}.",
            self.size * self.size
        );
        format!("{rule}\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let words = action.to_lowercase();
        let at = numbers(words.strip_prefix("reveal").unwrap_or(&words));
        let Some([row, column]) = at.as_deref().and_then(|at| <[usize; 2]>::try_from(at).ok()) else {
            return Move::illegal("not a row and a column, such as 1 2");
        };
        if row >= self.size || column >= self.size {
            return Move::illegal(format!("row and column are 0 to {}", self.size - 1));
        }
        let cell = row * self.size + column;
        if self.mines.is_empty() {
            self.lay(cell);
        }
        if self.revealed[cell] {
            return Move::illegal(format!("revealed already\n{}", self.shown()));
        }
        if self.mines[cell] {
            return Move::over("a mine", 0.0, false);
        }
        let safe = self.size * self.size - self.count;
        let reward = self.reveal(cell) as f64 / safe as f64;
        let done = self.revealed.iter().filter(|&&revealed| revealed).count() == safe;
        if done { Move::over(self.shown(), reward, true) } else { Move::on(self.shown(), reward) }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        let hidden: Vec<usize> = (0..self.revealed.len()).filter(|&i| !self.revealed[i]).collect();
        let cell = hidden[draw.below(hidden.len())];
        format!("{} {}", cell / self.size, cell % self.size)
    }
}
