//! Tower of Hanoi: move all disks from A to C, one at a time, never a larger one onto a smaller one. Reward 1 when solved;
//! at the last turn the fraction of disks on C.

use super::{ActionFormat, GameLimits, Games, Move, Rules, TaskDraw, schema_for};
use crate::task::{Entry, options};

pub(super) const ENTRY: Entry = Entry {
    name: "hanoi",
    about: "move a tower of disks from A to C, in several turns",
    schema: || schema_for!(Options),
    build: |values, seed| {
        let o: Options = options(values)?;
        let limits = GameLimits { turns: o.turns, format: o.format };
        let deal = move |_: &mut TaskDraw| Hanoi { pegs: [(1..=o.disks).rev().collect(), vec![], vec![]] };
        Ok(Box::new(Games { name: "hanoi", seed, limits, deal }))
    },
};

with_defaults! {
struct Options {
    /// Disks of the tower. [1, 16]
    disks: usize = 3,
    /// Maximum number of turns of an episode. [1, 100000]
    turns: usize = 10,
    /// Format of actions: `boxed` (in `\boxed{}`), or `line` (the first line).
    format: ActionFormat = ActionFormat::Boxed,
}
}

const PEGS: [char; 3] = ['A', 'B', 'C'];

/// Disks of each peg, the lowest first.
struct Hanoi {
    pegs: [Vec<usize>; 3],
}

impl Hanoi {
    fn shown(&self) -> String {
        let peg = |(name, disks): (char, &Vec<usize>)| {
            let disks: Vec<String> = disks.iter().map(usize::to_string).collect();
            format!("{name}: {}", disks.join(" "))
        };
        PEGS.into_iter()
            .zip(&self.pegs)
            .map(peg)
            .map(|line| line.trim_end().to_string())
            .collect::<Vec<_>>()
            .join("\n")
    }

    fn disks(&self) -> usize {
        self.pegs.iter().map(Vec::len).sum()
    }

    fn allows(&self, from: usize, to: usize) -> bool {
        let Some(disk) = self.pegs[from].last() else { return false };
        from != to && self.pegs[to].last().is_none_or(|below| disk < below)
    }
}

impl Rules for Hanoi {
    fn instructions(&self) -> String {
        let rule = "Move all disks to C, one at a time, none onto a smaller one. `A C` moves the top disk of A to C.";
        format!("{rule}\n{}\n", self.shown())
    }

    fn play(&mut self, action: &str) -> Move {
        let letters: Vec<char> = action.to_uppercase().chars().filter(|c| c.is_alphanumeric()).collect();
        let peg = |letter: &char| PEGS.iter().position(|peg| peg == letter);
        let pegs: Option<Vec<usize>> = letters.iter().map(peg).collect();
        let Some([from, to]) = pegs.as_deref().and_then(|pegs| <[usize; 2]>::try_from(pegs).ok()) else {
            return Move::illegal("not two pegs, such as A C");
        };
        if !self.allows(from, to) {
            return Move::illegal(format!("not allowed\n{}", self.shown()));
        }
        let disk = self.pegs[from].pop();
        self.pegs[to].extend(disk);
        let solved = self.pegs[2].len() == self.disks();
        if solved { Move::over(self.shown(), 1.0, true) } else { Move::on(self.shown(), 0.0) }
    }

    fn at_limit(&self) -> f64 {
        self.pegs[2].len() as f64 / self.disks() as f64
    }

    fn random(&self, draw: &mut TaskDraw) -> String {
        let moves: Vec<[usize; 2]> =
            (0..9).map(|i| [i / 3, i % 3]).filter(|&[from, to]| self.allows(from, to)).collect();
        let [from, to] = moves[draw.below(moves.len())];
        format!("{} {}", PEGS[from], PEGS[to])
    }
}
