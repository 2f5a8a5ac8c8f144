//! Which rows come next: shuffled, weighted, and exactly resumable.
//!
//! The order is a function of the seed and of how many rows each dataset has. A dataset of weight `w` gives
//! `w` times its rows to each epoch; it goes through all of them before it repeats any, also across epochs.

use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;
use serde::{Deserialize, Serialize};

use super::Dataset;

/// How rows are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Decides the order.
    pub seed: u64,
    /// Off: datasets one after the other, rows in the order of the files.
    pub shuffle: bool,
    /// Leaves out the batch at the end of an epoch that is smaller than asked for.
    pub drop_last: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 0, shuffle: true, drop_last: true }
    }
}

/// A row of one of the datasets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pick {
    /// Which dataset.
    pub dataset: usize,
    /// Which row of it.
    pub row: usize,
}

/// Rows drawn together; a batch never spans two epochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The epoch they belong to, from 0.
    pub epoch: u64,
    /// The rows.
    pub picks: Vec<Pick>,
}

/// Everything a checkpoint needs to go on with the very next row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The seed of the order.
    pub seed: u64,
    /// The epoch under way, from 0.
    pub epoch: u64,
    /// Rows of it already drawn.
    pub cursor: usize,
    /// Rows and weight of each dataset, to notice that the data changed.
    pub sizes: Vec<(usize, f64)>,
    /// Whether rows are shuffled.
    pub shuffle: bool,
}

/// Draws rows without end, epoch after epoch.
#[derive(Clone, Debug)]
pub struct Loader {
    options: Options,
    sizes: Vec<(usize, f64)>,
    epoch: u64,
    cursor: usize,
    order: Vec<Pick>,
}

/// What a permutation is for; part of its random numbers' counter.
const ROWS: u32 = 0x726f_7773;
const MIX: u32 = 0x6d69_7865;

impl Loader {
    /// A loader over datasets.
    pub fn new(datasets: &[Dataset], options: Options) -> Result<Self> {
        Self::over(datasets.iter().map(|d| (d.len(), d.weight)).collect(), options)
    }

    /// A loader over datasets given by number of rows and weight.
    pub fn over(sizes: Vec<(usize, f64)>, options: Options) -> Result<Self> {
        if sizes.iter().any(|(_, w)| !(w.is_finite() && *w > 0.0)) {
            return Err(Error::usage("a weight of data is not a number above 0").fix("give positive weights"));
        }
        let mut loader = Loader { options, sizes, epoch: 0, cursor: 0, order: Vec::new() };
        if (0..loader.sizes.len()).all(|d| loader.share(d, 0).is_empty()) {
            return Err(Error::data("an epoch has no rows").fix("give more data or larger weights"));
        }
        loader.order = loader.arrange();
        Ok(loader)
    }

    /// The next `count` rows, or what is left of the epoch.
    pub fn next_batch(&mut self, count: usize) -> Result<Draw> {
        if count == 0 {
            return Err(Error::usage("a batch of 0 rows").fix("set the batch size to at least 1"));
        }
        let whole = |l: &Loader| l.order.len() - l.cursor >= count;
        if self.cursor >= self.order.len() || (self.options.drop_last && !whole(self)) {
            self.advance();
        }
        if self.options.drop_last && !whole(self) {
            return Err(Error::usage(format!(
                "a batch of {count} rows, but an epoch has only {}",
                self.order.len()
            ))
            .fix("lower the batch size, give more data, or keep the last batch (drop_last = false)"));
        }
        let end = (self.cursor + count).min(self.order.len());
        let picks = self.order[self.cursor..end].to_vec();
        self.cursor = end;
        Ok(Draw { epoch: self.epoch, picks })
    }

    /// Batches of `count` rows in the epoch under way.
    pub fn batches(&self, count: usize) -> usize {
        let rows = self.order.len();
        if self.options.drop_last { rows / count.max(1) } else { rows.div_ceil(count.max(1)) }
    }

