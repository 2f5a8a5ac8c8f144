//! Which block of threads has which rows: lists on the card, made on the host.
//!
//! Every layer of a step asks for the same lists, so the last ones are kept and compared by value.

use crate::backend::{PagedRows, Segments};
use crate::cuda::Cuda;
use crate::cuda::memory::CardMemory;
use crate::error::Result;
use crate::lock;
use crate::plain::Plain;
use std::sync::Arc;

/// Tokens of a cache block: one tile of keys.
pub(crate) const TOKENS: usize = 64;
/// Rows at most that decoding's kernel takes.
pub(super) const DECODE_ROWS: usize = 16;
/// Lists that are kept: forward and both passes of the backward, for two models.
const KEPT: usize = 6;

/// As the kernels declare it: of a sequence's `count` new tokens (from `row` of the batch and `position` of the
/// sequence on) what begins at `first`; `blocks` is where the list of its cache blocks begins or, in a backward, where
/// its kept gradients of scores do. The first `settled` of these blocks are full and not written by this batch.
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

// SAFETY: six numbers of four bytes, one after the other.
unsafe impl Plain for BlockWork {}

/// Work for some blocks of threads.
pub(super) struct WorkList {
    /// On the card.
    pub memory: Arc<CardMemory>,
    /// Blocks of threads for each key head.
    pub len: usize,
    /// 16-byte units that the kept gradients of all scores of a key head take.
    pub kept: usize,
}

impl WorkList {
    fn new(cuda: &Cuda, work: Vec<BlockWork>, kept: usize) -> Result<Self> {
        Ok(WorkList { memory: Arc::new(cuda.uploaded(&work)?), len: work.len(), kept })
    }
}

/// Heaviest first, so that the last blocks to finish are short ones.
fn sorted(mut work: Vec<(usize, BlockWork)>) -> Vec<BlockWork> {
    work.sort_by_key(|(weight, _)| std::cmp::Reverse(*weight));
    work.into_iter().map(|(_, w)| w).collect()
}

/// What a list of packed sequences counts in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PackedUnit {
    /// Stacked rows: that many heads to a token.
    Rows { group: usize },
    /// Keys, of which each serves that many heads.
    Keys { group: usize },
    /// The same where gradients of scores are kept as attention/backward_keys_wgmma.cu does.
    WgmmaKeys { group: usize },
    /// Rows of the tiles that are kept so: 64 tokens of one head, that many heads, the next tokens.
    TileRows { group: usize },
}

impl PackedUnit {
    /// How many of them a sequence of that length has.
    fn of(self, length: usize) -> usize {
        match self {
            PackedUnit::Rows { group } => length * group,
            PackedUnit::Keys { .. } | PackedUnit::WgmmaKeys { .. } => length,
            PackedUnit::TileRows { group } => length.div_ceil(TOKENS) * group,
        }
    }
    /// 16-byte units that all gradients of scores of such a sequence take, for one key head.
    fn kept(self, length: usize) -> usize {
        match self {
            PackedUnit::Rows { group } | PackedUnit::Keys { group } => 32 * tiles(length * group, group),
            PackedUnit::WgmmaKeys { group } | PackedUnit::TileRows { group } => {
                let tiles = length.div_ceil(TOKENS);
                512 * group * (tiles * (tiles + 1) / 2)
            }
        }
    }
    /// Whether early ones have most to do: early keys are seen by many rows, late rows see many keys.
    fn early_is_heavy(self) -> bool {
        matches!(self, PackedUnit::Keys { .. } | PackedUnit::WgmmaKeys { .. })
    }
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
    pub blocks: Arc<CardMemory>,
    /// For each row of the batch its place in the cache, in tokens; `u32::MAX` for a row of no sequence.
    pub slots: Arc<CardMemory>,
    /// Rows that `slots` covers.
    pub rows: usize,
    /// Cache blocks there must be.
    pub needed: usize,
    /// Sequences with few rows.
    pub decode: WorkList,
    /// The others.
    pub many: WorkList,
}

/// What a paged list depends on.
struct PagedKey {
    rows: PagedRows,
    cut: PagedCut,
}

/// How work on new tokens is cut into blocks of threads.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct PagedCut {
    /// Query heads of a key head.
    pub group: usize,
    /// Stacked rows of a block of threads.
    pub step: usize,
    /// Whether short sequences have a kernel of their own, with [`DECODE_ROWS`] to a block.
    pub decode: bool,
    /// Rows of `qkv`.
    pub batch: usize,
}

