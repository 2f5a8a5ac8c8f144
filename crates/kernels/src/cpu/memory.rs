//! A caching allocator for aligned memory.
//!
//! A training step allocates similar sizes repeatedly; returning them to the system would cost a page fault per 4 KiB each time.
//! Batches differ in length, so sizes are rounded up to classes, a slightly larger block serves if none fits exactly, and unused
//! memory beyond a quarter of the peak is returned.
//!
//! Large blocks, and packed weights as a group, use huge pages of 2 MiB where available: GEMMs read rows that are kilobytes
//! apart, and with 4 KiB pages TLB misses would dominate.

use crate::{Buffer, DType, Error, MemoryUsage, Purpose, Result, lock};
use memmap2::MmapMut;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

const ALIGN: usize = 64;
/// Unused memory that is always kept, in addition to a quarter of the peak.
const KEEP: usize = 32 << 20;
/// Vector kernels may read, never write, up to one vector past the end of a buffer.
const SLACK: usize = 64;
/// A huge page. Blocks of at least this size have a mapping of their own.
const HUGE: usize = 2 << 20;
/// Address space for a group of smaller packed weights; only written pages take memory.
const SLAB: usize = 8 * HUGE;

/// The caching allocator.
#[derive(Clone, Default)]
pub struct Arena {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    free: BTreeMap<usize, Vec<BlockOrigin>>,
    unused: usize,
    in_use: usize,
    peak: usize,
    /// Bytes by purpose.
    books: MemoryUsage,
    /// Maximum bytes in use + 1; 0 is no limit.
    limit: usize,
    /// Slab for the next small weight, and the bytes of it in use.
    slab: Option<(Arc<Pages>, usize)>,
}

/// Zeroed memory aligned to huge pages.
struct Pages {
    at: NonNull<u8>,
    _map: MmapMut,
}

// SAFETY: plain memory; access to each part is governed by the `Memory` that lies in it.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(bytes: usize) -> Option<Self> {
        let bytes = bytes.checked_add(SLACK)?;
        let mut map = MmapMut::map_anon(bytes.checked_add(HUGE)?).ok()?;
        let skip = map.as_ptr().align_offset(HUGE);
        // Whole huge pages only, so that a block's tail does not take 2 MiB. A hint: everything works without it.
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(memmap2::Advice::HugePage, skip, bytes / HUGE * HUGE);
        Some(Pages { at: NonNull::from(map.get_mut(skip)?), _map: map })
    }
}

/// Where a block came from.
enum BlockOrigin {
    /// The system's allocator.
    Heap(NonNull<u8>),
    /// Its own mapping.
    Own(Pages),
    /// Part of a slab, which lives as long as its last part.
    Part(NonNull<u8>, #[allow(dead_code)] Arc<Pages>),
}

impl BlockOrigin {
    fn at(&self) -> NonNull<u8> {
        match self {
            BlockOrigin::Heap(at) | BlockOrigin::Part(at, _) => *at,
            BlockOrigin::Own(pages) => pages.at,
        }
    }

    /// Allocates zeroed memory.
    fn new(bytes: usize) -> Option<Self> {
        if bytes >= HUGE {
            return Pages::new(bytes).map(BlockOrigin::Own);
        }
        // SAFETY: the layout has a non-zero size.
        NonNull::new(unsafe { alloc_zeroed(layout(bytes)?) }).map(BlockOrigin::Heap)
    }
}

// SAFETY: a block is plain memory with one owner.
unsafe impl Send for BlockOrigin {}

/// Memory of one buffer; returned to its arena when dropped.
pub struct Memory {
    at: NonNull<u8>,
    bytes: usize,
    block: Option<BlockOrigin>,
    purpose: Purpose,
    arena: Arena,
}

// SAFETY: plain memory; shared access is read-only (`&Memory`), exclusive access is `&mut Memory`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Rounds up to one of eight size classes per power of two: wastes at most an eighth.
fn class(bytes: usize) -> usize {
    let step = (bytes.next_power_of_two() / 16).max(ALIGN);
    bytes.next_multiple_of(step)
}

/// Refuses sizes whose classes would overflow.
fn within_reason(bytes: usize) -> Result<()> {
    if bytes > isize::MAX as usize / 2 {
        return Err(Error::resource("a buffer of that size cannot exist"));
    }
    Ok(())
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.checked_add(SLACK)?, ALIGN).ok()
}

