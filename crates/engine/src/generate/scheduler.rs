//! The scheduler: rows of the next step, admission, preemption.
//!
//! `running` and `waiting` are sorted by id, the order of submission: the oldest are admitted first, the youngest preempted
//! first. A preempted sequence keeps its tokens; its keys and values are recomputed later.

use super::cache::BlockTable;
use super::sampler::Sampler;
use super::sequence::RunningSequence;
use super::{GenerationRequest, Id};
use crate::{Error, Result};

impl Sampler {
    pub(super) fn check_request(&self, request: &GenerationRequest) -> Result<()> {
        let (p, vocab) = (&request.params, self.config.vocab);
        p.validate()?;
        if request.prompt.is_empty() {
            return Err(
                Error::data("the prompt has no tokens").fix("begin with the model's first token (BOS)")
            );
        }
        if p.sampled >= request.prompt.len() {
            return Err(Error::usage(format!(
                "{} tokens of a prompt of {} are the completion's, and none is left to complete",
                p.sampled,
                request.prompt.len()
            )));
        }
        self.config.check_ids(&request.prompt)?;
        if !p.stop_strings.is_empty() && self.tokenizer.is_none() {
            return Err(Error::usage("stop strings need a tokenizer, and this sampler has none")
                .fix("give the sampler its tokenizer, or use stop_ids"));
        }
        if p.top_logprobs > vocab {
            return Err(Error::usage(format!(
                "top_logprobs is {}, the vocabulary has {vocab}",
                p.top_logprobs
            )));
        }
        let (prompt, new) = (request.prompt.len(), p.max_new_tokens);
        // The last token is sampled but never computed.
        let tokens = prompt.saturating_add(new - 1);
        if let Some(most) = self.config.max_positions_hard().filter(|&most| tokens > most) {
            return Err(Error::usage(format!(
                "a prompt of {prompt} tokens and {new} new ones pass the model's {most} positions"
            ))
            .fix("a shorter prompt or a smaller max_new_tokens"));
        }
        let (need, have, bytes) = (self.cache.blocks_for(tokens), self.cache.total(), self.cache.block_bytes);
        if need > have {
            return Err(Error::resource(format!(
                "a prompt of {prompt} tokens and {new} new ones need {need} cache blocks of {bytes} bytes, \
                 the budget of {} bytes has {have}",
                self.options.bytes
            ))
            .fix(format!(
                "a cache of at least {} bytes, or a smaller max_new_tokens",
                need.saturating_mul(bytes)
            )));
        }
        Ok(())
    }

    pub(super) fn schedule(&mut self) {
        self.schedule_once();
        // If every running sequence was preempted, a second pass admits waiting ones.
        if self.running.iter().all(|s| s.rows == 0) {
            self.schedule_once();
        }
    }

    /// Schedules one row for every sequence that continues, before the tokens of `step` are known. `false` if that is
    /// impossible: a prompt is being computed, a request can be admitted, the host samples, or blocks run out.
    pub(super) fn schedule_ahead(&mut self, step: &[Id]) -> bool {
        let simple = |s: &RunningSequence| s.pending() == 0 && s.params.is_chosen_by_device();
        if !self.looks_ahead || !self.running.iter().all(simple) {
            return false;
        }
        let count = self.running.iter().filter(|s| s.continues()).count();
        if count == 0 || (count < self.options.max_sequences && !self.waiting.is_empty()) {
            return false;
        }
        for s in self.running.iter_mut().filter(|s| s.continues()) {
            let known = step.binary_search(&s.id).is_ok();
            if !known || !self.cache.reserve(&mut s.table, s.computed, s.computed + 1) {
                return false;
            }
            s.rows = 1;
        }
        true
    }

    /// Assigns rows of this step, and blocks for them, to each running sequence.
    fn schedule_once(&mut self) {
        let mut budget = self.options.max_batch_tokens;
        let before = self.usage.preemptions;
        let mut i = 0;
        while i < self.running.len() {
            let s = &mut self.running[i];
            s.fresh = false;
            s.rows = take_rows(s.pending(), &mut budget);
            if s.rows == 0 || self.reserve_or_preempt(i) {
                i += 1;
            }
        }
        if self.usage.preemptions == before {
            self.admit(&mut budget);
        }
    }

    /// Allocates blocks for the rows of running sequence `i`, preempting younger sequences, or `i` itself.
    fn reserve_or_preempt(&mut self, i: usize) -> bool {
        loop {
            let s = &mut self.running[i];
            let end = s.computed + s.rows;
            if self.cache.reserve(&mut s.table, s.computed, end) {
                self.cache.publish(&mut s.table, &s.ids, end);
                return true;
            }
            let id = s.id;
            let waits = self.waiting.iter().rposition(|w| !w.table.blocks.is_empty());
            let younger = waits.filter(|&w| self.waiting[w].id > id);
            let last = self.running.len() - 1;
            match younger {
                Some(w) if last == i || self.waiting[w].id > self.running[last].id => self.free_blocks(w),
                _ => {
                    self.preempt(last);
                    if last == i {
                        return false;
                    }
                }
            }
        }
    }

