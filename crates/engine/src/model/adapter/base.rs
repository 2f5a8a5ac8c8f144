//! Where the weights under an adapter live. They never change; a merge reads each of them once.
//!
//! As NF4 they take 4.5 bits a weight instead of 16: blocks of 64 share an f32 magnitude, and each weight is the nearest of 16
//! fractions of it. The policy is then an adapter on the rounded weights, `round(nf4(base) + s B A)`, as in QLoRA.

use crate::checkpoint::ParamValues;
use crate::model::ParamShape;
use crate::model::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::codes::{NF4_BLOCK, decode_nf4, encode_nf4};
use ferrl_kernels::{Buffer, DType};
use std::ops::Range;

/// Where the weights under an adapter are, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BaseHome {
    /// Memory of the device, in bf16 where that holds them exactly.
    #[default]
    Device,
    /// The machine's memory, likewise; merges read them through the bus.
    Host,
    /// Memory of the device, as NF4.
    Nf4,
}

/// A weight as NF4.
pub(crate) struct Nf4Base {
    codes: Buffer,
    absmax: Buffer,
    block: usize,
    len: usize,
}

impl Model {
    /// A parameter that is the base of an adapter, of which products read what [`Model::merge`] derives. `block` where its
    /// numbers come from NF4 in blocks of this size.
    pub(in crate::model) fn base_param(
        &mut self,
        index: usize,
        shape: ParamShape,
        numbers: ParamValues<'_>,
        (home, block): (BaseHome, Option<usize>),
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
                let base = self.nf4_base(&shape, &numbers.into_f32s(), block)?;
                self.bases.insert(index, base);
            }
            _ => numbers.write(&*backend, &mut master)?,
        }
        Ok(Param { shape, master, own: 0..shape.len(), whole: None, derived, turned: None, aside: None })
    }

    fn nf4_base(&self, shape: &ParamShape, values: &[f32], block: Option<usize>) -> Result<Nf4Base> {
        let size = block.unwrap_or(NF4_BLOCK);
        let (codes, absmax) = encode_nf4(values, size);
        if block.is_some() {
            // Numbers that come from the same blocks are not rounded a second time.
            let mut back = vec![0.0; values.len()];
            decode_nf4(&codes, &absmax, size, 0, &mut back);
            if back.iter().zip(values).any(|(x, y)| x.to_bits() != y.to_bits()) {
                return Err(Error::model(format!(
                    "the NF4 blocks of {} lie otherwise in the files than the decoder holds the weight",
                    shape.id
                ))
                .fix("adapter.base = \"device\" or \"host\""));
            }
        }
        let numbers: Vec<f32> = codes.iter().map(|&c| f32::from(c)).collect();
        let mut on_device = self.backend.alloc(DType::U8, codes.len())?;
        self.backend.write(&mut on_device, 0, &numbers)?;
        Ok(Nf4Base { codes: on_device, absmax: self.upload(&absmax)?, block: size, len: values.len() })
    }

    /// The weights under an adapter, or of any parameter, as a new buffer of f32.
    pub(in crate::model) fn base_f32(&self, param: usize) -> Result<Buffer> {
        let (b, master) = (&*self.backend, self.master(param));
        if let Some(whole) = self.decoded_base(param)? {
            return Ok(whole);
        }
        let mut whole = self.f32s(master.len())?;
        b.copy(master, 0, &mut whole, 0, master.len())?;
        Ok(whole)
    }

    /// A base that is NF4, in f32; `None` where the master is the base.
    pub(in crate::model) fn decoded_base(&self, param: usize) -> Result<Option<Buffer>> {
        let gathered = self.params[param].whole.is_some();
        let Some(base) = self.bases.get(&param).filter(|_| !gathered) else { return Ok(None) };
        let mut whole = self.f32s(base.len)?;
        self.backend.decode_nf4(&base.codes, &base.absmax, base.block, &mut whole)?;
        Ok(Some(whole))
    }

    /// Keeps this rank's part of a base, in the home that it has.
    pub(in crate::model) fn split_base(
        &mut self,
        param: usize,
        own: Range<usize>,
        home: BaseHome,
    ) -> Result<()> {
        let (values, shape) = (self.own_values(param)?, self.params[param].shape);
        let (part, block) = (values[own.clone()].to_vec(), self.bases.remove(&param).map(|base| base.block));
        let format = self.params[param].master.dtype();
        self.params[param].derived = None; // before the part is allocated: both need not fit at once
        let backend = self.backend.clone();
        self.params[param].master = match (home, block) {
            (_, Some(block)) => {
                let base = self.nf4_base(&shape, &part, Some(block))?;
                self.bases.insert(param, base);
                backend.alloc(DType::F32, 0)?
            }
            (BaseHome::Host, None) => backend.alloc_host(format, part.len())?,
            _ => backend.alloc(format, part.len())?,
        };
        if block.is_none() {
            backend.write(&mut self.params[param].master, 0, &part)?;
        }
        self.params[param].own = own;
        Ok(())
    }

    /// How parts of a base travel: as they are held, with no number changed.
    pub(in crate::model) fn base_format(&self, param: usize) -> DType {
        if self.is_nf4(param) { DType::F32 } else { self.params[param].master.dtype() }
    }

    /// Whether a parameter lies under an adapter.
    pub(in crate::model) fn is_base(&self, param: usize) -> bool {
        self.adapter.as_ref().is_some_and(|adapter| adapter.adapts(param))
    }

    /// Whether a parameter is the base of an adapter and has no master.
    pub(crate) fn is_nf4(&self, param: usize) -> bool {
        self.bases.contains_key(&param)
    }
}
