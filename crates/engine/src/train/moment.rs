//! Storage of optimizer state: f32, or block-wise 8-bit codes with an absmax per block.
//!
//! Only matrices inside layers, which are nearly all of a large model, are 8-bit. Embeddings keep f32 because a row that rarely
//! gets a gradient must not share a block's scale with others; heads, norms, biases, adapters and short parameters are small.

use crate::Result;
use crate::model::{ParamKind, ParamShape};
use ferrl_kernels::codes::{BLOCK, SIGNED};
use ferrl_kernels::{Backend, Buffer, DType};
use std::ops::Range;

/// Parameters with fewer weights keep f32 moments, as in bitsandbytes.
const SMALLEST: usize = 4096;

/// A parameter's optimizer buffers, in checkpoint order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// First moment, or SGD's momentum buffer: values or codes.
    First,
    /// Second moment: values or codes.
    Second,
    /// EMA of the weights.
    Average,
    /// Absmax of each block of the first moment, if 8-bit.
    FirstAbsmax,
    /// Absmax of each block of the second moment, if 8-bit.
    SecondAbsmax,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MomentStorage {
    /// 8-bit codes.
    pub coded: bool,
    /// In host memory.
    pub offload: bool,
}

impl StateKind {
    pub const ALL: [StateKind; 5] = [
        StateKind::First,
        StateKind::Second,
        StateKind::Average,
        StateKind::FirstAbsmax,
        StateKind::SecondAbsmax,
    ];

    /// Its name in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            StateKind::First => "first",
            StateKind::Second => "second",
            StateKind::Average => "average",
            StateKind::FirstAbsmax => "first_absmax",
            StateKind::SecondAbsmax => "second_absmax",
        }
    }

    /// The elements of this buffer that belong to a range of weights.
    pub fn range(self, weights: &Range<usize>) -> Range<usize> {
        match self {
            StateKind::FirstAbsmax | StateKind::SecondAbsmax => {
                weights.start.div_ceil(BLOCK)..weights.end.div_ceil(BLOCK)
            }
            _ => weights.clone(),
        }
    }

    /// Its element type, given whether moments are 8-bit.
    pub fn dtype(self, coded: bool) -> DType {
        match self {
            StateKind::First | StateKind::Second if coded => DType::U8,
            _ => DType::F32,
        }
    }

    pub(super) fn alloc(self, backend: &dyn Backend, len: usize, stored: MomentStorage) -> Result<Buffer> {
        let dtype = self.dtype(stored.coded);
        // The EMA is read whenever the averaged model is used; moments once per step.
        match stored.offload && self != StateKind::Average {
            true => backend.alloc_host(dtype, len),
            false => backend.alloc(dtype, len),
        }
    }

    /// Zero moments for `len` weights.
    pub(super) fn zeros(
        self,
        backend: &dyn Backend,
        weights: usize,
        stored: MomentStorage,
    ) -> Result<Buffer> {
        let mut buffer = self.alloc(backend, self.range(&(0..weights)).len(), stored)?;
        let zero = if self == StateKind::First && stored.coded { f32::from(SIGNED.code(0.0)) } else { 0.0 };
        backend.fill(&mut buffer, zero)?;
        Ok(buffer)
    }
}

/// Whether 8-bit AdamW quantises the moments of a parameter, of which the elements `trained` are trained.
pub fn is_coded(shape: &ParamShape, trained: &[Range<usize>]) -> bool {
    let whole = |r: &Range<usize>| {
        r.start.is_multiple_of(BLOCK) && (r.end.is_multiple_of(BLOCK) || r.end == shape.len())
    };
    let inside = shape.id.layer.is_some() && shape.id.kind == ParamKind::Weight && !shape.id.is_vector();
    inside && shape.len() >= SMALLEST && trained.iter().all(whole)
}
