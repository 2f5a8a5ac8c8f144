//! The sampler: requests in, one forward pass a step, tokens and completions out.

use super::cache::Cache;
use super::recorded::Recorded;
use super::sampler::Chooser;
use super::sequence::Sequence;
use super::{CacheOptions, Completion, Event, Id, Request, SamplingParams, Stop};
use crate::model::Model;
use crate::model::config::Position;
use crate::model::decoder::{Context, Keep};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use ferrl_kernels::backend::{PagedRows, PagedSequence};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Completes many requests together, in any order of arrival.
pub struct Sampler {
    pub(super) options: CacheOptions,
    pub(super) cache: Cache,
    /// In the order of ids, as is `waiting`.
    pub(super) running: Vec<Sequence>,
    pub(super) waiting: VecDeque<Sequence>,
    pub(super) usage: Usage,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    pub(super) vocab: usize,
    /// Where the model has a table of positions, its length.
    pub(super) positions: Option<usize>,
    version: u64,
    next: u64,
    chooser: Chooser,
    recorded: Recorded,
    /// Kept from step to step for its allocations.
    rows: PagedRows,
    /// Events of other requests that came up while `generate` ran.
    kept: Vec<Event>,
}

/// How full a sampler is, and what it has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Blocks of the cache.
    pub blocks: usize,
    /// Blocks that sequences refer to.
    pub used: usize,
    /// Blocks nobody refers to whose contents can still be shared.
    pub cached: usize,
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Forward passes.
    pub steps: u64,
    /// Rows of all forward passes.
    pub rows: u64,
    /// Prompt tokens that did not have to be computed.
    pub reused: u64,
    /// Times a running sequence gave its blocks up.
    pub preemptions: u64,
    /// Blocks copied because a shared one was written.
    pub copies: u64,
}

impl Sampler {
    /// Allocates the cache.
    pub fn new(model: &Model, options: CacheOptions) -> Result<Self> {
        model.lm_head()?;
        for (name, n) in
            [("max_batch_tokens", options.max_batch_tokens), ("max_sequences", options.max_sequences)]
        {
            if n == 0 {
                return Err(Error::usage(format!("{name} is 0, expected at least 1")));
            }
        }
        Ok(Sampler {
            options,
            cache: Cache::new(model, options.bytes)?,
            running: Vec::new(),
            waiting: VecDeque::new(),
            usage: Usage::default(),
            tokenizer: None,
            vocab: model.config.vocab,
            positions: (model.config.position == Position::Learned).then_some(model.config.max_positions),
            version: model.version,
            next: 0,
            chooser: Chooser::default(),
            recorded: Recorded::default(),
            rows: PagedRows::default(),
            kept: Vec::new(),
        })
    }

    /// With the tokenizer that stop strings need.
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// Takes a request; it runs in the coming steps.
    pub fn submit(&mut self, request: Request) -> Result<Id> {
        self.check(&request)?;
        let id = Id(self.next);
        self.next += 1;
        self.waiting.push_back(Sequence::new(id, request));
        Ok(id)
    }

