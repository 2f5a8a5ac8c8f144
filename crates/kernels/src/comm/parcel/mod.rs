//! Messages of buffer contents between ranks ("parcels"): device to device if the ranks are connected so ([`Ranks::connect`]),
//! else through host memory, with the same interface for both.
//!
//! A parcel is a note of a few bytes and pieces of numbers. Both sides derive the pieces from the note and from shapes, so no
//! metadata is sent. On a device, all parcels of an exchange share one buffer per wire format, with aligned pieces.

mod block;
mod inbox;

pub use block::Block;
pub use inbox::Inbox;

use super::device::{Devices, FORMATS, Mover, Section, Shipment, announce};
use super::line::{Completed, Job};
use super::{Group, Pending, Ranks, message_buffer, recycle};
use crate::backend::Backend;
use crate::buffer::{Buffer, DType};
use crate::error::Result;
use crate::narrow;
use std::ops::Range;
use std::sync::Arc;

/// Numbers that are converted at a time in host memory: 256 KiB, which stay in the cache; converting whole messages takes page
/// faults for as many bytes again.
const AT_ONCE: usize = 64 << 10;

/// Contiguous numbers and their wire format, f32 or bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParcelPiece {
    pub len: usize,
    /// Wire format.
    pub format: DType,
}

impl ParcelPiece {
    /// `len` f32 elements.
    pub fn f32s(len: usize) -> Self {
        ParcelPiece { len, format: DType::F32 }
    }

    fn bytes(self) -> usize {
        self.len * self.format.size()
    }

    /// Index of its section in a shipment.
    fn section(self) -> usize {
        FORMATS.iter().position(|&f| f == self.format).expect("f32 or bf16")
    }

    /// Padded length in the section: vector loads need multiples of eight.
    fn padded(self) -> usize {
        self.len.next_multiple_of(8)
    }
}

pub struct ParcelContents {
    /// Bytes to be read first.
    pub note: Vec<u8>,
    /// Pieces, in the order in which they are pushed and taken.
    pub pieces: Vec<ParcelPiece>,
}

/// Which slot is sent to which rank.
pub enum Route {
    /// Slot `r` to rank `r`.
    Each,
    /// The only slot to each of these ranks.
    Same(Vec<usize>),
}

impl Route {
    fn slot(&self, rank: usize) -> Option<usize> {
        match self {
            Route::Each => Some(rank),
            Route::Same(to) => to.contains(&rank).then_some(0),
        }
    }
}

/// Parcels being packed.
pub struct Outbox {
    backend: Arc<dyn Backend>,
    route: Route,
    slots: Vec<ParcelContents>,
    /// Pieces pushed so far, by slot.
    pushed: Vec<usize>,
    packed: ParcelStorage,
}

enum ParcelStorage {
    /// Serialised notes and numbers by slot, and the bytes filled.
    Host { bytes: Vec<Vec<u8>>, filled: Vec<usize>, numbers: Vec<f32> },
    /// One buffer per wire format, and each slot's range filled so far.
    Device { mover: Arc<dyn Mover>, buffers: [Buffer; 2], filled: Vec<[Range<usize>; 2]> },
}

impl Outbox {
    /// Allocates parcels with these contents.
    pub fn new(
        ranks: &Ranks,
        backend: &Arc<dyn Backend>,
        route: Route,
        slots: Vec<ParcelContents>,
    ) -> Result<Self> {
        let mover = ranks.0.as_ref().and_then(|group| group.mover());
        let packed = match mover {
            None => ParcelStorage::host(&slots),
            Some(mover) => ParcelStorage::device(mover, &**backend, &slots)?,
        };
        let pushed = vec![0; slots.len()];
        Ok(Outbox { backend: backend.clone(), route, slots, pushed, packed })
    }

    /// Pushes a slot's next piece: elements of a buffer from `at` on.
    pub fn push(&mut self, slot: usize, from: &Buffer, at: usize) -> Result<()> {
        let piece = self.slots[slot].pieces[self.pushed[slot]];
        self.pushed[slot] += 1;
        match &mut self.packed {
            ParcelStorage::Host { bytes, filled, numbers } => {
                for start in (0..piece.len).step_by(AT_ONCE) {
                    let part = ParcelPiece { len: AT_ONCE.min(piece.len - start), ..piece };
                    numbers.resize(part.len, 0.0);
                    self.backend.read(from, at + start, numbers)?;
                    write(numbers, part.format, &mut bytes[slot][filled[slot]..][..part.bytes()]);
                    filled[slot] += part.bytes();
                }
            }
            ParcelStorage::Device { buffers, filled, .. } => {
                let range = &mut filled[slot][piece.section()];
                let to = &mut buffers[piece.section()];
                self.backend.copy(from, at, to, range.end, piece.len)?;
                range.end += piece.padded();
            }
        }
        Ok(())
    }

