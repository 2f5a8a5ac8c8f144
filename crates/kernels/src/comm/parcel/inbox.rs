//! Received parcels.

use super::{AT_ONCE, Block, ParcelPiece};
use crate::backend::Backend;
use crate::buffer::{Buffer, DType};
use crate::comm::device::{ANNOUNCEMENT, Shipment};
use crate::comm::recycle;
use crate::error::{Error, Result};
use std::sync::Arc;

/// Received parcels. Each piece is taken once, those of a rank in the order in which it pushed them.
pub struct Inbox {
    backend: Arc<dyn Backend>,
    /// Messages by rank, in host memory: whole parcels, or only notes.
    messages: Vec<Vec<u8>>,
    /// Bytes consumed of each.
    taken: Vec<usize>,
    /// Numbers received device to device.
    shipped: Option<Shipped>,
    numbers: Vec<f32>,
}

struct Shipped {
    shipment: Shipment,
    own: usize,
    /// Elements taken of each rank's numbers, by section.
    taken: Vec<[usize; 2]>,
}

impl Shipped {
    /// Location of a rank's next piece.
    fn next(&mut self, from: usize, piece: ParcelPiece) -> Result<(&Buffer, usize)> {
        let s = piece.section();
        let sections = if from == self.own { &self.shipment.out } else { &self.shipment.into };
        let (section, taken) = (&sections[s], &mut self.taken[from][s]);
        let at = section.ranges[from].start + *taken;
        *taken += piece.padded();
        if at + piece.padded() > section.ranges[from].end {
            return Err(unequal_shapes());
        }
        Ok((&section.buffer, at))
    }

    fn is_taken(&self, from: usize) -> bool {
        let sections = if from == self.own { &self.shipment.out } else { &self.shipment.into };
        sections.iter().zip(self.taken[from]).all(|(section, taken)| section.ranges[from].len() == taken)
    }
}

/// The error if ranks disagree on shapes.
fn unequal_shapes() -> Error {
    Error::rank("another rank's model has another shape").fix("one binary and one recipe on all ranks")
}

impl Inbox {
    pub(super) fn host(backend: Arc<dyn Backend>, messages: Vec<Vec<u8>>) -> Self {
        let taken = vec![0; messages.len()];
        Inbox { backend, messages, taken, shipped: None, numbers: Vec::new() }
    }

    pub(super) fn device(
        backend: Arc<dyn Backend>,
        messages: Vec<Vec<u8>>,
        mut shipment: Shipment,
        own: usize,
    ) -> Result<Self> {
        shipment.join()?;
        let shipped = Shipped { shipment, own, taken: vec![[0; 2]; messages.len()] };
        let taken = vec![ANNOUNCEMENT; messages.len()];
        Ok(Inbox { backend, messages, taken, shipped: Some(shipped), numbers: Vec::new() })
    }

    /// The note of a rank's parcel, of known length. Taken before the pieces.
    pub fn note(&mut self, from: usize, len: usize) -> Result<Vec<u8>> {
        self.bytes(from, len).map(<[u8]>::to_vec)
    }

    fn bytes(&mut self, from: usize, len: usize) -> Result<&[u8]> {
        let at = self.taken[from];
        self.taken[from] += len;
        self.messages[from].get(at..at + len).ok_or_else(unequal_shapes)
    }

    /// Writes a rank's next piece to a buffer, from element `at` on.
    pub fn write(&mut self, from: usize, piece: ParcelPiece, to: &mut Buffer, at: usize) -> Result<()> {
        if let Some(shipped) = &mut self.shipped {
            let (buffer, start) = shipped.next(from, piece)?;
            return self.backend.copy(buffer, start, to, at, piece.len);
        }
        for start in (0..piece.len).step_by(AT_ONCE) {
            self.next_numbers(from, ParcelPiece { len: AT_ONCE.min(piece.len - start), ..piece })?;
            self.backend.write(to, at + start, &self.numbers)?;
        }
        Ok(())
    }

    /// Writes a rank's next piece to a block of a buffer.
    pub fn write_block(&mut self, from: usize, to: &mut Buffer, block: &Block) -> Result<()> {
        let piece = ParcelPiece { len: block.len(), format: to.dtype() };
        if let Some(at) = block.in_a_row() {
            return self.write(from, piece, to, at);
        }
        if let Some(shipped) = &mut self.shipped {
            let (buffer, start) = shipped.next(from, piece)?;
            return block.unpack(&*self.backend, (buffer, start), to);
        }
        for some in block.in_parts(AT_ONCE) {
            self.next_numbers(from, ParcelPiece { len: some.len(), ..piece })?;
            let mut packed = self.backend.alloc(piece.format, some.len())?;
            self.backend.write(&mut packed, 0, &self.numbers)?;
            some.unpack(&*self.backend, (&packed, 0), to)?;
        }
        Ok(())
    }

    /// `total += piece`, for the next piece of a rank, in f32.
    pub fn add(&mut self, from: usize, total: &mut Buffer) -> Result<()> {
        let piece = ParcelPiece::f32s(total.len());
        if let Some(shipped) = &mut self.shipped {
            let (buffer, start) = shipped.next(from, piece)?;
            return self.backend.axpy_from(1.0, buffer, start, total);
        }
        self.next_numbers(from, piece)?;
        let mut buffer = self.backend.alloc(DType::F32, piece.len)?;
        self.backend.write(&mut buffer, 0, &self.numbers)?;
        self.backend.axpy(1.0, &buffer, total)
    }

    /// Reads a rank's next piece to the host.
    pub fn read(&mut self, from: usize, piece: ParcelPiece, to: &mut [f32]) -> Result<()> {
        if let Some(shipped) = &mut self.shipped {
            let (buffer, start) = shipped.next(from, piece)?;
            return self.backend.read(buffer, start, to);
        }
        read(self.bytes(from, piece.bytes())?, piece.format, to);
        Ok(())
    }

    fn next_numbers(&mut self, from: usize, piece: ParcelPiece) -> Result<()> {
        let mut numbers = std::mem::take(&mut self.numbers);
        numbers.resize(piece.len, 0.0);
        read(self.bytes(from, piece.bytes())?, piece.format, &mut numbers);
        self.numbers = numbers;
        Ok(())
    }

    /// Checks that nothing is left of a rank's parcel.
    pub fn end(&self, from: usize) -> Result<()> {
        let read = self.taken[from] == self.messages[from].len();
        let taken = self.shipped.as_ref().is_none_or(|shipped| shipped.is_taken(from));
        if read && taken { Ok(()) } else { Err(unequal_shapes()) }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        recycle(std::mem::take(&mut self.messages));
    }
}

/// Deserialises numbers.
fn read(bytes: &[u8], format: DType, values: &mut [f32]) {
    match format {
        DType::Bf16 => {
            let wide = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            values.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(x, b)| *x = wide(b));
        }
        _ => values.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
    }
}
