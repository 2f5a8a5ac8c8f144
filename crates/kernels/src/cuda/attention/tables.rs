//! Work lists: which rows each thread block processes. Built on the host, stored on the GPU.
//!
//! Every layer of a step uses the same lists, so recent ones are cached and looked up by value.

use crate::backend::{PagedRows, Segments};
use crate::cuda::Cuda;
use crate::cuda::memory::CardMemory;
use crate::plain::Plain;
use crate::{Result, lock};
use std::sync::Arc;

/// Tokens per cache block, which is one key tile.
pub(crate) const TOKENS: usize = 64;
/// Maximum rows of the decode kernel.
pub(super) const DECODE_ROWS: usize = 16;
/// Cached lists: forward and both passes of the backward, for two models.
const KEPT: usize = 6;

/// As declared in the kernels: the rows from `first` on, of a sequence's `count` new tokens (which start at `row` of the batch
/// and `position` of the sequence). `blocks` is the start of its block table or, in a backward, of its stored score gradients.
/// The first `settled` of these blocks are full and not written by this batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct BlockWork {
    row: i32,
    count: i32,
    position: i32,
    blocks: i32,
    first: i32,
    settled: i32,
}

// SAFETY: six four-byte numbers without padding.
unsafe impl Plain for BlockWork {}

/// Work items, one per thread block.
pub(super) struct WorkList {
    /// On the GPU.
    pub memory: Arc<CardMemory>,
    /// Thread blocks per key head.
    pub len: usize,
    /// 16-byte units of all stored score gradients of a key head.
    pub kept: usize,
}

impl WorkList {
    fn new(cuda: &Cuda, work: Vec<BlockWork>, kept: usize) -> Result<Self> {
        Ok(WorkList { memory: Arc::new(cuda.uploaded(&work)?), len: work.len(), kept })
    }
}

/// Longest first, so that the last blocks to finish are short.
fn sorted(mut work: Vec<(usize, BlockWork)>) -> Vec<BlockWork> {
    work.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
    work.into_iter().map(|(_, w)| w).collect()
}

/// Unit of work in packed sequences.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PackedUnit {
    /// Stacked rows: `group` heads per token.
    Rows { group: usize },
    /// Keys, each of which serves `group` query heads.
    Keys { group: usize },
    /// Keys, with score gradients stored as in attention/backward_keys_wgmma.cu.
    WgmmaKeys { group: usize },
    /// Tile rows of that layout: 64 tokens of one head, then the other heads of the group, then the next tokens.
    TileRows { group: usize },
}

impl PackedUnit {
    /// Units of a sequence of this length.
    fn of(self, length: usize) -> usize {
        match self {
            PackedUnit::Rows { group } => length * group,
            PackedUnit::Keys { .. } | PackedUnit::WgmmaKeys { .. } => length,
            PackedUnit::TileRows { group } => length.div_ceil(TOKENS) * group,
        }
    }
    /// 16-byte units of all score gradients of such a sequence, for one key head.
    fn kept(self, length: usize) -> usize {
        match self {
            PackedUnit::Rows { group } | PackedUnit::Keys { group } => 32 * tiles(length * group, group),
            PackedUnit::WgmmaKeys { group } | PackedUnit::TileRows { group } => {
                let tiles = length.div_ceil(TOKENS);
                512 * group * (tiles * (tiles + 1) / 2)
            }
        }
    }
    /// Whether early units have the most work: many rows attend to early keys, late rows attend to many keys.
    fn early_is_heavy(self) -> bool {
        matches!(self, PackedUnit::Keys { .. } | PackedUnit::WgmmaKeys { .. })
    }
}

/// Tiles of 16 stacked rows and 16 keys of a sequence: row tile r has key tiles 0..=r / group.
fn tiles(rows: usize, group: usize) -> usize {
    let r = rows.div_ceil(16);
    let (q, m) = (r / group, r % group);
    group * (q * q.saturating_sub(1) / 2) + m * q + r
}

