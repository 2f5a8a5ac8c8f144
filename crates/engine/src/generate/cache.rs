//! Paged KV cache: blocks of a fixed number of tokens, reference counts, copy on write, prefix caching.
//!
//! A full block is indexed by its tokens and its parent block, so that a later sequence with the same prefix finds it.
//! Unreferenced blocks stay in the prefix index until their memory is needed; the least recently used is evicted first.

use crate::model::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::Heads;
use ferrl_kernels::{Backend, Buffer, Purpose};
use std::collections::{BTreeMap, HashMap};

/// Sizes of the cache and of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes of keys and values over all layers.
    pub bytes: usize,
    /// Maximum number of prompt tokens per step (chunked prefill).
    pub max_batch_tokens: usize,
    /// Maximum number of concurrent sequences.
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

/// The block table of a sequence.
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
    /// Key in `idle` while unreferenced.
    since: u64,
}

/// An entry of the prefix index.
struct CacheEntry {
    key: u64,
    serial: u64,
    /// Serial of the parent block; 0 for a sequence's first. Serials are never reused.
    parent: u64,
    ids: Vec<u32>,
}

pub(super) struct KvCache {
    /// Tokens per block.
    pub size: usize,
    /// Bytes per block.
    pub block_bytes: usize,
    /// One buffer per layer.
    pub layers: Vec<Buffer>,
    /// Number of copy-on-write copies.
    pub copies: u64,
    heads: Heads,
    /// Copies (from, to) to make before the next forward pass.
    pending: Vec<(u32, u32)>,
    blocks: Vec<CacheBlock>,
    free: Vec<u32>,
    idle: BTreeMap<u64, u32>,
    index: HashMap<u64, u32>,
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
            index: HashMap::new(),
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
    /// Blocks needed for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size)
    }

    /// References the cached prefix of `ids`, at most all but the last token.
    pub fn find(&mut self, ids: &[u32]) -> BlockTable {
        let mut table = BlockTable::default();
        let mut parent = 0;
        for part in ids[..ids.len().saturating_sub(1)].chunks_exact(self.size) {
            let Some((block, serial)) = self.lookup(parent, part) else { break };
            self.take(block);
            table.blocks.push(block);
            table.chain.push(serial);
            parent = serial;
        }
        table
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
        let copied = table.blocks.get(from / self.size).is_some_and(|&b| self.blocks[b as usize].refs > 1);
        self.blocks_for(to).saturating_sub(table.blocks.len()) + usize::from(copied)
    }

    /// Makes all pending copies, in one operation.
    pub fn copy(&mut self, backend: &dyn Backend) -> Result<()> {
        let pairs = std::mem::take(&mut self.pending);
        self.copy_pairs(backend, &pairs)
    }

    /// The pending copies (from, to).
    pub fn copies_due(&self) -> &[(u32, u32)] {
        &self.pending
    }

    /// Makes these copies.
    pub fn copy_pairs(&mut self, backend: &dyn Backend, pairs: &[(u32, u32)]) -> Result<()> {
        if pairs.is_empty() {
            return Ok(());
        }
        backend.cache_copies(self.heads, pairs, &mut self.layers)
    }

    /// Makes positions `from..to` of a sequence writable (after the next [`KvCache::copy`]); `false` if blocks run out, in which
    /// case it may be called again.
    pub fn reserve(
        &mut self,
        backend: &dyn Backend,
        table: &mut BlockTable,
        from: usize,
        to: usize,
    ) -> Result<bool> {
        if let Some(&block) = table.blocks.get(from / self.size) {
            if self.blocks[block as usize].refs > 1 {
                let Some(own) = self.allocate() else { return Ok(false) };
                // The block may have been freed and reallocated while a copy from or to it is still pending.
                if self.pending.iter().any(|&(from, to)| to == block || to == own || from == own) {
                    self.copy(backend)?;
                }
                self.pending.push((block, own));
                self.copies += 1;
                table.blocks[from / self.size] = own;
                self.drop_ref(block);
            } else {
                self.forget(block);
            }
            table.chain.truncate(from / self.size);
        }
        while table.blocks.len() < self.blocks_for(to) {
            let Some(block) = self.allocate() else { return Ok(false) };
            table.blocks.push(block);
        }
        Ok(true)
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
                None => {
                    let key = hash(parent, part);
                    if self.index.contains_key(&key) {
                        return; // hash collision: this block is not indexed
                    }
                    self.serial += 1;
                    let block = table.blocks[i];
                    let entry = CacheEntry { key, serial: self.serial, parent, ids: part.to_vec() };
                    self.blocks[block as usize].entry = Some(entry);
                    self.index.insert(key, block);
                    self.serial
                }
            };
            table.chain.push(serial);
        }
    }

    /// Frees a sequence's blocks.
    pub fn release(&mut self, table: &mut BlockTable) {
        table.chain.clear();
        // Last first: a sequence's tail is evicted before its beginning.
        while let Some(block) = table.blocks.pop() {
            self.drop_ref(block);
        }
    }

    /// Clears the prefix index.
    pub fn forget_all(&mut self) {
        self.index.clear();
        self.blocks.iter_mut().for_each(|b| b.entry = None);
        self.free.extend(std::mem::take(&mut self.idle).into_values());
    }

    fn lookup(&self, parent: u64, ids: &[u32]) -> Option<(u32, u64)> {
        let &block = self.index.get(&hash(parent, ids))?;
        let entry = self.blocks[block as usize].entry.as_ref()?;
        (entry.parent == parent && entry.ids == ids).then_some((block, entry.serial))
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
        if b.entry.is_some() {
            self.clock += 1;
            b.since = self.clock;
            self.idle.insert(self.clock, block);
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

/// FNV-1a over the parent's serial and the token ids.
fn hash(parent: u64, ids: &[u32]) -> u64 {
    let mix = |h: u64, word: u64| (h ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    ids.iter().fold(mix(0xcbf2_9ce4_8422_2325, parent), |h, &id| mix(h, u64::from(id)))
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
        let mut most = 0;
        for i in 0..4000u32 {
            let [what, which, ..] = ferrl_kernels::philox::philox4x32([i, 0, 0, 0], [7, 0]);
            let at = which as usize % tables.len().max(1);
            match what % 4 {
                0 => {
                    let mut table = BlockTable::default();
                    if cache.reserve(b, &mut table, 0, 1).unwrap() {
                        tables.push(table);
                    }
                }
                1 if !tables.is_empty() => {
                    let shared = cache.share(&tables[at], 1);
                    tables.push(shared);
                }
                2 if !tables.is_empty() => {
                    cache.reserve(b, &mut tables[at], 0, 1).unwrap();
                }
                3 if !tables.is_empty() => cache.release(&mut tables.swap_remove(at)),
                _ => {}
            }
            most = most.max(cache.pending.len());
            for (n, &(_, to)) in cache.pending.iter().enumerate() {
                let others = cache.pending.iter().enumerate().filter(|&(m, _)| m != n);
                assert!(cache.pending.iter().all(|&(from, _)| from != to), "{i}: {:?}", cache.pending);
                assert!({ others }.all(|(_, &(_, other))| other != to), "{i}: {:?}", cache.pending);
            }
        }
        assert!(most >= 2, "copies do wait");
    }

    #[test]
    fn a_hash_that_lies_is_not_believed() {
        let model = model();
        let mut cache = KvCache::new(&model, 1 << 20).unwrap();
        let n = cache.size;
        let (one, other) = (vec![1; 2 * n + 1], vec![2; 2 * n + 1]);
        let mut table = BlockTable::default();
        assert!(cache.reserve(&*model.backend, &mut table, 0, one.len()).unwrap());
        cache.publish(&mut table, &one, one.len());
        let mut found = cache.find(&one);
        assert_eq!(found.blocks, table.blocks[..2]);
        cache.release(&mut found);
        // Other tokens under a hash of ours, and our tokens after another block.
        cache.index.insert(hash(0, &other[..n]), table.blocks[0]);
        cache.index.insert(hash(0, &one[..n]), table.blocks[1]);
        assert!(cache.find(&other).blocks.is_empty() && cache.find(&one).blocks.is_empty());
        cache.release(&mut table);
        assert_eq!(cache.available(), cache.total());
    }
}
