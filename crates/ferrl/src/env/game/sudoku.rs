//! Sudoku: fill the empty cells so that every row, column and block has every number once. The solution is the only one.
//! Reward: one divided by the number of empty cells for each right number; a wrong one is refused.

use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, numbers, schema_for, within};
use crate::task::{Entry, options};
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "sudoku",
    about: "fill a sudoku cell by cell, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| Sudoku::dealt(o.size, o.clues, draw);
        Ok(Box::new(Games { name: "sudoku", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Rows and columns: 4 or 9.
    size: usize = 4,
    /// Number of given cells; more if needed for a unique solution.
    clues: usize = 10,
    /// Maximum number of turns of an episode. [1, 100000]
    turns: usize = 15,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        if o.size != 4 && o.size != 9 {
            let what = format!("a sudoku of {} rows, expected 4 or 9", o.size);
            return Err(Error::usage(what).at("data.task.size").fix("data.task.size = 4"));
        }
        within("clues", o.clues, if o.size == 4 { 4 } else { 22 }, o.size * o.size - 1)?;
        Ok(o)
    }
}

/// Numbers by cell; 0 is an empty one.
#[derive(Clone)]
struct Sudoku {
    size: usize,
    cells: Vec<usize>,
    solution: Vec<usize>,
    empty: usize,
}

impl Sudoku {
    /// A full board, from which cells are taken as long as one solution is left.
    fn dealt(size: usize, clues: usize, draw: &mut TaskDraw) -> Sudoku {
        let mut board = Sudoku { size, cells: vec![0; size * size], solution: Vec::new(), empty: 0 };
        board.fill(draw);
        board.solution = board.cells.clone();
        let mut order: Vec<usize> = (0..size * size).collect();
        while board.cells.len() - board.empty > clues && !order.is_empty() {
            let cell = order.swap_remove(draw.below(order.len()));
            let number = std::mem::take(&mut board.cells[cell]);
            if board.clone().solutions(2) == 1 {
                board.empty += 1;
            } else {
                board.cells[cell] = number;
            }
        }
        board
    }

    /// Whether a number may stand in an empty cell.
    fn fits(&self, cell: usize, number: usize) -> bool {
        let (n, block) = (self.size, self.size.isqrt());
        let (row, column) = (cell / n, cell % n);
        let corner = (row / block * block) * n + column / block * block;
        (0..n).all(|i| {
            let others = [row * n + i, i * n + column, corner + i / block * n + i % block];
            others.into_iter().all(|other| self.cells[other] != number)
        })
    }

    /// The empty cell with the fewest numbers that fit, and these.
    fn tightest(&self) -> Option<(usize, Vec<usize>)> {
        let fitting = |cell: usize| (1..=self.size).filter(|&n| self.fits(cell, n)).collect::<Vec<_>>();
        let empty = (0..self.cells.len()).filter(|&cell| self.cells[cell] == 0);
        empty.map(|cell| (cell, fitting(cell))).min_by_key(|(_, numbers)| numbers.len())
    }

    /// Fills all empty cells at random.
    fn fill(&mut self, draw: &mut TaskDraw) -> bool {
        let Some((cell, mut numbers)) = self.tightest() else { return true };
        while !numbers.is_empty() {
            self.cells[cell] = numbers.swap_remove(draw.below(numbers.len()));
            if self.fill(draw) {
                return true;
            }
        }
        self.cells[cell] = 0;
        false
    }

    /// Number of solutions, counted up to `most`.
    fn solutions(&mut self, most: usize) -> usize {
        let Some((cell, numbers)) = self.tightest() else { return 1 };
        let mut found = 0;
        for number in numbers {
            self.cells[cell] = number;
            found += self.solutions(most - found);
            if found >= most {
                break;
            }
        }
        self.cells[cell] = 0;
        found
    }

    fn shown(&self) -> String {
        let cell = |&number: &usize| if number == 0 { ".".to_string() } else { number.to_string() };
        let row = |cells: &[usize]| cells.iter().map(cell).collect::<Vec<_>>().join(" ");
        self.cells.chunks(self.size).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Rules for Sudoku {
    fn instructions(&self) -> String {
        let n = self.size;
        let rule = format!(
            "Fill the sudoku: every row, column and block has each number from 1 to {n} once. \
             An action is row, column and number, such as 1 2 3."
        );
        format!("{rule}\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let Some([row, column, number]) = numbers(action).and_then(|n| <[usize; 3]>::try_from(n).ok()) else {
            return Move::illegal("not a row, a column and a number");
        };
        if [row, column, number].iter().any(|n| !(1..=self.size).contains(n)) {
            return Move::illegal(format!("rows, columns and numbers are 1 to {}", self.size));
        }
        let cell = (row - 1) * self.size + column - 1;
        if self.cells[cell] != 0 {
            return Move::illegal(format!("filled already\n{}", self.shown()));
        }
        if self.solution[cell] != number {
            return Move::illegal(format!("wrong\n{}", self.shown()));
        }
        self.cells[cell] = number;
        let reward = 1.0 / self.empty as f64;
        let done = self.cells == self.solution;
        if done { Move::over(self.shown(), reward, true) } else { Move::on(self.shown(), reward) }
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        let empty: Vec<usize> = (0..self.cells.len()).filter(|&cell| self.cells[cell] == 0).collect();
        let cell = empty[draw.below(empty.len())];
        let (row, column) = (cell / self.size + 1, cell % self.size + 1);
        format!("{row} {column} {}", 1 + draw.below(self.size))
    }
}