    /// The epoch under way, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Passes over the data so far, with the part of the one under way.
    pub fn epochs(&self) -> f64 {
        self.epoch as f64 + self.cursor as f64 / self.order.len().max(1) as f64
    }

    /// Whether every row of the epoch was drawn.
    pub fn at_end(&self) -> bool {
        self.cursor >= self.order.len()
    }

    /// Rows in the epoch under way.
    pub fn epoch_rows(&self) -> usize {
        self.order.len()
    }

    /// What a checkpoint keeps.
    pub fn state(&self) -> State {
        State {
            seed: self.options.seed,
            epoch: self.epoch,
            cursor: self.cursor,
            sizes: self.sizes.clone(),
            shuffle: self.options.shuffle,
        }
    }

    /// Goes on where a checkpoint stopped; refused when the data is not what it was.
    pub fn restore(&mut self, state: &State) -> Result<()> {
        if state.sizes != self.sizes {
            let show = |sizes: &[(usize, f64)]| {
                sizes.iter().map(|(n, w)| format!("{n} rows x {w}")).collect::<Vec<_>>().join(", ")
            };
            return Err(Error::data(format!(
                "the data is not what the checkpoint was made with: got {}, expected {}",
                show(&self.sizes),
                show(&state.sizes)
            ))
            .fix("resume with the same data and weights, or start a new run from the saved model"));
        }
        if (state.seed, state.shuffle) != (self.options.seed, self.options.shuffle) {
            return Err(Error::usage(format!(
                "data is drawn with seed {} and shuffle {}, the checkpoint with {} and {}",
                self.options.seed, self.options.shuffle, state.seed, state.shuffle
            ))
            .fix("resume with the settings of the run"));
        }
        self.epoch = state.epoch;
        self.order = self.arrange();
        self.cursor = state.cursor.min(self.order.len());
        Ok(())
    }

    fn advance(&mut self) {
        // Small weights can leave an epoch empty; some later one is not, as the first was not.
        loop {
            self.epoch += 1;
            self.cursor = 0;
            self.order = self.arrange();
            if !self.order.is_empty() {
                return;
            }
        }
    }

    /// The part of a dataset's endless stream of rows that an epoch takes.
    fn share(&self, dataset: usize, epoch: u64) -> std::ops::Range<u64> {
        let (rows, weight) = self.sizes[dataset];
        let upto = |epoch: u64| (epoch as f64 * weight * rows as f64).round() as u64;
        upto(epoch)..upto(epoch + 1)
    }

    /// All rows of the epoch, in order.
    fn arrange(&self) -> Vec<Pick> {
        let mut order = Vec::new();
        for dataset in 0..self.sizes.len() {
            let rows = self.sizes[dataset].0 as u64;
            let (mut pass, mut permutation) = (u64::MAX, Vec::new());
            for position in self.share(dataset, self.epoch) {
                if position / rows != pass {
                    pass = position / rows;
                    permutation = (0..rows as usize).collect();
                    if self.options.shuffle {
                        shuffle(&mut permutation, self.options.seed, pass, ROWS ^ dataset as u32);
                    }
                }
                order.push(Pick { dataset, row: permutation[(position % rows) as usize] });
            }
        }
        if self.options.shuffle {
            shuffle(&mut order, self.options.seed, self.epoch, MIX);
        }
        order
    }
}

