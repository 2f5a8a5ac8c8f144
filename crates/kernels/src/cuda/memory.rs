//! A caching allocator for device memory.
//!
//! Allocating from the driver costs as much as a small kernel, and freeing synchronises, so freed blocks are cached. All work
//! is on one stream: a freed block may be reused at once, because its readers were launched before its next writers. (Memory
//! used by a transfer to another GPU is freed after the compute stream waits for it: `exchange`.) Sizes of temporary buffers
//! are rounded up to classes, and a slightly larger block serves if none fits exactly. Weights, gradients and moments are
//! permanent and are not rounded.

use super::context::check;
use super::handles::{CudaContext, Pinned};
use crate::usage::{MemoryReport, MemoryUsage, Purpose, size};
use crate::{Buffer, DType, Error, Result, lock};
use cudarc::driver::sys::{self, CUresult};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

const ALIGN: usize = 512;
/// Device bytes of context, kernels and libraries.
const CONTEXT: usize = super::FOOTPRINT.fixed as usize;
/// Bytes from which a block is large.
const LARGE: usize = 64 << 20;

/// The caching allocator.
#[derive(Clone)]
pub struct CardArena {
    state: Arc<Mutex<CardArenaState>>,
}

struct CardArenaState {
    context: Arc<CudaContext>,
    free: BTreeMap<usize, Vec<u64>>,
    unused: usize,
    books: MemoryUsage,
    held: usize,
    most_held: usize,
    /// Number of driver allocations.
    asked: u64,
    /// Limit of total device memory, if lower than the real one.
    limit: Option<usize>,
    /// Large sizes that were requested so far.
    seen_sizes: BTreeSet<usize>,
    /// While a graph is captured: blocks freed since, which stay with the graph.
    kept: Option<Vec<MemoryBlock>>,
}

/// A device memory block in use.
#[derive(Clone, Copy)]
struct MemoryBlock {
    at: u64,
    bytes: usize,
    purpose: Purpose,
}

/// Memory of one buffer; returned to its arena when dropped, or to the system if it is host memory.
pub struct CardMemory {
    block: MemoryBlock,
    arena: CardArena,
    /// Pinned host memory, which kernels access over the bus under the host's addresses.
    host: Option<Pinned>,
}

impl CardMemory {
    /// Its device address.
    pub fn ptr(&self) -> u64 {
        self.block.at
    }
    /// Whether it belongs to this arena and holds `len` elements of `size` bytes.
    pub(super) fn is_room(&self, arena: &CardArena, len: usize, size: usize) -> bool {
        let bytes = len.checked_mul(size);
        Arc::ptr_eq(&self.arena.state, &arena.state) && bytes.is_some_and(|bytes| bytes <= self.block.bytes)
    }
}

/// Contents of a buffer of this backend.
pub(super) struct Data {
    /// `None` if only upper halves are stored.
    memory: Option<CardMemory>,
    /// Host copy of indices, to check and sort them without waiting for the device.
    host: Option<Vec<u32>>,
    /// If `memory` has the lower halves of a split master (or nothing): the upper halves, which are a weight.
    upper: Option<Arc<CardMemory>>,
}

impl Data {
    /// A split master; without lower halves, a bf16 master.
    pub(super) fn split(lower: Option<CardMemory>, upper: Arc<CardMemory>) -> Self {
        Data { memory: lower, host: None, upper: Some(upper) }
    }
}

/// Block size for a request. Temporary buffers: the next of 32 size classes per power of two, so at most 1/32 is wasted.
fn rounded(bytes: usize, purpose: Purpose) -> usize {
    let step = if is_permanent(purpose) { ALIGN } else { (bytes.next_power_of_two() / 64).max(ALIGN) };
    bytes.next_multiple_of(step)
}

/// Whether memory of this purpose is permanent.
fn is_permanent(purpose: Purpose) -> bool {
    matches!(purpose, Purpose::Weights | Purpose::Gradients | Purpose::Optimizer)
}

/// Sizes of cached blocks that may serve a request.
fn serving(wanted: usize, purpose: Purpose) -> std::ops::RangeInclusive<usize> {
    wanted..=wanted + wanted / if is_permanent(purpose) { 64 } else { 4 }
}

