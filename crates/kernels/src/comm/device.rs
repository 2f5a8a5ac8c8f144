//! Numbers that go from the memory of one device to that of another without passing through the host.
//!
//! A [`Shipment`] belongs to an exchange of the [`Line`](super::line::Line): its messages announce how many numbers follow, and
//! the thread of exchanges begins the transfers once all messages are there and none is an error. The thread that computes
//! then joins them: what it gives the device afterwards waits on the device, not on the host.

use super::Arrived;
use crate::backend::Backend;
use crate::buffer::{Buffer, DType};
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// Moves the contents of buffers between the devices of a group of ranks.
pub(super) trait Mover: Send + Sync {
    /// What moves them, for people.
    fn describe(&self) -> String;
    /// Prepares the transfers of one exchange. They begin after all work that this device has been given before this call.
    fn prepare(&self, backend: &Arc<dyn Backend>) -> Result<Box<dyn Transfer>>;
    /// What moves them within a group of these ranks, where it is known without asking the others; else [`Ranks::connect`](super::Ranks::connect)
    /// of the group finds it.
    fn team(&self, _members: &[usize]) -> Option<Arc<dyn Mover>> {
        None
    }
    /// Seconds in which this rank's transfers were under way since the last call, as far as they are complete.
    fn take_seconds(&self) -> f64 {
        0.0
    }
    /// The last call: every rank has finished.
    fn finish(&self) {}
}

/// The transfers of one exchange.
pub(super) trait Transfer: Send {
    /// Begins to send `ranges[r]` of every section of `out` to rank `r`, and to receive `ranges[r]` of `into` from it. All
    /// ranks begin the transfers of the same exchanges in the same order. The buffers stay as they are until the join.
    fn begin(&mut self, out: &[Section], into: &mut [Section]) -> Result<()>;
    /// What the device is given from now on waits for the transfers.
    fn join(&mut self, into: &mut [Section]) -> Result<()>;
}

/// A buffer of which each rank has a range: numbers for it, or from it.
pub(super) struct Section {
    pub buffer: Buffer,
    /// Elements, by rank. Numbers for this rank itself stay where they are.
    pub ranges: Vec<Range<usize>>,
}

/// The storage types of numbers that travel; a shipment has a section of each.
pub(super) const FORMATS: [DType; 2] = [DType::F32, DType::Bf16];

/// Bytes that announce a shipment: the number of elements in each section.
pub(super) const ANNOUNCEMENT: usize = 8 * FORMATS.len();

/// How many elements of each section go to a rank, as bytes.
pub(super) fn announce(counts: [usize; 2]) -> Vec<u8> {
    counts.iter().flat_map(|&count| (count as u64).to_le_bytes()).collect()
}

fn announced(message: &[u8]) -> Option<[usize; 2]> {
    let (words, _) = message.get(..ANNOUNCEMENT)?.as_chunks::<8>();
    Some([0, 1].map(|i| u64::from_le_bytes(words[i]) as usize))
}

/// Numbers of an exchange between devices, with the memory that they leave and that they come to.
pub(super) struct Shipment {
    transfer: Box<dyn Transfer>,
    pub out: Vec<Section>,
    pub into: Vec<Section>,
    /// Whether transfers are under way that nothing on the device waits for yet.
    under_way: bool,
}

impl Shipment {
    /// Of sections in the order of [`FORMATS`]. `into` has room for as much as may come.
    pub fn new(transfer: Box<dyn Transfer>, out: Vec<Section>, into: Vec<Section>) -> Self {
        Shipment { transfer, out, into, under_way: false }
    }

    /// Begins the transfers that the messages of all ranks announce. A rank that has failed before sends empty messages until
    /// all are in step again; every rank sees that, and none begins.
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
        // Even where this fails, some of them may have begun.
        self.under_way = true;
        self.transfer.begin(&self.out, &mut self.into)
    }

    /// What the device is given from now on waits for the numbers.
    pub fn join(&mut self) -> Result<()> {
        if self.under_way {
            self.transfer.join(&mut self.into)?;
            self.under_way = false;
        }
        Ok(())
    }
}

impl Drop for Shipment {
    /// The memory goes back to the device, which may use it for other work at once: that work must wait as well.
    fn drop(&mut self) {
        if self.join().is_err() {
            // Transfers may still read and write there.
            std::mem::forget((std::mem::take(&mut self.out), std::mem::take(&mut self.into)));
        }
    }
}

/// How numbers go from device to device in a group, as its ranks have agreed.
pub(super) struct Devices {
    /// None where they go through host memory.
    pub mover: Option<Arc<dyn Mover>>,
    /// Why they do, where someone should know.
    pub why_not: Option<String>,
}
