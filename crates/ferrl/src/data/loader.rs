//! The order of rows: shuffled, weighted, and exactly resumable.
//!
//! The order is a function of the seed and of the number of rows of each dataset. A dataset of weight `w` adds `w` times its rows
//! to each epoch; no row repeats before all were drawn, also across epochs. The rows of an endless dataset (a generated task) are
//! numbered continuously and keep their order.

use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;
use serde::{Deserialize, Serialize};

/// How rows are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Decides the order.
    pub seed: u64,
    /// Off: datasets one after the other, rows in the order of the files.
    pub shuffle: bool,
    /// Sampling with replacement.
    pub replacement: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 0, shuffle: true, replacement: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Number of rows; for an endless dataset, the rows of an epoch at weight 1.
    pub rows: usize,
    /// How often each row is seen in an epoch.
    pub weight: f64,
    /// Rows are numbered on and on and never come again.
    pub endless: bool,
}

impl Size {
    /// Of a dataset with an end.
    pub fn of(rows: usize, weight: f64) -> Self {
        Size { rows, weight, endless: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PickedRow {
    pub dataset: u32,
    /// Which row of it, counted from where the epoch begins if the dataset is endless.
    row: u32,
}

/// Rows drawn together; a batch never spans two epochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DrawnRows {
    /// The epoch they belong to, from 0.
    pub epoch: u64,
    /// Dataset and row of each.
    pub picks: Vec<(usize, u64)>,
}

/// Everything a checkpoint needs to resume with the next row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoaderState {
    pub seed: u64,
    /// The epoch under way, from 0.
    pub epoch: u64,
    /// Rows of it already drawn.
    pub cursor: usize,
    /// Rows and weight of each dataset, to notice that the data changed.
    pub sizes: Vec<(usize, f64)>,
    pub shuffle: bool,
    /// Whether rows are drawn with replacement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replacement: bool,
}

/// Draws rows without end, epoch after epoch.
#[derive(Clone, Debug)]
pub struct Loader {
    options: Options,
    sizes: Vec<Size>,
    epoch: u64,
    cursor: usize,
    order: Vec<PickedRow>,
}

/// Largest weight of a dataset.
pub const MAX_WEIGHT: f64 = 10_000.0;
/// Most rows of an epoch: its order is in memory.
pub const MAX_ROWS: f64 = 200e6;
/// Most passes over the data.
pub const MAX_EPOCHS: f64 = 1e6;

/// What a permutation is for; part of its random numbers' counter.
const ROWS: u32 = 0x726f_7773;
const MIX: u32 = 0x6d69_7865;
const DRAW: u32 = 0x6472_6177;

impl Loader {
    pub fn new(sizes: Vec<Size>, options: Options) -> Result<Self> {
        if let Some(size) = sizes.iter().find(|s| !(s.weight > 0.0 && s.weight <= MAX_WEIGHT)) {
            let what =
                format!("a weight is {}, expected a number above 0, at most {MAX_WEIGHT}", size.weight);
            return Err(Error::usage(what).at("data.weights").fix("data.weights = [1.0, 0.5]"));
        }
        let rows: f64 = sizes.iter().map(|s| s.rows as f64 * s.weight).sum();
        if rows > MAX_ROWS {
            let what = format!("an epoch would have {rows:.0} rows, more than {MAX_ROWS:.0}");
            return Err(Error::usage(what)
                .at("data.weights")
                .fix("smaller weights, or a part: train[:1000000]@path"));
        }
        let mut loader = Loader { options, sizes, epoch: 0, cursor: 0, order: Vec::new() };
        if loader.rows_of(0) == 0 {
            return Err(Error::data("an epoch has no rows").fix("give more data or larger weights"));
        }
        loader.order = loader.arrange();
        Ok(loader)
    }

    pub fn options(&self) -> Options {
        self.options
    }

    /// The next `count` rows, or what is left of the epoch.
    pub fn next_batch(&mut self, count: usize) -> Result<DrawnRows> {
        if count == 0 {
            return Err(Error::usage("a batch of 0 rows").fix("set the batch size to at least 1"));
        }
        if self.at_end() {
            self.advance();
        }
        let end = (self.cursor + count).min(self.order.len());
        let row = |p: &PickedRow| {
            let dataset = p.dataset as usize;
            let before = if self.sizes[dataset].endless { self.share(dataset, self.epoch).start } else { 0 };
            (dataset, before + u64::from(p.row))
        };
        let picks = self.order[self.cursor..end].iter().map(row).collect();
        self.cursor = end;
        Ok(DrawnRows { epoch: self.epoch, picks })
    }