impl CardArena {
    pub(super) fn new(context: Arc<CudaContext>) -> Self {
        let (free, seen_sizes, books) = (BTreeMap::new(), BTreeSet::new(), MemoryUsage::default());
        let state = CardArenaState {
            context,
            free,
            unused: 0,
            books,
            held: 0,
            most_held: 0,
            asked: 0,
            limit: None,
            seen_sizes,
            kept: None,
        };
        CardArena { state: Arc::new(Mutex::new(state)) }
    }

    fn state(&self) -> MutexGuard<'_, CardArenaState> {
        lock(&self.state)
    }

    /// Allocates at least `bytes` bytes with unspecified contents.
    pub fn take(&self, bytes: usize) -> Result<CardMemory> {
        if bytes > isize::MAX as usize / 2 {
            return Err(Error::resource("a buffer of that size cannot exist"));
        }
        let mut state = self.state();
        let wanted = rounded(bytes.max(1), state.books.purpose);
        let near = serving(wanted, state.books.purpose);
        if let Some(kept) = &mut state.kept {
            let fits = |b: &MemoryBlock| near.contains(&b.bytes);
            if let Some(i) = kept.iter().position(fits) {
                let block = kept.swap_remove(i);
                return Ok(CardMemory { block, arena: self.clone(), host: None });
            }
        }
        let near = state.free.range(near).find(|(_, blocks)| !blocks.is_empty());
        let bytes = near.map_or(wanted, |(&bytes, _)| bytes);
        let at = match state.free.get_mut(&bytes).and_then(Vec::pop) {
            Some(at) => {
                state.unused -= bytes;
                at
            }
            None => {
                // Limit cached memory, so that ever new batch sizes do not exhaust it. A new large size means new shapes:
                // blocks cached for earlier ones may never fit again.
                let most = state.books.at_peak.total().max(state.books.now.total() + bytes);
                let keep = if bytes >= LARGE && state.seen_sizes.insert(bytes) { 0 } else { most / 4 };
                state.release(keep);
                state.fresh(bytes)?
            }
        };
        let block = MemoryBlock { at, bytes, purpose: state.books.add(bytes) };
        drop(state);
        Ok(CardMemory { block, arena: self.clone(), host: None })
    }

    /// The same in host memory, which the device's accounting excludes.
    fn take_host(&self, bytes: usize) -> Result<CardMemory> {
        let context = self.state().context.clone();
        let host = Pinned::new(&context, bytes.max(1))?;
        let block = MemoryBlock { at: host.at(0, 0) as u64, bytes, purpose: Purpose::default() };
        Ok(CardMemory { block, arena: self.clone(), host: Some(host) })
    }

    /// Bytes in use now, and at the peak.
    pub fn usage(&self) -> (usize, usize) {
        let books = self.state().books;
        (books.now.total(), books.at_peak.total())
    }

    /// Limits total device memory, including the context.
    pub(super) fn set_limit(&self, bytes: Option<usize>) {
        self.state().limit = bytes;
    }

    /// Labels later allocations; returns the previous label.
    pub(super) fn set_purpose(&self, purpose: Purpose) -> Purpose {
        std::mem::replace(&mut self.state().books.purpose, purpose)
    }

    pub(super) fn report(&self) -> MemoryReport {
        let state = self.state();
        let (used, total) = state.card();
        let most = used + (state.most_held - state.held);
        MemoryReport { books: state.books, asked: state.asked, used, most, total }
    }

    /// A buffer with unspecified contents.
    pub fn buffer(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::resource("a buffer of that size cannot exist"))?;
        Ok(Buffer::new(
            dtype,
            len,
            Box::new(Data { memory: Some(self.take(bytes)?), host: None, upper: None }),
        ))
    }
}

impl CardArena {
    /// A buffer in host memory with unspecified contents.
    pub fn host_buffer(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::resource("a buffer of that size cannot exist"))?;
        let memory = Some(self.take_host(bytes)?);
        Ok(Buffer::new(dtype, len, Box::new(Data { memory, host: None, upper: None })))
    }

    /// Starts retaining freed blocks for the graph that is being captured.
    pub(super) fn retain_freed(&self) {
        self.state().kept = Some(Vec::new());
    }

    /// Stops that; returns the retained blocks for the graph.
    pub(super) fn take_retained(&self) -> RetainedBlocks {
        let blocks = self.state().kept.take().unwrap_or_default();
        RetainedBlocks { blocks, arena: self.clone() }
    }
}

