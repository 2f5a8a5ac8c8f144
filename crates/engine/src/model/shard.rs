//! ZeRO-3: every rank owns a shard of each parameter and gathers a layer's weights when they are needed.
//!
//! Shards are cut at multiples of the chunk that a dot product sums, so that norms have the bits of one process; the rest of an
//! update is element-wise. The assignment of shards to ranks rotates from parameter to parameter, so that short parameters do
//! not all end up on one rank.

use super::adapter::BaseHome;
use super::param::ParamShape;
use super::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::backend::DOT_CHUNK;
use ferrl_kernels::comm::{Inbox, Outbox, ParcelContents, ParcelPiece, PendingParcels, Route, part};
use ferrl_kernels::{Backend, Buffer, DType, Purpose, Ranks, Weight};
use std::ops::Range;

/// How a model is sharded over ranks.
#[derive(Clone)]
pub struct Split {
    pub(super) ranks: Ranks,
    /// Ranks that together hold one copy of the weights.
    pub(super) shards: usize,
    /// Index of the model within the run.
    pub(super) number: usize,
}

impl Split {
    /// Shards over all ranks, in `copies` full replicas.
    pub fn new(ranks: &Ranks, copies: usize, number: usize) -> Result<Self> {
        let size = ranks.size();
        if copies == 0 || !size.is_multiple_of(copies) {
            return Err(Error::usage(format!(
                "{size} ranks cannot hold {copies} equal copies of the weights"
            ))
            .fix("a number of copies that divides the number of ranks"));
        }
        Ok(Split { ranks: ranks.clone(), shards: size / copies, number })
    }

    /// The elements of parameter `param`, of length `len`, that a rank owns.
    pub(crate) fn part(&self, param: usize, len: usize, rank: usize) -> Range<usize> {
        let index = (rank % self.shards + param) % self.shards;
        let chunks = part(len.div_ceil(DOT_CHUNK), index, self.shards);
        (chunks.start * DOT_CHUNK).min(len)..(chunks.end * DOT_CHUNK).min(len)
    }

    /// Ranks per replica; the first replica has the lowest ranks.
    pub fn shards(&self) -> usize {
        self.shards
    }

    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The ranks of this rank's replica.
    fn copy(&self) -> Range<usize> {
        let first = self.ranks.rank() / self.shards * self.shards;
        first..first + self.shards
    }

    /// All-gather within the replica, tagged with ranks. Collective over all ranks of the run.
    fn gather(&self, own: &[u8]) -> Result<impl Iterator<Item = (usize, Vec<u8>)> + use<>> {
        let copy = self.copy();
        let none: &[u8] = &[];
        let parts: Vec<&[u8]> =
            (0..self.ranks.size()).map(|to| if copy.contains(&to) { own } else { none }).collect();
        let arrived = self.ranks.all_to_all(&parts)?;
        Ok(arrived.into_iter().enumerate().filter(move |(rank, _)| copy.contains(rank)))
    }

    /// Rank `rank`'s shard of a parameter in transfer: start, and length with wire format.
    fn piece(&self, part: &ShardTransfer, rank: usize) -> (usize, ParcelPiece) {
        let range = self.part(part.param, part.len, rank);
        (range.start, ParcelPiece { len: range.len(), format: part.format })
    }

    /// Pieces that each rank of the replica sends to this one.
    fn expected(&self, parts: &[ShardTransfer]) -> Vec<Vec<ParcelPiece>> {
        let copy = self.copy();
        let from = |rank: usize| match copy.contains(&rank) {
            true => parts.iter().map(|part| self.piece(part, rank).1).collect(),
            false => Vec::new(),
        };
        (0..self.ranks.size()).map(from).collect()
    }

