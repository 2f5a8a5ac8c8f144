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
    /// Whose steps these are: the recordings name the addresses of its weights.
    place: Vec<usize>,
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
    /// What follows is of this model: recordings of another, or of weights that lie elsewhere now, are dropped.
    pub fn of(&mut self, model: &Model) {
        let place = model.place();
        if self.place != place {
            self.steps.clear();
            self.place = place;
        }
    }

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
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::checkpoint::InitOptions;
    use crate::generate::{CacheOptions, Generator, Request, Sampler, SamplingParams};
    use crate::model::Options;

    /// A sampler replayed the steps it had recorded of one model when it was given another.
    #[test]
    fn steps_of_another_model_are_dropped() {
        let mut init = InitOptions::new("llama");
        (init.vocab, init.hidden, init.layers, init.std) = (20, 8, 1, 0.4);
        let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
        let model = |seed| {
            let init = InitOptions { seed, ..init.clone() };
            Model::random(backend.clone(), &init, Options::default()).unwrap()
        };
        let (one, other) = (model(1), model(2));
        let mut sampler = Sampler::new(&one, CacheOptions::default()).unwrap();
        let params = SamplingParams { max_new_tokens: 6, ..SamplingParams::greedy() };
        let ask = || Request { prompt: vec![1, 2], params: params.clone(), stream: [0; 3] };
        let record = |sampler: &mut Sampler, model: &Model| {
            let step =
                || Step { tokens: model.tokens(&[0], &[0]).unwrap(), h: None, recording: None, lists: 0 };
            sampler.recorded.steps.insert((1, 256), step());
        };
        sampler.generate(&one, vec![ask()]).unwrap();
        record(&mut sampler, &one);
        sampler.generate(&one, vec![ask()]).unwrap();
        sampler.invalidate();
        let mine = sampler.generate(&one, vec![ask()]).unwrap();
        assert_eq!(sampler.recorded.steps.len(), 1, "its own stay: they read the weights where they are");
        let theirs = sampler.generate(&other, vec![ask()]).unwrap();
        assert!(sampler.recorded.steps.is_empty());
        // Nor does it answer from blocks of the first, whose version is the same.
        let mut fresh = Sampler::new(&other, CacheOptions::default()).unwrap();
        assert!(theirs == fresh.generate(&other, vec![ask()]).unwrap() && theirs != mine);
        // Weights that lie elsewhere.
        record(&mut sampler, &other);
        let mut moved = other;
        moved.params[0].master = backend.alloc(ferrl_kernels::DType::F32, 20 * 8).unwrap();
        moved.version += 1;
        sampler.recorded.of(&moved);
        assert!(sampler.recorded.steps.is_empty());
        // A model that does not fit the cache is no model of this sampler.
        let wide = InitOptions { hidden: 16, ..init.clone() };
        let wide = Model::random(backend.clone(), &wide, Options::default()).unwrap();
        sampler.submit(ask()).unwrap();
        let error = sampler.step(&wide).unwrap_err().to_string();
        assert!(error.contains("another shape"), "{error}");
    }

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
