//! Memory: allocation, copies between host and device, and vectors.

use crate::operands::{Heads, VOCAB_TILE};
use crate::usage::{MemoryReport, MemoryUsage, Purpose};
use crate::{Buffer, DType, Result, Weight, composed, shapes};

/// What operand checks need to know of a device: which memory it owns, and its cache and head layouts.
pub trait DeviceInfo {
    /// The device itself.
    fn as_info(&self) -> &dyn DeviceInfo;
    /// Whether a buffer is memory of this device, at least as long as it claims.
    fn holds(&self, buffer: &Buffer) -> bool;
    /// The same for a weight; with `backward`, whether it was allocated for `linear_dx`, too.
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool;
    /// The elements of an index buffer of this device.
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32];
    /// Tokens per KV-cache block.
    fn block_tokens(&self) -> usize;
    /// Elements of a KV-cache block of one layer, keys and values together.
    fn block_len(&self, heads: Heads) -> usize;
    /// Vocabulary entries per tile of the head. Tile statistics are combined in order, so splitting the head at multiples of this
    /// changes no bit.
    fn vocab_tile(&self) -> usize {
        VOCAB_TILE
    }
}

/// Allocation, and copies between host and device.
pub trait MemoryOps: DeviceInfo {
    /// Bytes allocated now, and at the peak.
    fn memory(&self) -> (usize, usize);
    /// Labels later allocations; returns the previous label. See [`Purpose::on`].
    fn set_purpose(&self, _purpose: Purpose) -> Purpose {
        Purpose::default()
    }
    /// Memory use; `None` if the device does not track it.
    fn memory_report(&self) -> Option<MemoryReport> {
        None
    }
    /// Bytes of buffers by purpose, now and at the peak; `None` if the device does not count them.
    fn books(&self) -> Option<MemoryUsage> {
        self.memory_report().map(|report| report.books)
    }
    /// Returns cached free memory to the system, between phases with different allocation sizes. No-op where nothing is cached or
    /// reallocation is expensive.
    fn trim(&self) {}
    /// Limits the device's total memory, including what it holds besides buffers; `None` lifts the limit.
    fn set_memory_limit(&self, bytes: Option<usize>);
    /// Allocates a buffer with unspecified contents.
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer>;
    /// [`MemoryOps::alloc`] in host memory that operations access over the bus, for data used once per step. The same as
    /// [`MemoryOps::alloc`] on a device that computes in host memory.
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.alloc(dtype, len)
    }
    /// Sets every element.
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()> {
        shapes::fill(self.as_info(), dst)?;
        self.write(dst, 0, &vec![value; dst.len()])
    }
    /// Writes to `dst[at..]`, converted to its type; 8-bit codes are given as whole numbers.
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()>;
    /// Writes to `dst[at..]` from little-endian bf16 bytes, converted to its type.
    fn write_bf16(&self, dst: &mut Buffer, at: usize, src: &[u8]) -> Result<()> {
        shapes::write_bf16(self.as_info(), dst, at, src.len())?;
        let pairs = src.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        self.write(dst, at, &pairs.map(|b| f32::from_bits(u32::from(b) << 16)).collect::<Vec<_>>())
    }
    /// Reads from `src[at..]`, converted to f32.
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()>;
    /// Uploads ids, positions or row indices.
    fn indices(&self, values: &[u32]) -> Result<Buffer>;
    /// Overwrites an index buffer with equally many values, at the same address.
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        shapes::set_indices(self.as_info(), dst, values.len())?;
        *dst = self.indices(values)?;
        Ok(())
    }
    /// `dst[to..to + len] = src[from..from + len]`, converted if the types differ.
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()>;
    /// Strided copy of rows with `columns` elements. Each side is given as (buffer, offset of the first row, row pitch); both
    /// have the same type.
    fn copy_block(
        &self,
        (src, from, pitch): (&Buffer, usize, usize),
        (dst, to, to_pitch): (&mut Buffer, usize, usize),
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        shapes::copy_block(self.as_info(), (src, from, pitch), (dst, to, to_pitch), [rows, columns])?;
        (0..rows).try_for_each(|r| self.copy(src, from + r * pitch, dst, to + r * to_pitch, columns))
    }
}

/// Elements per partial sum of a dot product.
pub const DOT_CHUNK: usize = 4096;

/// Element-wise sums, dot products, gather and scatter of rows.
pub trait VectorOps: MemoryOps {
    /// `y += a * x`
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// `y += a * x[at..at + y.len()]`
    fn axpy_from(&self, a: f32, x: &Buffer, at: usize, y: &mut Buffer) -> Result<()> {
        shapes::axpy_from(self.as_info(), x, at, y)?;
        let mut part = self.alloc(x.dtype(), y.len())?;
        self.copy(x, at, &mut part, 0, y.len())?;
        self.axpy(a, &part, y)
    }
    /// Dot product in f64: one sum per chunk of [`DOT_CHUNK`] elements, then the sum of these.
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64> {
        self.add_chunks(&self.chunk_dots(x, y)?)
    }
    /// The chunk sums of [`VectorOps::dot`], for sharded vectors.
    fn chunk_dots(&self, x: &Buffer, y: &Buffer) -> Result<Vec<f64>> {
        shapes::dot(self.as_info(), x, y)?;
        composed::chunk_dots(self, x, y)
    }
    /// Adds chunk sums in the order of [`VectorOps::dot`].
    fn add_chunks(&self, sums: &[f64]) -> Result<f64> {
        Ok(sums.iter().sum())
    }
    /// [`VectorOps::dot`] of several pairs, for devices on which one readback costs as much as many.
    fn dots(&self, pairs: &[(&Buffer, &Buffer)]) -> Result<Vec<f64>> {
        pairs.iter().map(|(x, y)| self.dot(x, y)).collect()
    }
    /// Dequantises NF4, two codes per byte: `out[i] = NF4[code i] * absmax[i / block]` ([`codes`](crate::codes)).
    fn decode_nf4(&self, codes: &Buffer, absmax: &Buffer, block: usize, out: &mut Buffer) -> Result<()> {
        shapes::decode_nf4(self.as_info(), codes, absmax, block, out)?;
        composed::decode_nf4(self, codes, absmax, block, out)
    }
    /// Index of the first NaN or infinity.
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        shapes::first_non_finite(self.as_info(), x)?;
        let values = composed::download(self, x)?;
        Ok(values.iter().position(|x| !x.is_finite()))
    }
    /// `dst[i] = src[rows[i]]`, by rows.
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::gather_rows(self.as_info(), src, rows, width, dst)?;
        composed::gather_rows(self, src, rows, width, dst)
    }
    /// `dst[rows[i]] = src[i]`, by rows; other rows become zero. `rows` are distinct.
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::scatter_rows(self.as_info(), src, rows, width, dst)?;
        composed::scatter_rows(self, src, rows, width, dst)
    }
}