/// Work lists for new tokens over the cache.
pub(super) struct Paged {
    /// Block tables of all sequences, concatenated.
    pub blocks: Arc<CardMemory>,
    /// Each batch row's position in the cache, in tokens; `u32::MAX` for padding rows.
    pub slots: Arc<CardMemory>,
    /// Rows that `slots` covers.
    pub rows: usize,
    /// Number of cache blocks referenced.
    pub needed: usize,
    /// Sequences for the decode kernel.
    pub decode: WorkList,
    /// The other sequences.
    pub many: WorkList,
}

/// Cache key of a paged list.
struct PagedKey {
    rows: PagedRows,
    cut: PagedTiling,
}

/// Tiling of work on new tokens.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct PagedTiling {
    /// Query heads per key head.
    pub group: usize,
    /// Stacked rows per thread block.
    pub step: usize,
    /// Whether short sequences use the decode kernel, with [`DECODE_ROWS`] per block.
    pub decode: bool,
    /// Rows of `qkv`.
    pub batch: usize,
}

/// The cached lists.
#[derive(Default)]
pub struct Tables {
    packed: Vec<(Vec<usize>, PackedUnit, usize, Arc<WorkList>)>,
    paged: Vec<(PagedKey, Arc<Paged>)>,
    /// One per decode batch size, at a fixed address, for CUDA graphs.
    steady: Vec<Steady>,
    /// Number of reallocations of such lists.
    moves: u64,
}

/// Lists of a decode batch with one new token per sequence; updated in place.
struct Steady {
    key: PagedKey,
    lists: Arc<Paged>,
    /// Contents of `lists.blocks`, which seldom change.
    blocks: Vec<u32>,
    /// Capacity in block numbers.
    room: usize,
    /// Value of `moves` at its last reallocation.
    moved: u64,
}

/// Minimum capacity, in block numbers.
const ROOM: usize = 1 << 14;

/// Work on whole sequences, and the units of all their score gradients.
fn packed_work(segments: &Segments, unit: PackedUnit, step: usize) -> (Vec<BlockWork>, usize) {
    let (mut work, mut kept) = (Vec::new(), 0);
    for r in segments.iter() {
        let all = unit.of(r.len());
        for first in (0..all).step_by(step) {
            let weight = if unit.early_is_heavy() { all - first } else { first + step };
            // Score gradients are stored only if all offsets fit this type.
            let (row, count, blocks) = (r.start as i32, r.len() as i32, kept as i32);
            work.push((
                weight,
                BlockWork { row, count, position: 0, blocks, first: first as i32, settled: 0 },
            ));
        }
        kept += unit.kept(r.len());
    }
    (sorted(work), kept)
}

/// Work on whole sequences, `step` rows or keys per thread block.
pub(super) fn packed(
    cuda: &Cuda,
    segments: &Segments,
    unit: PackedUnit,
    step: usize,
) -> Result<Arc<WorkList>> {
    let mut tables = lock(&cuda.tables);
    let known = |(starts, u, s, _): &&(Vec<usize>, PackedUnit, usize, Arc<WorkList>)| {
        *u == unit && *s == step && *starts == segments.starts
    };
    if let Some((_, _, _, list)) = tables.packed.iter().find(known) {
        return Ok(list.clone());
    }
    let (work, kept) = packed_work(segments, unit, step);
    let list = Arc::new(WorkList::new(cuda, work, kept)?);
    tables.packed.insert(0, (segments.starts.clone(), unit, step, list.clone()));
    tables.packed.truncate(KEPT);
    Ok(list)
}

/// [`Paged`] before upload.
struct PagedWork {
    blocks: Vec<u32>,
    slots: Vec<u32>,
    decode: Vec<BlockWork>,
    many: Vec<BlockWork>,
}

