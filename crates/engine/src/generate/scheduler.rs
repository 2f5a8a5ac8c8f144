//! The sampler: requests in, one forward pass a step, tokens and completions out.

use super::cache::Cache;
use super::recorded::Recorded;
use super::sampler::{Chooser, Choosing};
use super::sequence::Sequence;
use super::{CacheOptions, Completion, Event, Id, Request, SamplingParams, Stop};
use crate::model::decoder::{Context, Keep};
use crate::model::{Config, Model};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use ferrl_kernels::Buffer;
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
    /// Of the model it samples from.
    pub(super) config: Config,
    /// Number and version of the weights that the cached blocks are of; none at first and after [`Sampler::invalidate`].
    weights: Option<(u64, u64)>,
    next: u64,
    chooser: Chooser,
    pub(super) recorded: Recorded,
    /// Whether the next step is begun before the tokens of the last are known.
    pub(super) looks_ahead: bool,
    /// The step that was begun and whose tokens nobody has asked for.
    pub(super) flight: Option<Flight>,
    /// Kept from step to step for its allocations.
    rows: PagedRows,
    /// Events of other requests that came up while `generate` ran.
    kept: Vec<Event>,
}

/// A step whose tokens are being chosen.
pub(super) struct Flight {
    /// Whose, in their order.
    ids: Vec<Id>,
    choosing: Choosing,
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
            config: model.config.clone(),
            weights: None,
            next: 0,
            chooser: Chooser::default(),
            recorded: Recorded::default(),
            looks_ahead: model.backend.records(),
            flight: None,
            rows: PagedRows::default(),
            kept: Vec::new(),
        })
    }

    /// With the tokenizer that stop strings need.
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// Says whether a step is begun before the tokens of the one before it are known to the host, where nothing but their
    /// ids is missing: as on devices that work on while the host prepares. What is sampled does not depend on it; a
    /// sequence that ends is then computed one step too far, and a request may begin one step later.
    pub fn look_ahead(mut self, yes: bool) -> Self {
        self.looks_ahead = yes;
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

    /// Forgets all that is cached, for weights that changed without a new version. (Another version, and another model
    /// of the same shape, are noticed.)
    pub fn invalidate(&mut self) {
        self.restart();
        self.weights = None;
    }

    /// Whether these weights are those of the last step; if not, all that came of others is forgotten.
    fn meet(&mut self, model: &Model) -> Result<()> {
        if self.weights == Some(model.weights()) {
            return Ok(());
        }
        let stored_alike = self.cache.layers.iter().all(|layer| layer.dtype() == model.dtype);
        if model.config != self.config || !stored_alike {
            return Err(Error::usage(
                "a sampler is given a model of another shape than the one it was made for",
            )
            .fix("a sampler of its own for each"));
        }
        self.restart();
        self.recorded.of(model);
        self.weights = Some(model.weights());
        Ok(())
    }

    /// One forward pass: a token for every sequence that is up to date, and some of the prompts of the others.
    pub fn step(&mut self, model: &Model) -> Result<Vec<Event>> {
        self.meet(model)?;
        let mut events = std::mem::take(&mut self.kept);
        if self.running.is_empty() && self.waiting.is_empty() {
            self.flight = None;
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
        let flight = match self.flight.take() {
            Some(flight) if self.land(&flight) => flight,
            _ => match self.begin(model)? {
                Some(flight) => flight,
                None => return Ok(()),
            },
        };
        self.flight = self.begin_next(model, &flight)?;
        let find = |id: &Id| self.running.binary_search_by_key(id, |s| s.id).ok().map(|i| &self.running[i]);
        let wanted: Vec<Option<&Sequence>> = flight.ids.iter().map(find).collect();
        let picks = self.chooser.end(model, &flight.choosing, &wanted)?;
        let mut picks = flight.ids.iter().zip(picks).peekable();
        let mut result = Ok(());
        for mut s in std::mem::take(&mut self.running) {
            while picks.next_if(|(id, _)| **id < s.id).is_some() {}
            let Some((_, Some(pick))) = picks.next_if(|(id, _)| **id == s.id) else {
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

    /// Decides who runs, and begins a step with them; none where no token comes of it.
    fn begin(&mut self, model: &Model) -> Result<Option<Flight>> {
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
        self.cache.copy(backend)?;
        // One new token for each sequence, and all of them wanted: a step like many others.
        let mut once = None;
        if backend.records() && last.len() == ids.len() {
            let fill = &mut |to: &mut Buffer| Recorded::fill(model, &ids, to);
            self.recorded.decode(model, &positions, &self.rows, &mut self.cache.layers, fill)?;
        } else {
            let tokens = model.tokens(&ids, &positions)?;
            let context = Context::Paged(&self.rows, &mut self.cache.layers);
            once = Some(model.forward(&tokens, context, Keep::Nothing)?.0);
        }
        self.count(ids.len());
        for s in &mut self.running {
            s.computed += std::mem::take(&mut s.rows);
        }
        self.hand_over();
        if last.is_empty() {
            return Ok(None);
        }
        let ready: Vec<&Sequence> = self.running.iter().filter(|s| s.pending() == 0).collect();
        let h = once.as_ref().unwrap_or_else(|| self.recorded.hidden());
        let choosing = Chooser::begin(model, h, &last, &ready, 0)?;
        Ok(Some(Flight { ids: ready.iter().map(|s| s.id).collect(), choosing }))
    }

    /// Begins the step after `flight`, whose tokens are still being chosen; none where more than their ids is missing:
    /// someone computes a prompt, waits for a place, or is chosen for by the host, or blocks are short.
    fn begin_next(&mut self, model: &Model, flight: &Flight) -> Result<Option<Flight>> {
        let backend = &*model.backend;
        let simple = |s: &Sequence| s.pending() == 0 && s.params.is_chosen_by_device();
        if !self.looks_ahead || !self.running.iter().all(simple) {
            return Ok(None);
        }
        let on: Vec<usize> = (0..self.running.len()).filter(|&i| self.running[i].goes_on()).collect();
        let room = on.len() < self.options.max_sequences;
        if on.is_empty() || (room && !self.waiting.is_empty()) {
            return Ok(None);
        }
        for &i in &on {
            let s = &mut self.running[i];
            if !self.cache.reserve(backend, &mut s.table, s.computed, s.computed + 1)? {
                return Ok(None);
            }
        }
        let positions: Vec<u32> = on.iter().map(|&i| self.running[i].computed as u32).collect();
        self.rows.sequences.resize_with(on.len(), PagedSequence::default);
        for (row, (&i, entry)) in on.iter().zip(&mut self.rows.sequences).enumerate() {
            let s = &self.running[i];
            (entry.row, entry.count, entry.position) = (row, 1, s.computed);
            entry.blocks.clone_from(&s.table.blocks);
        }
        let wanted: Vec<&Sequence> = on.iter().map(|&i| &self.running[i]).collect();
        let ids: Vec<Id> = wanted.iter().map(|s| s.id).collect();
        let places: Option<Vec<usize>> = ids.iter().map(|id| flight.ids.binary_search(id).ok()).collect();
        let Some(places) = places else { return Ok(None) };
        self.cache.copy(backend)?;
        let fill = &mut |to: &mut Buffer| flight.choosing.feed(model, &places, to);
        let mut once = None;
        if backend.records() {
            self.recorded.decode(model, &positions, &self.rows, &mut self.cache.layers, fill)?;
        } else {
            let mut tokens = model.tokens(&vec![0; positions.len()], &positions)?;
            fill(&mut tokens.ids)?;
            let context = Context::Paged(&self.rows, &mut self.cache.layers);
            once = Some(model.forward(&tokens, context, Keep::Nothing)?.0);
        }
        let h = once.as_ref().unwrap_or_else(|| self.recorded.hidden());
        let all: Vec<u32> = (0..ids.len() as u32).collect();
        let choosing = Chooser::begin(model, h, &all, &wanted, 1)?;
        Ok(Some(Flight { ids, choosing }))
    }

    /// Takes a step that was begun ahead for done; `false` where nobody of it runs any more.
    fn land(&mut self, flight: &Flight) -> bool {
        let mut rows = 0;
        for s in &mut self.running {
            if flight.ids.binary_search(&s.id).is_ok() {
                s.computed += 1;
                self.cache.publish(&mut s.table, &s.ids, s.computed);
                rows += 1;
            }
        }
        if rows > 0 {
            self.count(flight.ids.len());
            self.hand_over();
        }
        rows > 0
    }

    fn count(&mut self, rows: usize) {
        self.usage.steps += 1;
        self.usage.rows += rows as u64;
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