    /// Dot products of sharded vectors, given as `(parameter, length, sums of this rank's chunks)`; returns all chunk sums of
    /// each.
    pub(crate) fn chunk_sums(&self, own: &[(usize, usize, Vec<f64>)]) -> Result<Vec<Vec<f64>>> {
        let bytes: Vec<u8> = own.iter().flat_map(|(_, _, sums)| sums).flat_map(|x| x.to_le_bytes()).collect();
        let mut all: Vec<Vec<f64>> =
            own.iter().map(|(_, len, _)| vec![0.0; len.div_ceil(DOT_CHUNK)]).collect();
        for (rank, bytes) in self.gather(&bytes)? {
            let mut numbers = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b));
            for ((param, len, _), whole) in own.iter().zip(&mut all) {
                let range = self.part(*param, *len, rank);
                let chunks = range.start.div_ceil(DOT_CHUNK)..range.end.div_ceil(DOT_CHUNK);
                for sum in &mut whole[chunks] {
                    *sum = numbers.next().ok_or_else(unequal_shapes)?;
                }
            }
        }
        Ok(all)
    }
}

/// The error if ranks disagree on a model's shapes.
pub(crate) fn unequal_shapes() -> Error {
    Error::rank("another rank's model has another shape").fix("one binary and one recipe on all ranks")
}

/// A parameter whose shards are being exchanged.
struct ShardTransfer {
    /// Index of the parameter.
    param: usize,
    /// Its full length.
    len: usize,
    /// Wire format; bf16 where all readers round to it.
    format: DType,
}

/// Shards being received by [`Model::begin_gather`].
pub(crate) struct PendingGather {
    parts: Vec<ShardTransfer>,
    coming: PendingParcels,
}

enum WeightSource<'a> {
    /// This rank holds all of them.
    Own(&'a [f32]),
    /// The shards received from the ranks of the replica.
    Arrived(&'a Split, &'a ShardTransfer, &'a mut Inbox),
}

impl WeightSource<'_> {
    /// Writes all weights to a device buffer.
    fn write(self, backend: &dyn Backend, to: &mut Buffer) -> Result<()> {
        match self {
            WeightSource::Own(values) => backend.write(to, 0, values),
            WeightSource::Arrived(split, part, inbox) => split.copy().try_for_each(|rank| {
                let (at, piece) = split.piece(part, rank);
                inbox.write(rank, piece, to, at)
            }),
        }
    }

    /// Writes all weights to host memory.
    fn read(self, values: &mut [f32]) -> Result<()> {
        match self {
            WeightSource::Own(own) => values.copy_from_slice(own),
            WeightSource::Arrived(split, part, inbox) => {
                for rank in split.copy() {
                    let (at, piece) = split.piece(part, rank);
                    inbox.read(rank, piece, &mut values[at..at + piece.len])?;
                }
            }
        }
        Ok(())
    }
}

impl Model {
    /// Keeps this rank's shards and frees the rest; [`Model::gather_all`] restores the full weights.
    pub fn split(&mut self, split: Split) -> Result<()> {
        assert!(self.split.is_none(), "a model is split once");
        let adapter = self.adapter.as_ref();
        let home = adapter.map_or(BaseHome::Device, |adapter| adapter.options.base);
        for i in 0..self.params.len() {
            match self.is_base(i) {
                true => self.shard_base(i, &split, home)?,
                false => self.shard_param(i, &split)?,
            }
        }
        self.split = Some(split);
        Ok(())
    }

    pub(super) fn shard_param(&mut self, param: usize, split: &Split) -> Result<()> {
        let own = split.part(param, self.params[param].shape.len(), split.ranks.rank());
        let _weights = Purpose::Weights.on(&self.backend);
        let mut values = vec![0.0; own.len()];
        self.backend.read(&self.params[param].master, own.start, &mut values)?;
        let param = &mut self.params[param];
        param.derived = None; // free first: full weight and shard need not fit together
        param.master = self.backend.alloc(DType::F32, own.len())?;
        self.backend.write(&mut param.master, 0, &values)?;
        param.own = own;
        Ok(())
    }

