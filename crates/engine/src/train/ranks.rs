//! The gradient of an update whose micro-batches are computed by several ranks.
//!
//! Micro-batch `i` belongs to rank `i mod p`. After each round of `p` micro-batches every rank gets its part of the `p` gradients
//! and adds them to its part of the total in the order of the micro-batches; after the last round the parts are gathered. That
//! is the sum of one process, addition by addition, so the weights have the same bits for any number of ranks.

use super::Trainer;
use super::accumulate::Sum;
use crate::Result;
use crate::model::Model;
use crate::model::gradient::Gradient;
use crate::model::shard::{buckets, read_f32s, unequal_shapes, write_f32s};
use ferrl_kernels::comm::{Pending, give_back, part, room};
use ferrl_kernels::{Buffer, DType, Purpose, Ranks};
use std::ops::Range;

/// This rank's part of every parameter's gradient; absent as long as nothing was added to it.
pub(super) type Totals = Vec<Option<Buffer>>;

/// Numbers of parameters, where there are any.
type Numbers = Vec<Option<Vec<f32>>>;

impl Trainer {
    /// Adds the gradients of a round: those of this rank's backward, where it had a micro-batch, and of the others'. All ranks
    /// call it together. Alone there is nothing to do: a backward adds to the total itself. Nor is there where weights are
    /// split: gradients have gone to their ranks layer by layer.
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

    /// After the last round: the whole gradient, on every rank; of the rank's own weights where they are split.
    pub fn gather_gradient(&mut self, ranks: &Ranks) -> Result<()> {
        let Some(totals) = self.totals.take() else { return Ok(()) };
        if self.model.split_over().is_some() {
            return self.keep_own(totals);
        }
        let all: Vec<usize> = (0..self.grads.len()).collect();
        let part_of = |i: usize, rank: usize| part(self.model.params[i].shape.len(), rank, ranks.size());
        for bucket in buckets(&all, |i| self.model.params[i].shape.len()) {
            let read = |&i: &usize| totals[i].as_ref().map(|total| self.model.read_f32s(total)).transpose();
            let own = bucket.iter().map(read).collect::<Result<Numbers>>()?;
            let arrived = ranks.all_gather(&pack(&own))?;
            for (rank, arrived) in arrived.iter().enumerate() {
                let lengths = bucket.iter().map(|&i| part_of(i, rank).len());
                for (&i, part) in bucket.iter().zip(unpack(arrived, lengths)?) {
                    let start = part_of(i, rank).start;
                    if let (Some(part), Some(slot)) = (part, &mut self.grads[i]) {
                        self.model.backend.write(slot.written(), start, &part)?;
                    }
                }
            }
        }
        self.sum = Sum::Whole;
        Ok(())
    }

    /// The sums of this rank's own weights, where an update finds them.
    fn keep_own(&mut self, totals: Totals) -> Result<()> {
        for (i, total) in totals.into_iter().enumerate() {
            self.grads[i] = match total.filter(|_| self.optimizer.trains(i)) {
                Some(total) => Some(Gradient::of(total)),
                None => self.slot(i)?,
            };
        }
        // The update needs other sizes than forward and backward, whose memory would lie beside its own.
        self.model.backend.trim();
        self.sum = Sum::Whole;
        Ok(())
    }
}

/// Which of a parameter's weights a rank sums up, by parameter, length and rank.
type Parts<'a> = &'a dyn Fn(usize, usize, usize) -> Range<usize>;

/// How gradients reach the ranks that sum them up.
pub(super) struct GradientExchange<'a> {
    model: &'a Model,
    ranks: &'a Ranks,
    parts: Parts<'a>,
    /// Ranks that have computed the gradient of a micro-batch together.
    team: usize,
}

impl<'a> GradientExchange<'a> {
    pub fn new(model: &'a Model, ranks: &'a Ranks, parts: Parts<'a>) -> Self {
        let team = model.team().map_or(1, |team| team.ranks().size());
        GradientExchange { model, ranks, parts, team }
    }