/// For each referenced cache block, whether the batch writes it: a sequence may read what another one in the same batch
/// computes.
fn written_blocks(rows: &PagedRows) -> Vec<bool> {
    let most = rows.sequences.iter().flat_map(|s| &s.blocks).max().map_or(0, |&b| b as usize + 1);
    let mut open = vec![false; most];
    for s in &rows.sequences {
        let tiles = s.position / TOKENS..(s.position + s.count).div_ceil(TOKENS);
        for &b in s.blocks.iter().take(tiles.end).skip(tiles.start) {
            open[b as usize] = true;
        }
    }
    open
}

fn paged_work(rows: &PagedRows, cut: PagedTiling) -> PagedWork {
    let PagedTiling { group, step, decode, batch } = cut;
    let mut slots = vec![u32::MAX; batch];
    let (mut blocks, mut short, mut long) = (Vec::new(), Vec::new(), Vec::new());
    let mut written = Vec::new();
    let open = written_blocks(rows);
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
        let full = &s.blocks[..s.position / TOKENS];
        let settled = full.iter().take_while(|&&b| !open[b as usize]).count() as i32;
        let (list, step) =
            if decode && all <= DECODE_ROWS { (&mut short, DECODE_ROWS) } else { (&mut long, step) };
        for first in (0..all).step_by(step) {
            let weight = s.position + (first + step).min(all).div_ceil(group);
            let (row, count, position) = (s.row as i32, s.count as i32, s.position as i32);
            let first = first as i32;
            list.push((weight, BlockWork { row, count, position, blocks: at, first, settled }));
        }
    }
    written.sort_unstable();
    assert!(written.windows(2).all(|w| w[0] < w[1]), "two rows go to one place of the cache");
    PagedWork { blocks, slots, decode: sorted(short), many: sorted(long) }
}

/// Work on new tokens.
pub(super) fn paged(cuda: &Cuda, rows: &PagedRows, cut: PagedTiling) -> Result<Arc<Paged>> {
    let mut tables = lock(&cuda.tables);
    if !rows.sequences.is_empty() && rows.sequences.iter().all(|s| s.count == 1) {
        return steady(cuda, &mut tables, rows, cut);
    }
    let known = |(k, _): &&(PagedKey, Arc<Paged>)| k.cut == cut && k.rows == *rows;
    if let Some((_, found)) = tables.paged.iter().find(known) {
        return Ok(found.clone());
    }
    let lists = paged_work(rows, cut);
    let made = Arc::new(Paged {
        blocks: Arc::new(cuda.uploaded(&lists.blocks)?),
        slots: Arc::new(cuda.uploaded(&lists.slots)?),
        rows: cut.batch,
        needed: lists.blocks.iter().max().map_or(0, |&b| b as usize + 1),
        decode: WorkList::new(cuda, lists.decode, 0)?,
        many: WorkList::new(cuda, lists.many, 0)?,
    });
    let key = PagedKey { rows: rows.clone(), cut };
    tables.paged.insert(0, (key, made.clone()));
    tables.paged.truncate(2);
    Ok(made)
}

