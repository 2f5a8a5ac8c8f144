//! Decode steps as CUDA graphs: rows are padded to one of a few batch sizes, and a device that can capture launches the
//! hundreds of kernels of a step at once (`GraphOps::repeat`).
//!
//! Padding rows belong to no sequence; their results are discarded.

use crate::Result;
use crate::model::Model;
use crate::model::config::QkNorm;
use crate::model::decoder::{Keep, PastKv, Tokens};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::{Graph, PagedRows};
use std::collections::HashMap;

/// Maximum number of captured steps.
const MOST: usize = 64;

/// Captured decode steps of one model over one cache.
#[derive(Default)]
pub(super) struct DecodeGraphs {
    /// The model they were captured for: graphs hold the addresses of its weights.
    place: Vec<usize>,
    /// By padded rows and number of RoPE positions.
    steps: HashMap<(usize, usize), GraphStep>,
    /// Key of the step that ran last.
    last: (usize, usize),
}

/// The buffers that the CUDA graph of one batch size reads and writes.
struct GraphStep {
    tokens: Tokens,
    /// Output: hidden states.
    h: Option<Buffer>,
    graph: Graph,
}

/// Rows are padded to one of these sizes: every number up to 4, then four sizes per power of two.
fn bucket(rows: usize) -> usize {
    let step = (rows.next_power_of_two() / 8).max(1);
    rows.next_multiple_of(step)
}

impl DecodeGraphs {
    /// Whether a model's decode step can be captured: it must not copy to or from the host (MoE routing and the QK norm of whole
    /// rows do), nor wait for other ranks of a team.
    pub fn serve(model: &Model) -> bool {
        let config = &model.config;
        let alone = model.team().is_none() && model.backend.captures();
        alone && config.experts.is_none() && config.qk_norm != Some(QkNorm::Whole)
    }

    /// Prepares for this model: drops graphs of another, or of weights that have moved.
    pub fn of(&mut self, model: &Model) {
        let place = model.place();
        if self.place != place {
            self.steps.clear();
            self.place = place;
        }
    }

    /// Hidden states of the last step, including padding rows.
    pub fn hidden(&self) -> &Buffer {
        self.steps[&self.last].h.as_ref().expect("a step that ran")
    }

    /// One decode step of each sequence; `fill` writes the token ids into the first elements of an index buffer.
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
        let padded = [positions, &vec![0; batch - positions.len()]].concat();
        // A RoPE table that grows is reallocated, which invalidates graphs captured with the old one.
        let reach = positions.iter().max().map_or(0, |&p| p as usize + 1);
        let key = (batch, model.rotary(reach)?.map_or(0, |tables| tables.positions()));
        if !self.steps.contains_key(&key) {
            if self.steps.len() >= MOST {
                self.steps.clear();
            }
            let tokens = model.tokens(&vec![0; batch], &padded)?;
            self.steps.insert(key, GraphStep { tokens, h: None, graph: Graph::default() });
        }
        self.last = key;
        let Some(GraphStep { tokens, h, graph }) = self.steps.get_mut(&key) else {
            unreachable!("inserted before")
        };
        fill(&mut tokens.ids)?;
        backend.set_indices(&mut tokens.positions, &padded)?;
        tokens.reach = reach;
        backend.repeat(graph, rows, batch, &mut || {
            *h = Some(model.forward(tokens, PastKv::Paged(rows, cache), Keep::Nothing)?.0);
            Ok(())
        })
    }

    /// Uploads token ids, for [`DecodeGraphs::decode`].
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
    use crate::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
    use crate::model::Options;

    /// A sampler launched the graphs it had captured of one model when it was given another.
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
        let ask = || GenerationRequest { prompt: vec![1, 2], params: params.clone(), stream: [0; 3] };
        let record = |sampler: &mut Sampler, model: &Model| {
            let tokens = model.tokens(&[0], &[0]).unwrap();
            sampler.graphs.steps.insert((1, 256), GraphStep { tokens, h: None, graph: Graph::default() });
        };
        sampler.generate(&one, vec![ask()]).unwrap();
        record(&mut sampler, &one);
        sampler.generate(&one, vec![ask()]).unwrap();
        sampler.invalidate();
        let mine = sampler.generate(&one, vec![ask()]).unwrap();
        assert_eq!(sampler.graphs.steps.len(), 1, "its own stay: they read the weights where they are");
        let theirs = sampler.generate(&other, vec![ask()]).unwrap();
        assert!(sampler.graphs.steps.is_empty());
        // Nor may it reuse cached blocks of the first, whose version is the same.
        let mut fresh = Sampler::new(&other, CacheOptions::default()).unwrap();
        assert!(theirs == fresh.generate(&other, vec![ask()]).unwrap() && theirs != mine);
        // Weights that have moved.
        record(&mut sampler, &other);
        let mut moved = other;
        moved.params[0].master = backend.alloc(ferrl_kernels::DType::F32, 20 * 8).unwrap();
        moved.version += 1;
        sampler.graphs.of(&moved);
        assert!(sampler.graphs.steps.is_empty());
        // A model whose shape does not match the cache is refused.
        let wide = InitOptions { hidden: 16, ..init.clone() };
        let wide = Model::random(backend.clone(), &wide, Options::default()).unwrap();
        sampler.submit(ask()).unwrap();
        let error = sampler.step(&wide).unwrap_err().to_string();
        assert!(error.contains("another shape"), "{error}");
    }

    #[test]
    fn graph_buckets_are_few_and_waste_at_most_a_quarter() {
        let sizes: std::collections::BTreeSet<usize> = (1..=512).map(bucket).collect();
        assert!(sizes.len() < 40, "{sizes:?}");
        for rows in 1..=512 {
            assert!(bucket(rows) >= rows && bucket(rows) * 4 <= rows * 5 + 4, "{rows}");
        }
        assert_eq!([1, 2, 3, 4, 5, 64, 100, 256].map(bucket), [1, 2, 3, 4, 5, 64, 112, 256]);
    }
}