    /// Shards an adapter's base weight, in its present format and memory.
    pub(super) fn shard_base(&mut self, param: usize, split: &Split, home: BaseHome) -> Result<()> {
        let own = split.part(param, self.params[param].shape.len(), split.ranks.rank());
        let _weights = Purpose::Weights.on(&self.backend.clone());
        self.split_base(param, own, home)
    }

    /// How its weights are sharded, if they are.
    pub fn split_over(&self) -> Option<&Split> {
        self.split.as_ref()
    }

    /// Gathers all weights that are not yet gathered. Collective.
    pub fn gather_all(&mut self) -> Result<()> {
        self.gather(0..self.params.len(), self.training)
    }

    /// The same for forward only: skips what only backward reads.
    pub fn gather_to_read(&mut self) -> Result<()> {
        self.gather(0..self.params.len(), false)
    }

    /// Frees gathered weights.
    pub fn release_all(&mut self) {
        self.release(0..self.params.len());
    }

    /// Gathers those of the parameters that are not yet gathered, for forward or also for `backward`. Collective.
    pub(crate) fn gather(&mut self, params: impl IntoIterator<Item = usize>, backward: bool) -> Result<()> {
        let split = self.split.clone();
        if split.is_none() && self.team.is_none() {
            return Ok(());
        }
        let backward = self.both_ways(backward);
        let missing = self.missing(params, backward);
        for few in buckets(&missing, |i| self.params[i].shape.len()) {
            let Some(split) = &split else {
                for &i in few {
                    let own = self.own_values(i)?;
                    self.materialize(i, backward, WeightSource::Own(&own))?;
                    self.merge_gathered(i)?;
                }
                continue;
            };
            let (parts, outbox) = self.transfers(few, split, true)?;
            let inbox = split.ranks.exchange_parcels(outbox, &split.expected(&parts))?;
            self.arrange(split, &parts, inbox, backward)?;
        }
        Ok(())
    }

    /// Builds the derived weights from received shards.
    fn arrange(
        &mut self,
        split: &Split,
        parts: &[ShardTransfer],
        mut inbox: Inbox,
        backward: bool,
    ) -> Result<()> {
        for part in parts {
            self.materialize(part.param, backward, WeightSource::Arrived(split, part, &mut inbox))?;
            self.merge_gathered(part.param)?;
        }
        split.copy().try_for_each(|rank| inbox.end(rank))
    }

    /// Whether weights are gathered for backward right away: also if an adapter is merged into them or a team shares them, since
    /// these are derived once for both passes.
    fn both_ways(&self, backward: bool) -> bool {
        self.training && (backward || self.adapter.is_some() || self.team.is_some())
    }

    /// Those of the parameters that are not gathered yet. `A` and `B` come before their bases; each base is merged on arrival, so
    /// that only one base is held beside its merged weight.
    fn missing(&self, params: impl IntoIterator<Item = usize>, backward: bool) -> Vec<usize> {
        let one_way = self.adapter.is_none() && self.team.is_none();
        let forward_only = |w: &Weight| one_way && !self.backend.holds_weight(w, true);
        let lacks = |&i: &usize| {
            let param = &self.params[i];
            !param.is_materialized() || backward && param.derived.as_ref().is_some_and(forward_only)
        };
        let mut missing: Vec<usize> = params.into_iter().filter(lacks).collect();
        missing.sort_by_key(|&i| (self.is_base(i), i));
        missing
    }

    /// Starts gathering parameters (prefetch); [`Model::finish_gather`] completes it.
    pub(crate) fn begin_gather(&self, params: &[usize], backward: bool) -> Result<Option<PendingGather>> {
        let Some(split) = &self.split else { return Ok(None) };
        let missing = self.missing(params.iter().copied(), self.both_ways(backward));
        if missing.is_empty() {
            return Ok(None);
        }
        let _weights = Purpose::Weights.on(&self.backend);
        let (parts, outbox) = self.transfers(&missing, split, true)?;
        let coming = split.ranks.begin_parcels(outbox, &split.expected(&parts))?;
        Ok(Some(PendingGather { parts, coming }))
    }