    /// Pushes a slot's next piece: a block of a buffer.
    pub fn push_block(&mut self, slot: usize, from: &Buffer, block: &Block) -> Result<()> {
        if let Some(at) = block.in_a_row() {
            return self.push(slot, from, at);
        }
        if let ParcelStorage::Device { buffers, filled, .. } = &mut self.packed {
            let piece = self.slots[slot].pieces[self.pushed[slot]];
            self.pushed[slot] += 1;
            let range = &mut filled[slot][piece.section()];
            block.pack(&*self.backend, from, &mut buffers[piece.section()], range.end)?;
            range.end += piece.padded();
            return Ok(());
        }
        let mut packed = self.backend.alloc(from.dtype(), block.len())?;
        block.pack(&*self.backend, from, &mut packed, 0)?;
        self.push(slot, &packed, 0)
    }

    fn check(&self) {
        let all = self.slots.iter().zip(&self.pushed).all(|(slot, &pushed)| slot.pieces.len() == pushed);
        assert!(all, "every piece is pushed before the parcels leave");
    }
}

impl ParcelStorage {
    fn host(slots: &[ParcelContents]) -> Self {
        let packed = |slot: &ParcelContents| {
            let numbers: usize = slot.pieces.iter().map(|p| p.bytes()).sum();
            let mut bytes = message_buffer(slot.note.len() + numbers);
            bytes[..slot.note.len()].copy_from_slice(&slot.note);
            bytes
        };
        let filled = slots.iter().map(|slot| slot.note.len()).collect();
        ParcelStorage::Host { bytes: slots.iter().map(packed).collect(), filled, numbers: Vec::new() }
    }

    fn device(mover: Arc<dyn Mover>, backend: &dyn Backend, slots: &[ParcelContents]) -> Result<Self> {
        let mut totals = [0; 2];
        let filled = slots.iter().map(|slot| begin(&mut totals, &slot.pieces).map(|r| r.start..r.start));
        let filled = filled.collect();
        Ok(ParcelStorage::Device { mover, buffers: buffers(backend, totals)?, filled })
    }
}

/// Ranges of these pieces in each section; advances `totals`.
fn begin(totals: &mut [usize; 2], pieces: &[ParcelPiece]) -> [Range<usize>; 2] {
    let starts = *totals;
    pieces.iter().for_each(|piece| totals[piece.section()] += piece.padded());
    [0, 1].map(|i| starts[i]..totals[i])
}

fn buffers(backend: &dyn Backend, totals: [usize; 2]) -> Result<[Buffer; 2]> {
    Ok([backend.alloc(FORMATS[0], totals[0])?, backend.alloc(FORMATS[1], totals[1])?])
}

/// Serialises numbers.
fn write(values: &[f32], format: DType, bytes: &mut [u8]) {
    match format {
        DType::Bf16 => {
            let pairs = bytes.as_chunks_mut::<2>().0.iter_mut();
            pairs.zip(values).for_each(|(b, &x)| *b = narrow(x).to_le_bytes());
        }
        _ => bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, x)| *b = x.to_le_bytes()),
    }
}

/// Parcels in flight.
#[must_use]
pub struct PendingParcels {
    pending: Pending,
    backend: Arc<dyn Backend>,
}

impl Ranks {
    /// Starts sending parcels; [`Ranks::receive`] returns those of the other ranks. `expected` are the largest pieces that each
    /// rank may send. All ranks must start and receive in the same order, as with [`Ranks::begin`].
    pub fn begin_parcels(&self, outbox: Outbox, expected: &[Vec<ParcelPiece>]) -> Result<PendingParcels> {
        outbox.check();
        let Outbox { backend, route, slots, packed, .. } = outbox;
        let pending = match (packed, route) {
            (ParcelStorage::Host { bytes, .. }, Route::Each) => self.begin(bytes),
            (ParcelStorage::Host { mut bytes, .. }, Route::Same(to)) => {
                self.begin_gather(bytes.swap_remove(0), to)
            }
            (ParcelStorage::Device { mover, buffers, filled }, route) => {
                let group = self.0.as_ref().expect("devices belong to a group");
                group.ship(&backend, mover, PackedParcels { route, slots, buffers, filled }, expected)?
            }
        };
        Ok(PendingParcels { pending, backend })
    }