    /// Number of batches of up to `count` rows in `epochs` epochs; a fraction of an epoch counts as that fraction of its batches.
    pub fn batches(&self, epochs: f64, count: usize) -> u64 {
        let (epochs, count) = (epochs.clamp(0.0, MAX_EPOCHS), count.max(1) as u64);
        let batches = |epoch: u64| self.rows_of(epoch).div_ceil(count);
        let whole = epochs.floor() as u64;
        let part = (epochs.fract() * batches(whole) as f64 - 1e-9).ceil().max(0.0) as u64;
        (0..whole).map(batches).sum::<u64>() + part
    }

    /// Passes over the data so far, with the part of the one under way.
    pub fn epochs(&self) -> f64 {
        self.epoch as f64 + self.cursor as f64 / self.order.len().max(1) as f64
    }

    /// Whether every row of the epoch was drawn.
    pub fn at_end(&self) -> bool {
        self.cursor >= self.order.len()
    }

    pub fn epoch_rows(&self) -> usize {
        self.order.len()
    }

    /// Rows of one dataset in the first epoch.
    pub fn rows_from(&self, dataset: usize) -> u64 {
        let share = self.share(dataset, 0);
        share.end - share.start
    }

    /// What a checkpoint keeps.
    pub fn state(&self) -> LoaderState {
        LoaderState {
            seed: self.options.seed,
            epoch: self.epoch,
            cursor: self.cursor,
            sizes: self.plain_sizes(),
            shuffle: self.options.shuffle,
            replacement: self.options.replacement,
        }
    }

    fn plain_sizes(&self) -> Vec<(usize, f64)> {
        self.sizes.iter().map(|s| (s.rows, s.weight)).collect()
    }

