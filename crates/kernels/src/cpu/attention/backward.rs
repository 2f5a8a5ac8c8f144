//! The backward pass, which recomputes the softmax weights from the stored log-sum-exp.
//!
//! A task computes, for a span of query positions of one sequence and key head, their gradients and their contribution to the
//! gradients of all keys and values they attend to. Short sequences are one span; contributions of a long one are added in span
//! order. Spans depend only on the length, so no sum depends on the number of threads.

use super::{
    BLOCK, Product, QueryRows, ROWS, STRIDE, Scoring, SeenKeys, Storage, TaskRows, cut, gather, matrix,
    multiply, panels, row_dots, scatter, scores, softmax_backward, transpose, with_scratch,
};
use crate::backend::{Attention, AttentionSaved, Heads, Segments};
use crate::cpu::Cpu;
use crate::cpu::matmul::tile::PANEL;
use crate::cpu::memory::{f32s, f32s_mut};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::Level;
use crate::{Buffer, DType, Result};
use std::ops::Range;

/// Minimum tokens per span.
const SPAN: usize = 512;
/// Maximum spans per sequence: each needs a buffer for the gradients of all keys and values before it.
const MAX_SPANS: usize = 4;

pub fn attention_backward(
    cpu: &Cpu,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    segments: &Segments,
    dqkv: &mut Buffer,
) -> Result<()> {
    let AttentionSaved { qkv, out, lse } = saved;
    let (tokens, heads) = (segments.rows(), op.heads);
    assert!(heads.heads.is_multiple_of(heads.kv_heads) && op.window != Some(0));
    assert!(segments.starts.is_sorted(), "sequences overlap");
    assert!(qkv.len() == tokens * heads.qkv_width() && dqkv.len() == qkv.len());
    assert!(out.len() == tokens * heads.out_width() && dout.len() == out.len());
    assert!(lse.len() == tokens * heads.heads);
    match qkv.dtype() {
        DType::F32 => backward::<f32>(cpu, op, saved, dout, segments, dqkv),
        _ => backward::<u16>(cpu, op, saved, dout, segments, dqkv),
    }
}

/// The operands of all tasks.
pub(super) struct BackwardOperands<'a, T> {
    pub op: Attention,
    pub qkv: &'a [T],
    pub out: &'a [T],
    pub lse: &'a [f32],
    pub dout: &'a [T],
    pub dqkv: Disjoint<'a, T>,
}

/// Query positions `span` of the sequence in `rows`, and the key blocks they attend to.
pub(super) struct BackwardTask {
    pub rows: Range<usize>,
    pub kv_head: usize,
    pub span: Range<usize>,
    pub blocks: Range<usize>,
    /// Offset of its key and value gradients, if there are other spans.
    pub share: Option<usize>,
    /// Row of `dqkv` for the span's first query; `None` if query gradients are not computed.
    pub to: Option<usize>,
}

/// Elements of a key or value block as f32 panels.
pub(super) fn block(heads: Heads) -> usize {
    panels(heads) * BLOCK * PANEL
}

/// Elements derived from a block: keys transposed, values transposed, keys.
pub(super) fn derived(heads: Heads) -> usize {
    2 * heads.head_dim * BLOCK + block(heads)
}

/// Spans of a sequence: a function of its length.
pub(super) fn spans(len: usize) -> impl Iterator<Item = Range<usize>> {
    let step = len.div_ceil((len / SPAN).clamp(1, MAX_SPANS)).next_multiple_of(BLOCK);
    (0..len).step_by(step.max(1)).map(move |start| start..(start + step).min(len))
}

/// Key blocks that queries of these positions attend to.
pub(super) fn seen_blocks(op: &Attention, span: &Range<usize>) -> Range<usize> {
    SeenKeys::at(span.start, op.window).from / BLOCK..span.end.div_ceil(BLOCK)
}

/// The tasks of all sequences, and the elements of all their contributions.
fn tasks(op: &Attention, segments: &Segments) -> (Vec<BackwardTask>, usize) {
    let heads = op.heads;
    let (mut tasks, mut room) = (Vec::new(), 0);
    for rows in segments.iter().filter(|r| !r.is_empty()) {
        let first = tasks.len();
        for span in spans(rows.len()) {
            let blocks = seen_blocks(op, &span);
            for kv_head in 0..heads.kv_heads {
                let share = (span.len() < rows.len()).then_some(room);
                room += share.map_or(0, |_| 2 * block(heads) * blocks.len());
                let to = Some(rows.start + span.start);
                let (rows, span, blocks) = (rows.clone(), span.clone(), blocks.clone());
                tasks.push(BackwardTask { rows, kv_head, span, blocks, share, to });
            }
        }
        // Longest first: the last rows attend to most keys.
        tasks[first..].reverse();
    }
    (tasks, room)
}

