//! Sampling a token from each row of logits; only the tokens are copied to the host, when they are requested.

use crate::backend::{Choices, SampleOps, SampleSpec, TokenChoice};
use crate::cuda::Cuda;
use crate::cuda::context::check;
use crate::cuda::handles::{Pinned, StreamEvent};
use crate::cuda::head::logp::TILE;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::{CardMemory, f32_ptr, ptr};
use crate::{Buffer, DType, Error, Result, lock, shapes};
use cudarc::driver::sys;
use std::sync::{Arc, Mutex};

/// Threads per block of `truncated`, and its shared memory besides one sum per tile.
const THREADS: u32 = 512;
const ROOM: usize = 32 * THREADS as usize * 4 + 32 * 8 + 24;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("TILE", TILE), ("THREADS", THREADS as usize)];
/// Bytes of a tile and of a choice, as the kernels declare them.
const TILE_BYTES: usize = 16;
const CHOICE_BYTES: usize = 16;

/// Sampling parameters as the kernels read them, one word each. A negative draw is greedy.
#[derive(Clone, Copy)]
struct ChoiceWords {
    draw: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
}

/// As the kernels write it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Chosen {
    token: u32,
    logit: f32,
    lse: f32,
    kept: f32,
}

/// Pinned memory that choices are copied to, and the event of the copy.
pub struct ChoiceSlot {
    memory: Pinned,
    rows: usize,
    event: StreamEvent,
}

/// Free slots; they live as long as the device.
pub type Slots = Arc<Mutex<Vec<ChoiceSlot>>>;

/// Cached lists on the device, by value: most are the same from step to step.
pub type Lists = Mutex<Vec<(Vec<u32>, Arc<CardMemory>)>>;

/// Number of cached lists.
const KEPT: usize = 4;

/// A list on the device.
fn listed(cuda: &Cuda, values: Vec<u32>) -> Result<Arc<CardMemory>> {
    let mut lists = lock(&cuda.lists);
    if let Some((_, memory)) = lists.iter().find(|(known, _)| *known == values) {
        return Ok(memory.clone());
    }
    let memory = Arc::new(cuda.uploaded(&values)?);
    lists.truncate(KEPT - 1);
    lists.insert(0, (values, memory.clone()));
    Ok(memory)
}

/// Choices in flight.
struct PendingChoices {
    /// On the device.
    chosen: CardMemory,
    rows: usize,
    slot: Option<ChoiceSlot>,
    slots: Slots,
}

impl Drop for PendingChoices {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            // The copy must be complete before the slot is reused.
            let _ = slot.event.wait();
            lock(&self.slots).push(slot);
        }
    }
}

fn slot(cuda: &Cuda, rows: usize) -> Result<ChoiceSlot> {
    let mut free = lock(&cuda.slots);
    if let Some(i) = free.iter().position(|s| s.rows >= rows) {
        return Ok(free.swap_remove(i));
    }
    let rows = rows.next_power_of_two().max(64);
    let memory = Pinned::new(&cuda.context, rows * CHOICE_BYTES)?;
    Ok(ChoiceSlot { memory, rows, event: StreamEvent::new(&cuda.context, false)? })
}

/// Launches the kernels, then the copy of the choices.
fn start(
    cuda: &Cuda,
    logits: &Buffer,
    lse: Option<&Buffer>,
    specs: &[ChoiceWords],
) -> Result<PendingChoices> {
    let rows = specs.len();
    assert!(logits.len().is_multiple_of(rows.max(1)) && lse.is_none_or(|l| l.len() == rows));
    let vocab = logits.len() / rows.max(1);
    let count = vocab.div_ceil(TILE);
    let words = |a: &ChoiceWords| [a.draw.to_bits(), a.top_p.to_bits(), a.min_p.to_bits(), a.top_k];
    let asked = listed(cuda, specs.iter().flat_map(words).collect())?;
    let tiles = cuda.arena.take(rows * count * TILE_BYTES)?;
    let chosen = cuda.arena.take(rows * CHOICE_BYTES)?;
    let (logits, lse) = (f32_ptr(logits), lse.map_or(0, f32_ptr));
    let (n_rows, n_vocab, n_count) = (rows as u32, vocab as u32, count as u32);
    let all = args![logits, lse, &asked, n_rows, n_vocab, n_count, &tiles];
    cuda.launch("sample", "tiles", Grid::new((rows * count).div_ceil(8), 256).early(), &all)?;
    let all = args![logits, lse, &asked, n_vocab, n_count, &tiles, &chosen];
    cuda.launch("sample", "pick", Grid::new(rows, 32).early(), &all)?;
    let truncates = |a: &ChoiceWords| a.draw >= 0.0 && (a.top_k > 0 || a.top_p < 1.0 || a.min_p > 0.0);
    if specs.iter().any(truncates) {
        let grid = Grid::new(rows, THREADS).with_shared(ROOM + count * 8);
        cuda.launch("truncate", "truncated", grid, &all)?;
    }
    cuda.bind()?;
    let slot = slot(cuda, rows)?;
    let bytes = rows * CHOICE_BYTES;
    if rows > 0 {
        // SAFETY: the slot has room for the rows, and is used by nothing else until the event.
        let copied = unsafe {
            sys::cuMemcpyDtoHAsync_v2(slot.memory.at(0, bytes).cast(), chosen.ptr(), bytes, cuda.stream)
        };
        check(copied, || "fetching choices".into())?;
    }
    // SAFETY: a live event and the GPU's stream.
    let recorded = unsafe { sys::cuEventRecord(slot.event.handle, cuda.stream) };
    check(recorded, || "fetching choices".into()).inspect_err(|_| {
        // The copy must not write to freed memory.
        let _ = cuda.synchronize();
    })?;
    Ok(PendingChoices { chosen, rows, slot: Some(slot), slots: cuda.slots.clone() })
}