    /// Adds this rank's part of every micro-batch's gradients of these parameters to the totals, in the order of the ranks.
    pub fn add(&self, params: &[usize], grads: &[Option<Gradient>], totals: &mut Totals) -> Result<()> {
        for bucket in buckets(params, |i| self.model.params[i].shape.len()) {
            let parts = self.pack_all(bucket, grads)?;
            let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            self.add_arrived(bucket, self.ranks.all_to_all(&slices)?, totals)?;
            give_back(parts);
        }
        Ok(())
    }

    /// Starts to send gradients to the ranks that sum them; [`Exchange::finish`] waits and adds the sums.
    pub fn begin(&self, params: Vec<usize>, grads: &[Option<Gradient>]) -> Result<Leaving> {
        let pending = self.ranks.begin(self.pack_all(&params, grads)?);
        Ok(Leaving { params, pending })
    }

    /// The end of it.
    pub fn finish(&self, leaving: Leaving, totals: &mut Totals) -> Result<()> {
        self.add_arrived(&leaving.params, self.ranks.wait(leaving.pending)?, totals)
    }

    fn pack_all(&self, params: &[usize], grads: &[Option<Gradient>]) -> Result<Vec<Vec<u8>>> {
        (0..self.ranks.size()).map(|to| self.pack(params, grads, to)).collect()
    }

    fn add_arrived(&self, params: &[usize], all: Vec<Vec<u8>>, totals: &mut Totals) -> Result<()> {
        for arrived in all.chunks(self.team) {
            if let [bytes] = arrived {
                self.add_numbers(params, bytes, totals)?;
                continue;
            }
            for (&i, part) in params.iter().zip(self.join(params, arrived)?) {
                if let Some(part) = part {
                    self.add_part(&mut totals[i], &part)?;
                }
            }
        }
        give_back(all);
        Ok(())
    }

    /// Adds what one rank has sent, a parameter at a time.
    fn add_numbers(&self, params: &[usize], bytes: &[u8], totals: &mut Totals) -> Result<()> {
        let (there, mut rest) = bytes.split_at_checked(params.len()).ok_or_else(unequal_shapes)?;
        let mut numbers = Vec::new();
        for (&i, _) in params.iter().zip(there).filter(|(_, there)| **there == 1) {
            let len = self.part(i, self.ranks.rank()).len();
            let (own, after) = rest.split_at_checked(4 * len).ok_or_else(unequal_shapes)?;
            numbers.resize(len, 0.0);
            read_f32s(own, &mut numbers);
            self.add_part(&mut totals[i], &numbers)?;
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err(unequal_shapes()) }
    }

    /// This rank's part of a micro-batch's gradients, from the members of the team that computed it.
    fn join(&self, bucket: &[usize], arrived: &[Vec<u8>]) -> Result<Numbers> {
        let mut all: Numbers = vec![None; bucket.len()];
        for (member, arrived) in arrived.iter().enumerate() {
            let pieces = |&i: &usize| self.pieces(i, member, self.ranks.rank());
            let pieces: Vec<Vec<GradientPiece>> = bucket.iter().map(pieces).collect();
            let lengths = pieces.iter().map(|p| p.iter().map(|p| p.len).sum());
            let values = unpack(arrived, lengths)?;
            for (slot, (&i, (values, pieces))) in
                all.iter_mut().zip(bucket.iter().zip(values.into_iter().zip(pieces)))
            {
                let Some(values) = values else { continue };
                if self.team == 1 {
                    *slot = Some(values);
                    continue;
                }
                let own = self.part(i, self.ranks.rank());
                let whole = slot.get_or_insert_with(|| vec![0.0; own.len()]);
                let mut rest = &values[..];
                for piece in pieces {
                    let (here, after) = rest.split_at(piece.len);
                    let at = piece.element - own.start;
                    whole[at..at + piece.len].copy_from_slice(here);
                    rest = after;
                }
            }
        }
        Ok(all)
    }

    fn part(&self, param: usize, rank: usize) -> Range<usize> {
        (self.parts)(param, self.model.params[param].shape.len(), rank)
    }

