//! Masters whose upper halves are the GEMM weights: see `split_master.cuh`.
//!
//! Outside, such a buffer is an f32 buffer. Optimizer steps and embeddings access the halves in place; rare operations work on
//! a copy ([`Whole`]).

use crate::cuda::context::{Cuda, check};
use crate::cuda::gemm::linear::{WeightForm, form, stored};
use crate::cuda::launch::args;
use crate::cuda::memory::{CardMemory, Data, element, split_parts};
use crate::{Buffer, DType, Result, Weight};
use cudarc::driver::sys;

/// Numbers uploaded at a time, to keep the staging copy small.
const PIECE: usize = 1 << 24;

/// See [`LinearOps::master`](crate::backend::LinearOps::master): for bf16 weights.
pub fn master(cuda: &Cuda, weight: &Weight) -> Result<Option<Buffer>> {
    if stored(weight).1 != DType::Bf16 {
        return Ok(None);
    }
    let lower = cuda.arena.take(2 * weight.n * weight.k)?;
    Ok(Some(halves(weight, Some(lower))))
}

/// See [`LinearOps::rounded_master`](crate::backend::LinearOps::rounded_master): for bf16 weights.
pub fn rounded_master(weight: &Weight) -> Option<Buffer> {
    (stored(weight).1 == DType::Bf16).then(|| halves(weight, None))
}

fn halves(weight: &Weight, lower: Option<CardMemory>) -> Buffer {
    let form = weight.data().downcast_ref::<WeightForm>().expect("a weight of the CUDA backend");
    Buffer::new(DType::F32, weight.n * weight.k, Box::new(Data::split(lower, form.0.clone())))
}

/// Whether the master's upper halves are this weight.
pub(crate) fn is_of(master: &Buffer, weight: &Weight) -> bool {
    split_parts(master, 0).is_some_and(|[_, upper]| upper == form(weight))
}

/// Joins `n` elements from `at` on to f32, at an address.
pub(crate) fn join(cuda: &Cuda, b: &Buffer, at: usize, to: u64, n: usize) -> Result<()> {
    let [lower, upper] = split_parts(b, at).expect("a split master");
    cuda.launch_flat("split_master", "join", n, &args![lower, upper, to, n])
}

/// Splits `n` f32 values at an address into the elements from `at` on.
pub(crate) fn split(cuda: &Cuda, from: u64, b: &mut Buffer, at: usize, n: usize) -> Result<()> {
    let [lower, upper] = split_parts(b, at).expect("a split master");
    cuda.launch_flat("split_master", "split", n, &args![from, lower, upper, n])
}

/// Writes bf16 values to the upper halves from `at` on, and zeros to the lower ones.
pub(crate) fn write_bf16(cuda: &Cuda, b: &mut Buffer, at: usize, bytes: &[u8]) -> Result<()> {
    let [lower, upper] = split_parts(b, at).expect("a split master");
    cuda.upload(upper, bytes)?;
    if lower == 0 {
        return Ok(());
    }
    // SAFETY: the buffer has as many lower halves as it has elements.
    check(unsafe { sys::cuMemsetD16Async(lower, 0, bytes.len() / 2, cuda.stream) }, || {
        "clearing halves".into()
    })
}

/// Writes host values to the elements from `at` on.
pub(crate) fn write(cuda: &Cuda, b: &mut Buffer, at: usize, values: &[f32]) -> Result<()> {
    for (i, piece) in values.chunks(PIECE).enumerate() {
        let room = cuda.uploaded(piece)?;
        split(cuda, room.ptr(), b, at + i * PIECE, piece.len())?;
    }
    Ok(())
}

/// A buffer's elements in place, or an f32 copy of a split master.
pub(crate) enum Whole {
    There(u64),
    Copy(CardMemory),
}

impl Whole {
    /// `n` elements from `at` on.
    pub(crate) fn of(cuda: &Cuda, b: &Buffer, at: usize, n: usize) -> Result<Self> {
        if split_parts(b, at).is_none() {
            return Ok(Whole::There(element(b, at)));
        }
        let room = cuda.arena.take(4 * n)?;
        join(cuda, b, at, room.ptr(), n)?;
        Ok(Whole::Copy(room))
    }

    /// Their address.
    pub(crate) fn ptr(&self) -> u64 {
        match self {
            Whole::There(at) => *at,
            Whole::Copy(room) => room.ptr(),
        }
    }

    /// Writes a copy back to the split master.
    pub(crate) fn put_back(self, cuda: &Cuda, b: &mut Buffer, at: usize, n: usize) -> Result<()> {
        match self {
            Whole::There(_) => Ok(()),
            Whole::Copy(room) => split(cuda, room.ptr(), b, at, n),
        }
    }
}