/// Waits for the choices, but not for work launched after them.
fn finish(pending: &PendingChoices) -> Result<Vec<Chosen>> {
    let Some(slot) = &pending.slot else { unreachable!("taken when dropped") };
    slot.event.wait()?;
    let at = slot.memory.at(0, pending.rows * CHOICE_BYTES);
    // SAFETY: the event was recorded after the copy, so the slot holds the rows.
    Ok(unsafe { std::slice::from_raw_parts(at.cast::<Chosen>(), pending.rows) }.to_vec())
}

/// Without truncation.
fn plain(draw: f32) -> ChoiceWords {
    ChoiceWords { draw, top_p: 1.0, min_p: 0.0, top_k: 0 }
}

impl SampleOps for Cuda {
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>> {
        shapes::sample(self, logits, lse, uniform)?;
        assert!(uniform.iter().all(|&u| u >= 0.0));
        let specs: Vec<ChoiceWords> = uniform.iter().map(|&u| plain(u)).collect();
        let chosen = finish(&start(self, logits, Some(lse), &specs)?)?;
        Ok(chosen.into_iter().map(|c| c.token).collect())
    }
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>> {
        shapes::argmax(self, logits, rows)?;
        let chosen = finish(&start(self, logits, None, &vec![plain(-1.0); rows])?)?;
        Ok(chosen.into_iter().map(|c| c.token).collect())
    }
    fn choose(&self, logits: &Buffer, lse: &Buffer, specs: &[SampleSpec]) -> Result<Choices> {
        shapes::choose(self, logits, lse, specs.iter().map(|spec| spec.draw))?;
        let asked = |a: &SampleSpec| match a.draw {
            None => plain(-1.0),
            Some(draw) => {
                ChoiceWords { draw, top_p: a.top_p, min_p: a.min_p, top_k: a.top_k.min(1 << 30) as u32 }
            }
        };
        let specs: Vec<ChoiceWords> = specs.iter().map(asked).collect();
        Ok(Choices::new(Box::new(start(self, logits, Some(lse), &specs)?)))
    }
    fn chosen(&self, choices: &Choices) -> Result<Vec<TokenChoice>> {
        let all = finish(pending(choices)?)?;
        Ok(all
            .into_iter()
            .map(|Chosen { token, logit, lse, kept }| TokenChoice { token, logit, lse, kept })
            .collect())
    }
    fn feed(&self, choices: &[&Choices], from: &[(usize, u32)], ids: &mut Buffer) -> Result<()> {
        let rows = choices.iter().map(|c| Ok(pending(c)?.rows)).collect::<Result<Vec<usize>>>()?;
        shapes::feed(self, &rows, from, ids)?;
        assert!(ids.dtype() == DType::U32 && from.len() <= ids.len());
        for (i, choices) in choices.iter().enumerate() {
            let pending = pending(choices)?;
            let mine = || from.iter().enumerate().filter(|(_, f)| f.0 == i);
            let rows: Vec<u32> = mine().map(|(_, f)| f.1).collect();
            assert!(rows.iter().all(|&r| (r as usize) < pending.rows));
            let count = rows.len();
            let lists = listed(self, rows.into_iter().chain(mine().map(|(to, _)| to as u32)).collect())?;
            let places = lists.ptr() + (count * 4) as u64;
            let all = args![&pending.chosen, &lists, places, count as u32, ptr(ids)];
            self.launch_flat("sample", "feed", count, &all)?;
        }
        Ok(())
    }
}

fn pending(choices: &Choices) -> Result<&PendingChoices> {
    let made = choices.data().downcast_ref();
    made.ok_or_else(|| Error::usage("choices of another device"))
}
