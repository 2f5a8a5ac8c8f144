//! How an optimizer's numbers of a parameter are stored: f32, or 8-bit codes in blocks that share a magnitude.
//!
//! Codes are for matrices inside layers, which are nearly all of a large model. Tables, heads, norms, biases, adapters and
//! short parameters keep f32: a row of a table that rarely has a gradient shares no block with others, and the rest is small.

use crate::Result;
use crate::model::{ParamKind, ParamShape};
use ferrl_kernels::codes::{BLOCK, SIGNED};
use ferrl_kernels::{Backend, Buffer, DType};
use std::ops::Range;

/// Parameters with fewer weights keep f32 moments, as in bitsandbytes.
const SMALLEST: usize = 4096;

/// The optimizer's buffers of a parameter, in the order in which checkpoints have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// First moment, or SGD's velocity: numbers or codes.
    First,
    /// Second moment: numbers or codes.
    Second,
    /// Average of the weights.
    Average,
    /// Largest magnitude of each block of the first moment, where it is codes.
    FirstAbsmax,
    /// The same of the second moment.
    SecondAbsmax,
}

/// How the moments of a parameter are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MomentStorage {
    /// As 8-bit codes.
    pub coded: bool,
    /// In the machine's memory.
    pub offload: bool,
}

impl StateKind {
    /// All of them.
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

    /// The numbers that belong to these weights.
    pub fn range(self, weights: &Range<usize>) -> Range<usize> {
        match self {
            StateKind::FirstAbsmax | StateKind::SecondAbsmax => {
                weights.start.div_ceil(BLOCK)..weights.end.div_ceil(BLOCK)
            }
            _ => weights.clone(),
        }
    }

    /// How its numbers are stored where moments are codes, or not.
    pub fn dtype(self, coded: bool) -> DType {
        match self {
            StateKind::First | StateKind::Second if coded => DType::U8,
            _ => DType::F32,
        }
    }

    /// Memory for `len` of its numbers.
    pub(super) fn room(self, backend: &dyn Backend, numbers: usize, stored: MomentStorage) -> Result<Buffer> {
        let dtype = self.dtype(stored.coded);
        // The average is read whenever the averaged model is; moments once a step.
        match stored.offload && self != StateKind::Average {
            true => backend.alloc_host(dtype, numbers),
            false => backend.alloc(dtype, numbers),
        }
    }

    /// Zero moments of `len` weights.
    pub(super) fn zeros(
        self,
        backend: &dyn Backend,
        weights: usize,
        stored: MomentStorage,
    ) -> Result<Buffer> {
        let mut buffer = self.room(backend, self.range(&(0..weights)).len(), stored)?;
        let zero = if self == StateKind::First && stored.coded { f32::from(SIGNED.code(0.0)) } else { 0.0 };
        backend.fill(&mut buffer, zero)?;
        Ok(buffer)
    }
}

/// Whether 8-bit AdamW has codes for the moments of a parameter, of which these elements are trained.
pub fn is_coded(shape: &ParamShape, trained: &[Range<usize>]) -> bool {
    let whole = |r: &Range<usize>| {
        r.start.is_multiple_of(BLOCK) && (r.end.is_multiple_of(BLOCK) || r.end == shape.len())
    };
    let inside = shape.id.layer.is_some() && shape.id.kind == ParamKind::Weight && !shape.id.is_vector();
    inside && shape.len() >= SMALLEST && trained.iter().all(whole)
}
