//! From experience to what is computed at once: passes, updates, micro-batches.

use crate::algo::UpdatePlan;
use crate::experience::{Experience, Metrics, MicroBatch, Sequence, UpdateCounts};
use crate::pack::{TokenBudget, pack};
use ferrl_engine::train::{self, Batch};
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;

/// The sequences of one update, by index.
pub struct Update {
    members: Vec<usize>,
}

/// Cuts the experience into `passes` times `minibatches` updates. Groups and pairs stay whole; each pass has its own
/// order, decided by seed, step and pass alone.
pub fn updates(e: &Experience, plan: UpdatePlan, seed: u64, step: u64) -> Vec<Update> {
    let (passes, minibatches) = (plan.epochs, plan.minibatches);
    let mut units: Vec<Vec<usize>> = Vec::new();
    let mut last = None;
    for (i, s) in e.sequences.iter().enumerate() {
        let key = Some((s.group, s.pair));
        if key == last {
            units.last_mut().expect("a unit is open").push(i);
        } else {
            units.push(vec![i]);
            last = key;
        }
    }
    let mut all = Vec::new();
    for pass in 0..passes {
        let mut order: Vec<usize> = (0..units.len()).collect();
        if minibatches > 1 {
            let draw = |i: usize| {
                philox4x32([i as u32, pass as u32, step as u32, 0x6d62], [seed as u32, (seed >> 32) as u32])
            };
            order.sort_by_key(|&i| (draw(i), i));
        }
        for part in order.chunks(units.len().div_ceil(minibatches).max(1)) {
            all.push(Update { members: part.iter().flat_map(|&u| units[u].iter().copied()).collect() });
        }
    }
    all
}

impl Update {
    pub fn whole(e: &Experience) -> Self {
        Update { members: (0..e.sequences.len()).collect() }
    }

    /// Which sequences are computed together: at most `budget` tokens each, about equally full, both sides of a pair
    /// in one, and only what was sampled at the same temperature. A function of the sequences' order, lengths and
    /// temperatures and of the budget alone.
    pub fn bins(&self, e: &Experience, budget: usize) -> Result<Vec<Vec<usize>>> {
        let mut by_temperature: Vec<(u32, Vec<usize>)> = Vec::new();
        for &i in &self.members {
            let key = e.sequences[i].divisor().to_bits();
            match by_temperature.iter_mut().find(|(other, _)| *other == key) {
                Some((_, members)) => members.push(i),
                None => by_temperature.push((key, vec![i])),
            }
        }
        let mut bins = Vec::new();
        for (_, members) in by_temperature {
            bins.extend(bins_of(&members, e, budget)?);
        }
        Ok(bins)
    }

    /// Micro-batches of at most `budget` tokens, as [`Update::bins`] cuts them.
    pub fn micro_batches<'a>(&self, e: &'a Experience, budget: usize) -> Result<Vec<MicroBatch<'a>>> {
        let counts = UpdateCounts::of(self.members.iter().map(|&i| &e.sequences[i]));
        if counts.tokens == 0.0 {
            return Err(Error::data("no token of this update is trained on")
                .fix("look at the masks with `ferrl data check`"));
        }
        let batch = |bin: Vec<usize>| MicroBatch {
            sequences: bin.into_iter().map(|i| &e.sequences[i]).collect(),
            counts,
        };
        Ok(self.bins(e, budget)?.into_iter().map(batch).collect())
    }
}

fn bins_of(members: &[usize], e: &Experience, budget: usize) -> Result<Vec<Vec<usize>>> {
    let sequence = |m: usize| &e.sequences[members[m]];
    let lengths: Vec<usize> = (0..members.len()).map(|m| sequence(m).ids.len()).collect();
    // Pairs are numbered from 0; a sequence in no pair gets a number beyond them.
    let pairs = 1 + e.sequences.iter().filter_map(|s| s.pair).max().unwrap_or(0);
    let together: Vec<usize> = (0..members.len()).map(|m| sequence(m).pair.unwrap_or(pairs + m)).collect();
    let place = |m: usize| format!("sequence {} of the step (group {})", members[m], sequence(m).group);
    let budget = TokenBudget { tokens: budget, setting: "train.micro_batch_tokens", multiple: 1 };
    let packing = pack(&lengths, &together, budget, &place)?;
    Ok(packing.bins.into_iter().map(|bin| bin.into_iter().map(|m| members[m]).collect()).collect())
}

/// How many micro-batches an update has, and how full the mean one is compared with the fullest.
pub fn balance(batches: &[MicroBatch<'_>], metrics: &mut Metrics) {
    let sizes: Vec<f64> = batches.iter().map(|b| b.len() as f64).collect();
    let most = sizes.iter().copied().fold(1.0, f64::max);
    metrics.add("micro_batches", sizes.len() as f64);
    metrics.add("micro_batches/balance", sizes.iter().sum::<f64>() / sizes.len().max(1) as f64 / most);
}

/// What the engine computes for these sequences.
pub fn tokens<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Batch {
    let sequence = |s: &Sequence| train::BatchSequence {
        ids: s.ids.clone(),
        scored: s.trained.clone(),
        ..Default::default()
    };
    Batch { sequences: sequences.into_iter().map(sequence).collect(), others_per_row: 0 }
}
