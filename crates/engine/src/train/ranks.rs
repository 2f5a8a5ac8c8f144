//! The gradient of an update whose micro-batches are computed by several ranks.
//!
//! Micro-batch `i` belongs to rank `i mod p`. After each round of `p` micro-batches every rank gets its part of the `p` gradients
//! and adds them to its part of the total in the order of the micro-batches; after the last round the parts are gathered. That
//! is the sum of one process, addition by addition, so the weights have the same bits for any number of ranks.

use super::Trainer;
use super::accumulate::Sum;
use crate::{Error, Result};
use ferrl_kernels::Ranks;
use ferrl_kernels::comm::part;
use std::ops::Range;

/// Weights whose gradients are exchanged at once.
const BUCKET: usize = 4 << 20;

/// This rank's part of every parameter's gradient; absent as long as nothing was added to it.
pub(super) type Totals = Vec<Option<Vec<f32>>>;

impl Trainer {
    /// Adds the gradients of a round: those of this rank's backward, where it had a micro-batch, and of the others'. All ranks
    /// call it together. Alone there is nothing to do: a backward adds to the total itself.
    pub fn add_round(&mut self, ranks: &Ranks) -> Result<()> {
        if ranks.is_alone() {
            return Ok(());
        }
        let count = self.grads.len();
        let mut totals = self.totals.take().unwrap_or_else(|| vec![None; count]);
        for bucket in self.buckets() {
            let parts = (0..ranks.size()).map(|to| self.pack(&bucket, to, ranks.size()));
            let parts = parts.collect::<Result<Vec<Vec<u8>>>>()?;
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            for arrived in ranks.all_to_all(&parts)? {
                let lengths = bucket.clone().map(|i| self.part_of(i, ranks.rank(), ranks.size()).len());
                for (i, part) in bucket.clone().zip(unpack(&arrived, lengths)?) {
                    if let Some(part) = part {
                        add(&mut totals[i], part);
                    }
                }
            }
        }
        self.zero_grads();
        self.totals = Some(totals);
        Ok(())
    }

    /// After the last round: the whole gradient, on every rank.
    pub fn gather_gradient(&mut self, ranks: &Ranks) -> Result<()> {
        let Some(totals) = self.totals.take() else { return Ok(()) };
        for bucket in self.buckets() {
            let own: Vec<Option<&[f32]>> = bucket.clone().map(|i| totals[i].as_deref()).collect();
            let arrived = ranks.all_gather(&pack(&own))?;
            for (rank, arrived) in arrived.iter().enumerate() {
                let lengths = bucket.clone().map(|i| self.part_of(i, rank, ranks.size()).len());
                for (i, part) in bucket.clone().zip(unpack(arrived, lengths)?) {
                    let range = self.part_of(i, rank, ranks.size());
                    if let (Some(part), Some(slot)) = (part, &mut self.grads[i]) {
                        self.model.backend.write(slot.written(), range.start, &part)?;
                    }
                }
            }
        }
        self.sum = Sum::Whole;
        Ok(())
    }

    /// Parameters whose gradients are exchanged together.
    fn buckets(&self) -> Vec<Range<usize>> {
        let (mut all, mut start, mut weights) = (Vec::new(), 0, 0);
        for (i, param) in self.model.params.iter().enumerate() {
            weights += param.shape.len();
            if weights >= BUCKET || i + 1 == self.model.params.len() {
                all.push(start..i + 1);
                (start, weights) = (i + 1, 0);
            }
        }
        all
    }

    /// The weights of a parameter that a rank sums up.
    fn part_of(&self, param: usize, rank: usize, size: usize) -> Range<usize> {
        part(self.model.params[param].shape.len(), rank, size)
    }

    /// What rank `to` sums up of this rank's gradients.
    fn pack(&self, bucket: &Range<usize>, to: usize, size: usize) -> Result<Vec<u8>> {
        let read = |i: usize| -> Result<Option<Vec<f32>>> {
            let Some(slot) = self.grads[i].as_ref().filter(|slot| !slot.is_empty()) else { return Ok(None) };
            let range = self.part_of(i, to, size);
            let mut values = vec![0.0; range.len()];
            self.model.backend.read(slot.buffer(), range.start, &mut values)?;
            Ok(Some(values))
        };
        let values = bucket.clone().map(read).collect::<Result<Vec<_>>>()?;
        Ok(pack(&values.iter().map(Option::as_deref).collect::<Vec<_>>()))
    }
}

/// The first is written, the others are added.
fn add(total: &mut Option<Vec<f32>>, part: Vec<f32>) {
    match total {
        None => *total = Some(part),
        Some(total) => total.iter_mut().zip(part).for_each(|(t, p)| *t += p),
    }
}

/// One byte per parameter, 1 where it has a gradient, then the gradients of these.
fn pack(parts: &[Option<&[f32]>]) -> Vec<u8> {
    let numbers: usize = parts.iter().flatten().map(|p| p.len()).sum();
    let mut bytes = vec![0; parts.len() + 4 * numbers];
    let (there, mut rest) = bytes.split_at_mut(parts.len());
    for (there, part) in there.iter_mut().zip(parts) {
        let Some(part) = part else { continue };
        *there = 1;
        let (own, after) = rest.split_at_mut(4 * part.len());
        own.chunks_exact_mut(4).zip(*part).for_each(|(bytes, x)| bytes.copy_from_slice(&x.to_le_bytes()));
        rest = after;
    }
    bytes
}

fn unpack(bytes: &[u8], lengths: impl Iterator<Item = usize>) -> Result<Vec<Option<Vec<f32>>>> {
    let lengths: Vec<usize> = lengths.collect();
    let differs = || {
        Error::rank("another rank's gradient has another shape").fix("one binary and one recipe on all ranks")
    };
    let (there, mut rest) = bytes.split_at_checked(lengths.len()).ok_or_else(differs)?;
    let mut all = Vec::with_capacity(lengths.len());
    for (there, length) in there.iter().zip(lengths) {
        if *there == 0 {
            all.push(None);
            continue;
        }
        let (own, after) = rest.split_at_checked(4 * length).ok_or_else(differs)?;
        let numbers = own.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        all.push(Some(numbers.collect()));
        rest = after;
    }
    if rest.is_empty() { Ok(all) } else { Err(differs()) }
}