    /// A new request that continues the first `at_token` tokens (of prompt and completion) of one that has not
    /// ended, on the same blocks. Its stream has to be its own, or it repeats the other's draws.
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
        let new = self.submit(Request { prompt, params, stream })?;
        let child = self.waiting.pop_back();
        let parent = self.running.iter().chain(&self.waiting).find(|s| s.id == id);
        if let (Some(mut child), Some(parent)) = (child, parent) {
            let tokens = parent.computed.min(at_token - 1);
            child.take_over(self.cache.share(&parent.table, tokens), tokens);
            self.waiting.push_back(child);
        }
        Ok(new)
    }

    /// Ends a request now; `None` where it has ended already.
    pub fn cancel(&mut self, id: Id) -> Option<Completion> {
        let mut s = if let Some(i) = self.running.iter().position(|s| s.id == id) {
            self.running.remove(i)
        } else {
            let i = self.waiting.iter().position(|s| s.id == id)?;
            self.waiting.remove(i)?
        };
        self.cache.release(&mut s.table);
        Some(s.finish(Stop::Cancelled))
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.kept.is_empty()
    }

    /// How full it is.
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

    /// Forgets all that is cached; for weights that changed without a new version, or another model of the
    /// same shape.
    pub fn invalidate(&mut self) {
        self.restart();
    }

    /// One forward pass: a token for every sequence that is up to date, and some of the prompts of the others.
    pub fn step(&mut self, model: &Model) -> Result<Vec<Event>> {
        let mut events = std::mem::take(&mut self.kept);
        if self.version != model.version {
            self.version = model.version;
            self.restart();
        }
        if self.running.is_empty() && self.waiting.is_empty() {
            return Ok(events);
        }
        let result = self.advance(model, &mut events);
        if result.is_err() {
            // Blocks may have been promised that were never written.
            self.restart();
            self.kept = std::mem::take(&mut events);
        }
        result.map(|()| events)
    }

    /// Completes all requests and returns their completions in order.
    pub fn generate(&mut self, model: &Model, requests: Vec<Request>) -> Result<Vec<Completion>> {
        for (i, request) in requests.iter().enumerate() {
            self.check(request).map_err(|e| e.at(format!("request {i}")))?;
        }
        let mut place = HashMap::with_capacity(requests.len());
        for (i, request) in requests.into_iter().enumerate() {
            place.insert(self.submit(request)?, i);
        }
        let mut out: Vec<Option<Completion>> = place.iter().map(|_| None).collect();
        let (mut left, mut others) = (out.len(), Vec::new());
        while left > 0 {
            let events = self.step(model).inspect_err(|_| {
                place.keys().for_each(|&id| drop(self.cancel(id)));
                self.kept.splice(..0, others.drain(..));
            })?;
            for event in events {
                match event {
                    Event::Done { id, completion } if place.contains_key(&id) => {
                        out[place[&id]] = Some(completion);
                        left -= 1;
                    }
                    Event::Token { id, .. } if place.contains_key(&id) => {}
                    other => others.push(other),
                }
            }
        }
        self.kept = others;
        Ok(out.into_iter().flatten().collect())
    }

    fn advance(&mut self, model: &Model, events: &mut Vec<Event>) -> Result<()> {
        let backend = &*model.backend;
        // Where everyone who ran has given way to those who wait, a second look lets those in.
        for _ in 0..2 {
            self.schedule(backend)?;
            if self.running.iter().any(|s| s.rows > 0) {
                break;
            }
        }
        let (ids, positions, last) = self.lay_out();
        assert!(!ids.is_empty(), "a sequence that fits the cache alone always runs");
        // One new token for each sequence, and all of them wanted: a step like many others.
        let mut once = None;
        if model.backend.records() && last.len() == ids.len() {
            self.recorded.decode(model, &ids, &positions, &self.rows, &mut self.cache.layers)?;
        } else {
            let tokens = model.tokens(&ids, &positions)?;
            let context = Context::Paged(&self.rows, &mut self.cache.layers);
            once = Some(model.forward(&tokens, context, Keep::Nothing)?.0);
        }
        self.usage.steps += 1;
        self.usage.rows += ids.len() as u64;
        for s in &mut self.running {
            s.computed += std::mem::take(&mut s.rows);
        }
        self.hand_over();
        if last.is_empty() {
            return Ok(());
        }
        let ready: Vec<&Sequence> = self.running.iter().filter(|s| s.pending() == 0).collect();
        let h = once.as_ref().unwrap_or_else(|| self.recorded.hidden());
        let mut picks = self.chooser.choose(model, h, &last, &ready)?.into_iter();
        let mut result = Ok(());
        for mut s in std::mem::take(&mut self.running) {
            let pick = if s.pending() == 0 { picks.next() } else { None };
            let Some(pick) = pick else {
                self.running.push(s);
                continue;
            };
            events.push(Event::Token { id: s.id, token: pick.token, logp: pick.logp });
            match s.push(pick, model.version, self.tokenizer.as_deref()) {
                Ok(Some(stop)) => {
                    self.cache.release(&mut s.table);
                    events.push(Event::Done { id: s.id, completion: s.finish(stop) });
                }
                other => {
                    result = result.and(other.map(|_| ()));
                    self.running.push(s);
                }
            }
        }
        result
    }

    /// The rows of this step: ids, positions, and which of them a token follows.
    fn lay_out(&mut self) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
        let (mut ids, mut positions, mut last) = (Vec::new(), Vec::new(), Vec::new());
        let mut count = 0;
        for s in self.running.iter().filter(|s| s.rows > 0) {
            if self.rows.sequences.len() == count {
                self.rows.sequences.push(PagedSequence::default());
            }
            let entry = &mut self.rows.sequences[count];
            (entry.row, entry.count, entry.position) = (ids.len(), s.rows, s.computed);
            entry.blocks.clear();
            entry.blocks.extend_from_slice(&s.table.blocks);
            let end = s.computed + s.rows;
            ids.extend_from_slice(&s.ids[s.computed..end]);
            positions.extend(s.computed as u32..end as u32);
            if end == s.ids.len() {
                last.push(ids.len() as u32 - 1);
            }
            count += 1;
        }
        self.rows.sequences.truncate(count);
        (ids, positions, last)
    }
}
