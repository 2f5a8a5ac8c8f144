//! Paged KV cache: blocks of a fixed number of tokens, reference counts, copy on write, prefix caching.
//!
//! A full block is indexed by its tokens and its parent block, so that a later sequence with the same prefix finds it. The last,
//! partly filled block of a sequence is indexed when the sequence ends. A prefix that ends inside a block references that block, and
//! copies it when it is continued. Unreferenced blocks stay in the prefix index until their memory is needed: partly filled blocks are
//! evicted first, then the least recently used.

use crate::model::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::Heads;
use ferrl_kernels::{Backend, Buffer, Purpose};
use std::collections::BTreeMap;

/// Sizes of the cache and of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes of keys and values over all layers.
    pub bytes: usize,
    /// Maximum number of prompt tokens per step (chunked prefill).
    pub max_batch_tokens: usize,
    pub max_sequences: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions { bytes: 64 << 20, max_batch_tokens: 2048, max_sequences: 256 }
    }
}

impl CacheOptions {
    /// A cache for `sequences` concurrent sequences of `tokens` tokens each.
    pub fn fit(model: &Model, sequences: usize, tokens: usize) -> Self {
        let blocks = sequences * (tokens.div_ceil(model.backend.block_tokens()) + 1);
        CacheOptions {
            bytes: blocks * block_bytes(model),
            max_batch_tokens: model.backend.busy_tokens(),
            max_sequences: sequences,
        }
    }
}

fn heads(model: &Model) -> Heads {
    let c = &model.config;
    model.own_heads(Heads { heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim })
}

/// One buffer per layer for `blocks` blocks.
fn layers(model: &Model, heads: Heads, blocks: usize) -> Result<Vec<Buffer>> {
    let len = model.backend.cache_len(heads, blocks);
    let _cache = Purpose::Cache.on(&model.backend);
    (0..model.config.layers).map(|_| model.backend.alloc(model.dtype, len)).collect()
}

/// Bytes of one block over all layers.
fn block_bytes(model: &Model) -> usize {
    model.backend.cache_len(heads(model), 1) * model.config.layers * model.dtype.size()
}

#[derive(Default)]
pub(super) struct BlockTable {
    pub blocks: Vec<u32>,
    /// Serials of the leading blocks that are in the prefix index.
    chain: Vec<u64>,
}

#[derive(Default)]
struct CacheBlock {
    refs: u32,
    entry: Option<CacheEntry>,
    /// Key in `idle` while unreferenced: whether it is full, and when it was released.
    since: (bool, u64),
}

/// Key of an entry of the prefix index: the serial of the parent block (0 for a sequence's first), and the block's tokens.
type CacheKey = (u64, Vec<u32>);

struct CacheEntry {
    key: CacheKey,
    /// Serials are never reused.
    serial: u64,
    /// Whether its keys and values were computed before the step that is being scheduled, so that the block can be copied.
    computed: bool,
}

pub(super) struct KvCache {
    /// Tokens per block.
    pub size: usize,
    pub block_bytes: usize,
    pub layers: Vec<Buffer>,
    /// Number of copy-on-write copies.
    pub copies: u64,
    heads: Heads,
    /// Copies (from, to) to make before the next forward pass.
    pending: Vec<Vec<(u32, u32)>>,
    blocks: Vec<CacheBlock>,
    free: Vec<u32>,
    idle: BTreeMap<(bool, u64), u32>,
    /// Ordered, so that the longest common prefix is next to where a prefix would be inserted.
    index: BTreeMap<CacheKey, u32>,
    serial: u64,
    clock: u64,
}

impl KvCache {
    pub fn new(model: &Model, bytes: usize) -> Result<Self> {
        let (heads, block_bytes) = (heads(model), block_bytes(model));
        let count = bytes / block_bytes.max(1);
        if count == 0 {
            return Err(Error::usage(format!("{bytes} bytes of cache hold no block of {block_bytes} bytes"))
                .fix("a larger cache budget"));
        }
        // Allocated first: a size beyond the device's memory must be an error here, not an abort in allocating the block list.
        let layers = layers(model, heads, count)?;
        Ok(KvCache {
            size: model.backend.block_tokens(),
            block_bytes,
            layers,
            copies: 0,
            heads,
            pending: Vec::new(),
            blocks: (0..count).map(|_| CacheBlock::default()).collect(),
            free: (0..count as u32).rev().collect(),
            idle: BTreeMap::new(),
            index: BTreeMap::new(),
            serial: 0,
            clock: 0,
        })
    }

    /// Allocates the layers' buffers if they were freed.
    pub fn alloc_layers(&mut self, model: &Model) -> Result<()> {
        if self.layers.is_empty() {
            self.layers = layers(model, self.heads, self.blocks.len())?;
        }
        Ok(())
    }