/// The lists made last.
#[derive(Default)]
pub struct Tables {
    packed: Vec<(Vec<usize>, PackedUnit, usize, Arc<WorkList>)>,
    paged: Vec<(PagedKey, Arc<Paged>)>,
    /// One for each kind of batch that only decodes: its lists stay where they are, for graphs.
    steady: Vec<Steady>,
    /// Counts moves of such lists.
    moves: u64,
}

/// Lists of a batch with one new token a sequence; what they hold changes in place.
struct Steady {
    key: PagedKey,
    lists: Arc<Paged>,
    /// What `lists.blocks` holds, which seldom changes.
    blocks: Vec<u32>,
    /// Block numbers that fit.
    room: usize,
    /// The number of its last move.
    moved: u64,
}

/// Block numbers that a steady list has room for at least.
const ROOM: usize = 1 << 14;

/// Work on whole sequences, and what keeping all gradients of scores takes.
fn packed_work(segments: &Segments, unit: PackedUnit, step: usize) -> (Vec<BlockWork>, usize) {
    let (mut work, mut kept) = (Vec::new(), 0);
    for r in segments.iter() {
        let all = unit.of(r.len());
        for first in (0..all).step_by(step) {
            let weight = if unit.early_is_heavy() { all - first } else { first + step };
            // Gradients are kept only where all of them are within the reach of this number.
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

/// Work on whole sequences, `step` rows or keys to a block of threads.
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

/// [`Paged`] before it goes to the card.
struct PagedWork {
    blocks: Vec<u32>,
    slots: Vec<u32>,
    decode: Vec<BlockWork>,
    many: Vec<BlockWork>,
}

/// Of each cache block that is named, whether a row of the batch goes there: a sequence may read what another computes
/// beside it.
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

fn paged_work(rows: &PagedRows, cut: PagedCut) -> PagedWork {
    let PagedCut { group, step, decode, batch } = cut;
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
pub(super) fn paged(cuda: &Cuda, rows: &PagedRows, cut: PagedCut) -> Result<Arc<Paged>> {
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

/// As [`paged`], for one new token a sequence. As much work as for a full batch: what is missing does nothing.
fn steady(cuda: &Cuda, tables: &mut Tables, rows: &PagedRows, cut: PagedCut) -> Result<Arc<Paged>> {
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

/// Puts the rows of a batch that only decodes into the lists of its size; a number that changes when any list moved.
pub(crate) fn stage(cuda: &Cuda, rows: &PagedRows, batch: usize) -> Result<u64> {
    let mut tables = lock(&cuda.tables);
    let cuts: Vec<PagedCut> =
        tables.steady.iter().map(|s| s.key.cut).filter(|cut| cut.batch == batch).collect();
    for cut in cuts {
        steady(cuda, &mut tables, rows, cut)?;
    }
    // The largest number of those of this size: only its own moves make its graphs void.
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
            // Rows 16 r.. see keys up to their last token; the card counts all of a full tile.
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
        let work = paged_work(&rows, PagedCut { group: 4, step: 64, decode: true, batch: 43 });
        assert_eq!(work.blocks, [5, 3, 0, 7], "only blocks that are read");
        assert_eq!((work.slots[0], work.slots[1], work.slots[41]), (u32::MAX, 3 * 64, 7 * 64 + 5));
        let only = BlockWork { row: 1, count: 1, position: 64, blocks: 0, first: 0, settled: 1 };
        assert_eq!(work.decode, [only]);
        let firsts: Vec<i32> = work.many.iter().map(|w| w.first).collect();
        assert_eq!(firsts, [128, 64, 0]);
        assert!(work.many.iter().all(|w| (w.row, w.count, w.position, w.blocks) == (2, 40, 30, 2)));
        let all = paged_work(&rows, PagedCut { group: 4, step: 64, decode: false, batch: 43 });
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
        // The second reads block 4 in full, which the first fills with its last token now.
        let rows = PagedRows { sequences: vec![sequence(0, 127, &[2, 4]), sequence(1, 130, &[2, 4, 5])] };
        let work = paged_work(&rows, PagedCut { group: 1, step: 64, decode: true, batch: 2 });
        let settled = |row: i32| work.decode.iter().find(|w| w.row == row).map(|w| w.settled);
        assert_eq!((settled(0), settled(1)), (Some(1), Some(1)));
    }

    #[test]
    #[should_panic(expected = "two rows go to one place")]
    fn sequences_do_not_write_over_each_other() {
        let sequence = |row| PagedSequence { row, count: 2, position: 0, blocks: vec![4] };
        paged_work(
            &PagedRows { sequences: vec![sequence(0), sequence(2)] },
            PagedCut { group: 1, step: 64, decode: true, batch: 4 },
        );
    }
}
