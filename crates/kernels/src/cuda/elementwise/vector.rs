//! Vectors: fill, conversion, dot products, gather and scatter of rows.

use crate::backend::{DOT_CHUNK, MemoryOps, VectorOps};
use crate::codes::NF4;
use crate::cuda::context::{Cuda, check};
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{self, CardMemory, element, index_buffer, kernel, letter, ptr};
use crate::cuda::optim::split_master::{self, Whole};
use crate::plain::Plain;
use crate::usage::{MemoryReport, Purpose};
use crate::{Buffer, DType, Result, narrow, shapes};
use cudarc::driver::sys;

/// Rows per partial sum; partial sums are added in order.
pub(crate) const CHUNK: usize = 128;

/// Number of rows of `width` in `len` elements.
pub(crate) fn row_count(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "{len} elements are not rows of {width}");
    len / width
}

impl MemoryOps for Cuda {
    fn memory(&self) -> (usize, usize) {
        self.arena.usage()
    }
    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        self.arena.set_purpose(purpose)
    }
    fn memory_report(&self) -> Option<MemoryReport> {
        Some(self.arena.report())
    }
    fn set_memory_limit(&self, bytes: Option<usize>) {
        self.arena.set_limit(bytes);
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.arena.buffer(dtype, len)
    }
    fn alloc_host(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.arena.host_buffer(dtype, len)
    }
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()> {
        shapes::fill(self, dst)?;
        self.bind()?;
        let (at, n) = (ptr(dst), dst.len());
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the buffer has `n` elements of that size.
        let start = || unsafe {
            check(
                match dst.dtype() {
                    DType::U8 => sys::cuMemsetD8Async(at, value as u8, n, self.stream),
                    DType::Bf16 => sys::cuMemsetD16Async(at, narrow(value), n, self.stream),
                    _ => sys::cuMemsetD32Async(at, value.to_bits(), n, self.stream),
                },
                || format!("setting {n} elements"),
            )
        };
        self.profile.time(self.stream, || "fill".into(), start)
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        shapes::write(self, dst, at, src.len())?;
        assert!(at + src.len() <= dst.len());
        if memory::split_parts(dst, at).is_some() {
            return split_master::write(self, dst, at, src);
        }
        match dst.dtype() {
            DType::F32 => return self.put(dst, at, src),
            DType::U8 => {
                let codes: Vec<u8> = src.iter().map(|&x| x as u8).collect();
                return self.put(dst, at, &codes);
            }
            _ => {}
        }
        let room = self.uploaded(src)?;
        convert(self, (room.ptr(), DType::F32), (element(dst, at), dst.dtype()), src.len())
    }
    fn write_bf16(&self, dst: &mut Buffer, at: usize, src: &[u8]) -> Result<()> {
        shapes::write_bf16(self, dst, at, src.len())?;
        assert!(at + src.len() / 2 <= dst.len());
        if memory::split_parts(dst, at).is_some() {
            return split_master::write_bf16(self, dst, at, src);
        }
        match dst.dtype() {
            DType::Bf16 if memory::on_host(dst, at, src.len() / 2).is_some() => {
                let numbers = src.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
                return self.put(dst, at, &numbers.collect::<Vec<u16>>());
            }
            DType::Bf16 => return self.upload(element(dst, at), src),
            _ => {}
        }
        let room = self.uploaded(src)?;
        convert(self, (room.ptr(), DType::Bf16), (element(dst, at), dst.dtype()), src.len() / 2)
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        shapes::read(self, src, at, dst.len())?;
        assert!(at + dst.len() <= src.len());
        if src.dtype() == DType::F32 {
            if memory::on_host(src, at, dst.len()).is_some() {
                return self.get(src, at, dst);
            }
            return self.download(Whole::of(self, src, at, dst.len())?.ptr(), dst);
        }
        if src.dtype() == DType::U8 {
            let mut codes = vec![0u8; dst.len()];
            self.get(src, at, &mut codes)?;
            dst.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(code));
            return Ok(());
        }
        let mut bits = vec![0u16; dst.len()];
        self.get(src, at, &mut bits)?;
        dst.iter_mut().zip(bits).for_each(|(x, b)| *x = f32::from_bits(u32::from(b) << 16));
        Ok(())
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        Ok(index_buffer(self.uploaded(values)?, values))
    }
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        shapes::set_indices(self, dst, values.len())?;
        memory::set_indices(self, dst, values)
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        shapes::copy(self, (src, from), (dst, to), len)?;
        assert!(from + len <= src.len() && to + len <= dst.len());
        let source = Whole::of(self, src, from, len)?;
        if memory::split_parts(dst, to).is_none() {
            return convert(self, (source.ptr(), src.dtype()), (element(dst, to), dst.dtype()), len);
        }
        let room = if src.dtype() == DType::F32 { None } else { Some(self.arena.take(4 * len)?) };
        if let Some(room) = &room {
            convert(self, (source.ptr(), src.dtype()), (room.ptr(), DType::F32), len)?;
        }
        split_master::split(self, room.as_ref().map_or(source.ptr(), CardMemory::ptr), dst, to, len)
    }
    fn copy_block(
        &self,
        (src, from, pitch): (&Buffer, usize, usize),
        (dst, to, to_pitch): (&mut Buffer, usize, usize),
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        shapes::copy_block(self, (src, from, pitch), (dst, to, to_pitch), [rows, columns])?;
        if rows * columns == 0 {
            return Ok(());
        }
        let size = src.dtype().size();
        // A single row has no pitch: the driver refuses values beyond its limit.
        let bytes = |pitch: usize| size * if rows == 1 { columns } else { pitch };
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: element(src, from),
            srcArray: std::ptr::null_mut(),
            srcPitch: bytes(pitch),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: element(dst, to),
            dstArray: std::ptr::null_mut(),
            dstPitch: bytes(to_pitch),
            WidthInBytes: columns * size,
            Height: rows,
        };
        self.bind()?;
        // SAFETY: `shapes::copy_block` has checked that both buffers hold their last row, and they are not the same memory.
        check(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream) }, || {
            format!("copying {rows} rows of {columns} elements")
        })
    }
}

