//! Sokoban: push every box onto a target. Reward 1 when solved; at the last turn the fraction of boxes on targets.
//!
//! Boards are dealt backwards: from the solved one the player pulls boxes around, so that each can be solved.

use super::{ActionFormat, Direction, GameLimits, Games, Move, Rules, TaskDraw, schema_for, within};
use crate::task::{Entry, options};
use ferrl_engine::Result;
use serde_json::{Map, Value};

pub(super) const ENTRY: Entry = Entry {
    name: "sokoban",
    about: "push boxes onto targets, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o = Options::read(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| Sokoban::dealt(o.size, o.boxes, o.turns, draw);
        Ok(Box::new(Games { name: "sokoban", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Rows and columns, walls included. [5, 32]
    size: usize = 6,
    /// Number of boxes, and of targets.
    boxes: usize = 2,
    /// Maximum number of turns of an episode. [2, 100000]
    turns: usize = 20,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        within("boxes", o.boxes, 1, (o.size - 2) * (o.size - 2) / 4)?;
        Ok(o)
    }
}

type Cell = [usize; 2];

#[derive(Clone)]
struct Sokoban {
    size: usize,
    targets: Vec<Cell>,
    boxes: Vec<Cell>,
    player: Cell,
}

impl Sokoban {
    fn dealt(size: usize, boxes: usize, turns: usize, draw: &mut TaskDraw) -> Sokoban {
        loop {
            let mut free: Vec<Cell> =
                (1..size - 1).flat_map(|r| (1..size - 1).map(move |c| [r, c])).collect();
            let mut cell = || free.swap_remove(draw.below(free.len()));
            let targets: Vec<Cell> = (0..boxes).map(|_| cell()).collect();
            let solved = Sokoban { size, boxes: targets.clone(), targets, player: cell() };
            // Every pull is one push of the solution; walking between them must fit too.
            if let Some(board) = solved.pulled(turns, draw) {
                return board;
            }
        }
    }

    /// The board after a random walk back of fewer than `turns` steps, where no box is left on a target.
    fn pulled(mut self, turns: usize, draw: &mut TaskDraw) -> Option<Sokoban> {
        for _ in 0..turns - 1 {
            let direction = Direction::ALL[draw.below(4)].1;
            let Some(to) = self.open(self.player, direction) else { continue };
            let behind = Direction::ALL
                .iter()
                .map(|(_, d)| *d)
                .find(|d| d.from(to, [self.size; 2]) == Some(self.player));
            // The box on the other side comes along, most of the time.
            let pulled = behind.and_then(|d| d.from(self.player, [self.size; 2]));
            let index = pulled.and_then(|at| self.boxes.iter().position(|b| *b == at));
            if let Some(index) = index.filter(|_| draw.chance(0.8)) {
                self.boxes[index] = self.player;
            }
            self.player = to;
        }
        (self.on_targets() == 0).then_some(self)
    }

    /// The next cell, where it is neither wall nor box.
    fn open(&self, from: Cell, direction: Direction) -> Option<Cell> {
        self.inside(from, direction).filter(|cell| !self.boxes.contains(cell))
    }

    fn inside(&self, from: Cell, direction: Direction) -> Option<Cell> {
        let within = |cell: &Cell| cell.iter().all(|i| (1..self.size - 1).contains(i));
        direction.from(from, [self.size; 2]).filter(within)
    }

    fn on_targets(&self) -> usize {
        self.boxes.iter().filter(|b| self.targets.contains(b)).count()
    }

    fn shown(&self) -> String {
        let symbol = |cell: Cell| {
            let wall = cell.iter().any(|&i| i == 0 || i + 1 == self.size);
            let (target, full) = (self.targets.contains(&cell), self.boxes.contains(&cell));
            match (wall, cell == self.player, full, target) {
                (true, ..) => '#',
                (_, true, _, true) => '+',
                (_, true, ..) => '@',
                (_, _, true, true) => '*',
                (_, _, true, _) => '$',
                (_, _, _, true) => '.',
                _ => ' ',
            }
        };
        let row = |r: usize| (0..self.size).map(|c| symbol([r, c])).collect::<String>();
        (0..self.size).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Rules for Sokoban {
    fn instructions(&self) -> String {
        let rule = "Push every box ($) onto a target (.). You are @ (+ on a target); * is a box on a target, # a wall. \
                    An action is up, down, left or right.";
        format!("{rule}\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let Some(direction) = Direction::read(action) else {
            return Move::illegal("not one of up, down, left, right");
        };
        let Some(to) = self.inside(self.player, direction) else {
            return Move::illegal(format!("a wall\n{}", self.shown()));
        };
        if let Some(index) = self.boxes.iter().position(|b| *b == to) {
            let Some(next) = self.open(to, direction) else {
                return Move::illegal(format!("the box cannot move\n{}", self.shown()));
            };
            self.boxes[index] = next;
        }
        self.player = to;
        let solved = self.on_targets() == self.boxes.len();
        if solved { Move::over(self.shown(), 1.0, true) } else { Move::on(self.shown(), 0.0) }
    }

    fn at_limit(&self) -> f64 {
        self.on_targets() as f64 / self.boxes.len() as f64
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        Direction::random(draw)
    }
}
