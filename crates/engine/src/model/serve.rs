//! Reading the full state of a model that is sharded over ranks.
//!
//! [`Model::hand_out`] gives each rank some full parameters, so that all ranks write a checkpoint together. An adapter is
//! small: rank 0 requests one tensor at a time from the other ranks, which serve it, and never holds more than one.

use super::shard::{Split, read_f32s, unequal_shapes, write_f32s};
use super::weights::Model;
use crate::Result;
use ferrl_kernels::Ranks;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Index of the model within the run.
    pub model: usize,
    /// Index of the parameter.
    pub param: usize,
    /// 0: weights; then the optimizer's buffers in their order.
    pub kind: usize,
}

impl Split {
    /// Gathers a full tensor of a parameter with `len` weights to rank 0; `own` is this rank's part and `numbers` extracts the
    /// values of a range of weights. Rank 0 calls it while all others [`serve`].
    pub(crate) fn collect(
        &self,
        (param, kind): (usize, usize),
        len: usize,
        own: &[f32],
        numbers: impl Fn(Range<usize>) -> Range<usize>,
    ) -> Result<Vec<f32>> {
        let request = [self.number, param, kind].map(|x| (x as u64).to_le_bytes()).concat();
        self.ranks.broadcast(&request)?;
        let mut whole = vec![0.0; numbers(0..len).len()];
        whole[numbers(self.part(param, len, 0))].copy_from_slice(own);
        let nothing: Vec<&[u8]> = vec![&[]; self.ranks.size()];
        let arrived = self.ranks.all_to_all(&nothing)?;
        for (rank, bytes) in arrived.iter().enumerate().take(self.shards).skip(1) {
            let to = &mut whole[numbers(self.part(param, len, rank))];
            if bytes.len() != 4 * to.len() {
                return Err(unequal_shapes());
            }
            read_f32s(bytes, to);
        }
        Ok(whole)
    }
}

impl Model {
    /// Gathers each sharded parameter in f32 to one rank of the first copy, round-robin. Collective.
    pub fn hand_out(&self, mut each: impl FnMut(usize, Vec<f32>) -> Result<()>) -> Result<()> {
        let Some(split) = &self.split else {
            return (0..self.params.len()).try_for_each(|i| each(i, self.own_values(i)?));
        };
        let (rank, all) = (split.ranks.rank(), (0..self.params.len()).collect::<Vec<_>>());
        for few in all.chunks(split.shards) {
            let mut parts: Vec<Vec<u8>> = vec![Vec::new(); split.ranks.size()];
            for (part, &param) in parts.iter_mut().zip(few).filter(|_| rank < split.shards) {
                let values = self.own_values(param)?;
                *part = vec![0; 4 * values.len()];
                write_f32s(&values, part);
            }
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let arrived = split.ranks.all_to_all(&parts)?;
            let Some(&param) = few.get(rank) else { continue };
            let len = self.params[param].shape.len();
            let mut whole = vec![0.0; len];
            for (from, bytes) in arrived.iter().enumerate().take(split.shards) {
                let to = &mut whole[split.part(param, len, from)];
                if bytes.len() != 4 * to.len() {
                    return Err(unequal_shapes());
                }
                read_f32s(bytes, to);
            }
            each(param, whole)?;
        }
        Ok(())
    }
}

/// Lets rank 0 read whole tensors in `work`, while the others [`serve`].
pub fn served<T>(ranks: &Ranks, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = work();
    if ranks.has_failed() {
        return done; // the other ranks have stopped serving
    }
    ranks.broadcast(&[0]).and(done)
}

/// Sends rank 0 this rank's part of each tensor it requests, until it is done; `own` reads that part.
pub fn serve(ranks: &Ranks, own: impl Fn(StateTensor) -> Result<Vec<f32>>) -> Result<()> {
    loop {
        let request = ranks.broadcast(&[])?;
        let ([model, param, kind], []) = request.as_chunks::<8>() else { return Ok(()) };
        let [model, param, kind] = [model, param, kind].map(|b| u64::from_le_bytes(*b) as usize);
        let values = own(StateTensor { model, param, kind })?;
        let mut bytes = vec![0; 4 * values.len()];
        write_f32s(&values, &mut bytes);
        let mut parts: Vec<&[u8]> = vec![&[]; ranks.size()];
        parts[0] = &bytes;
        ranks.all_to_all(&parts)?;
    }
}
