//! Keys and values in blocks of a fixed number of tokens: counted references, copy on write, shared prefixes.
//!
//! A full block is indexed by what its tokens are and which block they follow, so that a later sequence that
//! begins the same finds it. Unreferenced blocks stay in the prefix index until their memory is needed, oldest first.

use crate::model::Model;
use crate::{Error, Result};
use ferrl_kernels::backend::Heads;
use ferrl_kernels::{Backend, Buffer, Purpose};
use std::collections::{BTreeMap, HashMap};

/// Room for generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes of keys and values, over all layers.
    pub bytes: usize,
    /// Prompt tokens computed in one step at most; longer prompts take several steps.
    pub max_batch_tokens: usize,
    /// Sequences that run at the same time at most.
    pub max_sequences: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        CacheOptions { bytes: 64 << 20, max_batch_tokens: 2048, max_sequences: 256 }
    }
}

impl CacheOptions {
    /// Room for that many sequences of that many tokens at the same time.
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

/// A buffer of each layer for this many blocks.
fn layers(model: &Model, heads: Heads, blocks: usize) -> Result<Vec<Buffer>> {
    let len = model.backend.cache_len(heads, blocks);
    let _cache = Purpose::Cache.on(&model.backend);
    (0..model.config.layers).map(|_| model.backend.alloc(model.dtype, len)).collect()
}

/// Bytes of one block over all layers.
fn block_bytes(model: &Model) -> usize {
    model.backend.cache_len(heads(model), 1) * model.config.layers * model.dtype.size()
}

/// The blocks of one sequence, in order.
#[derive(Default)]
pub(super) struct BlockTable {
    pub blocks: Vec<u32>,
    /// Serial numbers of the leading blocks that are indexed.
    chain: Vec<u64>,
}

#[derive(Default)]
struct CacheBlock {
    refs: u32,
    entry: Option<CacheEntry>,
    /// Key in `idle` while it is unreferenced.
    since: u64,
}

/// What an indexed block holds.
struct CacheEntry {
    key: u64,
    serial: u64,
    /// Serial of the block before; 0 at the beginning of a sequence. Serials are never used again.
    parent: u64,
    ids: Vec<u32>,
}

pub(super) struct KvCache {
    /// Tokens of a block.
    pub size: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// One buffer a layer.
    pub layers: Vec<Buffer>,
    /// Blocks copied because a shared one was written.
    pub copies: u64,
    heads: Heads,
    /// Copies that have to be made before anything is computed.
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
        // First of all: a size that the device has no memory for is an error here, and an abort as a list of blocks.
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

    /// Allocates the buffers of all layers where there are none.
    pub fn alloc_layers(&mut self, model: &Model) -> Result<()> {
        if self.layers.is_empty() {
            self.layers = layers(model, self.heads, self.blocks.len())?;
        }
        Ok(())
    }

    /// Frees the buffers until [`KvCache::alloc_layers`], and forgets what they held. No sequence has a block.
    pub fn free_layers(&mut self) {
        self.forget_all();
        self.layers.clear();
    }

    /// Number of blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }
    /// Blocks that can be had.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }
    /// Unreferenced blocks that are still in the prefix index.
    pub fn cached(&self) -> usize {
        self.idle.len()
    }
    /// Blocks for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.size)
    }

    /// Refers to the blocks that hold the beginning of `ids`, always short of its last token.
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

    /// Blocks that [`KvCache::reserve`] would take.
    pub fn missing(&self, table: &BlockTable, from: usize, to: usize) -> usize {
        let copied = table.blocks.get(from / self.size).is_some_and(|&b| self.blocks[b as usize].refs > 1);
        self.blocks_for(to).saturating_sub(table.blocks.len()) + usize::from(copied)
    }

    /// Makes the copies that [`KvCache::reserve`] has asked for, of all sequences and layers at once.
    pub fn copy(&mut self, backend: &dyn Backend) -> Result<()> {
        let pairs = std::mem::take(&mut self.pending);
        self.copy_pairs(backend, &pairs)
    }

    /// Copies of blocks, from and to, that the next [`KvCache::copy`] makes.
    pub fn copies_due(&self) -> &[(u32, u32)] {
        &self.pending
    }

    /// Makes these.
    pub fn copy_pairs(&mut self, backend: &dyn Backend, pairs: &[(u32, u32)]) -> Result<()> {
        if pairs.is_empty() {
            return Ok(());
        }
        backend.cache_copies(self.heads, pairs, &mut self.layers)
    }

    /// Makes places `from..to` of a sequence writable, after the next [`KvCache::copy`]; `false` where blocks are short, and
    /// may be called again.
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
                // A block that was given back meanwhile may be in a copy that is still to be made.
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

    /// Makes the full blocks of a sequence whose first `tokens` tokens are (or will be, in this step) computed
    /// findable.
    pub fn publish(&mut self, table: &mut BlockTable, ids: &[u32], tokens: usize) {
        while table.chain.len() < tokens / self.size {
            let i = table.chain.len();
            let parent = table.chain.last().copied().unwrap_or(0);
            let part = &ids[i * self.size..(i + 1) * self.size];
            let serial = match self.lookup(parent, part) {
                Some((_, serial)) => serial, // computed twice concurrently: the first one counts
                None => {
                    let key = hash(parent, part);
                    if self.index.contains_key(&key) {
                        return; // two different blocks with one hash: this one stays private
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

    /// Gives all blocks back.
    pub fn release(&mut self, table: &mut BlockTable) {
        table.chain.clear();
        // Last first: the ends of sequences make room before their beginnings.
        while let Some(block) = table.blocks.pop() {
            self.drop_ref(block);
        }
    }

    /// Forgets what all blocks hold.
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

/// FNV-1a over words.
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

    /// A card makes all of them at the same time.
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
