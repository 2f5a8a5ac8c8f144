//! The paged KV cache: blocks of 32 tokens.
//!
//! Per key head, a block holds the keys as `[head_dim][32 tokens]` and the values as panels `[32 tokens][32]`, so that both are
//! right operands of the register tile without repacking.

use super::forward::attend;
use super::{BLOCK, Storage, panels, transpose};
use crate::backend::{Attention, CacheOps, Heads, PagedRows};
use crate::cpu::Cpu;
use crate::cpu::matmul::tile::PANEL;
use crate::cpu::pool::Disjoint;
use crate::{Buffer, DType, Result, shapes};

/// Below this many new elements the work is not distributed to threads.
const SMALL: usize = 16 * 1024;

/// Elements of one head in a block.
pub(super) fn head_len(heads: Heads) -> usize {
    heads.head_dim * BLOCK + panels(heads) * BLOCK * PANEL
}

/// Elements of a block.
pub(in crate::cpu) fn block_len(heads: Heads) -> usize {
    heads.kv_heads * head_len(heads)
}

impl CacheOps for Cpu {
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        shapes::cache_write(self, heads, qkv, rows, cache)?;
        match qkv.dtype() {
            DType::F32 => write::<f32>(self, heads, Storage::of(qkv), rows, Storage::of_mut(cache)),
            _ => write::<u16>(self, heads, Storage::of(qkv), rows, Storage::of_mut(cache)),
        }
        Ok(())
    }
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        shapes::cache_copies(self, heads, pairs, layers)?;
        for layer in layers {
            pairs.iter().try_for_each(|&(from, to)| cache_copy(heads, from, to, layer))?;
        }
        Ok(())
    }
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_paged(self, &op, qkv, rows, cache, out)?;
        let width = op.heads.qkv_width();
        match qkv.dtype() {
            DType::F32 => attend::<f32>(self, op, (qkv, width), (rows, cache), out, None),
            _ => attend::<u16>(self, op, (qkv, width), (rows, cache), out, None),
        }
        Ok(())
    }
}

/// New tokens for one block.
struct BlockPiece {
    row: usize,
    slot: usize,
    count: usize,
    block: usize,
}

pub(super) fn write<T: Storage + Default>(
    cpu: &Cpu,
    heads: Heads,
    qkv: &[T],
    rows: &PagedRows,
    cache: &mut [T],
) {
    let (width, block_len) = (heads.qkv_width(), block_len(heads));
    let mut pieces = Vec::new();
    for s in &rows.sequences {
        let mut done = 0;
        while done < s.count {
            let position = s.position + done;
            let slot = position % BLOCK;
            let count = (BLOCK - slot).min(s.count - done);
            let block = s.blocks[position / BLOCK] as usize;
            assert!((block + 1) * block_len <= cache.len(), "block {block} is not in the cache");
            pieces.push(BlockPiece { row: s.row + done, slot, count, block });
            done += count;
        }
    }
    let mut blocks: Vec<usize> = pieces.iter().map(|p| p.block).collect();
    blocks.sort_unstable();
    assert!(blocks.windows(2).all(|w| w[0] < w[1]), "two sequences write to one block");
    let new: usize = rows.sequences.iter().map(|s| s.count).sum();
    let cache = Disjoint::new(cache);
    let task = |i: usize| {
        let p = &pieces[i];
        // SAFETY: in bounds, and each block is written by one task (both asserted above).
        let block = unsafe { cache.part(p.block * block_len, block_len) };
        for h in 0..heads.kv_heads {
            let at = |r: usize| (p.row + r) * width + (heads.heads + h) * heads.head_dim;
            let (k, v) = block[h * head_len(heads)..][..head_len(heads)].split_at_mut(heads.head_dim * BLOCK);
            transpose(qkv, at, p.count, heads.head_dim, &mut k[p.slot..]);
            for r in 0..p.count {
                let row = &qkv[at(r) + heads.kv_heads * heads.head_dim..][..heads.head_dim];
                for (panel, part) in row.chunks(PANEL).enumerate() {
                    let to = &mut v[(panel * BLOCK + p.slot + r) * PANEL..][..PANEL];
                    to[..part.len()].copy_from_slice(part);
                    to[part.len()..].fill(T::default());
                }
            }
        }
    };
    if new * width <= SMALL { (0..pieces.len()).for_each(task) } else { cpu.pool.run(pieces.len(), task) }
}

/// Copies block `from` to block `to`.
fn cache_copy(heads: Heads, from: u32, to: u32, cache: &mut Buffer) -> Result<()> {
    let len = block_len(heads);
    let (from, to) = (from as usize * len, to as usize * len);
    match cache.dtype() {
        DType::F32 => <f32 as Storage>::of_mut(cache).copy_within(from..from + len, to),
        _ => <u16 as Storage>::of_mut(cache).copy_within(from..from + len, to),
    }
    Ok(())
}