fn backward<T: Storage>(
    cpu: &Cpu,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    segments: &Segments,
    dqkv: &mut Buffer,
) -> Result<()> {
    let heads = op.heads;
    let (tasks, room) = tasks(&op, segments);
    let mut shares = cpu.arena.buffer(DType::F32, room)?;
    let call = BackwardOperands {
        op,
        qkv: T::of(saved.qkv),
        out: T::of(saved.out),
        lse: f32s(saved.lse),
        dout: T::of(dout),
        dqkv: Disjoint::new(T::of_mut(dqkv)),
    };
    let all = Disjoint::new(f32s_mut(&mut shares));
    cpu.pool.run(tasks.len(), |i| {
        let task = &tasks[i];
        let (fixed, sums) = (task_room(heads, task.blocks.len()), 2 * block(heads) * task.blocks.len());
        with_scratch(fixed + sums, |scratch| {
            let (scratch, own) = scratch.split_at_mut(fixed);
            // SAFETY: the tasks' contributions do not overlap.
            let sums = task.share.map_or(own, |at| unsafe { all.part(at, sums) });
            sums.fill(0.0);
            query_rows(cpu, &call, task, Some(&mut *sums), scratch);
            if task.share.is_none() {
                for b in task.blocks.clone() {
                    store_block(cpu, &call, task, b, &sums[(b - task.blocks.start) * 2 * block(heads)..]);
                }
            }
        });
    });
    add_shares(cpu, &call, &tasks, f32s(&shares));
    Ok(())
}

/// Scratch elements that [`query_rows`] needs for a task with this many blocks.
pub(super) fn task_room(heads: Heads, blocks: usize) -> usize {
    3 * matrix(heads) + 2 * ROWS * BLOCK + derived(heads) * blocks
}

/// Operand and result tiles of some query rows, in panels.
struct PanelTiles<'a> {
    q: &'a mut [f32],
    dout: &'a mut [f32],
    dq: &'a mut [f32],
    p: &'a mut [f32],
    dp: &'a mut [f32],
    /// Per row: log-sum-exp of its scores, and `dout . out`.
    lse: [f32; ROWS],
    delta: [f32; ROWS],
}

/// Query gradients of the task. Adds key, then value gradients of each block to `sums`, if those are computed.
pub(super) fn query_rows<T: Storage>(
    cpu: &Cpu,
    call: &BackwardOperands<'_, T>,
    task: &BackwardTask,
    mut sums: Option<&mut [f32]>,
    mut scratch: &mut [f32],
) {
    let (heads, level) = (call.op.heads, cpu.level);
    let mut tiles = PanelTiles {
        q: cut(&mut scratch, matrix(heads)),
        dout: cut(&mut scratch, matrix(heads)),
        dq: cut(&mut scratch, matrix(heads)),
        p: cut(&mut scratch, ROWS * BLOCK),
        dp: cut(&mut scratch, ROWS * BLOCK),
        lse: [0.0; ROWS],
        delta: [0.0; ROWS],
    };
    let keys_and_values = scratch;
    for b in task.blocks.clone() {
        let at = (b - task.blocks.start) * derived(heads);
        derive(cpu, call, task, b, (tiles.dq, &mut keys_and_values[at..at + derived(heads)]));
    }
    let group = heads.heads / heads.kv_heads;
    let end = task.span.end * group;
    for first in (task.span.start * group..end).step_by(ROWS) {
        let count = ROWS.min(end - first);
        let rows = QueryRows::new(&call.op, task.kv_head, 0, first, count);
        load_rows(level, call, task, &rows, &mut tiles);
        let blocks = rows.blocks();
        for b in blocks.start.max(task.blocks.start)..blocks.end.min(task.blocks.end) {
            let at = b - task.blocks.start;
            let derived = &keys_and_values[at * derived(heads)..][..derived(heads)];
            let sums = sums.as_deref_mut().map(|sums| &mut sums[at * 2 * block(heads)..][..2 * block(heads)]);
            block_products(level, &call.op, &rows, b, (derived, sums), (&mut tiles, task.to.is_some()));
        }
        let (Some(to), width) = (task.to, heads.qkv_width()) else { continue };
        let offsets = rows.offsets_from(task.span.start, to * width, width, heads.head_dim);
        // SAFETY: in bounds, and the queries of every row and head belong to one task.
        let room = unsafe { TaskRows::new(call.dqkv) };
        scatter(level, (tiles.dq, STRIDE), &[1.0; ROWS], &offsets[..count], heads.head_dim, room);
    }
}