    /// Waits for the parcels of all ranks.
    pub fn receive(&self, coming: PendingParcels) -> Result<Inbox> {
        let PendingParcels { pending, backend } = coming;
        match &self.0 {
            None => Ok(Inbox::host(backend, self.wait(pending)?)),
            Some(group) => group.unpack(backend, group.waiting(|line| line.wait(pending.number))?),
        }
    }

    /// Sends parcels and waits for those of the other ranks.
    pub fn exchange_parcels(&self, outbox: Outbox, expected: &[Vec<ParcelPiece>]) -> Result<Inbox> {
        let Outbox { backend, route, packed: ParcelStorage::Host { bytes, .. }, .. } = &outbox else {
            let PendingParcels { backend, .. } = self.begin_parcels(outbox, expected)?;
            let group = self.0.as_ref().expect("devices belong to a group");
            return group.unpack(backend, group.waiting(|line| line.last())?);
        };
        outbox.check();
        let own = self.rank();
        // What a rank sends to itself is moved, not copied.
        let sent = |rank: &usize| route.slot(*rank).filter(|_| *rank != own);
        let parts: Vec<&[u8]> =
            (0..self.size()).map(|r| sent(&r).map_or(&[][..], |slot| &bytes[slot])).collect();
        let mut messages = self.all_to_all(&parts)?;
        let (backend, kept) = (backend.clone(), route.slot(own));
        if let ParcelStorage::Host { mut bytes, .. } = outbox.packed {
            messages[own] = kept.map(|slot| std::mem::take(&mut bytes[slot])).unwrap_or_default();
            recycle(bytes);
        }
        Ok(Inbox::host(backend, messages))
    }
}

/// Parcels packed in device memory.
struct PackedParcels {
    route: Route,
    slots: Vec<ParcelContents>,
    buffers: [Buffer; 2],
    filled: Vec<[Range<usize>; 2]>,
}

impl PackedParcels {
    /// Elements of a section that go to a rank.
    fn range(&self, rank: usize, section: usize) -> Range<usize> {
        self.route.slot(rank).map_or(0..0, |slot| self.filled[slot][section].clone())
    }
}

impl Group {
    pub(super) fn mover(&self) -> Option<Arc<dyn Mover>> {
        self.devices.get().and_then(|Devices { mover, .. }| mover.clone())
    }

    fn unpack(&self, backend: Arc<dyn Backend>, (number, mut completed): Completed) -> Result<Inbox> {
        let shipment = completed.shipment.take();
        let messages = self.read((number, completed))?;
        match shipment {
            None => Ok(Inbox::host(backend, messages)),
            Some(shipment) => Inbox::device(backend, messages, shipment, self.comm.rank()),
        }
    }

    /// Starts an exchange with device-to-device transfers.
    fn ship(
        &self,
        backend: &Arc<dyn Backend>,
        mover: Arc<dyn Mover>,
        packing: PackedParcels,
        expected: &[Vec<ParcelPiece>],
    ) -> Result<Pending> {
        let (own, size) = (self.comm.rank(), self.comm.size());
        let mut totals = [0; 2];
        let none = Vec::new();
        let coming = |rank: usize| if rank == own { &none } else { &expected[rank] };
        let incoming: Vec<_> = (0..size).map(|rank| begin(&mut totals, coming(rank))).collect();
        let into = buffers(&**backend, totals)?.into_iter().enumerate();
        let into = into.map(|(i, buffer)| {
            let ranges = incoming.iter().map(|ranges| ranges[i].clone()).collect();
            Section { buffer, ranges }
        });
        let into = into.collect();
        let message = |rank: usize| {
            let mut message = announce([0, 1].map(|section| packing.range(rank, section).len()));
            let note = packing.route.slot(rank).map(|slot| &packing.slots[slot].note);
            message.extend(note.into_iter().flatten());
            message
        };
        let messages: Vec<Vec<u8>> = (0..size).map(message).collect();
        // What a rank sends to itself is read from where it was packed.
        let ranges = [0, 1].map(|s| (0..size).map(|rank| packing.range(rank, s)).collect::<Vec<_>>());
        let elements =
            |rank: usize| [0, 1].map(|s| ranges[s][rank].len() * FORMATS[s].size()).iter().sum::<usize>();
        self.count_sent((0..size).map(|rank| messages[rank].len() + elements(rank)));
        let out = packing.buffers.into_iter().zip(ranges);
        let out = out.map(|(buffer, ranges)| Section { buffer, ranges }).collect();
        let shipment = Shipment::new(mover.prepare(backend)?, out, into);
        let number = self.line().begin(&self.comm, Job::announced(messages, shipment));
        Ok(Pending { number, alone: None })
    }
}