/// [`paged`] for one new token per sequence. The list covers the full batch: items of padding rows do nothing.
fn steady(cuda: &Cuda, tables: &mut Tables, rows: &PagedRows, cut: PagedTiling) -> Result<Arc<Paged>> {
    let batch = cut.batch;
    let found = tables.steady.iter().position(|s| s.key.cut == cut);
    if let Some(steady) = found.map(|i| &tables.steady[i]).filter(|s| s.key.rows == *rows) {
        return Ok(steady.lists.clone());
    }
    let mut work = paged_work(rows, cut);
    let nothing = BlockWork { row: 0, count: 0, position: 0, blocks: 0, first: 0, settled: 0 };
    for list in [&mut work.decode, &mut work.many] {
        let each = list.len() / rows.sequences.len();
        list.resize(each * batch, nothing);
    }
    let needed = work.blocks.iter().max().map_or(0, |&b| b as usize + 1);
    let key = PagedKey { rows: rows.clone(), cut };
    if let Some(i) = found.filter(|&i| tables.steady[i].room >= work.blocks.len()) {
        let old = tables.steady[i].lists.clone();
        if tables.steady[i].blocks != work.blocks {
            cuda.upload(old.blocks.ptr(), &work.blocks)?;
            tables.steady[i].blocks = work.blocks;
        }
        cuda.upload(old.slots.ptr(), &work.slots)?;
        cuda.upload(old.decode.memory.ptr(), &work.decode)?;
        cuda.upload(old.many.memory.ptr(), &work.many)?;
        let list = |l: &WorkList| WorkList { memory: l.memory.clone(), len: l.len, kept: 0 };
        let (blocks, slots) = (old.blocks.clone(), old.slots.clone());
        let lists =
            Paged { blocks, slots, rows: batch, needed, decode: list(&old.decode), many: list(&old.many) };
        tables.steady[i].key = key;
        tables.steady[i].lists = Arc::new(lists);
        return Ok(tables.steady[i].lists.clone());
    }
    let room = work.blocks.len().next_power_of_two().max(ROOM);
    let blocks = cuda.arena.take(4 * room)?;
    cuda.upload(blocks.ptr(), &work.blocks)?;
    let lists = Arc::new(Paged {
        blocks: Arc::new(blocks),
        slots: Arc::new(cuda.uploaded(&work.slots)?),
        rows: batch,
        needed,
        decode: WorkList::new(cuda, work.decode, 0)?,
        many: WorkList::new(cuda, work.many, 0)?,
    });
    tables.moves += 1;
    let new = Steady { key, lists: lists.clone(), blocks: work.blocks, room, moved: tables.moves };
    match found {
        Some(i) => tables.steady[i] = new,
        None => tables.steady.push(new),
    }
    Ok(lists)
}