    /// Waits for the shards and builds the derived weights.
    pub(crate) fn finish_gather(&mut self, coming: PendingGather, backward: bool) -> Result<()> {
        let Some(split) = self.split.clone() else { return Ok(()) };
        let backward = self.both_ways(backward);
        let inbox = split.ranks.receive(coming.coming)?;
        self.arrange(&split, &coming.parts, inbox, backward)
    }

    pub(crate) fn release(&mut self, params: impl IntoIterator<Item = usize>) {
        if self.split.is_some() || self.team.is_some() {
            for i in params {
                let param = &mut self.params[i];
                (param.whole, param.derived, param.transposed) = (None, None, None);
            }
        }
    }

    /// Wire formats of parameters, and this rank's shards in them.
    fn transfers(
        &self,
        params: &[usize],
        split: &Split,
        rounded: bool,
    ) -> Result<(Vec<ShardTransfer>, Outbox)> {
        let format = |param: usize, shape: &ParamShape| {
            if self.is_base(param) {
                self.base_format(param)
            } else if rounded && self.dtype == DType::Bf16 && !self.reads_f32(shape) {
                DType::Bf16
            } else {
                DType::F32
            }
        };
        let travels = |&param: &usize| {
            let shape = &self.params[param].shape;
            ShardTransfer { param, len: shape.len(), format: format(param, shape) }
        };
        let parts: Vec<ShardTransfer> = params.iter().map(travels).collect();
        let pieces = parts.iter().map(|part| split.piece(part, split.ranks.rank()).1).collect();
        let slot = ParcelContents { note: Vec::new(), pieces };
        let mut outbox =
            Outbox::new(&split.ranks, &self.backend, Route::Same(split.copy().collect()), vec![slot])?;
        for part in &parts {
            match self.is_nf4(part.param) {
                true => outbox.push(0, &self.base_f32(part.param)?, 0)?,
                false => match self.rounded_part(part)? {
                    Some(rounded) => outbox.push(0, &rounded, 0)?,
                    None => outbox.push(0, &self.params[part.param].master, 0)?,
                },
            }
        }
        Ok((parts, outbox))
    }

    /// This rank's shard as the device rounds GEMM weights; `None` if that is round-to-nearest-even or nothing is rounded. A
    /// device that stores a weight inside its master rounds ties away from zero.
    fn rounded_part(&self, part: &ShardTransfer) -> Result<Option<Buffer>> {
        let b = &*self.backend;
        let master = &self.params[part.param].master;
        if part.format != DType::Bf16 || self.is_base(part.param) || !b.rounds_masters() || master.is_empty()
        {
            return Ok(None);
        }
        let weight = b.weight(1, master.len(), DType::Bf16, false)?;
        let Some(mut rounded) = b.rounded_master(&weight)? else { return Ok(None) };
        b.copy(master, 0, &mut rounded, 0, master.len())?;
        Ok(Some(rounded))
    }

    /// Whether anything but a GEMM reads the parameter.
    fn reads_f32(&self, shape: &ParamShape) -> bool {
        !self.config.is_multiplied(shape.id) || shape.id.slot.is_table() || shape.id.slot.is_f32()
    }

    /// This rank's shard of a parameter.
    pub fn own_values(&self, param: usize) -> Result<Vec<f32>> {
        if self.is_nf4(param) {
            return self.read_f32s(&self.base_f32(param)?);
        }
        self.read_f32s(&self.params[param].master)
    }

    /// All weights of a parameter. Collective if they are sharded.
    pub(crate) fn read_together(&self, param: usize) -> Result<Vec<f32>> {
        let Some(split) = &self.split else { return self.own_values(param) };
        let (parts, outbox) = self.transfers(&[param], split, false)?;
        let mut inbox = split.ranks.exchange_parcels(outbox, &split.expected(&parts))?;
        let mut whole = vec![0.0; self.params[param].shape.len()];
        WeightSource::Arrived(split, &parts[0], &mut inbox).read(&mut whole)?;
        Ok(whole)
    }