impl Arena {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Allocates at least `bytes` bytes with unspecified contents.
    pub fn take(&self, bytes: usize) -> Result<Memory> {
        within_reason(bytes)?;
        let wanted = class(bytes.max(1));
        let mut state = self.state();
        let near = state.free.range(wanted..=wanted + wanted / 4).find(|(_, blocks)| !blocks.is_empty());
        let bytes = near.map_or(wanted, |(&bytes, _)| bytes);
        state.within_limit(bytes)?;
        let reused = state.free.get_mut(&bytes).and_then(Vec::pop);
        let block = match reused {
            Some(block) => {
                state.unused -= bytes;
                block
            }
            None => {
                let peak = state.peak.max(state.in_use + bytes);
                state.release(peak / 4 + KEEP);
                BlockOrigin::new(bytes).ok_or_else(|| state.full(bytes))?
            }
        };
        Ok(self.lend(state, block, bytes))
    }

    /// [`Arena::take`] for long-lived, frequently read memory: small blocks share huge pages. A slab is returned to the system
    /// with its last block; blocks are not reused.
    pub fn take_lasting(&self, bytes: usize) -> Result<Memory> {
        within_reason(bytes)?;
        let bytes = class(bytes.max(1));
        if bytes >= HUGE {
            return self.take(bytes);
        }
        let mut state = self.state();
        state.within_limit(bytes)?;
        let (slab, from) = match state.slab.take() {
            Some((slab, taken)) if taken + bytes <= SLAB => (slab, taken),
            _ => (Arc::new(Pages::new(SLAB).ok_or_else(|| state.full(SLAB))?), 0),
        };
        state.slab = Some((slab.clone(), from + bytes));
        // SAFETY: `from + bytes` lies in the slab, and this part is given to nothing else.
        let at = unsafe { slab.at.add(from) };
        Ok(self.lend(state, BlockOrigin::Part(at, slab), bytes))
    }

    fn lend(&self, mut state: MutexGuard<'_, State>, block: BlockOrigin, bytes: usize) -> Memory {
        state.in_use += bytes;
        state.peak = state.peak.max(state.in_use);
        let purpose = state.books.add(bytes);
        Memory { at: block.at(), bytes, block: Some(block), purpose, arena: self.clone() }
    }

    /// Sets the purpose of later allocations; returns the previous one.
    pub fn set_purpose(&self, purpose: Purpose) -> Purpose {
        std::mem::replace(&mut self.state().books.purpose, purpose)
    }

    /// Returns all unused blocks to the system.
    pub fn trim(&self) {
        self.state().release(0);
    }

    /// What is in use, by purpose.
    pub fn books(&self) -> MemoryUsage {
        self.state().books
    }

    /// Limits the bytes in use; `None` removes the limit.
    pub fn set_limit(&self, bytes: Option<usize>) {
        self.state().limit = bytes.map_or(0, |b| b.saturating_add(1));
    }

    /// Bytes in use now, and at the peak.
    pub fn usage(&self) -> (usize, usize) {
        let state = self.state();
        (state.in_use, state.peak)
    }

    /// A buffer with unspecified contents.
    pub fn buffer(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = len
            .checked_mul(dtype.size())
            .ok_or_else(|| Error::resource("a buffer of that size cannot exist"))?;
        Ok(Buffer::new(dtype, len, Box::new(self.take(bytes)?)))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut state = self.arena.state();
        state.in_use -= self.bytes;
        state.books.remove(self.purpose, self.bytes);
        match self.block.take() {
            Some(BlockOrigin::Part(..)) | None => {}
            Some(block) => {
                state.unused += self.bytes;
                state.free.entry(self.bytes).or_default().push(block);
            }
        }
    }
}