    fn free_blocks(&mut self, w: usize) {
        let s = &mut self.waiting[w];
        self.cache.release(&mut s.table, &s.ids, s.computed);
        s.computed = 0;
    }

    /// Preempts a running sequence: frees its blocks and makes it wait.
    fn preempt(&mut self, i: usize) {
        let mut s = self.running.remove(i);
        self.usage.preemptions += 1;
        self.cache.release(&mut s.table, &s.ids, s.computed);
        (s.computed, s.rows) = (0, 0);
        let at = self.waiting.partition_point(|w| w.id < s.id);
        self.waiting.insert(at, s);
    }

    /// Frees all sequences' blocks and clears the prefix index.
    pub(super) fn restart(&mut self) {
        self.ahead = None;
        for mut s in std::mem::take(&mut self.running) {
            s.rows = 0;
            self.waiting.push_back(s);
        }
        self.waiting.make_contiguous().sort_by_key(|s| s.id);
        for w in 0..self.waiting.len() {
            self.free_blocks(w);
        }
        self.cache.forget_all();
    }

    /// Admits waiting sequences, oldest first, while there is room.
    fn admit(&mut self, budget: &mut usize) {
        let mut slots = self.options.max_sequences.saturating_sub(self.running.len());
        let mut at = 0;
        while at < self.waiting.len() && slots > 0 {
            let bare = self.waiting[at].table.blocks.is_empty();
            if bare && !self.find_prefix(at) {
                // Keeps a slot for when the prompt has been computed.
                (at, slots) = (at + 1, slots - 1);
                continue;
            }
            let s = &self.waiting[at];
            let wanted = self.cache.missing(&s.table, s.computed, s.ids.len() + 1);
            let fits = self.running.is_empty() || wanted <= self.cache.available();
            let rows = take_rows(s.pending(), budget);
            if !fits || rows == 0 {
                if bare {
                    self.free_blocks(at);
                }
                break;
            }
            let Some(mut s) = self.waiting.remove(at) else { break };
            (s.rows, s.fresh) = (rows, true);
            self.usage.reused += s.computed as u64;
            s.shared.get_or_insert(s.computed);
            let i = self.running.partition_point(|r| r.id < s.id);
            self.running.insert(i, s);
            if !self.reserve_or_preempt(i) {
                break;
            }
            slots -= 1;
        }
    }

    /// References the cached blocks of a new request if they hold its whole prefix, so that they are not evicted while it waits. Half of
    /// the cache is left to running sequences. A shorter prefix is looked up when the request is admitted: another sequence may be
    /// computing the rest by then.
    pub(super) fn keep_prefix(&mut self, s: &mut RunningSequence) {
        let (mut table, tokens) = self.cache.find(&s.ids);
        if tokens == s.cacheable_prefix().len() && self.cache.available() >= self.cache.total() / 2 {
            s.start_from(table, tokens);
        } else {
            self.cache.release(&mut table, &[], 0);
        }
    }

    /// Looks up a waiting sequence's prefix in the cache. `false` if another sequence is computing the same prefix in this
    /// step, in which case the sequence waits for it.
    fn find_prefix(&mut self, at: usize) -> bool {
        let (mut table, found) = self.cache.find(&self.waiting[at].ids);
        let beginning = self.waiting[at].cacheable_prefix();
        let tokens = beginning.len();
        // A running sequence may have more of it than the prefix index.
        let twin = self.running.iter().find(|r| tokens > found.max(1) && r.starts_with_prefix(beginning));
        let Some(twin) = twin else {
            self.waiting[at].start_from(table, found);
            return true;
        };
        self.cache.release(&mut table, &[], 0);
        if twin.fresh || twin.computed < tokens {
            self.waiting[at].follows = Some(twin.id);
            return false;
        }
        let table = self.cache.share(&twin.table, tokens);
        self.waiting[at].start_from(table, tokens);
        true
    }

    /// Gives sequences that waited for a common prompt its blocks, once it has been computed.
    pub(super) fn share_prefixes(&mut self) {
        for w in self.waiting.iter_mut() {
            let Some(id) = w.follows else { continue };
            let Ok(i) = self.running.binary_search_by_key(&id, |r| r.id) else { continue };
            let tokens = w.cacheable_prefix().len();
            if self.running[i].computed >= tokens && w.table.blocks.is_empty() {
                let table = self.cache.share(&self.running[i].table, tokens);
                w.start_from(table, tokens);
            }
        }
    }
}

impl RunningSequence {
    /// Starts from the first `computed` tokens, whose blocks are in `table`.
    pub(super) fn start_from(&mut self, table: BlockTable, computed: usize) {
        (self.table, self.computed, self.follows) = (table, computed, None);
    }
}

/// Always one row; more only within the budget.
fn take_rows(pending: usize, budget: &mut usize) -> usize {
    if pending == 1 {
        return 1;
    }
    let rows = pending.min(*budget);
    *budget -= rows;
    rows
}