impl Cuda {
    /// Writes elements from index `at` on, in the buffer's type.
    fn put<T: Plain>(&self, dst: &Buffer, at: usize, values: &[T]) -> Result<()> {
        let count = size_of_val(values) / dst.dtype().size();
        assert!(at + count <= dst.len() && count * dst.dtype().size() == size_of_val(values));
        let Some(to) = memory::on_host(dst, at, count) else {
            return self.upload(element(dst, at), values);
        };
        self.synchronize()?; // launched kernels may read it
        // SAFETY: `on_host` gives room for the elements, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values)) };
        Ok(())
    }

    /// Reads elements from index `at` on, in the buffer's type.
    fn get<T: Plain>(&self, src: &Buffer, at: usize, values: &mut [T]) -> Result<()> {
        assert!(at + values.len() <= src.len() && size_of::<T>() == src.dtype().size());
        let Some(from) = memory::on_host(src, at, values.len()) else {
            return self.download(element(src, at), values);
        };
        self.synchronize()?; // launched kernels may write it
        // SAFETY: `on_host` returns all elements, and any bits are a value.
        unsafe { std::ptr::copy_nonoverlapping(from, values.as_mut_ptr().cast::<u8>(), size_of_val(values)) };
        Ok(())
    }
}

impl VectorOps for Cuda {
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        shapes::axpy(self, x, y)?;
        assert_eq!(x.len(), y.len());
        let n = x.len();
        let (from, to) = (Whole::of(self, x, 0, n)?, Whole::of(self, y, 0, n)?);
        let args = args![a, from.ptr(), to.ptr(), n];
        self.launch_flat("vector", &kernel("axpy", &[x, y]), n.div_ceil(4), &args)?;
        to.put_back(self, y, 0, n)
    }
    fn axpy_from(&self, a: f32, x: &Buffer, at: usize, y: &mut Buffer) -> Result<()> {
        shapes::axpy_from(self, x, at, y)?;
        assert!(at + y.len() <= x.len());
        let n = y.len();
        // The kernel loads four elements at a time, which requires alignment.
        if !at.is_multiple_of(4) {
            let mut part = self.alloc(x.dtype(), n)?;
            self.copy(x, at, &mut part, 0, n)?;
            return self.axpy(a, &part, y);
        }
        let (from, to) = (Whole::of(self, x, at, n)?, Whole::of(self, y, 0, n)?);
        let args = args![a, from.ptr(), to.ptr(), n];
        self.launch_flat("vector", &kernel("axpy", &[x, y]), n.div_ceil(4), &args)?;
        to.put_back(self, y, 0, n)
    }
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64> {
        shapes::dot(self, x, y)?;
        Ok(self.dots(&[(x, y)])?[0])
    }
    fn dots(&self, pairs: &[(&Buffer, &Buffer)]) -> Result<Vec<f64>> {
        pairs.iter().try_for_each(|(x, y)| shapes::dot(self, x, y))?;
        let mut starts = vec![0u64];
        for (x, y) in pairs {
            assert_eq!(x.len(), y.len());
            starts.push(starts[starts.len() - 1] + x.len().div_ceil(DOT_CHUNK) as u64);
        }
        let chunks = starts[pairs.len()] as usize;
        let (sums, totals) = (self.arena.take(chunks * 8)?, self.arena.take(8 * pairs.len())?);
        let plain = |b: &Buffer| b.dtype() == DType::F32;
        if pairs.iter().all(|(x, y)| plain(x) && plain(y)) {
            let row = |((x, y), first): (&(&Buffer, &Buffer), &u64)| [ptr(x), ptr(y), x.len() as u64, *first];
            let table = self.uploaded(&pairs.iter().zip(&starts).flat_map(row).collect::<Vec<u64>>())?;
            let args = args![&table, pairs.len() as u32, &sums];
            self.launch("vector", "dots", Grid::new(chunks, 256), &args)?;
        } else {
            for ((x, y), first) in pairs.iter().zip(&starts) {
                sum_chunks(self, x, y, sums.ptr() + 8 * first)?;
            }
        }
        let starts = self.uploaded(&starts)?;
        self.launch("vector", "add_up", Grid::new(pairs.len(), 1024), &args![&sums, &starts, &totals])?;
        let mut results = vec![0f64; pairs.len()];
        self.download(totals.ptr(), &mut results)?;
        Ok(results)
    }
    fn chunk_dots(&self, x: &Buffer, y: &Buffer) -> Result<Vec<f64>> {
        shapes::dot(self, x, y)?;
        assert_eq!(x.len(), y.len());
        let mut results = vec![0f64; x.len().div_ceil(DOT_CHUNK)];
        if !results.is_empty() {
            let sums = self.arena.take(8 * results.len())?;
            sum_chunks(self, x, y, sums.ptr())?;
            self.download(sums.ptr(), &mut results)?;
        }
        Ok(results)
    }
    fn add_chunks(&self, sums: &[f64]) -> Result<f64> {
        let mut total = [0f64];
        if !sums.is_empty() {
            let (given, starts) = (self.uploaded(sums)?, self.uploaded(&[0, sums.len() as u64])?);
            let room = self.arena.take(8)?;
            self.launch("vector", "add_up", Grid::new(1, 1024), &args![&given, &starts, &room])?;
            self.download(room.ptr(), &mut total)?;
        }
        Ok(total[0])
    }
    fn decode_nf4(&self, codes: &Buffer, absmax: &Buffer, block: usize, out: &mut Buffer) -> Result<()> {
        shapes::decode_nf4(self, codes, absmax, block, out)?;
        let (n, table) = (out.len(), self.uploaded(&NF4.values)?);
        let args = args![ptr(codes), ptr(absmax), &table, ptr(out), n, block as u32];
        self.launch_flat("vector", "decode_nf4", n.div_ceil(8), &args)
    }
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>> {
        shapes::first_non_finite(self, x)?;
        let found = self.uploaded(&[u64::MAX])?;
        let blocks = x.len().div_ceil(256).min(16 * self.card.processors as usize);
        let grid = Grid::new(blocks, 256);
        let whole = Whole::of(self, x, 0, x.len())?;
        self.launch("vector", &kernel("non_finite", &[x]), grid, &args![whole.ptr(), x.len(), &found])?;
        let mut first = [0u64];
        self.download(found.ptr(), &mut first)?;
        Ok(Some(first[0] as usize).filter(|_| first[0] != u64::MAX))
    }
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        shapes::gather_rows(self, src, rows, width, dst)?;
        gather(self, src, ptr(rows), rows.len(), width, dst)
    }
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()> {
        let from = shapes::scatter_rows(self, src, rows, width, dst)?;
        let rows = self.uploaded(&from)?;
        gather(self, src, rows.ptr(), from.len(), width, dst)
    }
}