/// Memory of a graph; returned to its arena when dropped.
pub(super) struct RetainedBlocks {
    blocks: Vec<MemoryBlock>,
    arena: CardArena,
}

impl RetainedBlocks {
    /// Whether it was captured on this arena's device.
    pub(super) fn is_of(&self, arena: &CardArena) -> bool {
        Arc::ptr_eq(&self.arena.state, &arena.state)
    }
}

impl Drop for RetainedBlocks {
    fn drop(&mut self) {
        for block in self.blocks.drain(..) {
            drop(CardMemory { block, arena: self.arena.clone(), host: None });
        }
    }
}

impl CardArenaState {
    fn fresh(&mut self, bytes: usize) -> Result<u64> {
        let mut at = 0;
        for attempt in 0..2 {
            self.context.bind()?;
            let done = match self.limit.is_some_and(|limit| self.held + bytes + CONTEXT > limit) {
                true => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
                // SAFETY: the context is current; the driver writes an address.
                false => unsafe { sys::cuMemAlloc_v2(&mut at, bytes) },
            };
            if done == CUresult::CUDA_ERROR_OUT_OF_MEMORY && attempt == 0 {
                self.release(0);
            } else if done == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(self.full(bytes));
            } else {
                check(done, || format!("taking {bytes} bytes of its memory"))?;
                break;
            }
        }
        self.held += bytes;
        self.most_held = self.most_held.max(self.held);
        self.asked += 1;
        Ok(at)
    }

    /// Device bytes in use, and in total.
    fn card(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        if self.context.bind().is_ok() {
            // SAFETY: live variables; the context is current.
            unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        }
        match self.limit.filter(|&limit| limit < total) {
            // Ignores other programs' memory, which would not be on a GPU of the limited size.
            Some(limit) => ((self.held + CONTEXT).min(limit), limit),
            None => (total.saturating_sub(free), total),
        }
    }

    /// The out-of-memory error: request, free memory, and which purposes could use less.
    fn full(&self, bytes: usize) -> Error {
        let (books, (used, total)) = (&self.books, self.card());
        let what = format!(
            "out of memory on the card: {} more were wanted for {}, beside {}; {} of {} are free",
            size(bytes),
            books.purpose.name(),
            books.now.words(),
            size(total.saturating_sub(used)),
            size(total)
        );
        // The failed request may be small compared with what could be made smaller.
        let large = [Purpose::Cache, Purpose::Activations].into_iter().max_by_key(|&p| books.now.of(p));
        let other = large.filter(|&p| p != books.purpose && books.now.of(p) > bytes);
        Error::resource(what).short_of([books.purpose].into_iter().chain(other))
    }

    /// Frees cached blocks, the largest first, until at most `keep` bytes remain.
    fn release(&mut self, keep: usize) {
        while self.unused > keep {
            let Some((bytes, mut blocks)) = self.free.pop_last() else { return };
            if let Some(at) = blocks.pop() {
                self.unused -= bytes;
                self.held -= bytes;
                if self.context.bind().is_ok() {
                    // SAFETY: every free block came from the driver and has no other owner; the driver waits for its users.
                    unsafe { sys::cuMemFree_v2(at) };
                }
            }
            if !blocks.is_empty() {
                self.free.insert(bytes, blocks);
            }
        }
    }
}

impl Drop for CardArenaState {
    fn drop(&mut self) {
        self.release(0);
    }
}

impl Drop for CardMemory {
    fn drop(&mut self) {
        let mut state = self.arena.state();
        if self.host.is_some() {
            if state.context.bind().is_ok() {
                // SAFETY: the context is current. Readers of the memory must end before it is freed.
                unsafe { sys::cuCtxSynchronize() };
            }
            return;
        }
        if let Some(kept) = &mut state.kept {
            kept.push(self.block);
            return;
        }
        let MemoryBlock { at, bytes, purpose } = self.block;
        state.books.remove(purpose, bytes);
        state.unused += bytes;
        state.free.entry(bytes).or_default().push(at);
    }
}