/// Updates the lists of a decode batch's size; the returned number changes when any of them is reallocated.
pub(crate) fn stage(cuda: &Cuda, rows: &PagedRows, batch: usize) -> Result<u64> {
    let mut tables = lock(&cuda.tables);
    let cuts: Vec<PagedTiling> =
        tables.steady.iter().map(|s| s.key.cut).filter(|cut| cut.batch == batch).collect();
    for cut in cuts {
        steady(cuda, &mut tables, rows, cut)?;
    }
    // The latest reallocation among lists of this size: only these invalidate its graphs.
    Ok(tables.steady.iter().filter(|s| s.key.cut.batch == batch).map(|s| s.moved).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::PagedSequence;

    #[test]
    fn every_row_and_key_has_one_owner_and_heavy_work_comes_first() {
        let segments = Segments::of([70, 0, 1, 200]);
        for (unit, per_token, step) in
            [(PackedUnit::Rows { group: 7 }, 7, 128), (PackedUnit::Keys { group: 7 }, 1, 64)]
        {
            let (work, _) = packed_work(&segments, unit, step);
            let mut owners = vec![0; segments.rows() * per_token];
            for w in &work {
                let all = w.count as usize * per_token;
                for i in w.first as usize..(w.first as usize + step).min(all) {
                    owners[w.row as usize * per_token + i] += 1;
                }
            }
            assert!(owners.iter().all(|&n| n == 1));
            let weight = |w: &BlockWork| if per_token == 1 { w.count - w.first } else { w.first };
            assert!(work.windows(2).all(|w| weight(&w[0]) >= weight(&w[1])));
        }
    }

    #[test]
    fn wgmma_passes_cut_and_keep_the_same_tiles() {
        let segments = Segments::of([70, 0, 1, 200]);
        let (keys, kept) = packed_work(&segments, PackedUnit::WgmmaKeys { group: 7 }, 128);
        let (rows, same) = packed_work(&segments, PackedUnit::TileRows { group: 7 }, 2);
        // Tiles of 64x64 on and under the diagonal, 8 KiB each: 3, 1 and 10 for every head.
        assert_eq!((kept * 16, same), ((3 + 1 + 10) * 7 * 8192, kept));
        for list in [&keys, &rows] {
            let from = |row: i32| list.iter().find(|w| w.row == row).unwrap().blocks;
            assert_eq!((from(0), from(70), from(71)), (0, 3 * 7 * 512, 4 * 7 * 512));
        }
        let firsts = |list: &[BlockWork], row: i32| -> Vec<i32> {
            list.iter().filter(|w| w.row == row).map(|w| w.first).collect()
        };
        assert_eq!(firsts(&keys, 71), [0, 128]);
        assert_eq!(firsts(&rows, 0), [12, 10, 8, 6, 4, 2, 0]);
        assert_eq!(firsts(&rows, 70), [6, 4, 2, 0]);
    }

    #[test]
    fn kept_gradients_have_room_for_what_rows_see() {
        for (length, group) in [(1usize, 1usize), (70, 7), (33, 2), (130, 12), (64, 60)] {
            let rows = length * group;
            // Rows 16 r.. attend to keys up to their last token; the GPU stores all of a full tile.
            let seen = |r: usize| (r * 16 + 15) / group / 16 + 1;
            let all: usize = (0..rows.div_ceil(16)).map(seen).sum();
            assert_eq!(tiles(rows, group), all, "{length} {group}");
        }
    }

    #[test]
    fn new_tokens_go_to_their_blocks_and_short_sequences_to_their_kernel() {
        let sequence = |row, count, position, blocks: &[u32]| PagedSequence {
            row,
            count,
            position,
            blocks: blocks.to_vec(),
        };
        let rows =
            PagedRows { sequences: vec![sequence(1, 1, 64, &[5, 3, 9]), sequence(2, 40, 30, &[0, 7])] };
        let work = paged_work(&rows, PagedTiling { group: 4, step: 64, decode: true, batch: 43 });
        assert_eq!(work.blocks, [5, 3, 0, 7], "only blocks that are read");
        assert_eq!((work.slots[0], work.slots[1], work.slots[41]), (u32::MAX, 3 * 64, 7 * 64 + 5));
        let only = BlockWork { row: 1, count: 1, position: 64, blocks: 0, first: 0, settled: 1 };
        assert_eq!(work.decode, [only]);
        let firsts: Vec<i32> = work.many.iter().map(|w| w.first).collect();
        assert_eq!(firsts, [128, 64, 0]);
        assert!(work.many.iter().all(|w| (w.row, w.count, w.position, w.blocks) == (2, 40, 30, 2)));
        let all = paged_work(&rows, PagedTiling { group: 4, step: 64, decode: false, batch: 43 });
        assert_eq!((all.decode.len(), all.many.len()), (0, 4));
    }

    #[test]
    fn what_another_sequence_writes_beside_it_is_not_settled() {
        let sequence = |row, position, blocks: &[u32]| PagedSequence {
            row,
            count: 1,
            position,
            blocks: blocks.to_vec(),
        };
        // The second reads all of block 4, whose last token the first writes now.
        let rows = PagedRows { sequences: vec![sequence(0, 127, &[2, 4]), sequence(1, 130, &[2, 4, 5])] };
        let work = paged_work(&rows, PagedTiling { group: 1, step: 64, decode: true, batch: 2 });
        let settled = |row: i32| work.decode.iter().find(|w| w.row == row).map(|w| w.settled);
        assert_eq!((settled(0), settled(1)), (Some(1), Some(1)));
    }

    #[test]
    #[should_panic(expected = "two rows go to one place")]
    fn sequences_do_not_write_over_each_other() {
        let sequence = |row| PagedSequence { row, count: 2, position: 0, blocks: vec![4] };
        paged_work(
            &PagedRows { sequences: vec![sequence(0), sequence(2)] },
            PagedTiling { group: 1, step: 64, decode: true, batch: 4 },
        );
    }
}