impl State {
    fn within_limit(&self, bytes: usize) -> Result<()> {
        if self.limit > 0 && self.in_use + bytes >= self.limit { Err(self.full(bytes)) } else { Ok(()) }
    }

    fn full(&self, bytes: usize) -> Error {
        Error::resource(format!(
            "out of memory: {:.1} MiB more were wanted beside {:.1} MiB in use",
            bytes as f64 / 1048576.0,
            self.in_use as f64 / 1048576.0
        ))
        .fix("a smaller model, fewer or shorter sequences at once, or bf16")
    }

    /// Returns unused blocks to the system, the largest first, until at most `keep` bytes are left.
    fn release(&mut self, keep: usize) {
        while self.unused > keep {
            let Some((bytes, mut blocks)) = self.free.pop_last() else { return };
            let block = blocks.pop();
            self.unused -= if block.is_some() { bytes } else { 0 };
            if let (Some(BlockOrigin::Heap(at)), Some(layout)) = (block, layout(bytes)) {
                // SAFETY: every free block of the heap was allocated with this layout and has no other owner.
                unsafe { dealloc(at.as_ptr(), layout) };
            }
            if !blocks.is_empty() {
                self.free.insert(bytes, blocks);
            }
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.release(0);
    }
}

pub(crate) use crate::plain::Plain;

impl Memory {
    fn check<T>(&self, len: usize) {
        let bytes = len.checked_mul(size_of::<T>());
        assert!(bytes.is_some_and(|bytes| bytes <= self.bytes), "more elements than there is memory for");
    }
    /// Whether it holds `len` elements of `size` bytes.
    pub(super) fn has_room(&self, len: usize, size: usize) -> bool {
        len.checked_mul(size).is_some_and(|bytes| bytes <= self.bytes)
    }
    pub fn slice<T: Plain>(&self, len: usize) -> &[T] {
        self.check::<T>(len);
        // SAFETY: initialised (allocated zeroed), aligned, long enough, and T is plain.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().cast(), len) }
    }
    pub fn slice_mut<T: Plain>(&mut self, len: usize) -> &mut [T] {
        self.check::<T>(len);
        // SAFETY: as above, and access is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr().cast(), len) }
    }
}

/// A buffer's elements, by storage type.
#[derive(Clone, Copy)]
pub enum Slice<'a> {
    F32(&'a [f32]),
    /// bf16 bits
    Bf16(&'a [u16]),
}

/// A buffer's elements, by storage type.
pub enum SliceMut<'a> {
    F32(&'a mut [f32]),
    /// bf16 bits
    Bf16(&'a mut [u16]),
}

/// The memory of a buffer, if it is of this backend.
pub(super) fn memory_of(b: &Buffer) -> Option<&Memory> {
    b.data().downcast_ref()
}

fn memory(b: &Buffer) -> &Memory {
    b.data().downcast_ref().expect("a buffer of the CPU backend")
}

fn memory_mut(b: &mut Buffer) -> &mut Memory {
    b.data_mut().downcast_mut().expect("a buffer of the CPU backend")
}

/// The elements of an f32 buffer.
pub fn f32s(b: &Buffer) -> &[f32] {
    assert_eq!(b.dtype(), DType::F32);
    memory(b).slice(b.len())
}

/// The elements of an f32 buffer.
pub fn f32s_mut(b: &mut Buffer) -> &mut [f32] {
    assert_eq!(b.dtype(), DType::F32);
    let len = b.len();
    memory_mut(b).slice_mut(len)
}

/// The elements of an index buffer.
pub fn u32s(b: &Buffer) -> &[u32] {
    assert_eq!(b.dtype(), DType::U32);
    memory(b).slice(b.len())
}

/// The elements of an index buffer.
pub fn u32s_mut(b: &mut Buffer) -> &mut [u32] {
    assert_eq!(b.dtype(), DType::U32);
    let len = b.len();
    memory_mut(b).slice_mut(len)
}

/// The elements of a buffer of codes.
pub fn u8s(b: &Buffer) -> &[u8] {
    assert_eq!(b.dtype(), DType::U8);
    memory(b).slice(b.len())
}

/// The elements of a buffer of codes.
pub fn u8s_mut(b: &mut Buffer) -> &mut [u8] {
    assert_eq!(b.dtype(), DType::U8);
    let len = b.len();
    memory_mut(b).slice_mut(len)
}

/// The elements of a buffer, by their type.
pub fn elements<T: Plain>(b: &Buffer) -> &[T] {
    assert_eq!(b.dtype().size(), size_of::<T>());
    memory(b).slice(b.len())
}

/// The elements of a buffer, mutable.
pub fn elements_mut<T: Plain>(b: &mut Buffer) -> &mut [T] {
    assert_eq!(b.dtype().size(), size_of::<T>());
    let len = b.len();
    memory_mut(b).slice_mut(len)
}

/// The elements of a float buffer.
pub fn floats(b: &Buffer) -> Slice<'_> {
    match b.dtype() {
        DType::F32 => Slice::F32(f32s(b)),
        DType::Bf16 => Slice::Bf16(memory(b).slice(b.len())),
        DType::U32 | DType::U8 => panic!("a float buffer was expected, not indices"),
    }
}

/// The elements of a float buffer.
pub fn floats_mut(b: &mut Buffer) -> SliceMut<'_> {
    let len = b.len();
    match b.dtype() {
        DType::F32 => SliceMut::F32(f32s_mut(b)),
        DType::Bf16 => SliceMut::Bf16(memory_mut(b).slice_mut(len)),
        DType::U32 | DType::U8 => panic!("a float buffer was expected, not indices"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_ever_new_sizes_do_not_pile_up() {
        // A run whose steps all differed in length once grew until the system ran out of memory.
        let arena = Arena::default();
        let mut most = 0;
        for step in 0..4000usize {
            let sizes = [1_000_000 + step * 977, 300_000 + step * 311, 64 + step];
            let held: Vec<Memory> = sizes.iter().map(|&n| arena.take(n).expect("memory")).collect();
            drop(held);
            let state = arena.state();
            most = most.max(state.unused + state.in_use);
            assert!(state.unused <= state.peak + state.peak / 4 + KEEP);
        }
        assert!(most < 64 << 20, "{most} bytes were kept");
        let (in_use, peak) = arena.usage();
        assert!(in_use == 0 && peak < 8 << 20);
    }

    #[test]
    fn lasting_memory_is_zeroed_disjoint_and_returned() {
        let arena = Arena::default();
        let mut held: Vec<Memory> = Vec::new();
        for i in 0..60usize {
            let mut m = arena.take_lasting(1000 + i * 50_000).expect("memory");
            let len = m.bytes / 4;
            assert!(
                (m.at.as_ptr() as usize).is_multiple_of(ALIGN) && m.slice::<u32>(len).iter().all(|&x| x == 0)
            );
            m.slice_mut::<u32>(len).fill(i as u32 + 1);
            held.push(m);
        }
        for (i, m) in held.iter().enumerate() {
            assert!(
                m.slice::<u32>(m.bytes / 4).iter().all(|&x| x == i as u32 + 1),
                "another one wrote to {i}"
            );
        }
        assert_eq!(arena.usage().0, held.iter().map(|m| m.bytes).sum::<usize>());
        drop(held);
        assert_eq!(arena.usage().0, 0);
    }

    #[test]
    fn blocks_are_used_again() {
        let arena = Arena::default();
        let first = arena.take(100_000).expect("memory");
        let at = first.at;
        drop(first);
        let second = arena.take(99_000).expect("memory");
        assert_eq!(second.at, at);
        for bytes in [1, 63, 64, 65, 1000, 4097, 1 << 20, (1 << 20) + 1] {
            assert!(class(bytes) >= bytes && class(bytes) <= bytes + bytes / 8 + ALIGN, "{bytes}");
        }
    }
}
