//! Uploads of large data, such as a model's weights.
//!
//! An asynchronous copy goes through pinned memory, which one thread fills at a fifth of the GPU's copy bandwidth. So several
//! threads fill one staging buffer while the GPU reads the others.

use super::context::{Cuda, check};
use super::handles::{CudaContext, Pinned, StreamEvent};
use crate::{Result, cores};
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes of a staging buffer, and number of buffers.
const ROOM: usize = 16 << 20;
const ROOMS: usize = 4;
/// Maximum threads that fill a buffer.
const THREADS: usize = 8;
/// Minimum bytes for this path.
pub(super) const LARGE: usize = 2 * ROOM;

/// Pinned staging buffers, each with the event of its last copy.
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

    /// Copies to a device address with enough room; the source may change as soon as this returns.
    pub(super) fn upload(&mut self, cuda: &Cuda, to: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(ROOM).enumerate() {
            let (room, read) = (self.memory.at(i % ROOMS * ROOM, piece.len()), &self.read[i % ROOMS]);
            // Returns at once for a buffer that was never used.
            read.wait()?;
            // SAFETY: the buffer has this many bytes, and all reads of it are complete.
            self.fill(unsafe { std::slice::from_raw_parts_mut(room, piece.len()) }, piece);
            // SAFETY: the buffer does not change until the event completes; the device has room at `to`.
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