    /// Frees the buffers until [`KvCache::alloc_layers`] and clears the prefix index. No sequence may hold a block.
    pub fn free_layers(&mut self) {
        self.forget_all();
        self.layers.clear();
    }

    /// Number of blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }
    /// Blocks that can be allocated, including evictable ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }
    /// Unreferenced blocks in the prefix index.
    pub fn cached(&self) -> usize {
        self.idle.len()
    }
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size)
    }

    /// References the longest cached prefix of `ids`, at most all but the last token. Returns its length in tokens as well.
    pub fn find(&mut self, ids: &[u32]) -> (BlockTable, usize) {
        let mut table = BlockTable::default();
        let (mut parent, mut tokens) = (0, 0);
        let last = ids.len().saturating_sub(1);
        for part in ids[..last].chunks_exact(self.size) {
            let Some((block, serial)) = self.lookup(parent, part) else { break };
            self.take(block);
            table.blocks.push(block);
            table.chain.push(serial);
            (parent, tokens) = (serial, tokens + self.size);
        }
        if let Some((block, common)) = self.longest_common_prefix(parent, &ids[tokens..last]) {
            self.take(block);
            table.blocks.push(block);
            tokens += common;
        }
        (table, tokens)
    }

    /// The block after `parent` whose tokens begin with the most tokens of `ids`, and how many these are.
    fn longest_common_prefix(&self, parent: u64, ids: &[u32]) -> Option<(u32, usize)> {
        let key = (parent, ids[..ids.len().min(self.size)].to_vec());
        let neighbours = [self.index.range(..&key).next_back(), self.index.range(&key..).next()];
        let common = |((before, own), &block): (&CacheKey, &u32)| {
            let common = own.iter().zip(ids).take_while(|(a, b)| a == b).count();
            let entry = self.blocks[block as usize].entry.as_ref();
            (*before == parent && common > 0 && entry.is_some_and(|e| e.computed)).then_some((block, common))
        };
        neighbours.into_iter().flatten().filter_map(common).max_by_key(|&(_, common)| common)
    }

    /// A table that shares the blocks of the first `tokens` tokens.
    pub fn share(&mut self, table: &BlockTable, tokens: usize) -> BlockTable {
        let blocks = table.blocks[..self.blocks_for(tokens)].to_vec();
        blocks.iter().for_each(|&b| self.take(b));
        let whole = (tokens / self.size).min(table.chain.len());
        BlockTable { blocks, chain: table.chain[..whole].to_vec() }
    }

    /// Number of blocks that [`KvCache::reserve`] would allocate.
    pub fn missing(&self, table: &BlockTable, from: usize, to: usize) -> usize {
        let copied = table.blocks.get(from / self.size).is_some_and(|&b| self.is_shared(b));
        self.blocks_for(to).saturating_sub(table.blocks.len()) + usize::from(copied)
    }

    /// Makes the pending copies.
    pub fn copy(&mut self, backend: &dyn Backend) -> Result<()> {
        let groups = std::mem::take(&mut self.pending);
        self.copy_groups(backend, &groups)
    }

    /// The pending copies (from, to) in groups, each of which is made at once after the one before.
    pub fn copies_due(&self) -> &[Vec<(u32, u32)>] {
        &self.pending
    }

    pub fn copy_groups(&mut self, backend: &dyn Backend, groups: &[Vec<(u32, u32)>]) -> Result<()> {
        groups.iter().try_for_each(|pairs| backend.cache_copies(self.heads, pairs, &mut self.layers))
    }

    /// Adds a copy to the last group, or begins another if one of that group must be made first: blocks may have been freed and
    /// reallocated in the meantime.
    fn add_copy(&mut self, block: u32, own: u32) {
        let conflicts = |&(from, to): &(u32, u32)| to == block || to == own || from == own;
        match self.pending.last_mut().filter(|group| !group.iter().any(conflicts)) {
            Some(group) => group.push((block, own)),
            None => self.pending.push(vec![(block, own)]),
        }
        self.copies += 1;
    }

    /// Makes positions `from..to` of a sequence writable (after the next [`KvCache::copy`]); `false` if blocks run out, in which
    /// case it may be called again.
    pub fn reserve(&mut self, table: &mut BlockTable, from: usize, to: usize) -> bool {
        if let Some(&block) = table.blocks.get(from / self.size) {
            match self.is_shared(block).then(|| self.allocate()) {
                Some(Some(own)) => {
                    self.add_copy(block, own);
                    table.blocks[from / self.size] = own;
                    self.drop_ref(block);
                }
                Some(None) if self.blocks[block as usize].refs > 1 => return false,
                _ => self.forget(block),
            }
            table.chain.truncate(from / self.size);
        }
        while table.blocks.len() < self.blocks_for(to) {
            let Some(block) = self.allocate() else { return false };
            table.blocks.push(block);
        }
        true
    }

    /// Whether another sequence or the prefix index uses it, so that it must be copied before it is written.
    fn is_shared(&self, block: u32) -> bool {
        let b = &self.blocks[block as usize];
        b.refs > 1 || b.entry.is_some()
    }

    /// Adds a sequence's full blocks among its first `tokens` tokens, which are computed at the latest in this step, to the
    /// prefix index.
    pub fn publish(&mut self, table: &mut BlockTable, ids: &[u32], tokens: usize) {
        while table.chain.len() < tokens / self.size {
            let i = table.chain.len();
            let parent = table.chain.last().copied().unwrap_or(0);
            let part = &ids[i * self.size..(i + 1) * self.size];
            let serial = match self.lookup(parent, part) {
                Some((_, serial)) => serial, // computed twice concurrently: the first one is indexed
                None => self.insert(table.blocks[i], (parent, part.to_vec())),
            };
            table.chain.push(serial);
        }
    }

    /// Frees a sequence's blocks. Its first `tokens` tokens are computed; the last block of these is indexed even if partly filled.
    pub fn release(&mut self, table: &mut BlockTable, ids: &[u32], tokens: usize) {
        let full = tokens / self.size;
        if table.chain.len() >= full
            && let Some(&block) = table.blocks.get(full)
        {
            let parent = full.checked_sub(1).map_or(0, |last| table.chain[last]);
            self.keep_partial(block, (parent, ids[full * self.size..tokens].to_vec()));
        }
        for &block in table.blocks.iter().take(full) {
            if let Some(entry) = &mut self.blocks[block as usize].entry {
                entry.computed = true;
            }
        }
        table.chain.clear();
        // Last first: a sequence's tail is evicted before its beginning.
        while let Some(block) = table.blocks.pop() {
            self.drop_ref(block);
        }
    }

    /// Indexes a partly filled block, unless an indexed block begins with its tokens.
    fn keep_partial(&mut self, block: u32, key: CacheKey) {
        let known = self.index.range(&key..).next();
        let known = known.is_some_and(|((parent, ids), _)| *parent == key.0 && ids.starts_with(&key.1));
        if !key.1.is_empty() && !known && !self.is_shared(block) {
            self.insert(block, key);
            self.blocks[block as usize].entry.iter_mut().for_each(|e| e.computed = true);
        }
    }

    /// Indexes a block and returns its serial.
    fn insert(&mut self, block: u32, key: CacheKey) -> u64 {
        self.serial += 1;
        self.index.insert(key.clone(), block);
        self.blocks[block as usize].entry = Some(CacheEntry { key, serial: self.serial, computed: false });
        self.serial
    }

    /// Clears the prefix index.
    pub fn forget_all(&mut self) {
        self.pending.clear();
        self.index.clear();
        self.blocks.iter_mut().for_each(|b| b.entry = None);
        self.free.extend(std::mem::take(&mut self.idle).into_values());
    }

    fn lookup(&self, parent: u64, ids: &[u32]) -> Option<(u32, u64)> {
        let &block = self.index.get(&(parent, ids.to_vec()))?;
        let entry = self.blocks[block as usize].entry.as_ref()?;
        Some((block, entry.serial))
    }

    fn take(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        if b.refs == 0 {
            self.idle.remove(&b.since);
        }
        b.refs += 1;
    }

    fn drop_ref(&mut self, block: u32) {
        let b = &mut self.blocks[block as usize];
        b.refs -= 1;
        if b.refs > 0 {
            return;
        }
        if let Some(entry) = &b.entry {
            self.clock += 1;
            b.since = (entry.key.1.len() == self.size, self.clock);
            self.idle.insert(b.since, block);
        } else {
            self.free.push(block);
        }
    }

    fn allocate(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                self.forget(block);
                block
            }
        };
        self.blocks[block as usize].refs = 1;
        Some(block)
    }

    fn forget(&mut self, block: u32) {
        if let Some(entry) = self.blocks[block as usize].entry.take() {
            self.index.remove(&entry.key);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::checkpoint::InitOptions;
    use crate::model::Options;

    fn model() -> Model {
        let mut init = InitOptions::new("llama");
        (init.vocab, init.hidden, init.layers) = (8, 8, 1);
        let backend = ferrl_kernels::open("cpu", Some(1)).unwrap();
        Model::random(backend, &init, Options::default()).unwrap()
    }

    /// A GPU makes all copies of a call concurrently.
    #[test]
    fn copies_that_wait_for_each_other_are_not_made_at_once() {
        let model = model();
        let b = &*model.backend;
        let mut cache = KvCache::new(&model, 6 * block_bytes(&model)).unwrap();
        let mut tables: Vec<BlockTable> = Vec::new();
        let (mut most, mut groups) = (0, 0);
        for i in 0..4000u32 {
            let [what, which, ..] = ferrl_kernels::philox::philox4x32([i, 0, 0, 0], [7, 0]);
            let at = which as usize % tables.len().max(1);
            match what % 4 {
                0 => {
                    let mut table = BlockTable::default();
                    if cache.reserve(&mut table, 0, 1) {
                        tables.push(table);
                    }
                }
                1 if !tables.is_empty() => {
                    let shared = cache.share(&tables[at], 1);
                    tables.push(shared);
                }
                2 if !tables.is_empty() => {
                    cache.reserve(&mut tables[at], 0, 1);
                }
                3 if !tables.is_empty() => cache.release(&mut tables.swap_remove(at), &[i % 8], 1),
                _ => {}
            }
            for group in &cache.pending {
                most = most.max(group.len());
                for (n, &(_, to)) in group.iter().enumerate() {
                    let others = group.iter().enumerate().filter(|&(m, _)| m != n);
                    assert!(group.iter().all(|&(from, _)| from != to), "{i}: {group:?}");
                    assert!({ others }.all(|(_, &(_, other))| other != to), "{i}: {group:?}");
                }
            }
            groups = groups.max(cache.pending.len());
            if which % 64 == 0 {
                cache.copy(b).unwrap();
            }
        }
        assert!(groups >= 2, "some copies must wait for others");
        assert!(most >= 2, "copies do wait");
    }

    #[test]
    fn a_prefix_that_ends_inside_a_block_is_found_and_copied_when_it_is_continued() {
        let model = model();
        let b = &*model.backend;
        let mut cache = KvCache::new(&model, 8 * block_bytes(&model)).unwrap();
        let n = cache.size as u32;
        let long: Vec<u32> = (0..2 * n + n / 2).collect();
        let mut table = BlockTable::default();
        assert!(cache.reserve(&mut table, 0, long.len()));
        cache.publish(&mut table, &long, long.len());
        // Blocks that this step computes are shared whole, and not copied from.
        let half = &long[..long.len() - n as usize];
        let (mut early, tokens) = cache.find(half);
        assert_eq!((early.blocks.len(), tokens), (1, n as usize));
        cache.release(&mut early, half, tokens);
        cache.release(&mut table, &long, long.len());
        assert_eq!((cache.available(), cache.cached()), (cache.total(), 3));

        // To the last token but one, in a full block and in the one that the sequence has left behind.
        for len in [half.len(), long.len()] {
            let (mut found, tokens) = cache.find(&long[..len]);
            assert_eq!(tokens, len - 1);
            let shared = found.blocks.clone();
            assert_eq!(cache.missing(&found, tokens, len), 1);
            assert!(cache.reserve(&mut found, tokens, len));
            assert_eq!(cache.copies_due(), [[(shared[shared.len() - 1], found.blocks[shared.len() - 1])]]);
            cache.copy(b).unwrap();
            let (mut again, same) = cache.find(&long[..len]);
            assert_eq!((again.blocks.clone(), same), (shared, tokens), "what it held is still there");
            cache.release(&mut again, &long, same);
            cache.release(&mut found, &long[..len], len);
        }

        // Other tokens, and the same tokens behind another block.
        let other: Vec<u32> = [long[1..].to_vec(), vec![0]].concat();
        assert_eq!(cache.find(&other).1, 0);
        let swapped = [&long[n as usize..2 * n as usize], &long[..n as usize]].concat();
        assert_eq!(cache.find(&swapped).1, 0);
        let forks: Vec<u32> = [&long[..n as usize + 3], &[7, 7]].concat();
        let (mut found, tokens) = cache.find(&forks);
        assert_eq!(tokens, n as usize + 3);
        cache.release(&mut found, &forks, tokens);
        assert_eq!(cache.available(), cache.total());
    }

    #[test]
    fn a_prefix_continues_in_its_own_block_where_there_is_none_for_a_copy() {
        let model = model();
        let mut cache = KvCache::new(&model, block_bytes(&model)).unwrap();
        let (ids, mut table) = (vec![1, 2, 3, 4], BlockTable::default());
        assert!(cache.reserve(&mut table, 0, 3));
        cache.release(&mut table, &ids, 3);
        let (mut table, tokens) = cache.find(&ids);
        assert_eq!((tokens, cache.available()), (3, 0));
        assert!(cache.reserve(&mut table, 3, 4));
        assert!(cache.copies_due().is_empty());
        assert_eq!(cache.find(&ids).1, 0, "it is being written");
        cache.release(&mut table, &ids, 4);
        assert_eq!(cache.find(&[1, 2, 3, 4, 5]).1, 4);
    }
}
