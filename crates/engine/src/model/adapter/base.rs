//! Storage of the frozen base weights under an adapter. They never change; each merge reads each of them once.
//!
//! NF4 takes 4.5 bits per weight instead of 16: blocks of 64 share an f32 absmax, and each weight is the nearest of 16 code
//! values times that absmax. The policy is then `round(nf4(base) + s B A)`, as in QLoRA.

use crate::checkpoint::{Nf4Param, ParamValues};
use crate::model::ParamShape;
use crate::model::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::codes::{NF4_BLOCK, encode_nf4};
use ferrl_kernels::{Buffer, DType};
use std::ops::Range;

/// Where, and in which format, base weights are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseHome {
    /// Device memory; bf16 where that is exact, else f32.
    #[default]
    Device,
    /// Host memory, in the same formats; merges read it over the bus.
    Host,
    /// Device memory, NF4.
    Nf4,
}

pub(crate) struct Nf4Base {
    codes: Buffer,
    absmax: Buffer,
    block: usize,
    len: usize,
    /// Whether dequantised numbers are rounded to bf16.
    rounds: bool,
}

/// Numbers rounded at a time.
const PIECE: usize = 1 << 20;

impl Model {
    /// A base parameter; its GEMM weight is derived by [`Model::merge`]. `stored` is set if the files hold it in NF4.
    pub(in crate::model) fn base_param(
        &mut self,
        index: usize,
        shape: ParamShape,
        numbers: ParamValues<'_>,
        (home, stored): (BaseHome, Option<Nf4Param>),
    ) -> Result<Param> {
        let backend = self.backend.clone();
        let derived = Some(backend.weight(shape.rows, shape.cols, self.dtype, self.training)?);
        let exact = |x: &f32| x.to_bits() & 0xFFFF == 0;
        let half = self.dtype == DType::Bf16
            && match &numbers {
                ParamValues::Bf16(_) => true,
                ParamValues::F32(values) => values.iter().all(exact),
            };
        let format = if half { DType::Bf16 } else { DType::F32 };
        let mut master = match home {
            BaseHome::Device => backend.alloc(format, shape.len())?,
            BaseHome::Host => backend.alloc_host(format, shape.len())?,
            BaseHome::Nf4 => backend.alloc(DType::F32, 0)?,
        };
        match home {
            BaseHome::Nf4 => {
                let quantised = || {
                    let (codes, absmax) = encode_nf4(&numbers.into_f32s(), NF4_BLOCK);
                    Nf4Param { codes, absmax, block: NF4_BLOCK, rounds: false }
                };
                let base = self.nf4_base(stored.unwrap_or_else(quantised), shape.len())?;
                self.bases.insert(index, base);
            }
            _ => numbers.write(&*backend, &mut master)?,
        }
        Ok(Param::new(shape, master, derived))
    }

    fn nf4_base(&self, of: Nf4Param, len: usize) -> Result<Nf4Base> {
        let numbers: Vec<f32> = of.codes.iter().map(|&c| f32::from(c)).collect();
        let mut codes = self.backend.alloc(DType::U8, numbers.len())?;
        self.backend.write(&mut codes, 0, &numbers)?;
        Ok(Nf4Base { codes, absmax: self.upload(&of.absmax)?, block: of.block, len, rounds: of.rounds })
    }

    /// An adapter's base weight, or any other parameter, as a new f32 buffer.
    pub(in crate::model) fn base_f32(&self, param: usize) -> Result<Buffer> {
        let (b, master) = (&*self.backend, self.master(param));
        if let Some(whole) = self.decoded_base(param)? {
            return Ok(whole);
        }
        let mut whole = self.f32s(master.len())?;
        b.copy(master, 0, &mut whole, 0, master.len())?;
        Ok(whole)
    }

    /// An NF4 base dequantised to f32; `None` where the master is the base.
    pub(in crate::model) fn decoded_base(&self, param: usize) -> Result<Option<Buffer>> {
        let gathered = self.params[param].whole.is_some();
        let Some(base) = self.bases.get(&param).filter(|_| !gathered) else { return Ok(None) };
        let (b, mut whole) = (&*self.backend, self.f32s(base.len)?);
        b.decode_nf4(&base.codes, &base.absmax, base.block, &mut whole)?;
        if base.rounds {
            let mut half = b.alloc(DType::Bf16, base.len.min(PIECE))?;
            for at in (0..base.len).step_by(PIECE) {
                let len = PIECE.min(base.len - at);
                b.copy(&whole, at, &mut half, 0, len)?;
                b.copy(&half, 0, &mut whole, at, len)?;
            }
        }
        Ok(Some(whole))
    }

    /// Keeps this rank's shard of a base, in its present format and memory.
    pub(in crate::model) fn split_base(
        &mut self,
        param: usize,
        own: Range<usize>,
        home: BaseHome,
    ) -> Result<()> {
        if let Some(base) = self.bases.remove(&param) {
            let part = self.nf4_part(&base, &own)?;
            drop(base);
            self.params[param].derived = None;
            let base = self.nf4_base(part, own.len())?;
            self.bases.insert(param, base);
            self.params[param].own = own;
            return Ok(());
        }
        let part = self.own_values(param)?[own.clone()].to_vec();
        let format = self.params[param].master.dtype();
        self.params[param].derived = None; // free first: full weight and shard need not fit together
        let backend = self.backend.clone();
        self.params[param].master = match home {
            BaseHome::Host => backend.alloc_host(format, part.len())?,
            _ => backend.alloc(format, part.len())?,
        };
        backend.write(&mut self.params[param].master, 0, &part)?;
        self.params[param].own = own;
        Ok(())
    }

    /// A range of an NF4 base.
    fn nf4_part(&self, base: &Nf4Base, own: &Range<usize>) -> Result<Nf4Param> {
        let block = base.block;
        if !own.start.is_multiple_of(block) {
            return Err(Error::model(format!(
                "NF4 blocks of {block} weights cannot be split over these ranks"
            ))
            .fix("adapter.base = \"device\" or \"host\""));
        }
        let read = |from: &Buffer, range: Range<usize>| -> Result<Vec<f32>> {
            let mut out = vec![0.0; range.len()];
            self.backend.read(from, range.start, &mut out)?;
            Ok(out)
        };
        let codes = read(&base.codes, own.start / 2..own.end.div_ceil(2))?;
        let absmax = read(&base.absmax, own.start / block..own.end.div_ceil(block))?;
        let codes = codes.into_iter().map(|code| code as u8).collect();
        Ok(Nf4Param { codes, absmax, block, rounds: base.rounds })
    }

    /// Wire format of base shards: the storage format, so that no value changes.
    pub(in crate::model) fn base_format(&self, param: usize) -> DType {
        if self.is_nf4(param) { DType::F32 } else { self.params[param].master.dtype() }
    }

    /// Whether the parameter is an adapter's base weight.
    pub(in crate::model) fn is_base(&self, param: usize) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.adapts(param))
    }

    /// Whether it is an NF4 base, which has no master.
    pub(crate) fn is_nf4(&self, param: usize) -> bool {
        self.bases.contains_key(&param)
    }
}