    /// Dot products of sharded vectors over parameters. Collective.
    pub(crate) fn dots(&self, vectors: &[(usize, &Buffer, &Buffer)]) -> Result<Vec<f64>> {
        let b = &*self.backend;
        let Some(split) = &self.split else {
            return b.dots(&vectors.iter().map(|(_, x, y)| (*x, *y)).collect::<Vec<_>>());
        };
        let own = vectors
            .iter()
            .map(|(param, x, y)| Ok((*param, self.params[*param].shape.len(), b.chunk_dots(x, y)?)));
        let sums = split.chunk_sums(&own.collect::<Result<Vec<_>>>()?)?;
        sums.iter().map(|sums| b.add_chunks(sums)).collect()
    }

    /// Builds a parameter's derived weights, merging an adapter.
    fn materialize(&mut self, param: usize, backward: bool, weights: WeightSource<'_>) -> Result<()> {
        let shape = self.params[param].shape;
        if self.is_base(param) {
            let _weights = Purpose::Weights.on(&self.backend);
            let mut whole = self.f32s(shape.len())?;
            weights.write(&*self.backend, &mut whole)?;
            self.params[param].whole = Some(whole); // freed by the merge
            return Ok(());
        }
        if self.team.is_some() {
            let mut values = vec![0.0; shape.len()];
            weights.read(&mut values)?;
            if self.materialize_own(param, &values)? {
                return Ok(());
            }
            return self.materialize_full(param, backward, WeightSource::Own(&values));
        }
        self.materialize_full(param, backward, weights)
    }

    fn materialize_full(&mut self, param: usize, backward: bool, weights: WeightSource<'_>) -> Result<()> {
        let _weights = Purpose::Weights.on(&self.backend);
        let shape = self.params[param].shape;
        self.release([param]); // frees what was gathered for forward only
        let (mut derived, mut whole) = self.alloc_weights(&shape, backward)?;
        weights.write(&*self.backend, &mut whole)?;
        if let Some(weight) = &mut derived {
            self.backend.load_weight(&whole, weight)?;
        }
        let shared = derived.is_some() && !self.reads_f32(&shape);
        self.params[param].derived = derived;
        // Where the device stores the weight inside the master, it is freed with the weight.
        self.params[param].whole = (!shared).then_some(whole);
        Ok(())
    }

    pub(crate) fn layer_params(&self, layer: usize) -> Vec<usize> {
        self.params_of(Some(layer))
    }

    /// The parameters outside the layers.
    pub(crate) fn outer_params(&self) -> Vec<usize> {
        self.params_of(None)
    }

    fn params_of(&self, layer: Option<usize>) -> Vec<usize> {
        (0..self.params.len()).filter(|&i| self.params[i].shape.id.layer == layer).collect()
    }
}

/// Weights per gather message.
const BUCKET: usize = 4 << 20;

/// Splits a list into consecutive runs whose lengths add up to a bucket or slightly more.
pub(crate) fn buckets(list: &[usize], len: impl Fn(usize) -> usize) -> Vec<&[usize]> {
    let (mut all, mut start, mut weights) = (Vec::new(), 0, 0);
    for (at, &i) in list.iter().enumerate() {
        weights += len(i);
        if weights >= BUCKET || at + 1 == list.len() {
            all.push(&list[start..=at]);
            (start, weights) = (at + 1, 0);
        }
    }
    all
}

impl Param {
    /// Whether a sharded parameter is gathered.
    pub(crate) fn is_materialized(&self) -> bool {
        self.whole.is_some() || self.derived.is_some()
    }
}

/// Serialises values.
pub(crate) fn write_f32s(values: &[f32], bytes: &mut [u8]) {
    bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, x)| *b = x.to_le_bytes());
}

/// The inverse.
pub(crate) fn read_f32s(bytes: &[u8], values: &mut [f32]) {
    values.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
}