/// Fisher-Yates over counter-based random numbers: a function of the arguments alone.
fn shuffle<T>(items: &mut [T], seed: u64, round: u64, stream: u32) {
    let key = [seed as u32, (seed >> 32) as u32];
    for i in (1..items.len()).rev() {
        let counter = [i as u32, round as u32, (round >> 32) as u32, stream];
        let [low, high, ..] = philox4x32(counter, key);
        let word = u64::from(high) << 32 | u64::from(low);
        // The high half of a product scales the word to 0..=i; its bias is below 2^-32.
        let j = (u128::from(word) * (i as u128 + 1)) >> 64;
        items.swap(i, j as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn loader(sizes: &[(usize, f64)], options: Options) -> Loader {
        Loader::over(sizes.to_vec(), options).unwrap()
    }

    #[test]
    fn an_epoch_has_every_row_once_and_the_next_another_order() {
        let mut l = loader(&[(10, 1.0), (7, 1.0)], Options { drop_last: false, ..Options::default() });
        let mut epochs: HashMap<u64, Vec<Pick>> = HashMap::new();
        for _ in 0..2 * l.batches(4) {
            let draw = l.next_batch(4).unwrap();
            epochs.entry(draw.epoch).or_default().extend(draw.picks);
        }
        let sorted = |e: u64| {
            let mut picks = epochs[&e].clone();
            picks.sort();
            picks
        };
        let all: Vec<Pick> = (0..10)
            .map(|row| Pick { dataset: 0, row })
            .chain((0..7).map(|row| Pick { dataset: 1, row }))
            .collect();
        assert_eq!(sorted(0), all);
        assert_eq!(sorted(1), all);
        assert_ne!(epochs[&0], epochs[&1]);
    }

    #[test]
    fn resume_is_exact_from_every_point() {
        for drop_last in [true, false] {
            let options = Options { seed: 9, drop_last, ..Options::default() };
            let sizes = [(11, 1.0), (5, 2.0), (9, 0.4)];
            let mut whole = loader(&sizes, options);
            let draws: Vec<Draw> = (0..40).map(|i| whole.next_batch(1 + i % 5).unwrap()).collect();
            for stop in 0..40 {
                let mut first = loader(&sizes, options);
                (0..stop).for_each(|i| drop(first.next_batch(1 + i % 5).unwrap()));
                let saved = serde_json::to_string(&first.state()).unwrap();
                let mut second = loader(&sizes, options);
                second.restore(&serde_json::from_str(&saved).unwrap()).unwrap();
                for i in stop..40 {
                    assert_eq!(second.next_batch(1 + i % 5).unwrap(), draws[i], "stop {stop} draw {i}");
                }
            }
        }
    }

    #[test]
    fn weights_give_shares_and_no_row_repeats_before_all_were_seen() {
        let mut l = loader(&[(8, 0.5), (4, 2.0)], Options { drop_last: false, ..Options::default() });
        let mut seen: HashMap<Pick, usize> = HashMap::new();
        for epoch in 0..2 {
            let draw = l.next_batch(100).unwrap();
            assert_eq!((draw.epoch, draw.picks.len()), (epoch, 12));
            draw.picks.into_iter().for_each(|p| *seen.entry(p).or_default() += 1);
        }
        for (pick, count) in seen {
            assert_eq!(count, if pick.dataset == 0 { 1 } else { 4 });
        }
    }

    #[test]
    fn without_shuffle_rows_come_in_file_order() {
        let mut l = loader(&[(3, 1.0)], Options { shuffle: false, ..Options::default() });
        let rows = |d: Draw| d.picks.iter().map(|p| p.row).collect::<Vec<_>>();
        assert_eq!(rows(l.next_batch(2).unwrap()), [0, 1]);
        assert_eq!(rows(l.next_batch(2).unwrap()), [0, 1]);
        assert_eq!(l.epoch(), 1);
    }

    #[test]
    fn changed_data_and_impossible_batches_are_refused() {
        let state = loader(&[(3, 1.0)], Options::default()).state();
        let e = loader(&[(4, 1.0)], Options::default()).restore(&state).unwrap_err().to_string();
        assert!(e.contains("got 4 rows x 1, expected 3 rows x 1"), "{e}");
        let e = loader(&[(3, 1.0)], Options { seed: 1, ..Options::default() }).restore(&state).unwrap_err();
        assert!(e.to_string().contains("seed 1"), "{e}");
        let e = loader(&[(3, 1.0)], Options::default()).next_batch(4).unwrap_err().to_string();
        assert!(e.contains("batch of 4 rows") && e.contains("only 3"), "{e}");
        assert!(Loader::over(vec![(0, 1.0)], Options::default()).is_err());
        assert!(Loader::over(vec![(2, f64::NAN)], Options::default()).is_err());
    }
}
