//! The sliding puzzle: bring the tiles into order by moving one into the gap. Reward 1 when solved; at the last turn the
//! fraction of tiles in place.

use super::{ActionFormat, Direction, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};

pub(super) const ENTRY: Entry = Entry {
    name: "fifteen",
    about: "slide tiles into order, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |draw: &mut TaskDraw| Fifteen::shuffled(o.rows, draw);
        Ok(Box::new(Games { name: "fifteen", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Rows and columns of the board. [2, 10]
    rows: usize = 2,
    /// Maximum number of turns of an episode. [1, 100000]
    turns: usize = 20,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

/// Tiles by cell; 0 is the gap.
struct Fifteen {
    rows: usize,
    tiles: Vec<usize>,
}

impl Fifteen {
    /// Shuffled by legal moves, so it can be solved; never solved already.
    fn shuffled(rows: usize, draw: &mut TaskDraw) -> Fifteen {
        let tiles = (1..rows * rows).chain([0]).collect();
        let mut board = Fifteen { rows, tiles };
        let mut moves = 20 * rows * rows;
        while moves > 0 || board.in_place() == rows * rows - 1 {
            board.slide(Direction::ALL[draw.below(4)].1);
            moves = moves.saturating_sub(1);
        }
        board
    }

    /// Moves a tile into the gap; `up` moves the tile below it up.
    fn slide(&mut self, direction: Direction) -> bool {
        let gap = self.tiles.iter().position(|&tile| tile == 0).unwrap_or(0);
        let opposite = match direction {
            Direction::Up => Direction::Down,
            Direction::Down => Direction::Up,
            Direction::Left => Direction::Right,
            Direction::Right => Direction::Left,
        };
        let Some([row, column]) = opposite.from([gap / self.rows, gap % self.rows], [self.rows; 2]) else {
            return false;
        };
        self.tiles.swap(gap, row * self.rows + column);
        true
    }

    fn in_place(&self) -> usize {
        self.tiles.iter().enumerate().filter(|&(i, &tile)| tile == i + 1).count()
    }

    fn shown(&self) -> String {
        let cell = |&tile: &usize| if tile == 0 { "_".to_string() } else { tile.to_string() };
        let row = |tiles: &[usize]| tiles.iter().map(cell).collect::<Vec<_>>().join(" ");
        self.tiles.chunks(self.rows).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Rules for Fifteen {
    fn instructions(&self) -> String {
        let rule = "Slide tiles into the gap (_) until they are in order, the gap last. \
                    An action is the way a tile moves: up, down, left or right.";
        format!("{rule}\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let Some(direction) = Direction::read(action) else {
            return Move::illegal("not one of up, down, left, right");
        };
        if !self.slide(direction) {
            return Move::illegal(format!("no tile can move {}\n{}", action.to_lowercase(), self.shown()));
        }
        let solved = self.in_place() == self.tiles.len() - 1;
        if solved { Move::over(self.shown(), 1.0, true) } else { Move::on(self.shown(), 0.0) }
    }

    fn at_limit(&self) -> f64 {
        self.in_place() as f64 / (self.tiles.len() - 1) as f64
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        Direction::random(draw)
    }
}
