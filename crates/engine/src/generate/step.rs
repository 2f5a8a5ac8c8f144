//! One step of the sampler: a forward pass over the scheduled rows, and the tokens that follow it.
//!
//! An asynchronous device is given the next step before the host knows this step's tokens: sampled tokens are copied into the
//! next step's ids on the device. Such a step is committed once the tokens are known; a sequence that ended in the meantime was
//! computed one step too far, and its row is discarded.

use super::choose::{Chooser, Choosing, group_by_temperature};
use super::graphs::DecodeGraphs;
use super::sampler::Sampler;
use super::sequence::RunningSequence;
use super::{Event, Id};
use crate::Result;
use crate::model::Model;
use crate::model::decoder::{Keep, PastKv};
use ferrl_kernels::Buffer;
use ferrl_kernels::backend::PagedSequence;

/// A launched step whose tokens are being sampled.
pub(super) struct InFlight {
    /// Sequences that get a token, in order.
    pub ids: Vec<Id>,
    choosing: Choosing,
    rows: usize,
}

#[derive(Default)]
struct StepRows {
    /// 0 while the token is in flight.
    ids: Vec<u32>,
    positions: Vec<u32>,
    /// Rows after which a token is sampled.
    last: Vec<u32>,
    /// For each of `last`: index into `running`.
    sequences: Vec<usize>,
}

impl Sampler {
    pub(super) fn advance(&mut self, model: &Model, events: &mut Vec<Event>) -> Result<()> {
        let step = loop {
            let step = match self.ahead.take() {
                Some(ahead) => ahead,
                None => {
                    self.schedule();
                    self.launch(model, None)?
                }
            };
            if self.commit(&step) {
                break step;
            }
        };
        // The ranks of a team receive a step's tokens from the first rank, so they cannot run ahead.
        if model.team().is_none() && self.schedule_ahead(&step.ids) {
            self.ahead = Some(self.launch(model, Some(&step))?);
        }
        self.take_tokens(model, &step, events)
    }

    /// Launches the scheduled rows; input tokens come from `before` if that step is still in flight.
    fn launch(&mut self, model: &Model, before: Option<&InFlight>) -> Result<InFlight> {
        let backend = &*model.backend;
        let batch = self.lay_out();
        assert!(!batch.ids.is_empty(), "a sequence that fits the cache alone always runs");
        let wanted: Vec<&RunningSequence> = batch.sequences.iter().map(|&i| &self.running[i]).collect();
        let ahead = usize::from(before.is_some());
        self.lead(model, (&batch.ids, &batch.positions), || {
            group_by_temperature(&batch.last, &wanted, ahead).0
        })?;
        self.cache.copy(backend)?;
        let ids: Vec<Id> = wanted.iter().map(|s| s.id).collect();
        let fill = &mut |to: &mut Buffer| match before {
            Some(step) => step.choosing.feed(model, &step.places(&ids), to),
            None => DecodeGraphs::fill(model, &batch.ids, to),
        };
        let mut once = None;
        // A pure decode step: use a graph.
        if DecodeGraphs::serve(model) && batch.last.len() == batch.ids.len() {
            self.graphs.decode(model, &batch.positions, &self.rows, &mut self.cache.layers, fill)?;
        } else {
            let mut tokens = model.tokens(&batch.ids, &batch.positions)?;
            if before.is_some() {
                fill(&mut tokens.ids)?;
            }
            let context = PastKv::Paged(&self.rows, &mut self.cache.layers);
            once = Some(model.forward(&tokens, context, Keep::Nothing)?.0);
        }
        let h = once.as_ref().unwrap_or_else(|| self.graphs.hidden());
        let choosing = Chooser::begin(model, h, &batch.last, &wanted, ahead)?;
        Ok(InFlight { ids, choosing, rows: batch.ids.len() })
    }

    /// Counts the rows of a launched step as computed; `false` if all its sequences have ended.
    fn commit(&mut self, step: &InFlight) -> bool {
        let mut any = false;
        for s in self.running.iter_mut().filter(|s| s.rows > 0) {
            s.computed += std::mem::take(&mut s.rows);
            self.cache.publish(&mut s.table, &s.ids, s.computed);
            any = true;
        }
        if any {
            self.usage.steps += 1;
            self.usage.rows += step.rows as u64;
            self.share_prefixes();
        }
        any
    }

    /// Waits for the tokens of a step and appends them to their sequences.
    fn take_tokens(&mut self, model: &Model, step: &InFlight, events: &mut Vec<Event>) -> Result<()> {
        let find = |id: &Id| self.running.binary_search_by_key(id, |s| s.id).ok().map(|i| &self.running[i]);
        let wanted: Vec<Option<&RunningSequence>> = step.ids.iter().map(find).collect();
        let picks = self.chooser.end(model, &step.choosing, &wanted)?;
        let mut picks = step.ids.iter().zip(picks).peekable();
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
                    self.cache.release(&mut s.table, &s.ids, s.computed);
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

    /// Lays out the rows of the running sequences, and their block tables for the device.
    fn lay_out(&mut self) -> StepRows {
        let (mut batch, mut count) = (StepRows::default(), 0);
        for (i, s) in self.running.iter().enumerate().filter(|(_, s)| s.rows > 0) {
            if self.rows.sequences.len() == count {
                self.rows.sequences.push(PagedSequence::default());
            }
            let entry = &mut self.rows.sequences[count];
            (entry.row, entry.count, entry.position) = (batch.ids.len(), s.rows, s.computed);
            entry.blocks.clone_from(&s.table.blocks);
            let end = s.computed + s.rows;
            batch.ids.extend_from_slice(&s.ids[s.computed..end.min(s.ids.len())]);
            batch.positions.extend(s.computed as u32..end as u32);
            batch.ids.resize(batch.positions.len(), 0);
            if end >= s.ids.len() {
                batch.last.push(batch.ids.len() as u32 - 1);
                batch.sequences.push(i);
            }
            count += 1;
        }
        self.rows.sequences.truncate(count);
        batch
    }
}

impl InFlight {
    /// Indices into `running` of some sequences.
    fn places(&self, ids: &[Id]) -> Vec<usize> {
        ids.iter().filter_map(|id| self.ids.binary_search(id).ok()).collect()
    }
}