    /// Resumes at a checkpoint's position; an error if the data has changed.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        if state.sizes != self.plain_sizes() {
            let show = |sizes: &[(usize, f64)]| {
                sizes.iter().map(|(n, w)| format!("{n} rows x {w}")).collect::<Vec<_>>().join(", ")
            };
            return Err(Error::data(format!(
                "the data is not what the checkpoint was made with: got {}, expected {}",
                show(&self.plain_sizes()),
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
        if state.replacement != self.options.replacement {
            let word = |on: bool| if on { "with" } else { "without" };
            return Err(Error::usage(format!(
                "data is drawn {} replacement, the checkpoint {} it",
                word(self.options.replacement),
                word(state.replacement)
            ))
            .at("data.replacement")
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

    fn rows_of(&self, epoch: u64) -> u64 {
        let rows = |d: usize| self.share(d, epoch);
        (0..self.sizes.len()).map(|d| rows(d).end - rows(d).start).sum()
    }

    /// The part of a dataset's endless stream of rows that an epoch takes.
    fn share(&self, dataset: usize, epoch: u64) -> std::ops::Range<u64> {
        let Size { rows, weight, .. } = self.sizes[dataset];
        let upto = |epoch: u64| (epoch as f64 * weight * rows as f64).round() as u64;
        upto(epoch)..upto(epoch + 1)
    }

    /// All rows of the epoch, in order.
    fn arrange(&self) -> Vec<PickedRow> {
        let mut order = Vec::with_capacity(self.rows_of(self.epoch) as usize);
        for dataset in 0..self.sizes.len() {
            let share = self.share(dataset, self.epoch);
            let pick = |row: usize| PickedRow { dataset: dataset as u32, row: row as u32 };
            if self.sizes[dataset].endless {
                order.extend((0..share.end - share.start).map(|row| pick(row as usize)));
                continue;
            }
            let rows = self.sizes[dataset].rows as u64;
            if self.options.replacement {
                order.extend(share.map(|position| pick(self.drawn(dataset, position, rows))));
                continue;
            }
            let (mut pass, mut permutation) = (u64::MAX, Vec::new());
            for position in share {
                if position / rows != pass {
                    pass = position / rows;
                    permutation = (0..rows as usize).collect();
                    if self.options.shuffle {
                        shuffle(&mut permutation, self.options.seed, pass, ROWS ^ dataset as u32);
                    }
                }
                order.push(pick(permutation[(position % rows) as usize]));
            }
        }
        if self.options.shuffle {
            shuffle(&mut order, self.options.seed, self.epoch, MIX);
            self.in_turn(&mut order);
        }
        order
    }

    /// The row that a draw with replacement takes: a function of its position in the dataset's stream alone.
    fn drawn(&self, dataset: usize, position: u64, rows: u64) -> usize {
        let key = [self.options.seed as u32, (self.options.seed >> 32) as u32];
        let counter = [position as u32, (position >> 32) as u32, dataset as u32, DRAW];
        let [low, high, ..] = philox4x32(counter, key);
        let word = u64::from(high) << 32 | u64::from(low);
        ((u128::from(word) * u128::from(rows)) >> 64) as usize
    }

    /// Rows of endless datasets, back in their own order: they are random already, and number 7 follows number 6.
    fn in_turn(&self, order: &mut [PickedRow]) {
        let mut next = vec![0; self.sizes.len()];
        for pick in order.iter_mut().filter(|p| self.sizes[p.dataset as usize].endless) {
            let next = &mut next[pick.dataset as usize];
            pick.row = *next;
            *next += 1;
        }
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
        Loader::new(sizes.iter().map(|&(n, w)| Size::of(n, w)).collect(), options).unwrap()
    }

    fn endless(rows: usize, weight: f64) -> Size {
        Size { rows, weight, endless: true }
    }

    #[test]
    fn an_epoch_has_every_row_once_and_the_next_another_order() {
        let mut l = loader(&[(10, 1.0), (7, 1.0)], Options::default());
        let mut epochs: HashMap<u64, Vec<(usize, u64)>> = HashMap::new();
        for _ in 0..l.batches(2.0, 4) {
            let draw = l.next_batch(4).unwrap();
            epochs.entry(draw.epoch).or_default().extend(draw.picks);
        }
        let sorted = |e: u64| {
            let mut picks = epochs[&e].clone();
            picks.sort();
            picks
        };
        let all: Vec<(usize, u64)> = (0..10).map(|row| (0, row)).chain((0..7).map(|row| (1, row))).collect();
        assert_eq!(sorted(0), all);
        assert_eq!(sorted(1), all);
        assert_ne!(epochs[&0], epochs[&1]);
    }

    #[test]
    fn three_epochs_of_100_rows_in_batches_of_64_are_three_epochs_not_3_64() {
        let mut l = loader(&[(100, 1.0)], Options::default());
        assert_eq!(l.batches(3.0, 64), 6);
        let sizes: Vec<usize> = (0..6).map(|_| l.next_batch(64).unwrap().picks.len()).collect();
        assert_eq!(sizes, [64, 36, 64, 36, 64, 36]);
        assert_eq!(l.epochs(), 3.0);
    }

    #[test]
    fn a_batch_larger_than_an_epoch_is_the_epoch() {
        let mut l = loader(&[(3, 1.0)], Options::default());
        assert_eq!(l.batches(2.0, 64), 2);
        assert_eq!(l.next_batch(64).unwrap().picks.len(), 3);
        assert_eq!((l.next_batch(64).unwrap().epoch, l.epochs()), (1, 2.0));
    }

    #[test]
    fn parts_of_an_epoch_and_weights_that_leave_a_rest_are_counted_exactly() {
        let l = loader(&[(100, 1.0)], Options::default());
        assert_eq!([l.batches(0.5, 10), l.batches(2.5, 64), l.batches(0.3, 10)], [5, 5, 3]);
        assert_eq!(l.batches(f64::MAX, 64), 2_000_000, "bounded");
        // 3.6 rows an epoch: 4, 3, 4, 3, 4.
        let mut l = loader(&[(9, 0.4)], Options::default());
        assert_eq!(l.batches(5.0, 3), 2 + 1 + 2 + 1 + 2);
        (0..8).for_each(|_| drop(l.next_batch(3).unwrap()));
        assert_eq!(l.epochs(), 5.0);
    }

    #[test]
    fn resume_is_exact_from_every_point() {
        let options = Options { seed: 9, ..Options::default() };
        let sizes = vec![Size::of(11, 1.0), Size::of(5, 2.0), endless(16, 0.7), Size::of(9, 0.4)];
        let new = || Loader::new(sizes.clone(), options).unwrap();
        let mut whole = new();
        let draws: Vec<DrawnRows> = (0..40).map(|i| whole.next_batch(1 + i % 5).unwrap()).collect();
        for stop in 0..40 {
            let mut first = new();
            (0..stop).for_each(|i| drop(first.next_batch(1 + i % 5).unwrap()));
            let saved = serde_json::to_string(&first.state()).unwrap();
            let mut second = new();
            second.restore(&serde_json::from_str(&saved).unwrap()).unwrap();
            for (i, draw) in draws.iter().enumerate().skip(stop) {
                assert_eq!(&second.next_batch(1 + i % 5).unwrap(), draw, "stop {stop} draw {i}");
            }
        }
    }

    #[test]
    fn weights_give_shares_and_no_row_repeats_before_all_were_seen() {
        let mut l = loader(&[(8, 0.5), (4, 2.0)], Options::default());
        let mut seen: HashMap<(usize, u64), usize> = HashMap::new();
        for epoch in 0..2 {
            let draw = l.next_batch(100).unwrap();
            assert_eq!((draw.epoch, draw.picks.len()), (epoch, 12));
            draw.picks.into_iter().for_each(|p| *seen.entry(p).or_default() += 1);
        }
        for (pick, count) in seen {
            assert_eq!(count, if pick.0 == 0 { 1 } else { 4 });
        }
    }

    #[test]
    fn with_replacement_every_row_is_as_likely_as_any_other_each_time() {
        let options = Options { replacement: true, ..Options::default() };
        let mut l = loader(&[(50, 1.0)], options);
        let mut counts = [0usize; 50];
        for epoch in 0..400 {
            let picks = l.next_batch(100).unwrap().picks;
            assert_eq!(picks.len(), 50, "an epoch is as many draws as rows");
            let mut seen: Vec<u64> = picks.iter().map(|p| p.1).collect();
            seen.sort_unstable();
            seen.dedup();
            // 50 draws of 50 leave out (1 - 1/50)^50 = 36 % of them; no epoch of 400 comes near all.
            assert!(seen.len() < 45, "epoch {epoch} has {} different rows", seen.len());
            picks.iter().for_each(|p| counts[p.1 as usize] += 1);
        }
        // 400 expected, standard deviation 19.8.
        assert!(counts.iter().all(|c| (300..500).contains(c)), "{counts:?}");
        // Resuming takes up the very same draws, and another way of drawing is refused.
        let (mut a, mut b) = (loader(&[(50, 1.0)], options), loader(&[(50, 1.0)], options));
        drop(a.next_batch(33).unwrap());
        b.restore(&a.state()).unwrap();
        assert_eq!(a.next_batch(17).unwrap(), b.next_batch(17).unwrap());
        assert!(loader(&[(50, 1.0)], Options::default()).restore(&a.state()).is_err());
    }

    #[test]
    fn an_endless_dataset_counts_on_and_mixes_by_weight() {
        let mut l = Loader::new(vec![Size::of(10, 1.0), endless(10, 0.5)], Options::default()).unwrap();
        let (mut next, mut rows) = (0, 0);
        for _ in 0..60 {
            match l.next_batch(1).unwrap().picks[0] {
                (0, _) => rows += 1,
                (_, row) => {
                    assert_eq!(row, next, "in its own order, each once");
                    next += 1;
                }
            }
        }
        assert_eq!((rows, next, l.epochs()), (40, 20, 4.0));
        let mut alone = Loader::new(vec![endless(4, 1.0)], Options::default()).unwrap();
        let rows: Vec<u64> = (0..9).map(|_| alone.next_batch(1).unwrap().picks[0].1).collect();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn without_shuffle_rows_come_in_file_order() {
        let mut l = loader(&[(3, 1.0)], Options { shuffle: false, ..Options::default() });
        let rows = |d: DrawnRows| d.picks.iter().map(|p| p.1).collect::<Vec<_>>();
        assert_eq!(rows(l.next_batch(2).unwrap()), [0, 1]);
        assert_eq!(rows(l.next_batch(2).unwrap()), [2]);
        assert_eq!(rows(l.next_batch(2).unwrap()), [0, 1]);
        assert_eq!(l.epoch, 1);
    }

    #[test]
    fn changed_data_and_impossible_weights_are_refused() {
        let state = loader(&[(3, 1.0)], Options::default()).state();
        let e = loader(&[(4, 1.0)], Options::default()).restore(&state).unwrap_err().to_string();
        assert!(e.contains("got 4 rows x 1, expected 3 rows x 1"), "{e}");
        let e = loader(&[(3, 1.0)], Options { seed: 1, ..Options::default() }).restore(&state).unwrap_err();
        assert!(e.to_string().contains("seed 1"), "{e}");
        for (rows, weight) in
            [(0, 1.0), (2, f64::NAN), (2, -1.0), (2, 0.0), (2, 1e18), (1 << 30, 9000.0), (9, 1e-9)]
        {
            let refused = Loader::new(vec![Size::of(rows, weight)], Options::default());
            assert!(refused.is_err(), "{rows} rows x {weight}");
        }
    }
}