/// Loads queries, output gradients and statistics; zeros `dq`.
fn load_rows<T: Storage>(
    level: Level,
    call: &BackwardOperands<'_, T>,
    task: &BackwardTask,
    rows: &QueryRows,
    tiles: &mut PanelTiles<'_>,
) {
    let heads = call.op.heads;
    let (dims, panels, count) = (heads.head_dim, panels(heads), rows.count);
    let PanelTiles { q, dout, dq, lse, delta, .. } = tiles;
    let width = heads.out_width();
    let offsets = rows.offsets(task.rows.start * width, width, dims);
    gather(level, call.dout, &offsets[..count], dims, dout, STRIDE);
    gather(level, call.out, &offsets[..count], dims, dq, STRIDE);
    row_dots(level, dout, dq, panels, &mut delta[..count]);
    let width = heads.qkv_width();
    let offsets = rows.offsets(task.rows.start * width, width, dims);
    gather(level, call.qkv, &offsets[..count], dims, q, STRIDE);
    for (lse, (token, head)) in lse.iter_mut().zip(&rows.place[..count]) {
        *lse = call.lse[(task.rows.start + token) * heads.heads + head];
    }
    for panel in 0..panels {
        dq[panel * STRIDE..][..count * PANEL].fill(0.0);
    }
}

