//! Sampling by the ranks of a team (tensor parallelism). Each has its heads of the KV cache.
//!
//! The first rank leads: it schedules, chooses tokens, plays environments. The others compute what it computes: it sends them
//! the rows of every forward pass, and they take part in it. So nothing that happens on one rank alone (a tool's output, a
//! cancelled request) can make two ranks differ.

use super::sampler::Sampler;
use crate::model::Model;
use crate::model::decoder::{Keep, PastKv};
use crate::{Error, Result};
use ferrl_kernels::backend::{PagedRows, PagedSequence};

/// A forward pass that the leader asks for.
#[derive(Debug, Default, PartialEq)]
pub(super) struct TeamOrder {
    /// Blocks of the cache that are copied before it.
    pub copies: Vec<(u32, u32)>,
    pub ids: Vec<u32>,
    pub positions: Vec<u32>,
    pub rows: PagedRows,
}

impl TeamOrder {
    fn to_bytes(&self) -> Vec<u8> {
        let mut all = vec![self.copies.len() as u32];
        all.extend(self.copies.iter().flat_map(|&(from, to)| [from, to]));
        all.push(self.ids.len() as u32);
        all.extend(self.ids.iter().chain(&self.positions));
        for s in &self.rows.sequences {
            all.extend([s.row as u32, s.count as u32, s.position as u32, s.blocks.len() as u32]);
            all.extend(&s.blocks);
        }
        all.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Result<Self> {
        let mut numbers = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
        let lost = || Error::rank("an order of the first rank cannot be read").fix("one binary on all ranks");
        let mut next = || numbers.next().ok_or_else(lost);
        let mut order = TeamOrder::default();
        for _ in 0..next()? {
            order.copies.push((next()?, next()?));
        }
        let count = next()?;
        for list in [&mut order.ids, &mut order.positions] {
            for _ in 0..count {
                list.push(next()?);
            }
        }
        while let Ok(row) = next() {
            let (row, count, position) = (row as usize, next()? as usize, next()? as usize);
            let blocks = (0..next()?).map(|_| next()).collect::<Result<Vec<u32>>>()?;
            order.rows.sequences.push(PagedSequence { row, count, position, blocks });
        }
        Ok(order)
    }
}

/// Tells the other ranks of the model's team, if any, that sampling is over for now.
pub fn dismiss(model: &Model) -> Result<()> {
    model.team().map_or(Ok(()), |team| team.ranks().broadcast(&[]).map(drop))
}

impl Sampler {
    /// Sends the other ranks the next forward pass.
    pub(super) fn lead(&self, model: &Model, ids: &[u32], positions: &[u32]) -> Result<()> {
        let Some(team) = model.team() else { return Ok(()) };
        let copies = self.cache.copies_due().to_vec();
        let order =
            TeamOrder { copies, ids: ids.to_vec(), positions: positions.to_vec(), rows: self.rows.clone() };
        team.ranks().broadcast(&order.to_bytes()).map(drop)
    }

    /// Computes with the first rank of the model's team until it has sampled what it wanted.
    pub(super) fn compute_along(&mut self, model: &Model) -> Result<()> {
        let team = model.team().ok_or_else(|| Error::usage("a rank without a team follows nobody"))?;
        loop {
            let bytes = team.ranks().broadcast(&[])?;
            if bytes.is_empty() {
                return Ok(());
            }
            let TeamOrder { copies, ids, positions, rows } = TeamOrder::of_bytes(&bytes)?;
            self.cache.copy_pairs(&*model.backend, &copies)?;
            let tokens = model.tokens(&ids, &positions)?;
            let context = PastKv::Paged(&rows, &mut self.cache.layers);
            model.forward(&tokens, context, Keep::Nothing)?;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_order_arrives_as_it_was_sent() {
        let sequence =
            |row, blocks: &[u32]| PagedSequence { row, count: 2, position: 5, blocks: blocks.to_vec() };
        let rows =
            PagedRows { sequences: vec![sequence(0, &[3]), sequence(2, &[4, 1, 9]), sequence(4, &[])] };
        let order =
            TeamOrder { copies: vec![(1, 2)], ids: vec![7; 6], positions: vec![5, 6, 5, 6, 5, 6], rows };
        assert_eq!(TeamOrder::of_bytes(&order.to_bytes()).unwrap(), order);
        assert!(TeamOrder::of_bytes(&order.to_bytes()[..40]).is_err());
    }
}
