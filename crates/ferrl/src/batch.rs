//! From experience to what is computed at once: passes, updates, micro-batches.

use crate::experience::{Counts, Experience, MicroBatch, Sequence};
use ferrl_engine::train::{self, Batch};
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::philox4x32;

/// The sequences of one update, by index.
pub struct Update {
    members: Vec<usize>,
}

/// Cuts the experience into `passes` times `minibatches` updates. Groups and pairs stay whole; each pass has its own
/// order, decided by seed, step and pass alone.
pub fn updates(e: &Experience, (passes, minibatches): (usize, usize), seed: u64, step: u64) -> Vec<Update> {
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
    /// Micro-batches of at most `budget` tokens, in order, both sides of a pair together.
    pub fn micro_batches<'a>(&self, e: &'a Experience, budget: usize) -> Result<Vec<MicroBatch<'a>>> {
        let sequences: Vec<&'a Sequence> = self.members.iter().map(|&i| &e.sequences[i]).collect();
        let counts = Counts::of(sequences.iter().copied());
        if counts.tokens == 0.0 {
            return Err(Error::data("no token of this update is trained on")
                .fix("look at the masks with `ferrl data check`"));
        }
        let mut units: Vec<Vec<&Sequence>> = Vec::new();
        for s in sequences {
            match units.last_mut() {
                Some(unit) if s.pair.is_some() && unit[0].pair == s.pair => unit.push(s),
                _ => units.push(vec![s]),
            }
        }
        let lengths: Vec<usize> = units.iter().map(|u| u.iter().map(|s| s.ids.len()).sum()).collect();
        let plan = train::plan(&lengths, budget).map_err(|e| e.at("train.micro_batch_tokens"))?;
        let cut = |r: std::ops::Range<usize>| MicroBatch { sequences: units[r].concat(), counts };
        Ok(plan.into_iter().map(cut).collect())
    }
}

/// What the engine computes for a micro-batch.
pub fn tokens(batch: &MicroBatch<'_>) -> Batch {
    let sequence = |s: &&Sequence| train::Sequence {
        ids: s.ids.clone(),
        scored: s.trained.clone(),
        ..Default::default()
    };
    Batch { sequences: batch.sequences.iter().map(sequence).collect(), others_per_row: 0 }
}
