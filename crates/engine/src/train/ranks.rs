//! Data parallelism: the micro-batches of an update are computed by several ranks.
//!
//! Rank `i mod p` computes micro-batch `i`. After each round of `p` micro-batches, an all-to-all gives every rank its shard of
//! the `p` gradients, which it adds to its shard of the total in micro-batch order; after the last round the shards are
//! all-gathered. Addition by addition this is the sum of one process, so the weights have the same bits on any number of ranks.

use super::ModelTrainer;
use super::accumulate::Accumulated;
use crate::Result;
use crate::model::Model;
use crate::model::gradient::Gradient;
use crate::model::shard::buckets;
use ferrl_kernels::comm::{Inbox, Outbox, ParcelContents, ParcelPiece, PendingParcels, Route, part};
use ferrl_kernels::{Buffer, DType, Purpose, Ranks};
use std::ops::Range;

/// This rank's shard of every parameter's accumulated gradient; `None` until something was added.
pub(super) type Totals = Vec<Option<Buffer>>;

impl ModelTrainer {
    /// Adds the gradients of a round: this rank's, if it had a micro-batch, and the other ranks'. Collective. No-op on a single
    /// rank, where backward accumulates directly, and under ZeRO-3, where gradients are reduced layer by layer.
    pub fn add_round(&mut self, ranks: &Ranks) -> Result<()> {
        let (split, in_team) = (self.model.split_over().cloned(), self.model.team().is_some());
        if ranks.is_alone() || split.is_some() && !in_team {
            return Ok(());
        }
        let mut totals = self.take_totals();
        let all: Vec<usize> = (0..self.grads.len()).collect();
        let parts = |param: usize, len: usize, rank: usize| match &split {
            Some(split) => split.part(param, len, rank),
            None => part(len, rank, ranks.size()),
        };
        GradientExchange::new(&self.model, ranks, &parts).add(&all, &self.grads, &mut totals)?;
        self.zero_grads();
        self.totals = Some(totals);
        Ok(())
    }

    pub(super) fn take_totals(&mut self) -> Totals {
        self.totals.take().unwrap_or_else(|| self.model.params.iter().map(|_| None).collect())
    }

    /// After the last round: the complete gradient on every rank, or this rank's shard under ZeRO-3.
    pub fn gather_gradient(&mut self, ranks: &Ranks) -> Result<()> {
        let Some(totals) = self.totals.take() else { return Ok(()) };
        if self.model.split_over().is_some() {
            return self.store_shards(totals);
        }
        let all: Vec<usize> = (0..self.grads.len()).collect();
        let part_of = |i: usize, rank: usize| part(self.model.params[i].shape.len(), rank, ranks.size());
        for bucket in buckets(&all, |i| self.model.params[i].shape.len()) {
            let pieces = |rank: usize| bucket.iter().map(move |&i| ParcelPiece::f32s(part_of(i, rank).len()));
            let mut inbox = {
                let _gradients = Purpose::Gradients.on(&self.model.backend);
                let own = bucket.iter().filter_map(|&i| totals[i].as_ref());
                let slot = ParcelContents {
                    note: bucket.iter().map(|&i| totals[i].is_some().into()).collect(),
                    pieces: own.clone().map(|total| ParcelPiece::f32s(total.len())).collect(),
                };
                let to = Route::Same((0..ranks.size()).collect());
                let mut outbox = Outbox::new(ranks, &self.model.backend, to, vec![slot])?;
                own.into_iter().try_for_each(|total| outbox.push(0, total, 0))?;
                let expected: Vec<Vec<ParcelPiece>> =
                    (0..ranks.size()).map(|rank| pieces(rank).collect()).collect();
                ranks.exchange_parcels(outbox, &expected)?
            };
            for rank in 0..ranks.size() {
                let there = inbox.note(rank, bucket.len())?;
                for ((&i, piece), _) in
                    bucket.iter().zip(pieces(rank)).zip(there).filter(|(_, there)| *there == 1)
                {
                    let start = part_of(i, rank).start;
                    if let Some(slot) = &mut self.grads[i] {
                        inbox.write(rank, piece, slot.written(), start)?;
                    }
                }
                inbox.end(rank)?;
            }
        }
        drop(totals);
        // Update and rollout allocate other sizes than forward and backward: release the latter's cached memory first.
        self.model.backend.trim();
        self.sum = Accumulated::Whole;
        Ok(())
    }