/// Whether a buffer belongs to this arena and its memory fits its length; for indices also whether the host has a copy.
pub(super) fn holds(arena: &CardArena, b: &Buffer) -> bool {
    let Some(Data { memory, host, upper }) = b.data().downcast_ref::<Data>() else { return false };
    let known = b.dtype() != DType::U32 || host.as_ref().is_some_and(|ids| ids.len() == b.len());
    let size = if upper.is_some() { 2 } else { b.dtype().size() };
    let fits = |m: &CardMemory| m.is_room(arena, b.len(), size);
    known && memory.iter().chain(upper.as_deref()).all(fits)
}

fn data(b: &Buffer) -> &Data {
    b.data().downcast_ref().expect("a buffer of the CUDA backend")
}

/// An index buffer with its host copy.
pub(super) fn index_buffer(memory: CardMemory, values: &[u32]) -> Buffer {
    Buffer::new(
        DType::U32,
        values.len(),
        Box::new(Data { memory: Some(memory), host: Some(values.to_vec()), upper: None }),
    )
}

/// Overwrites an index buffer with equally many values.
pub(super) fn set_indices(cuda: &super::Cuda, b: &mut Buffer, values: &[u32]) -> Result<()> {
    assert!(b.dtype() == DType::U32 && b.len() == values.len());
    cuda.upload(ptr(b), values)?;
    let data: &mut Data = b.data_mut().downcast_mut().expect("a buffer of the CUDA backend");
    data.host = Some(values.to_vec());
    Ok(())
}

/// Host address of `len` elements from `at` on, if the buffer is in host memory.
pub(super) fn on_host(b: &Buffer, at: usize, len: usize) -> Option<*mut u8> {
    let size = b.dtype().size();
    data(b).memory.as_ref()?.host.as_ref().map(|host| host.at(at * size, len * size))
}

pub fn ptr(b: &Buffer) -> u64 {
    let Data { memory, upper, .. } = data(b);
    let whole = memory.as_ref().filter(|_| upper.is_none());
    whole.expect("a split master where whole numbers are wanted").ptr()
}

/// Addresses of the lower and upper halves from element `at` on, if it is a split master; 0 if there are no lower halves.
pub(super) fn split_parts(b: &Buffer, at: usize) -> Option<[u64; 2]> {
    let Data { memory, upper, .. } = data(b);
    assert!(at <= b.len());
    let from = |m: &CardMemory| m.ptr() + 2 * at as u64;
    upper.as_ref().map(|upper| [memory.as_ref().map_or(0, from), from(upper)])
}

pub fn f32_ptr(b: &Buffer) -> u64 {
    assert_eq!(b.dtype(), DType::F32);
    ptr(b)
}

/// The address of an element.
pub fn element(b: &Buffer, at: usize) -> u64 {
    assert!(at <= b.len());
    ptr(b) + (at * b.dtype().size()) as u64
}

/// The elements of an index buffer, from its host copy.
pub fn u32s(b: &Buffer) -> &[u32] {
    assert_eq!(b.dtype(), DType::U32);
    data(b).host.as_deref().expect("indices are known to the host")
}

/// The letter of a storage type in kernel names: `f` for f32, `b` for bf16.
pub fn letter(dtype: DType) -> char {
    match dtype {
        DType::F32 => 'f',
        DType::Bf16 => 'b',
        DType::U32 | DType::U8 => panic!("a float buffer was expected, not indices"),
    }
}

/// The name of a kernel for buffers of these types: `axpy_fb`.
pub fn kernel(name: &str, buffers: &[&Buffer]) -> String {
    let letters: String = buffers.iter().map(|b| letter(b.dtype())).collect();
    format!("{name}_{letters}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lasting_allocations_are_exact_and_temporary_ones_round_up_by_a_32nd() {
        // Gate and up of a 7B model in bf16.
        let bytes = 2 * 37888 * 3584;
        assert_eq!(rounded(bytes, Purpose::Weights), bytes);
        assert_eq!(rounded(bytes + 1, Purpose::Gradients), bytes + ALIGN);
        assert_eq!(rounded(bytes, Purpose::Activations), 33 << 23);
        for bytes in (1..1 << 22).step_by(4099) {
            let class = rounded(bytes, Purpose::Cache);
            assert!(class - bytes < (class / 32).max(ALIGN) && rounded(class, Purpose::Cache) == class);
        }
        // A cached block of another size must not be consumed by a permanent buffer.
        assert!(!serving(bytes, Purpose::Optimizer).contains(&(33 << 23)));
        assert!(serving(bytes, Purpose::Activations).contains(&(33 << 23)));
    }
}
