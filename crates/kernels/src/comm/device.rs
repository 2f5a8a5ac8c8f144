//! Transfers from device memory to device memory.
//!
//! A [`Shipment`] belongs to an exchange of the [`Line`](super::line::Line): the exchange's messages announce the number of
//! elements, and the exchange thread starts the transfers once all messages have arrived without an error. The compute thread
//! then joins them: its later device work waits on the device, not on the host.

use super::Arrived;
use crate::backend::Backend;
use crate::{Buffer, DType, Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Transfers buffers between the devices of a group of ranks.
pub(super) trait Mover: Send + Sync {
    /// The transport, for users.
    fn describe(&self) -> String;
    /// Prepares the transfers of one exchange. They start after all work given to this device before this call.
    fn prepare(&self, backend: &Arc<dyn Backend>) -> Result<Box<dyn Transfer>>;
    /// A mover for a subgroup, if it can be made without communication; else [`Ranks::connect`](super::Ranks::connect) of the
    /// subgroup makes it.
    fn team(&self, _members: &[usize]) -> Option<Arc<dyn Mover>> {
        None
    }
    /// Seconds for which this rank's completed transfers were in flight, since the last call.
    fn take_seconds(&self) -> f64 {
        0.0
    }
    /// Last call, after every rank has finished.
    fn finish(&self) {}
}

/// The transfers of one exchange.
pub(super) trait Transfer: Send {
    /// Starts sending `ranges[r]` of every section of `out` to rank `r`, and receiving `ranges[r]` of `into` from it. All ranks
    /// start the same exchanges in the same order. The buffers must not change until the join.
    fn begin(&mut self, out: &[Section], into: &mut [Section]) -> Result<()>;
    /// Makes later work on the device wait for the transfers.
    fn join(&mut self, into: &mut [Section]) -> Result<()>;
}

/// A buffer with one range per rank, to send or to receive.
pub(super) struct Section {
    pub buffer: Buffer,
    /// Element ranges by rank. The range of this rank itself is not transferred.
    pub ranges: Vec<Range<usize>>,
}

/// Wire formats; a shipment has one section per format.
pub(super) const FORMATS: [DType; 2] = [DType::F32, DType::Bf16];

/// Bytes of an announcement: the number of elements per section.
pub(super) const ANNOUNCEMENT: usize = 8 * FORMATS.len();

/// Serialises the number of elements per section for a rank.
pub(super) fn announce(counts: [usize; 2]) -> Vec<u8> {
    counts.iter().flat_map(|&count| (count as u64).to_le_bytes()).collect()
}

fn announced(message: &[u8]) -> Option<[usize; 2]> {
    let (words, _) = message.get(..ANNOUNCEMENT)?.as_chunks::<8>();
    Some([0, 1].map(|i| u64::from_le_bytes(words[i]) as usize))
}

/// The device-to-device part of an exchange, with its send and receive buffers.
pub(super) struct Shipment {
    transfer: Box<dyn Transfer>,
    pub out: Vec<Section>,
    pub into: Vec<Section>,
    /// Whether transfers were started that have not been joined.
    under_way: bool,
}

impl Shipment {
    /// Sections are in the order of [`FORMATS`]. `into` must have room for the largest possible transfer.
    pub fn new(transfer: Box<dyn Transfer>, out: Vec<Section>, into: Vec<Section>) -> Self {
        Shipment { transfer, out, into, under_way: false }
    }

    /// Starts the transfers that the ranks' messages announce. A rank that has failed sends empty messages until all are in
    /// step again; every rank sees that, and none starts.
    pub fn begin(&mut self, arrived: &[Arrived], own: usize) -> Result<()> {
        let counts: Option<Vec<_>> = arrived.iter().map(|a| announced(&a.bytes)).collect();
        let Some(counts) = counts else { return Ok(()) };
        for (rank, counts) in counts.into_iter().enumerate().filter(|(rank, _)| *rank != own) {
            for (section, count) in self.into.iter_mut().zip(counts) {
                let range = &mut section.ranges[rank];
                if count > range.len() {
                    return Err(Error::rank(format!("rank {rank} sends more numbers than fit"))
                        .fix("one binary and one recipe on all ranks"));
                }
                range.end = range.start + count;
            }
        }
        // Even if this fails, some transfers may have started.
        self.under_way = true;
        self.transfer.begin(&self.out, &mut self.into)
    }

    /// Makes later work on the device wait for the transfers.
    pub fn join(&mut self) -> Result<()> {
        if self.under_way {
            self.transfer.join(&mut self.into)?;
            self.under_way = false;
        }
        Ok(())
    }
}

impl Drop for Shipment {
    /// The buffers are returned to the allocator, which may reuse them at once: that work must wait for the transfers as well.
    fn drop(&mut self) {
        if self.join().is_err() {
            // Transfers may still access the buffers.
            std::mem::forget((std::mem::take(&mut self.out), std::mem::take(&mut self.into)));
        }
    }
}

/// The ranks' decision on device-to-device transfers.
pub(super) struct Devices {
    /// `None` if they go through host memory.
    pub mover: Option<Arc<dyn Mover>>,
    /// Why they do, if it should be reported.
    pub why_not: Option<String>,
}