/// One key/value block: adds to the block's sums, if any, and to `dq` with `queries`.
fn block_products(
    level: Level,
    op: &Attention,
    rows: &QueryRows,
    b: usize,
    (derived, sums): (&[f32], Option<&mut [f32]>),
    (tiles, queries): (&mut PanelTiles<'_>, bool),
) {
    let (heads, key) = (op.heads, b * BLOCK);
    let (dims, panels) = (heads.head_dim, panels(heads));
    let PanelTiles { q, dout, dq, p, dp, lse, delta } = tiles;
    let active = rows.seeing(key);
    let seen = &rows.seen[active.clone()];
    let valid = seen[seen.len() - 1].within(key).1;
    let (keys_across, rest) = derived.split_at(dims * BLOCK);
    let (values_across, keys) = rest.split_at(dims * BLOCK);
    scores(level, heads, active.clone(), q, keys_across, p);
    scores(level, heads, active.clone(), dout, values_across, dp);
    let p = &mut p[active.start * BLOCK..active.end * BLOCK];
    let dp = &mut dp[active.start * BLOCK..active.end * BLOCK];
    let (lse, delta) = (&lse[active.clone()], &delta[active.clone()]);
    softmax_backward(level, Scoring::of(op), key, seen, (lse, delta), (p, dp));
    let sums = sums.map(|sums| sums.split_at_mut(block(heads)));
    for (weights, rows, sums) in sums.into_iter().flat_map(|(dk, dv)| [(&*p, &**dout, dv), (&*dp, &**q, dk)])
    {
        let product = Product {
            rows: valid,
            units: active.len(),
            panels,
            a: weights,
            piece: ROWS,
            a_stride: 0,
            b: &rows[active.start * PANEL..],
            b_stride: STRIDE,
            c: sums,
            c_stride: BLOCK * PANEL,
            resume: true,
        };
        multiply::<1, BLOCK>(level, product);
    }
    if !queries {
        return;
    }
    let product = Product {
        rows: active.len(),
        units: valid,
        panels,
        a: dp,
        piece: BLOCK,
        a_stride: 0,
        b: keys,
        b_stride: BLOCK * PANEL,
        c: &mut dq[active.start * PANEL..],
        c_stride: STRIDE,
        resume: true,
    };
    multiply::<BLOCK, 1>(level, product);
}

/// Offsets of the key head in the rows of a block; values are `kv_heads * head_dim` further.
fn key_offsets(heads: Heads, task: &BackwardTask, b: usize) -> ([usize; BLOCK], usize) {
    let count = (task.rows.len() - b * BLOCK).min(BLOCK);
    let head = (heads.heads + task.kv_head) * heads.head_dim;
    (std::array::from_fn(|j| (task.rows.start + b * BLOCK + j) * heads.qkv_width() + head), count)
}

/// Fills the layout of [`derived`]; columns without a token are zero.
fn derive<T: Storage>(
    cpu: &Cpu,
    call: &BackwardOperands<'_, T>,
    task: &BackwardTask,
    b: usize,
    (room, out): (&mut [f32], &mut [f32]),
) {
    let heads = call.op.heads;
    let dims = heads.head_dim;
    let (keys, count) = key_offsets(heads, task, b);
    let values = keys.map(|at| at + heads.kv_heads * dims);
    if count < BLOCK {
        out.fill(0.0);
    }
    let (keys_across, rest) = out.split_at_mut(dims * BLOCK);
    let (values_across, key_panels) = rest.split_at_mut(dims * BLOCK);
    gather(cpu.level, call.qkv, &keys[..count], dims, key_panels, BLOCK * PANEL);
    gather(cpu.level, call.qkv, &values[..count], dims, room, BLOCK * PANEL);
    for (from, to) in [(&*key_panels, keys_across), (&*room, values_across)] {
        for d in (0..dims).step_by(PANEL) {
            let n = PANEL.min(dims - d);
            transpose(&from[d * BLOCK..], |j| j * PANEL, count, n, &mut to[d * BLOCK..]);
        }
    }
}

/// Writes a block's key and value gradients.
fn store_block<T: Storage>(
    cpu: &Cpu,
    call: &BackwardOperands<'_, T>,
    task: &BackwardTask,
    b: usize,
    sums: &[f32],
) {
    let count = (task.rows.len() - b * BLOCK).min(BLOCK);
    store_keys(cpu, call, task.kv_head, (task.rows.start + b * BLOCK, 0..count), sums);
}

/// Writes gradients of some keys of a block, and of their values, from row `to` of `dqkv` on.
pub(super) fn store_keys<T: Storage>(
    cpu: &Cpu,
    call: &BackwardOperands<'_, T>,
    kv_head: usize,
    (to, keys): (usize, Range<usize>),
    sums: &[f32],
) {
    let heads = call.op.heads;
    let (dk, dv) = sums.split_at(block(heads));
    for (head, sums) in [(heads.heads, dk), (heads.heads + heads.kv_heads, dv)] {
        let column = (head + kv_head) * heads.head_dim;
        let offsets: [usize; BLOCK] = std::array::from_fn(|j| (to + j) * heads.qkv_width() + column);
        let sums = (&sums[keys.start * PANEL..], BLOCK * PANEL);
        // SAFETY: in bounds, and the key and the value of a row and head are written by one task.
        let room = unsafe { TaskRows::new(call.dqkv) };
        scatter(cpu.level, sums, &[1.0; BLOCK], &offsets[..keys.len()], heads.head_dim, room);
    }
}

/// Adds the spans' contributions to each block in span order and writes the gradients.
fn add_shares<T: Storage>(cpu: &Cpu, call: &BackwardOperands<'_, T>, tasks: &[BackwardTask], shares: &[f32]) {
    let len = 2 * block(call.op.heads);
    // The span that contains a block's own tokens is the first that attends to it.
    let mut blocks = Vec::new();
    for (i, task) in tasks.iter().enumerate().filter(|(_, t)| t.share.is_some()) {
        blocks.extend((task.span.start / BLOCK..task.blocks.end).map(|b| (i, b)));
    }
    cpu.pool.run(blocks.len(), |i| {
        let (own, b) = blocks[i];
        let task = &tasks[own];
        with_scratch(len, |sums| {
            sums.fill(0.0);
            // A sequence's tasks are contiguous, later spans first.
            let sequence = tasks[..=own].iter().rev().take_while(|t| t.rows == task.rows);
            for t in sequence.filter(|t| t.kv_head == task.kv_head && t.blocks.contains(&b)) {
                if let Some(at) = t.share {
                    let share = &shares[at + (b - t.blocks.start) * len..][..len];
                    sums.iter_mut().zip(share).for_each(|(sum, x)| *sum += x);
                }
            }
            store_block(cpu, call, task, b, sums);
        });
    });
}
