//! Weights split over ranks (ZeRO-3): every rank owns a part of each parameter, and gathers a layer when its turn comes.
//!
//! Parts are cut at multiples of the chunks that a dot product sums, so that norms have the bits of one process; everything
//! else an update does is done element by element. Which rank has which part of a parameter goes round, so that short
//! parameters do not all lie on one rank.

use super::param::ParamShape;
use super::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::backend::DOT_CHUNK;
use ferrl_kernels::comm::part;
use ferrl_kernels::{Buffer, DType, Purpose, Ranks};
use std::ops::Range;

/// A model's place among the ranks that share its weights.
#[derive(Clone)]
pub struct Split {
    pub(super) ranks: Ranks,
    /// Ranks that hold one copy of the weights together.
    pub(super) shards: usize,
    /// Which of a run's models it is.
    pub(super) number: usize,
}

impl Split {
    /// Over all ranks, in `copies` whole copies.
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

    /// The weights of parameter `param`, of `len` in all, that a rank owns.
    pub(crate) fn part(&self, param: usize, len: usize, rank: usize) -> Range<usize> {
        let index = (rank % self.shards + param) % self.shards;
        let chunks = part(len.div_ceil(DOT_CHUNK), index, self.shards);
        (chunks.start * DOT_CHUNK).min(len)..(chunks.end * DOT_CHUNK).min(len)
    }

    /// The ranks.
    pub(crate) fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The ranks of this one's copy.
    fn copy(&self) -> Range<usize> {
        let first = self.ranks.rank() / self.shards * self.shards;
        first..first + self.shards
    }

    /// What each rank of this copy has, with its rank. All ranks of the run call it together.
    fn gather(&self, own: &[u8]) -> Result<impl Iterator<Item = (usize, Vec<u8>)> + use<>> {
        let copy = self.copy();
        let none: &[u8] = &[];
        let parts: Vec<&[u8]> =
            (0..self.ranks.size()).map(|to| if copy.contains(&to) { own } else { none }).collect();
        let arrived = self.ranks.all_to_all(&parts)?;
        Ok(arrived.into_iter().enumerate().filter(move |(rank, _)| copy.contains(rank)))
    }

    /// Whole vectors of numbers from the parts that ranks have of them. `own` are this rank's.
    pub(crate) fn whole(&self, own: &[OwnPart<'_>]) -> Result<Vec<Vec<f32>>> {
        let mut bytes = Vec::new();
        own.iter().for_each(|part| part.append(&mut bytes));
        let mut all: Vec<Vec<f32>> = own.iter().map(|p| vec![0.0; p.len]).collect();
        for (rank, bytes) in self.gather(&bytes)? {
            let mut rest = &bytes[..];
            for (part, whole) in own.iter().zip(&mut all) {
                let range = self.part(part.param, part.len, rank);
                let (here, after) =
                    rest.split_at_checked(part.width() * range.len()).ok_or_else(unequal_shapes)?;
                part.read(here, &mut whole[range]);
                rest = after;
            }
        }
        Ok(all)
    }

    /// The dot products of several parameters' vectors, by parameter, length and the sums of this rank's chunks; each as the
    /// list of the chunks' sums.
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

/// What is wrong where ranks do not agree on a model's shape.
pub(crate) fn unequal_shapes() -> Error {
    Error::rank("another rank's model has another shape").fix("one binary and one recipe on all ranks")
}

/// The numbers that a rank has of a parameter's vector.
pub(crate) struct OwnPart<'a> {
    /// Which parameter.
    pub param: usize,
    /// Length of the whole.
    pub len: usize,
    /// Those this rank owns.
    pub values: &'a [f32],
    /// How they travel; bf16 where no more of them is used.
    pub format: DType,
}

impl OwnPart<'_> {
    fn width(&self) -> usize {
        if self.format == DType::Bf16 { 2 } else { 4 }
    }

    /// Writes them behind what is there.
    fn append(&self, bytes: &mut Vec<u8>) {
        let at = bytes.len();
        bytes.resize(at + self.width() * self.values.len(), 0);
        let to = &mut bytes[at..];
        match self.format {
            DType::Bf16 => {
                let pairs = to.as_chunks_mut::<2>().0.iter_mut();
                pairs.zip(self.values).for_each(|(b, &x)| *b = ferrl_kernels::narrow(x).to_le_bytes());
            }
            _ => write_f32s(self.values, to),
        }
    }

    fn read(&self, bytes: &[u8], to: &mut [f32]) {
        match self.format {
            DType::Bf16 => {
                let (pairs, _) = bytes.as_chunks::<2>();
                to.iter_mut()
                    .zip(pairs)
                    .for_each(|(x, b)| *x = f32::from_bits((u16::from_le_bytes(*b) as u32) << 16));
            }
            _ => read_f32s(bytes, to),
        }
    }
}

impl Model {
    /// Keeps this rank's part of the weights and gives the rest away. They are there again after [`Model::gather_all`].
    pub fn split(&mut self, split: Split) -> Result<()> {
        assert!(self.split.is_none(), "a model is split once");
        for i in 0..self.params.len() {
            let own = split.part(i, self.params[i].shape.len(), split.ranks.rank());
            let _weights = Purpose::Weights.on(&self.backend);
            if self.adapter.as_ref().is_some_and(|adapter| adapter.adapts(i)) {
                self.split_base(i, own)?;
                continue;
            }
            let mut values = vec![0.0; own.len()];
            self.backend.read(&self.params[i].master, own.start, &mut values)?;
            let param = &mut self.params[i];
            param.derived = None; // before the part is allocated: both need not fit at once
            param.master = self.backend.alloc(DType::F32, own.len())?;
            self.backend.write(&mut param.master, 0, &values)?;
            param.own = own;
        }
        self.split = Some(split);
        Ok(())
    }

