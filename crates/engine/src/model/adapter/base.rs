//! Storage of the frozen base weights under an adapter. They never change; each merge reads each of them once.
//!
//! NF4 takes 4.5 bits per weight instead of 16: blocks of 64 share an f32 absmax, and each weight is the nearest of 16 code
//! values times that absmax. The policy is then `round(nf4(base) + s B A)`, as in QLoRA.

use crate::checkpoint::ParamValues;
use crate::model::ParamShape;
use crate::model::weights::{Model, Param};
use crate::{Error, Result};
use ferrl_kernels::codes::{NF4_BLOCK, decode_nf4, encode_nf4};
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
}

impl Model {
    /// A base parameter; its GEMM weight is derived by [`Model::merge`]. `block` is set if the values were dequantised from
    /// NF4 with this block size.
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
        Ok(Param::new(shape, master, derived))
    }

    fn nf4_base(&self, shape: &ParamShape, values: &[f32], block: Option<usize>) -> Result<Nf4Base> {
        let size = block.unwrap_or(NF4_BLOCK);
        let (codes, absmax) = encode_nf4(values, size);
        if block.is_some() {
            // Values dequantised from the same blocks are not rounded a second time.
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
        let mut whole = self.f32s(base.len)?;
        self.backend.decode_nf4(&base.codes, &base.absmax, base.block, &mut whole)?;
        Ok(Some(whole))
    }

    /// Keeps this rank's shard of a base, in its present format and memory.
    pub(in crate::model) fn split_base(
        &mut self,
        param: usize,
        own: Range<usize>,
        home: BaseHome,
    ) -> Result<()> {
        let (values, shape) = (self.own_values(param)?, self.params[param].shape);
        let (part, block) = (values[own.clone()].to_vec(), self.bases.remove(&param).map(|base| base.block));
        let format = self.params[param].master.dtype();
        self.params[param].derived = None; // free first: full weight and shard need not fit together
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
