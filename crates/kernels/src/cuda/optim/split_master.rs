//! Masters whose upper halves are the weights that products read: see `split_master.cuh`.
//!
//! Such a buffer is one of f32 to everyone outside. Updates and embeddings read and write the halves in place; what is
//! done rarely works on a copy ([`Whole`]).

use crate::buffer::{Buffer, DType, Weight};
use crate::cuda::context::Cuda;
use crate::cuda::gemm::linear::{Form, form, stored};
use crate::cuda::launch::args;
use crate::cuda::memory::{Data, Memory, element, split_parts};
use crate::error::Result;

/// Numbers that are uploaded at once, so that the copy stays small.
const PIECE: usize = 1 << 24;

/// See [`LinearOps::master`](crate::backend::LinearOps::master): for weights of bf16.
pub fn master(cuda: &Cuda, weight: &Weight) -> Result<Option<Buffer>> {
    if stored(weight).1 != DType::Bf16 {
        return Ok(None);
    }
    let (len, form) = (weight.n * weight.k, weight.data().downcast_ref::<Form>());
    let upper = form.expect("a weight of the CUDA backend").0.clone();
    let lower = cuda.arena.take(2 * len)?;
    Ok(Some(Buffer::new(DType::F32, len, Box::new(Data::split(lower, upper)))))
}

/// Whether the master's upper halves are this weight.
pub(crate) fn is_of(master: &Buffer, weight: &Weight) -> bool {
    split_parts(master, 0).is_some_and(|[_, upper]| upper == form(weight))
}

/// `n` numbers from `at` on, as whole ones, to an address.
pub(crate) fn join(cuda: &Cuda, b: &Buffer, at: usize, to: u64, n: usize) -> Result<()> {
    let [lower, upper] = split_parts(b, at).expect("a split master");
    cuda.launch_flat("split_master", "join", n, &args![lower, upper, to, n])
}

/// `n` whole numbers at an address become the halves from `at` on.
pub(crate) fn split(cuda: &Cuda, from: u64, b: &mut Buffer, at: usize, n: usize) -> Result<()> {
    let [lower, upper] = split_parts(b, at).expect("a split master");
    cuda.launch_flat("split_master", "split", n, &args![from, lower, upper, n])
}

/// Numbers of the host become the halves from `at` on.
pub(crate) fn write(cuda: &Cuda, b: &mut Buffer, at: usize, values: &[f32]) -> Result<()> {
    for (i, piece) in values.chunks(PIECE).enumerate() {
        let room = cuda.uploaded(piece)?;
        split(cuda, room.ptr(), b, at + i * PIECE, piece.len())?;
    }
    Ok(())
}

/// Elements of a buffer as they lie, or a copy of them where the buffer is a split master.
pub(crate) enum Whole {
    There(u64),
    Copy(Memory),
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

    /// What was written there goes back where it came from.
    pub(crate) fn put_back(self, cuda: &Cuda, b: &mut Buffer, at: usize, n: usize) -> Result<()> {
        match self {
            Whole::There(_) => Ok(()),
            Whole::Copy(room) => split(cuda, room.ptr(), b, at, n),
        }
    }
}