    /// How its weights are split.
    pub fn split_over(&self) -> Option<&Split> {
        self.split.as_ref()
    }

    /// Gathers all weights that are not gathered yet, so that this rank can compute with them. All ranks call it together.
    pub fn gather_all(&mut self) -> Result<()> {
        self.gather(0..self.params.len())
    }

    /// Gives back what was gathered.
    pub fn release_all(&mut self) {
        self.release(0..self.params.len());
    }

    /// Gathers the parameters that are not gathered yet. All ranks call it together.
    pub(crate) fn gather(&mut self, params: impl IntoIterator<Item = usize>) -> Result<()> {
        let split = self.split.clone();
        if split.is_none() && self.team.is_none() {
            return Ok(());
        }
        let missing: Vec<usize> = params.into_iter().filter(|&i| !self.params[i].is_readable()).collect();
        for few in buckets(&missing, |i| self.params[i].shape.len()) {
            let all = match &split {
                Some(split) => self.whole_values(split, few, true)?,
                None => few.iter().map(|&i| self.own_values(i)).collect::<Result<_>>()?,
            };
            for (i, values) in few.iter().zip(all) {
                self.make_readable(*i, &values)?;
            }
        }
        self.merge_gathered(&missing)
    }

    /// Gives parameters back.
    pub(crate) fn release(&mut self, params: impl IntoIterator<Item = usize>) {
        if self.split.is_some() || self.team.is_some() {
            for i in params {
                let param = &mut self.params[i];
                (param.whole, param.derived, param.turned) = (None, None, None);
            }
        }
    }

    /// The weights of parameters, in f32 or, where `rounded`, no more of them than products read. All ranks together.
    fn whole_values(&self, split: &Split, params: &[usize], rounded: bool) -> Result<Vec<Vec<f32>>> {
        let own = params.iter().map(|&i| self.own_values(i)).collect::<Result<Vec<_>>>()?;
        let format = |param: usize, shape: &ParamShape| {
            if self.is_base(param) {
                self.base_format(param)
            } else if rounded && self.dtype == DType::Bf16 && !self.reads_f32(shape) {
                DType::Bf16
            } else {
                DType::F32
            }
        };
        let parts: Vec<OwnPart<'_>> = params
            .iter()
            .zip(&own)
            .map(|(&param, values)| {
                let shape = &self.params[param].shape;
                OwnPart { param, len: shape.len(), values, format: format(param, shape) }
            })
            .collect();
        split.whole(&parts)
    }

    /// Whether something but products reads the parameter.
    fn reads_f32(&self, shape: &ParamShape) -> bool {
        !self.config.is_multiplied(shape.id) || shape.id.slot.is_table() || shape.id.slot.is_f32()
    }

    /// This rank's part of a parameter.
    pub(crate) fn own_values(&self, param: usize) -> Result<Vec<f32>> {
        if self.is_nf4(param) {
            return self.read_f32s(&self.base_f32(param)?);
        }
        self.read_f32s(&self.params[param].master)
    }

    /// All weights of a parameter. All ranks call it together where they are split.
    pub(crate) fn read_together(&self, param: usize) -> Result<Vec<f32>> {
        match &self.split {
            Some(split) => Ok(self.whole_values(split, &[param], false)?.swap_remove(0)),
            None => self.own_values(param),
        }
    }

    /// Dot products of vectors over parameters, of which each rank has its parts. All ranks call it together.
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

    /// The forms that products and other operations read, from the whole weights.
    fn make_readable(&mut self, param: usize, values: &[f32]) -> Result<()> {
        if self.is_base(param) {
            let _weights = Purpose::Weights.on(&self.backend);
            self.params[param].whole = Some(self.upload(values)?); // until it is merged
            return Ok(());
        }
        if self.make_own_readable(param, values)? {
            return Ok(());
        }
        let _weights = Purpose::Weights.on(&self.backend);
        let shape = self.params[param].shape;
        let (mut derived, mut whole) = self.forms(&shape)?;
        self.backend.write(&mut whole, 0, values)?;
        if let Some(weight) = &mut derived {
            self.backend.load_weight(&whole, weight)?;
        }
        let shared = derived.is_some() && !self.reads_f32(&shape);
        self.params[param].derived = derived;
        // Where the device holds master and weight in one memory, it is freed with the weight.
        self.params[param].whole = (!shared).then_some(whole);
        Ok(())
    }

    /// The parameters of a layer.
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

/// Weights that travel at once.
const BUCKET: usize = 4 << 20;

/// Parts of a list whose lengths add up to a bucket or little more.
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
    /// Whether all weights of a parameter that is split are there for whoever computes with them.
    pub(crate) fn is_readable(&self) -> bool {
        self.whole.is_some() || self.derived.is_some()
    }
}

/// Numbers as bytes that travel.
pub(crate) fn write_f32s(values: &[f32], bytes: &mut [u8]) {
    bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, x)| *b = x.to_le_bytes());
}

/// The way back.
pub(crate) fn read_f32s(bytes: &[u8], values: &mut [f32]) {
    values.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
}
