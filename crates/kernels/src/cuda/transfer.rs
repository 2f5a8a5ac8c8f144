//! Copies of much data to the card, such as a model's weights.
//!
//! A copy that need not wait goes through page-locked memory, and one thread fills that at a fifth of the speed at which the
//! card takes it. So several threads fill one room while the card reads the others.

use super::context::{Cuda, check};
use super::handles::{CudaContext, Pinned, StreamEvent};
use crate::cores;
use crate::error::Result;
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes of a room, and rooms.
const ROOM: usize = 16 << 20;
const ROOMS: usize = 4;
/// Threads that fill a room, at most.
const THREADS: usize = 8;
/// From how many bytes on it is worth it.
pub(super) const LARGE: usize = 2 * ROOM;

/// Page-locked rooms, and when the card has read each.
pub(super) struct StagingBuffers {
    memory: Pinned,
    read: [StreamEvent; ROOMS],
    threads: usize,
}

impl StagingBuffers {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let event = || StreamEvent::new(context, false);
        let read = [event()?, event()?, event()?, event()?];
        let threads = cores().min(THREADS);
        Ok(StagingBuffers { memory: Pinned::new(context, ROOMS * ROOM)?, read, threads })
    }

    /// Copies to an address of the card that has room for all of it; the source may change as soon as this returns.
    pub(super) fn upload(&mut self, cuda: &Cuda, to: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(ROOM).enumerate() {
            let (room, read) = (self.memory.at(i % ROOMS * ROOM, piece.len()), &self.read[i % ROOMS]);
            // One that was never used has nothing to wait for.
            read.wait()?;
            // SAFETY: the room has that many bytes, and all reads of it are complete.
            self.fill(unsafe { std::slice::from_raw_parts_mut(room, piece.len()) }, piece);
            // SAFETY: the room stays as it is until the event has happened; the card has room at `to`.
            let done = unsafe {
                let to = to + (i * ROOM) as u64;
                check(sys::cuMemcpyHtoDAsync_v2(to, room.cast(), piece.len(), cuda.stream), || {
                    format!("copying {} bytes to it", piece.len())
                })?;
                sys::cuEventRecord(read.handle, cuda.stream)
            };
            check(done, || "noting a copy to it".into())?;
        }
        Ok(())
    }

    fn fill(&self, room: &mut [u8], piece: &[u8]) {
        let part = piece.len().div_ceil(self.threads).max(1 << 20);
        std::thread::scope(|scope| {
            for (to, from) in room.chunks_mut(part).zip(piece.chunks(part)) {
                scope.spawn(|| to.copy_from_slice(from));
            }
        });
    }
}