/// Chunk sums of the dot product of two vectors, to a device address.
fn sum_chunks(cuda: &Cuda, x: &Buffer, y: &Buffer, sums: u64) -> Result<()> {
    let grid = Grid::new(x.len().div_ceil(DOT_CHUNK), 256);
    cuda.launch("vector", &kernel("dot", &[x, y]), grid, &args![x, y, x.len(), sums])
}

/// Copies `n` elements between addresses, converting if the types differ.
pub(crate) fn convert(cuda: &Cuda, from: (u64, DType), to: (u64, DType), n: usize) -> Result<()> {
    let name = format!("convert_{}{}", letter(from.1), letter(to.1));
    cuda.launch("vector", &name, Grid::new(n.div_ceil(8 * 256), 256), &args![from.0, to.0, n])
}

fn gather(cuda: &Cuda, src: &Buffer, rows: u64, count: usize, width: usize, dst: &mut Buffer) -> Result<()> {
    let grid = Grid::new(count, 128);
    cuda.launch("vector", &kernel("gather", &[src, dst]), grid, &args![src, rows, width, &*dst])
}

/// Writes to `to`, or adds, the column sums of `rows` rows at `x`, by a kernel of `vector.cu`.
pub(crate) fn sum_columns(
    cuda: &Cuda,
    kernel: &str,
    x: u64,
    [rows, width]: [usize; 2],
    to: (u64, bool),
) -> Result<()> {
    let chunks = rows.div_ceil(CHUNK);
    let sums = cuda.arena.take(chunks * width * 4)?;
    let columns = if width.is_multiple_of(4) { 4 * 64 } else { 64 };
    let grid = Grid::plane(width.div_ceil(columns), chunks, 64);
    let args = args![x, rows as u32, width as u32, CHUNK as u32, &sums];
    cuda.launch("vector", kernel, grid, &args)?;
    add_chunks(cuda, Chunks { at: sums.ptr(), stride: width, count: chunks, width }, to)
}

/// Partial sums: `count` of `width` elements, `stride` elements apart.
pub(crate) struct Chunks {
    pub at: u64,
    pub stride: usize,
    pub count: usize,
    pub width: usize,
}

/// Adds all partial sums in order; writes the total to `to`, or adds it once.
pub(crate) fn add_chunks(cuda: &Cuda, sums: Chunks, (to, add): (u64, bool)) -> Result<()> {
    let Chunks { at, stride, count, width } = sums;
    let args = args![at, stride as u32, count as u32, width as u32, to, add];
    if count > 16 {
        return cuda.launch("vector", "add_many_chunks", Grid::new(width.div_ceil(32), 256).early(), &args);
    }
    cuda.launch("vector", "add_chunks", Grid::new(width.div_ceil(256), 256).early(), &args)
}