    /// What a member of a team has of the gradients that rank `to` sums up.
    fn pieces(&self, param: usize, member: usize, to: usize) -> Vec<GradientPiece> {
        let part = self.part(param, to);
        let cut = self.model.is_cut(param);
        let (mut at, mut all) = (0, Vec::new());
        for has in self.model.computed(param, member) {
            let (start, end) = (has.start.max(part.start), has.end.min(part.end));
            if start < end {
                // A gradient that every member has all of lies there whole.
                let held = if cut { at + start - has.start } else { start };
                all.push(GradientPiece { held, element: start, len: end - start });
            }
            at += has.len();
        }
        all
    }

    /// What rank `to` sums up of this rank's gradients, as [`pack`] has it; a piece is in memory at a time beside.
    fn pack(&self, bucket: &[usize], grads: &[Option<Gradient>], to: usize) -> Result<Vec<u8>> {
        let member = self.ranks.rank() % self.team;
        let there: Vec<Option<&Gradient>> =
            bucket.iter().map(|&i| grads[i].as_ref().filter(|slot| !slot.is_empty())).collect();
        let pieces: Vec<Vec<GradientPiece>> = bucket.iter().map(|&i| self.pieces(i, member, to)).collect();
        let sent = there.iter().zip(&pieces).filter(|(slot, _)| slot.is_some());
        let count: usize = sent.flat_map(|(_, pieces)| pieces).map(|piece| piece.len).sum();
        let mut bytes = room(bucket.len() + 4 * count);
        let (flags, mut rest) = bytes.split_at_mut(bucket.len());
        let mut numbers = Vec::new();
        for ((flag, slot), pieces) in flags.iter_mut().zip(there).zip(pieces) {
            *flag = slot.is_some().into();
            let Some(slot) = slot else { continue };
            for piece in pieces {
                numbers.resize(piece.len, 0.0);
                self.model.backend.read(slot.buffer(), piece.held, &mut numbers)?;
                let (own, after) = rest.split_at_mut(4 * piece.len);
                write_f32s(&numbers, own);
                rest = after;
            }
        }
        Ok(bytes)
    }

    /// The first is written, the others are added.
    fn add_part(&self, total: &mut Option<Buffer>, part: &[f32]) -> Result<()> {
        let backend = &self.model.backend;
        let _gradients = Purpose::Gradients.on(backend);
        let mut buffer = backend.alloc(DType::F32, part.len())?;
        backend.write(&mut buffer, 0, part)?;
        match total {
            None => *total = Some(buffer),
            Some(total) => backend.axpy(1.0, &buffer, total)?,
        }
        Ok(())
    }
}

/// Gradients of some parameters on their way to the ranks that sum them up.
pub(super) struct Leaving {
    params: Vec<usize>,
    pending: Pending,
}

/// Numbers of a gradient that go from one rank to another.
struct GradientPiece {
    /// Where they begin in the sender's gradient, and among all weights of the parameter.
    held: usize,
    element: usize,
    len: usize,
}

/// One byte per parameter, 1 where it has a gradient, then the gradients of these.
fn pack(parts: &[Option<Vec<f32>>]) -> Vec<u8> {
    let numbers: usize = parts.iter().flatten().map(|p| p.len()).sum();
    let mut bytes = room(parts.len() + 4 * numbers);
    let (there, mut rest) = bytes.split_at_mut(parts.len());
    for (there, part) in there.iter_mut().zip(parts) {
        *there = part.is_some() as u8;
        let Some(part) = part else { continue };
        let (own, after) = rest.split_at_mut(4 * part.len());
        write_f32s(part, own);
        rest = after;
    }
    bytes
}

fn unpack(bytes: &[u8], lengths: impl Iterator<Item = usize>) -> Result<Numbers> {
    let lengths: Vec<usize> = lengths.collect();
    let (there, mut rest) = bytes.split_at_checked(lengths.len()).ok_or_else(unequal_shapes)?;
    let mut all = Vec::with_capacity(lengths.len());
    for (there, length) in there.iter().zip(lengths) {
        if *there == 0 {
            all.push(None);
            continue;
        }
        let (own, after) = rest.split_at_checked(4 * length).ok_or_else(unequal_shapes)?;
        let mut numbers = vec![0.0; length];
        read_f32s(own, &mut numbers);
        all.push(Some(numbers));
        rest = after;
    }
    if rest.is_empty() { Ok(all) } else { Err(unequal_shapes()) }
}
