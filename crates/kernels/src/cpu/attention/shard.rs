//! Attention of a row shard of packed sequences, for context parallelism.
//!
//! Forward is paged attention of new tokens: a row's arithmetic depends only on its position. Backward splits no sum either: the
//! gradient of a query sums over keys, those of a key and a value over queries. So some tasks compute the shard's query
//! gradients, reading all keys, and others its key and value gradients, reading all queries. Both recompute the scores.

use super::backward::{
    BackwardOperands, BackwardTask, block, query_rows, seen_blocks, spans, store_keys, task_room,
};
use super::forward::attend;
use super::paged::write;
use super::{BLOCK, Storage, with_scratch};
use crate::backend::{
    Attention, AttentionSaved, CacheOps, Heads, MemoryOps, PagedRows, PagedSequence, RowShard, ShardPiece,
};
use crate::cpu::Cpu;
use crate::cpu::memory::{f32s, f32s_mut};
use crate::cpu::pool::Disjoint;
use crate::{Buffer, DType, Result};
use std::ops::Range;

/// Maximum tokens per task.
const TOKENS: usize = 512;

pub fn attention_shard(
    cpu: &Cpu,
    op: Attention,
    shard: RowShard<'_>,
    (q, kv): (&Buffer, &Buffer),
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    match q.dtype() {
        DType::F32 => forward::<f32>(cpu, op, shard, (q, kv), out, lse),
        _ => forward::<u16>(cpu, op, shard, (q, kv), out, lse),
    }
}

fn forward<T: Storage + Default>(
    cpu: &Cpu,
    op: Attention,
    shard: RowShard<'_>,
    (q, kv): (&Buffer, &Buffer),
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let mut blocks = 0u32..;
    let all = shard.segments.iter().map(|rows| PagedSequence {
        row: rows.start,
        count: rows.len(),
        position: 0,
        blocks: blocks.by_ref().take(rows.len().div_ceil(BLOCK)).collect(),
    });
    let all = PagedRows { sequences: all.collect() };
    let own = shard.pieces().into_iter().map(|piece| PagedSequence {
        row: piece.row,
        count: piece.positions.len(),
        position: piece.positions.start,
        blocks: all.sequences[piece.sequence].blocks.clone(),
    });
    let own = PagedRows { sequences: own.collect() };
    let mut cache = cpu.alloc(kv.dtype(), cpu.cache_len(op.heads, blocks.start as usize))?;
    // The rows contain no queries.
    write::<T>(cpu, Heads { heads: 0, ..op.heads }, T::of(kv), &all, T::of_mut(&mut cache));
    let lse = Some(Disjoint::new(f32s_mut(lse)));
    attend::<T>(cpu, op, (q, op.heads.out_width()), (&own, &cache), out, lse);
    Ok(())
}

pub fn attention_shard_backward(
    cpu: &Cpu,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    shard: RowShard<'_>,
    dqkv: &mut Buffer,
) -> Result<()> {
    match dqkv.dtype() {
        DType::F32 => backward::<f32>(cpu, op, saved, dout, shard, dqkv),
        _ => backward::<u16>(cpu, op, saved, dout, shard, dqkv),
    }
    Ok(())
}

/// Some of the shard's tokens, of one sequence and key head.
struct ShardTask {
    rows: Range<usize>,
    kv_head: usize,
    positions: Range<usize>,
    /// Row of `dqkv` of the first token.
    to: usize,
    /// Whether it computes gradients of keys and values rather than of queries.
    keys: bool,
}

fn tasks(op: &Attention, shard: RowShard<'_>) -> Vec<ShardTask> {
    let mut tasks = Vec::new();
    for ShardPiece { sequence, positions, row } in shard.pieces() {
        let starts = &shard.segments.starts;
        let rows = starts[sequence]..starts[sequence + 1];
        for start in positions.clone().step_by(TOKENS) {
            let own = start..(start + TOKENS).min(positions.end);
            let to = row + start - positions.start;
            for (kv_head, keys) in (0..op.heads.kv_heads).flat_map(|h| [(h, false), (h, true)]) {
                tasks.push(ShardTask { rows: rows.clone(), kv_head, positions: own.clone(), to, keys });
            }
        }
    }
    tasks
}

fn backward<T: Storage>(
    cpu: &Cpu,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    shard: RowShard<'_>,
    dqkv: &mut Buffer,
) {
    let tasks = tasks(&op, shard);
    let call = BackwardOperands {
        op,
        qkv: T::of(saved.qkv),
        out: T::of(saved.out),
        lse: f32s(saved.lse),
        dout: T::of(dout),
        dqkv: Disjoint::new(T::of_mut(dqkv)),
    };
    cpu.pool.run(tasks.len(), |i| match tasks[i].keys {
        true => keys(cpu, &call, &tasks[i]),
        false => queries(cpu, &call, &tasks[i]),
    });
}

fn queries<T: Storage>(cpu: &Cpu, call: &BackwardOperands<'_, T>, task: &ShardTask) {
    let blocks = seen_blocks(&call.op, &task.positions);
    let (rows, span, to) = (task.rows.clone(), task.positions.clone(), Some(task.to));
    with_scratch(task_room(call.op.heads, blocks.len()), |scratch| {
        let task = BackwardTask { rows, kv_head: task.kv_head, span, blocks, share: None, to };
        query_rows(cpu, call, &task, None, scratch);
    });
}

/// Contributions per query span, added in span order as in [`super::backward`].
fn keys<T: Storage>(cpu: &Cpu, call: &BackwardOperands<'_, T>, task: &ShardTask) {
    let (heads, own, len) = (call.op.heads, &task.positions, task.rows.len());
    let blocks = own.start / BLOCK..own.end.div_ceil(BLOCK);
    // Queries beyond the window do not attend to these keys.
    let last = call.op.window.map_or(len, |window| (own.end - 1).saturating_add(window).min(len));
    let room = 2 * block(heads) * blocks.len();
    let (fixed, alone) = (task_room(heads, blocks.len()), spans(len).count() == 1);
    with_scratch(fixed + 2 * room, |scratch| {
        let (scratch, sums) = scratch.split_at_mut(fixed);
        let (total, sums) = sums.split_at_mut(room);
        total.fill(0.0);
        for span in spans(len) {
            let span = span.start.max(blocks.start * BLOCK)..span.end.min(last);
            if span.is_empty() {
                continue;
            }
            let (rows, blocks) = (task.rows.clone(), blocks.clone());
            let part = BackwardTask { rows, kv_head: task.kv_head, span, blocks, share: None, to: None };
            let to = if alone { &mut *total } else { &mut *sums };
            to.fill(0.0);
            query_rows(cpu, call, &part, Some(to), scratch);
            if !alone {
                total.iter_mut().zip(&*sums).for_each(|(total, x)| *total += x);
            }
        }
        for b in blocks.clone() {
            let keys = own.start.max(b * BLOCK)..own.end.min((b + 1) * BLOCK);
            let sums = &total[(b - blocks.start) * 2 * block(heads)..];
            let to = task.to + keys.start - own.start;
            store_keys(cpu, call, task.kv_head, (to, keys.start - b * BLOCK..keys.end - b * BLOCK), sums);
        }
    });
}