    /// Moves the totals of this rank's shards to where an update reads them.
    fn store_shards(&mut self, totals: Totals) -> Result<()> {
        for (i, total) in totals.into_iter().enumerate() {
            self.grads[i] = match total.filter(|_| self.optimizer.trains(i)) {
                Some(total) => Some(Gradient::of(total)),
                None => self.slot(i)?,
            };
        }
        // As above.
        self.model.backend.trim();
        self.sum = Accumulated::Whole;
        Ok(())
    }
}

/// The range of a parameter that a rank accumulates, by parameter, length and rank.
type OwnedRange<'a> = &'a dyn Fn(usize, usize, usize) -> Range<usize>;

/// Reduce-scatter of gradients in micro-batch order.
pub(super) struct GradientExchange<'a> {
    model: &'a Model,
    ranks: &'a Ranks,
    parts: OwnedRange<'a>,
    /// Ranks per team; a team computes a micro-batch's gradient together.
    team: usize,
}

impl<'a> GradientExchange<'a> {
    pub fn new(model: &'a Model, ranks: &'a Ranks, parts: OwnedRange<'a>) -> Self {
        let team = model.team().map_or(1, |team| team.ranks().size());
        GradientExchange { model, ranks, parts, team }
    }

    /// Adds this rank's shard of every micro-batch's gradients of these parameters to the totals, in rank order.
    pub fn add(&self, params: &[usize], grads: &[Option<Gradient>], totals: &mut Totals) -> Result<()> {
        for bucket in buckets(params, |i| self.model.params[i].shape.len()) {
            let _gradients = Purpose::Gradients.on(&self.model.backend);
            let outbox = self.pack(bucket, grads)?;
            let inbox = self.ranks.exchange_parcels(outbox, &self.expected(bucket))?;
            self.add_received(bucket, inbox, totals)?;
        }
        Ok(())
    }

    /// Starts sending gradients to the ranks that accumulate them; [`GradientExchange::finish`] waits and adds.
    pub fn begin(&self, params: Vec<usize>, grads: &[Option<Gradient>]) -> Result<PendingReduce> {
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        let coming = self.ranks.begin_parcels(self.pack(&params, grads)?, &self.expected(&params))?;
        Ok(PendingReduce { params, coming })
    }

    /// Waits for the gradients and adds them.
    pub fn finish(&self, pending_reduce: PendingReduce, totals: &mut Totals) -> Result<()> {
        self.add_received(&pending_reduce.params, self.ranks.receive(pending_reduce.coming)?, totals)
    }

    /// Adds received gradients in micro-batch order: each from one rank, or from the members of a team.
    fn add_received(&self, params: &[usize], mut inbox: Inbox, totals: &mut Totals) -> Result<()> {
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        for first in (0..self.ranks.size()).step_by(self.team) {
            if self.team > 1 {
                self.add_from_team(params, first, &mut inbox, totals)?;
                continue;
            }
            let there = inbox.note(first, params.len())?;
            for (&i, _) in params.iter().zip(there).filter(|(_, there)| *there == 1) {
                self.add_part(&mut inbox, first, self.part(i, self.ranks.rank()).len(), &mut totals[i])?;
            }
            inbox.end(first)?;
        }
        Ok(())
    }

    /// The first contribution is written, later ones are added.
    fn add_part(&self, inbox: &mut Inbox, from: usize, len: usize, total: &mut Option<Buffer>) -> Result<()> {
        let Some(total) = total else {
            let mut first = self.model.backend.alloc(DType::F32, len)?;
            inbox.write(from, ParcelPiece::f32s(len), &mut first, 0)?;
            *total = Some(first);
            return Ok(());
        };
        inbox.add(from, total)
    }

