//! The local sampler: continuous batching over a paged KV cache, on the weights that the trainer reads.
//!
//! `scheduler.rs` decides which sequences run, `step.rs` runs one forward pass, `choose.rs` samples the tokens.

use super::cache::KvCache;
use super::choose::Chooser;
use super::graphs::DecodeGraphs;
use super::sequence::RunningSequence;
use super::step::InFlight;
use super::{CacheOptions, Completion, Event, GenerationRequest, Generator, Id, SamplingParams, StopReason};
use crate::model::{Model, ModelConfig};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use ferrl_kernels::backend::PagedRows;
use std::collections::VecDeque;
use std::sync::Arc;

/// Completes many concurrent requests.
pub struct Sampler {
    pub(super) options: CacheOptions,
    pub(super) cache: KvCache,
    /// Sorted by id, as is `waiting`.
    pub(super) running: Vec<RunningSequence>,
    pub(super) waiting: VecDeque<RunningSequence>,
    pub(super) usage: Usage,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    /// Configuration of the model it samples from.
    pub(super) config: ModelConfig,
    /// Id and version of the weights that computed the cached blocks; `None` at first and after [`Sampler::invalidate`].
    weights: Option<(u64, u64)>,
    next: u64,
    exact: bool,
    pub(super) chooser: Chooser,
    pub(super) graphs: DecodeGraphs,
    /// Whether a step is launched before the previous step's tokens are known.
    pub(super) looks_ahead: bool,
    /// The step launched ahead, not yet committed.
    pub(super) ahead: Option<InFlight>,
    /// Reused from step to step to save allocations.
    pub(super) rows: PagedRows,
    /// Events for the next `step` to return first.
    events: Vec<Event>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Blocks referenced by sequences.
    pub used: usize,
    /// Unreferenced cache blocks whose contents can still be shared (prefix cache).
    pub cached: usize,
    pub running: usize,
    pub waiting: usize,
    /// Forward passes.
    pub steps: u64,
    /// Rows summed over all forward passes.
    pub rows: u64,
    /// Prompt tokens found in the prefix cache.
    pub reused: u64,
    pub preemptions: u64,
    /// Number of copy-on-write copies.
    pub copies: u64,
}

impl Sampler {
    /// Allocates the cache.
    pub fn new(model: &Model, options: CacheOptions) -> Result<Self> {
        model.check_lm_head()?;
        for (name, n) in
            [("max_batch_tokens", options.max_batch_tokens), ("max_sequences", options.max_sequences)]
        {
            if n == 0 {
                return Err(Error::usage(format!("{name} is 0, expected at least 1")));
            }
        }
        Ok(Sampler {
            options,
            cache: KvCache::new(model, options.bytes)?,
            running: Vec::new(),
            waiting: VecDeque::new(),
            usage: Usage::default(),
            tokenizer: None,
            config: model.config.clone(),
            weights: None,
            next: 0,
            exact: model.backend.is_exact(),
            chooser: Chooser::default(),
            graphs: DecodeGraphs::default(),
            looks_ahead: model.backend.runs_async(),
            ahead: None,
            rows: PagedRows::default(),
            events: Vec::new(),
        })
    }

