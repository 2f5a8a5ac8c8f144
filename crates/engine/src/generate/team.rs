//! Sampling by a tensor-parallel team. Each rank has its heads of the KV cache.
//!
//! The first rank leads: it schedules, samples and plays environments. It sends the other ranks the rows of every forward pass
//! and how tokens are sampled after it; they compute their part of both (`shared.rs`). So events on one rank only (a tool's
//! output, a cancelled request) cannot make ranks diverge.

use super::choose::SampleBatch;
use super::sampler::Sampler;
use super::shared::sample_in_team;
use crate::model::Model;
use crate::model::decoder::{Keep, PastKv};
use crate::{Error, Result};
use ferrl_kernels::backend::{PagedRows, PagedSequence, SampleSpec};

/// A forward pass that the leader announces.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TeamStep {
    /// Copy-on-write copies of cache blocks to make first, group by group.
    pub copies: Vec<Vec<(u32, u32)>>,
    pub ids: Vec<u32>,
    pub positions: Vec<u32>,
    /// Tokens to sample after it.
    pub heads: Vec<SampleBatch>,
    pub rows: PagedRows,
}

impl TeamStep {
    fn to_bytes(&self) -> Vec<u8> {
        let mut all = vec![self.copies.len() as u32];
        for group in &self.copies {
            all.push(group.len() as u32);
            all.extend(group.iter().flat_map(|&(from, to)| [from, to]));
        }
        all.push(self.ids.len() as u32);
        all.extend(self.ids.iter().chain(&self.positions));
        all.push(self.heads.len() as u32);
        for head in &self.heads {
            all.extend([head.divisor.to_bits(), head.rows.len() as u32]);
            all.extend(&head.rows);
            for (spec, on_host) in head.specs.iter().zip(&head.on_host) {
                let draw = spec.draw.map_or(u32::MAX, f32::to_bits);
                let (top_k, on_host) = (spec.top_k.min(u32::MAX as usize) as u32, u32::from(*on_host));
                all.extend([draw, top_k, spec.top_p.to_bits(), spec.min_p.to_bits(), on_host]);
            }
        }
        for s in &self.rows.sequences {
            all.extend([s.row as u32, s.count as u32, s.position as u32, s.blocks.len() as u32]);
            all.extend(&s.blocks);
        }
        all.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Result<Self> {
        let mut numbers = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let lost = || Error::rank("a step of the first rank cannot be read").fix("one binary on all ranks");
        let mut next = || numbers.next().ok_or_else(lost);
        let mut step = TeamStep::default();
        for _ in 0..next()? {
            let pairs = (0..next()?).map(|_| Ok((next()?, next()?)));
            step.copies.push(pairs.collect::<Result<_>>()?);
        }
        let count = next()?;
        for list in [&mut step.ids, &mut step.positions] {
            for _ in 0..count {
                list.push(next()?);
            }
        }
        for _ in 0..next()? {
            let (divisor, count) = (f32::from_bits(next()?), next()?);
            let mut head = SampleBatch { divisor, ..SampleBatch::default() };
            for _ in 0..count {
                head.rows.push(next()?);
            }
            for _ in 0..count {
                let draw = Some(next()?).filter(|&bits| bits != u32::MAX).map(f32::from_bits);
                let (top_k, top_p, min_p) =
                    (next()? as usize, f32::from_bits(next()?), f32::from_bits(next()?));
                head.specs.push(SampleSpec { draw, top_k, top_p, min_p });
                head.on_host.push(next()? == 1);
            }
            step.heads.push(head);
        }
        while let Ok(row) = next() {
            let (row, count, position) = (row as usize, next()? as usize, next()? as usize);
            let blocks = (0..next()?).map(|_| next()).collect::<Result<Vec<u32>>>()?;
            step.rows.sequences.push(PagedSequence { row, count, position, blocks });
        }
        Ok(step)
    }
}

/// Ends [`Generator::follow`](super::Generator::follow) on the other ranks of the model's team, if any.
pub fn dismiss(model: &Model) -> Result<()> {
    model.team().map_or(Ok(()), |team| team.ranks().broadcast(&[]).map(drop))
}

impl Sampler {
    /// Announces the next forward pass to the other ranks.
    pub(super) fn lead(
        &self,
        model: &Model,
        (ids, positions): (&[u32], &[u32]),
        heads: impl FnOnce() -> Vec<SampleBatch>,
    ) -> Result<()> {
        let Some(team) = model.team() else { return Ok(()) };
        let (copies, rows) = (self.cache.copies_due().to_vec(), self.rows.clone());
        let step =
            TeamStep { copies, ids: ids.to_vec(), positions: positions.to_vec(), heads: heads(), rows };
        team.ranks().broadcast(&step.to_bytes()).map(drop)
    }

    /// Computes along with the first rank of the model's team until dismissed.
    pub(super) fn compute_along(&mut self, model: &Model) -> Result<()> {
        let team = model.team().ok_or_else(|| Error::usage("only a rank of a team can follow another"))?;
        loop {
            let bytes = team.ranks().broadcast(&[])?;
            if bytes.is_empty() {
                return Ok(());
            }
            let TeamStep { copies, ids, positions, heads, rows } = TeamStep::of_bytes(&bytes)?;
            self.cache.copy_groups(&*model.backend, &copies)?;
            let tokens = model.tokens(&ids, &positions)?;
            let context = PastKv::Paged(&rows, &mut self.cache.layers);
            let (h, _) = model.forward(&tokens, context, Keep::Nothing)?;
            heads.iter().try_for_each(|step| sample_in_team(model, team, &h, step).map(drop))?;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_step_is_decoded_as_it_was_encoded() {
        let sequence =
            |row, blocks: &[u32]| PagedSequence { row, count: 2, position: 5, blocks: blocks.to_vec() };
        let rows =
            PagedRows { sequences: vec![sequence(0, &[3]), sequence(2, &[4, 1, 9]), sequence(4, &[])] };
        let specs =
            vec![SampleSpec::plain(None), SampleSpec { draw: Some(0.25), top_k: 7, top_p: 0.9, min_p: 0.1 }];
        let head = SampleBatch { divisor: 0.7, rows: vec![1, 5], specs, on_host: vec![true, false] };
        let (ids, positions) = (vec![7; 6], vec![5, 6, 5, 6, 5, 6]);
        let step = TeamStep {
            copies: vec![vec![(1, 2), (4, 3)], vec![(2, 5)]],
            ids,
            positions,
            heads: vec![head],
            rows,
        };
        assert_eq!(TeamStep::of_bytes(&step.to_bytes()).unwrap(), step);
        assert!(TeamStep::of_bytes(&step.to_bytes()[..40]).is_err());
    }
}