    /// Adds a micro-batch's gradients, sent in pieces by the members of the team that starts at rank `first`.
    fn add_from_team(
        &self,
        params: &[usize],
        first: usize,
        inbox: &mut Inbox,
        totals: &mut Totals,
    ) -> Result<()> {
        let (backend, own) = (&self.model.backend, self.ranks.rank());
        let mut joined: Totals = params.iter().map(|_| None).collect();
        for member in 0..self.team {
            let there = inbox.note(first + member, params.len())?;
            for ((&i, whole), _) in params.iter().zip(&mut joined).zip(there).filter(|(_, there)| *there == 1)
            {
                let part = self.part(i, own);
                let mut buffer = match whole.take() {
                    Some(buffer) => buffer,
                    None => self.zeros(part.len())?,
                };
                for piece in self.pieces(i, member, own) {
                    let at = piece.element - part.start;
                    inbox.write(first + member, ParcelPiece::f32s(piece.len), &mut buffer, at)?;
                }
                *whole = Some(buffer);
            }
            inbox.end(first + member)?;
        }
        for (&i, part) in params.iter().zip(joined) {
            match (part, &mut totals[i]) {
                (None, _) => {}
                (part, total @ None) => *total = part,
                (Some(part), Some(total)) => backend.axpy(1.0, &part, total)?,
            }
        }
        Ok(())
    }

    fn part(&self, param: usize, rank: usize) -> Range<usize> {
        (self.parts)(param, self.model.params[param].shape.len(), rank)
    }

    /// The pieces of `to`'s shard that a member of a team holds.
    fn pieces(&self, param: usize, member: usize, to: usize) -> Vec<GradientPiece> {
        let part = self.part(param, to);
        let cut = self.model.splits_gradient(param);
        let (mut at, mut all) = (0, Vec::new());
        for has in self.model.gradient_ranges(param, member) {
            let (start, end) = (has.start.max(part.start), has.end.min(part.end));
            if start < end {
                // A gradient that every member computes is stored in full.
                let held = if cut { at + start - has.start } else { start };
                all.push(GradientPiece { held, element: start, len: end - start });
            }
            at += has.len();
        }
        all
    }

    /// This rank's gradients for the ranks that accumulate them: a presence byte per parameter, then the gradients that are
    /// present.
    fn pack(&self, params: &[usize], grads: &[Option<Gradient>]) -> Result<Outbox> {
        let member = self.ranks.rank() % self.team;
        let there: Vec<Option<&Gradient>> =
            params.iter().map(|&i| grads[i].as_ref().filter(|slot| !slot.is_empty())).collect();
        let note: Vec<u8> = there.iter().map(|slot| slot.is_some().into()).collect();
        let sent = |to: usize| {
            let present = params.iter().zip(&there).filter_map(|(&i, slot)| slot.map(|slot| (i, slot)));
            let of = move |(i, slot)| self.pieces(i, member, to).into_iter().map(move |piece| (slot, piece));
            present.flat_map(of)
        };
        let slot = |to: usize| ParcelContents {
            note: note.clone(),
            pieces: sent(to).map(|(_, piece)| ParcelPiece::f32s(piece.len)).collect(),
        };
        let slots = (0..self.ranks.size()).map(slot).collect();
        let mut outbox = Outbox::new(self.ranks, &self.model.backend, Route::Each, slots)?;
        for to in 0..self.ranks.size() {
            for (slot, piece) in sent(to) {
                outbox.push(to, slot.buffer(), piece.held)?;
            }
        }
        Ok(outbox)
    }

    /// Pieces that each rank sends here if every parameter has a gradient.
    fn expected(&self, params: &[usize]) -> Vec<Vec<ParcelPiece>> {
        let from = |rank: usize| {
            let of = |&i: &usize| self.pieces(i, rank % self.team, self.ranks.rank());
            params.iter().flat_map(of).map(|piece| ParcelPiece::f32s(piece.len)).collect()
        };
        (0..self.ranks.size()).map(from).collect()
    }

    fn zeros(&self, len: usize) -> Result<Buffer> {
        let mut zeros = self.model.backend.alloc(DType::F32, len)?;
        self.model.backend.fill(&mut zeros, 0.0)?;
        Ok(zeros)
    }
}

/// Gradients being sent to the ranks that accumulate them.
pub(super) struct PendingReduce {
    params: Vec<usize>,
    coming: PendingParcels,
}

struct GradientPiece {
    /// Start in the sender's buffer, and in the parameter.
    held: usize,
    element: usize,
    len: usize,
}