    /// Sets the tokenizer, which stop strings need.
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// Whether no request is queued or running and no event is unread.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.events.is_empty()
    }

    /// Sets whether a step may be launched before the host knows the tokens of the previous one; the default on asynchronous
    /// devices. Does not change the sampled tokens: a sequence that ends is computed one step too far, and a request may start
    /// one step later.
    pub fn look_ahead(mut self, yes: bool) -> Self {
        self.looks_ahead = yes;
        self
    }

    /// A new request that continues from the first `at_token` tokens (prompt and completion) of one that has not ended, sharing
    /// its blocks. It needs a stream of its own, or it repeats the other's random numbers.
    pub fn fork(&mut self, id: Id, at_token: usize, params: SamplingParams, stream: [u32; 3]) -> Result<Id> {
        let Some(parent) = self.running.iter().chain(&self.waiting).find(|s| s.id == id) else {
            return Err(Error::usage(format!("request {} has ended or never was", id.0))
                .fix("submit its tokens as a prompt: what is cached of them is shared"));
        };
        let len = parent.ids.len();
        if at_token == 0 || at_token > len {
            return Err(Error::usage(format!("fork at token {at_token} of a sequence of {len}"))
                .fix(format!("a number from 1 to {len}")));
        }
        let prompt = parent.ids[..at_token].to_vec();
        let new = self.submit(GenerationRequest { prompt, params, stream })?;
        let child = self.waiting.pop_back();
        let parent = self.running.iter().chain(&self.waiting).find(|s| s.id == id);
        if let (Some(mut child), Some(parent)) = (child, parent) {
            let tokens = parent.computed.min(at_token - 1);
            self.cache.release(&mut child.table, &[], 0);
            child.start_from(self.cache.share(&parent.table, tokens), tokens);
            self.waiting.push_back(child);
        }
        Ok(new)
    }

    pub fn usage(&self) -> Usage {
        Usage {
            blocks: self.cache.total(),
            used: self.cache.total() - self.cache.available(),
            cached: self.cache.cached(),
            running: self.running.len(),
            waiting: self.waiting.len(),
            copies: self.cache.copies,
            ..self.usage
        }
    }

    /// Clears the prefix cache, for weights that changed without a new version. (A new version, or another model of the same
    /// shape, is detected.)
    pub fn invalidate(&mut self) {
        self.restart();
        self.weights = None;
    }

    /// Clears the prefix cache if other weights computed it.
    fn use_weights(&mut self, model: &Model) -> Result<()> {
        self.cache.alloc_layers(model)?;
        if self.weights == Some(model.weights()) {
            return Ok(());
        }
        let same_dtype = self.cache.layers.iter().all(|layer| layer.dtype() == model.dtype);
        if model.config != self.config || !same_dtype {
            return Err(Error::usage(
                "a sampler is given a model of another shape than the one it was made for",
            )
            .fix("a sampler of its own for each"));
        }
        self.restart();
        self.graphs.of(model);
        self.weights = Some(model.weights());
        Ok(())
    }
}

impl Generator for Sampler {
    fn check(&self, request: &GenerationRequest) -> Result<()> {
        self.check_request(request)
    }

    fn submit(&mut self, request: GenerationRequest) -> Result<Id> {
        self.check(&request)?;
        let id = Id(self.next);
        self.next += 1;
        let mut s = RunningSequence::new(id, request);
        self.keep_prefix(&mut s);
        self.waiting.push_back(s);
        Ok(id)
    }

    /// One forward pass: a token for every sequence whose prompt is computed, and a prefill chunk for the others.
    fn step(&mut self, policy: &Model) -> Result<Vec<Event>> {
        self.use_weights(policy)?;
        let mut events = std::mem::take(&mut self.events);
        if self.running.is_empty() && self.waiting.is_empty() {
            self.ahead = None;
            return Ok(events);
        }
        let result = self.advance(policy, &mut events);
        if result.is_err() {
            // After an error, blocks may be indexed that were never written.
            self.restart();
            self.events = std::mem::take(&mut events);
        }
        result.map(|()| events)
    }

    fn cancel(&mut self, id: Id) -> Option<Completion> {
        let mut s = if let Some(i) = self.running.iter().position(|s| s.id == id) {
            self.running.remove(i)
        } else {
            let i = self.waiting.iter().position(|s| s.id == id)?;
            self.waiting.remove(i)?
        };
        self.cache.release(&mut s.table, &s.ids, s.computed);
        Some(s.finish(StopReason::Cancelled))
    }

    fn is_exact(&self) -> bool {
        self.exact
    }

    fn release(&mut self) {
        if self.running.is_empty() && self.waiting.is_empty() {
            // CUDA graphs hold the addresses of the cache.
            (self.ahead, self.graphs, self.weights) = (None, DecodeGraphs::default(), None);
            self.cache.free_layers();
        }
    }

    fn follow(&mut self, policy: &Model) -> Result<()> {
        self.use_weights(policy)?;
        self.compute_along(policy)
    }

    fn put_back(&mut self, events: Vec<Event>) {
        self.events.splice(..0, events);
    }
}
