//! Which block of threads has which rows: lists on the card, made on the host.
//!
//! Every layer of a step asks for the same lists, so the last ones are kept and compared by value.

use crate::backend::{PagedRows, Segments};
use crate::cuda::Cuda;
use crate::cuda::memory::Memory;
use crate::error::Result;
use std::sync::Arc;

/// Tokens of a cache block: one tile of keys.
pub(super) const TOKENS: usize = 64;
/// Rows at most that decoding's kernel takes.
pub(super) const FEW: usize = 16;
/// Lists that are kept: forward and both passes of the backward, for two models.
const KEPT: usize = 6;

/// As the kernels declare it: of a sequence's `count` new tokens (from `row` of the batch and `position` of the
/// sequence on) what begins at `first`; `blocks` is where the list of its cache blocks begins or, in a backward, where
/// its kept gradients of scores do.
#[repr(C)]
#[derive(Clone, Copy)]
struct Work {
    row: i32,
    count: i32,
    position: i32,
    blocks: i32,
    first: i32,
}

/// Work for some blocks of threads.
pub(super) struct List {
    /// On the card.
    pub memory: Memory,
    /// Blocks of threads for each key head.
    pub len: usize,
    /// 16-byte units that the kept gradients of all scores of a key head take (see attention_backward.cu).
    pub kept: usize,
}

impl List {
    /// Heaviest first, so that the last blocks to finish are short ones.
    fn new(cuda: &Cuda, mut work: Vec<(usize, Work)>, kept: usize) -> Result<Self> {
        work.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
        let work: Vec<Work> = work.into_iter().map(|(_, w)| w).collect();
        Ok(List { memory: cuda.uploaded(&work)?, len: work.len(), kept })
    }
}

/// What a list of packed sequences counts in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Stacked rows: that many heads to a token.
    Rows { group: usize },
    /// Keys, of which each serves that many heads.
    Keys { group: usize },
}

/// Tiles of 16 stacked rows and 16 keys that such rows of a sequence see: those of number r see keys 0..=r / group.
fn tiles(rows: usize, group: usize) -> usize {
    let r = rows.div_ceil(16);
    let (q, m) = (r / group, r % group);
    group * (q * q.saturating_sub(1) / 2) + m * q + r
}

/// Lists for new tokens whose keys are in the cache.
pub(super) struct Paged {
    /// Blocks of all sequences, one after the other.
    pub blocks: Memory,
    /// For each row of the batch its place in the cache, in tokens; `u32::MAX` for a row of no sequence.
    pub slots: Memory,
    /// Rows that `slots` covers.
    pub rows: usize,
    /// Cache blocks there must be.
    pub needed: usize,
    /// Sequences with few rows.
    pub few: List,
    /// The others.
    pub many: List,
}

/// What a paged list depends on: the rows, heads to a key head, rows of a block of threads, rows of the batch, and
/// whether few rows have a kernel of their own.
#[derive(PartialEq)]
struct PagedKey {
    rows: PagedRows,
    group: usize,
    step: usize,
    batch: usize,
    few: bool,
}

/// The lists made last.
#[derive(Default)]
pub struct Tables {
    packed: Vec<(Vec<usize>, Unit, usize, Arc<List>)>,
    paged: Vec<(PagedKey, Arc<Paged>)>,
}

/// Work on whole sequences, `step` rows or keys to a block of threads.
pub(super) fn packed(cuda: &Cuda, segments: &Segments, unit: Unit, step: usize) -> Result<Arc<List>> {
    let mut tables = cuda.tables.lock().unwrap_or_else(|e| e.into_inner());
    let known = |(starts, u, s, _): &&(Vec<usize>, Unit, usize, Arc<List>)| {
        *u == unit && *s == step && *starts == segments.starts
    };
    if let Some((_, _, _, list)) = tables.packed.iter().find(known) {
        return Ok(list.clone());
    }
    let (mut work, mut kept) = (Vec::new(), 0);
    for r in segments.iter() {
        let (all, group) = match unit {
            Unit::Rows { group } => (r.len() * group, group),
            Unit::Keys { group } => (r.len(), group),
        };
        for first in (0..all).step_by(step) {
            // Late rows see many keys; early keys are seen by many rows.
            let weight = if let Unit::Keys { .. } = unit { all - first } else { first + step };
            // Gradients are kept only where all of them are within the reach of this number.
            let (row, count, blocks) = (r.start as i32, r.len() as i32, kept as i32);
            work.push((weight, Work { row, count, position: 0, blocks, first: first as i32 }));
        }
        kept += 32 * tiles(r.len() * group, group);
    }
    let list = Arc::new(List::new(cuda, work, kept)?);
    tables.packed.insert(0, (segments.starts.clone(), unit, step, list.clone()));
    tables.packed.truncate(KEPT);
    Ok(list)
}

/// Work on new tokens, `step` stacked rows to a block of threads, or `FEW` for short sequences if `few`. `batch` is
/// the number of rows of `qkv`.
pub(super) fn paged(
    cuda: &Cuda,
    rows: &PagedRows,
    group: usize,
    step: usize,
    few: bool,
    batch: usize,
) -> Result<Arc<Paged>> {
    let mut tables = cuda.tables.lock().unwrap_or_else(|e| e.into_inner());
    let known = |(k, _): &&(PagedKey, Arc<Paged>)| {
        k.group == group && k.step == step && k.few == few && k.batch == batch && k.rows == *rows
    };
    if let Some((_, found)) = tables.paged.iter().find(known) {
        return Ok(found.clone());
    }
    let mut slots = vec![u32::MAX; batch];
    let (mut blocks, mut short, mut long) = (Vec::new(), Vec::new(), Vec::new());
    let mut written = Vec::new();
    for s in &rows.sequences {
        let seen = s.position + s.count;
        assert!(s.row + s.count <= batch, "rows past the end of the batch");
        assert!(s.blocks.len() * TOKENS >= seen, "too few cache blocks for a sequence");
        let all = s.count * group;
        let at = blocks.len() as i32;
        blocks.extend_from_slice(&s.blocks[..seen.div_ceil(TOKENS)]);
        for (i, slot) in slots[s.row..s.row + s.count].iter_mut().enumerate() {
            let (block, token) = ((s.position + i) / TOKENS, (s.position + i) % TOKENS);
            *slot = s.blocks[block] * TOKENS as u32 + token as u32;
            written.push(*slot);
        }
        let (list, step) = if few && all <= FEW { (&mut short, FEW) } else { (&mut long, step) };
        for first in (0..all).step_by(step) {
            let weight = s.position + (first + step).min(all).div_ceil(group);
            let (row, count, position) = (s.row as i32, s.count as i32, s.position as i32);
            list.push((weight, Work { row, count, position, blocks: at, first: first as i32 }));
        }
    }
    written.sort_unstable();
    assert!(written.windows(2).all(|w| w[0] < w[1]), "two rows go to one place of the cache");
    let made = Arc::new(Paged {
        blocks: cuda.uploaded(&blocks)?,
        slots: cuda.uploaded(&slots)?,
        rows: batch,
        needed: blocks.iter().max().map_or(0, |&b| b as usize + 1),
        few: List::new(cuda, short, 0)?,
        many: List::new(cuda, long, 0)?,
    });
    let key = PagedKey { rows: rows.clone(), group, step, batch, few };
    tables.paged.insert(0, (key, made.clone()));
    tables.paged.truncate(2);
    Ok(made)
}
