//! Steps that only decode are recorded where the device can, and replayed: their shapes are few once the number of
//! rows is rounded up, and hundreds of operations then start at once.
//!
//! Rows that fill a batch up belong to no sequence. They compute something, which nobody reads.

use crate::Result;
use crate::model::Model;
use crate::model::decoder::{Context, Keep, Tokens};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{PagedRows, Recording};
use std::collections::HashMap;

/// Recordings that are kept.
const MOST: usize = 64;

/// Recordings of one model's decoding steps, over one cache.
#[derive(Default)]
pub(super) struct Recorded {
    steps: HashMap<(usize, usize), Step>,
    /// The step that was done last.
    last: (usize, usize),
}

/// A step of so many rows.
struct Step {
    tokens: Tokens,
    /// Hidden states of the last time.
    h: Option<Buffer>,
    recording: Option<Recording>,
    /// What the device said about the lists it was recorded with.
    lists: u64,
}

/// Rows are filled up to one of these: every number up to 4, then four steps to each doubling.
fn bucket(rows: usize) -> usize {
    let step = (rows.next_power_of_two() / 8).max(1);
    rows.next_multiple_of(step)
}

impl Recorded {
    /// Hidden states of the step that was done last; more rows than there were sequences.
    pub fn hidden(&self) -> &Buffer {
        self.steps[&self.last].h.as_ref().expect("a step that was done")
    }

    /// One new token of each sequence; `fill` puts their ids into the first elements of an index buffer.
    pub fn decode(
        &mut self,
        model: &Model,
        positions: &[u32],
        rows: &PagedRows,
        cache: &mut [Buffer],
        fill: &mut dyn FnMut(&mut Buffer) -> Result<()>,
    ) -> Result<()> {
        let backend = &*model.backend;
        let batch = bucket(positions.len());
        let filled = [positions, &vec![0; batch - positions.len()]].concat();
        // A table of rotations that grows moves, and a step that was recorded with the old one is void.
        let reach = positions.iter().max().map_or(0, |&p| p as usize + 1);
        let key = (batch, model.rotary(reach)?.map_or(0, |tables| tables.positions()));
        self.last = key;
        if !self.steps.contains_key(&key) {
            if self.steps.len() >= MOST {
                self.steps.clear();
            }
            // The first time it is done as it is: everything is then compiled, planned and in memory.
            let mut tokens = model.tokens(&vec![0; batch], &filled)?;
            fill(&mut tokens.ids)?;
            let (h, _) = model.forward(&tokens, Context::Paged(rows, cache), Keep::Nothing)?;
            self.steps.insert(key, Step { tokens, h: Some(h), recording: None, lists: 0 });
            return Ok(());
        }
        let Some(step) = self.steps.get_mut(&key) else { unreachable!("inserted before") };
        fill(&mut step.tokens.ids)?;
        backend.set_indices(&mut step.tokens.positions, &filled)?;
        step.tokens.reach = reach;
        let lists = backend.stage_rows(rows, batch)?;
        if step.recording.is_none() || step.lists != lists {
            let (mut h, tokens) = (None, &step.tokens);
            let recording = backend.record(&mut || {
                h = Some(model.forward(tokens, Context::Paged(rows, cache), Keep::Nothing)?.0);
                Ok(())
            })?;
            (step.h, step.recording, step.lists) = (h, Some(recording), lists);
        }
        if let Some(recording) = &step.recording {
            backend.replay(recording)?;
        }
        Ok(())
    }

    /// The ids of sequences, as [`Recorded::decode`] wants them.
    pub fn fill(model: &Model, ids: &[u32], to: &mut Buffer) -> Result<()> {
        let mut all = ids.to_vec();
        all.resize(to.len(), 0);
        model.backend.set_indices(to, &all)
    }
}

#[cfg(test)]
mod tests {
    use super::bucket;

    #[test]
    fn few_sizes_and_little_waste() {
        let sizes: std::collections::BTreeSet<usize> = (1..=512).map(bucket).collect();
        assert!(sizes.len() < 40, "{sizes:?}");
        for rows in 1..=512 {
            assert!(bucket(rows) >= rows && bucket(rows) * 4 <= rows * 5 + 4, "{rows}");
        }
        assert_eq!([1, 2, 3, 4, 5, 64, 100, 256].map(bucket), [1, 2, 3, 4, 5, 64, 112, 256]);
    }
}
