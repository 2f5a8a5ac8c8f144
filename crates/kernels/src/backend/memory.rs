//! Memory: allocation, copies between host and device, and plain vectors.

use crate::buffer::{Buffer, DType, Weight};
use crate::composed;
use crate::error::Result;
use crate::operands::{Heads, VOCAB_TILE};
use crate::shapes;
use crate::usage::{Books, MemoryReport, Purpose};

/// What the operand checks ask a device: which memory is its own, and how a cache block is laid out.
pub trait Home {
    /// The device itself.
    fn as_home(&self) -> &dyn Home;
    /// Whether a buffer is memory of this device, with room for as many elements as it says.
    fn holds(&self, buffer: &Buffer) -> bool;
    /// The same of a weight; with `backward`, whether it was made for `linear_dx` too.
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool;
    /// The elements of an index buffer of this device.
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32];
    /// Tokens of a KV-cache block.
    fn block_tokens(&self) -> usize;
    /// Elements of a KV-cache block of one layer, keys and values together.
    fn block_len(&self, heads: Heads) -> usize;
    /// Tokens of the vocabulary that the head processes at a time. Their numbers are folded in order, so a head may be split at
    /// multiples of it without a change in any bit.
    fn vocab_tile(&self) -> usize {
        VOCAB_TILE
    }
}

/// Allocation, and copies between host and device.
pub trait MemoryOps: Home {
    /// Bytes allocated now, and the most there have ever been.
    fn memory(&self) -> (usize, usize);
    /// Labels later allocations; returns the previous label. See [`Purpose::on`].
    fn set_purpose(&self, _purpose: Purpose) -> Purpose {
        Purpose::default()
    }
    /// Where its memory went; `None` where the device keeps no books.
    fn memory_report(&self) -> Option<MemoryReport> {
        None
    }
    /// Bytes of buffers by purpose, now and when they were most; `None` where the device does not count them.
    fn books(&self) -> Option<Books> {
        self.memory_report().map(|report| report.books)
    }
    /// Gives memory that was freed and is kept for reuse back to the system, between phases of work that need different sizes.
    /// Nothing where the device keeps none or where asking for it anew is dear.
    fn trim(&self) {}
    /// From now on the device's memory is taken to be so large, with what it holds beside buffers; `None` lifts the limit.
    fn set_memory_limit(&self, bytes: Option<usize>);
    /// Contents are unspecified.
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer>;
    /// As [`MemoryOps::alloc`], in the machine's memory, where operations read and write it through the bus: for what is needed
    /// once a step. The same as [`MemoryOps::alloc`] on a device that computes in the machine's memory.
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.alloc(dtype, len)
    }
    /// Sets every element.
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()> {
        shapes::fill(self.as_home(), dst)?;
        self.write(dst, 0, &vec![value; dst.len()])
    }
    /// To `dst[at..]`, converted to its type; codes are whole numbers.
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()>;
    /// To `dst[at..]`, from numbers of bf16 as files hold them (two bytes each, the lower one first), converted to its type.
    fn write_bf16(&self, dst: &mut Buffer, at: usize, src: &[u8]) -> Result<()> {
        shapes::write_bf16(self.as_home(), dst, at, src.len())?;
        let pairs = src.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
        self.write(dst, at, &pairs.map(|b| f32::from_bits(u32::from(b) << 16)).collect::<Vec<_>>())
    }
    /// From `src[at..]`, converted to f32.
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()>;
    /// A buffer of ids, positions or row numbers.
    fn indices(&self, values: &[u32]) -> Result<Buffer>;
    /// Other ids in the place of those of an index buffer; as many. The buffer stays where it is.
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        shapes::set_indices(self.as_home(), dst, values.len())?;
        *dst = self.indices(values)?;
        Ok(())
    }
    /// `dst[to..to + len] = src[from..from + len]`, converted where the types differ.
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()>;
    /// Copies rows of `columns` elements. A side is its buffer, where its first row begins and how many elements after it the next one
    /// does; both have one storage type.
    fn copy_block(
        &self,
        (src, from, pitch): (&Buffer, usize, usize),
        (dst, to, to_pitch): (&mut Buffer, usize, usize),
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        shapes::copy_block(self.as_home(), (src, from, pitch), (dst, to, to_pitch), [rows, columns])?;
        (0..rows).try_for_each(|r| self.copy(src, from + r * pitch, dst, to + r * to_pitch, columns))
    }
}

/// Elements whose products a dot product sums first.
pub const DOT_CHUNK: usize = 4096;

/// Element-wise sums, dot products, and rows picked by index.
pub trait VectorOps: MemoryOps {
    /// `y += a * x`
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// `y += a * x[at..]`, of as many elements as `y` has.
    fn axpy_from(&self, a: f32, x: &Buffer, at: usize, y: &mut Buffer) -> Result<()> {
        shapes::axpy_from(self.as_home(), x, at, y)?;
        let mut part = self.alloc(x.dtype(), y.len())?;
        self.copy(x, at, &mut part, 0, y.len())?;
        self.axpy(a, &part, y)
    }
    /// Sum of products, in f64: those of each chunk of [`DOT_CHUNK`] elements, then these sums.
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64> {
        self.add_chunks(&self.chunk_dots(x, y)?)
    }
    /// The sums of the chunks that [`VectorOps::dot`] adds up, for vectors of which this process has a part.
    fn chunk_dots(&self, x: &Buffer, y: &Buffer) -> Result<Vec<f64>> {
        shapes::dot(self.as_home(), x, y)?;
        composed::chunk_dots(self, x, y)
    }
    /// Adds up the sums of chunks, in the order in which [`VectorOps::dot`] does.
    fn add_chunks(&self, sums: &[f64]) -> Result<f64> {
        Ok(sums.iter().sum())
    }
    /// [`VectorOps::dot`] of several pairs, for devices where one answer costs as much as many.
    fn dots(&self, pairs: &[(&Buffer, &Buffer)]) -> Result<Vec<f64>> {
        pairs.iter().map(|(x, y)| self.dot(x, y)).collect()
    }
    /// The numbers behind NF4 codes, two a byte: `out[i] = NF4[code i] * absmax[i / block]` ([`codes`](crate::codes)).
    fn decode_nf4(&self, codes: &Buffer, absmax: &Buffer, block: usize, out: &mut Buffer) -> Result<()> {
        shapes::decode_nf4(self.as_home(), codes, absmax, block, out)?;
        composed::decode_nf4(self, codes, absmax, block, out)
    }
    /// Index of the first NaN or infinity.
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        shapes::first_non_finite(self.as_home(), x)?;
        let values = composed::download(self, x)?;
        Ok(values.iter().position(|x| !x.is_finite()))
    }
    /// Row `i` of `dst` is row `rows[i]` of `src`.
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::gather_rows(self.as_home(), src, rows, width, dst)?;
        composed::gather_rows(self, src, rows, width, dst)
    }
    /// Row `rows[i]` of `dst` is row `i` of `src`; the other rows become zero. `rows` are distinct.
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::scatter_rows(self.as_home(), src, rows, width, dst)?;
        composed::scatter_rows(self, src, rows, width, dst)
    }
}
