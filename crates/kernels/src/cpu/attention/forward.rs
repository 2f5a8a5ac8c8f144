//! The forward pass over the paged cache.

use super::paged::{block_len, head_len};
use super::{
    BLOCK, Product, QueryRows, ROWS, STRIDE, Scoring, Storage, TaskRows, cut, gather, matrix, multiply,
    panels, scatter, scores, softmax_step, with_scratch,
};
use crate::backend::{Attention, CacheOps, MemoryOps, PagedRows, PagedSequence, Segments};
use crate::cpu::Cpu;
use crate::cpu::matmul::tile::PANEL;
use crate::cpu::memory::f32s_mut;
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::Level;
use crate::math::ln;
use crate::{Buffer, DType, Result};

pub fn attention(
    cpu: &Cpu,
    op: Attention,
    qkv: &Buffer,
    segments: &Segments,
    out: &mut Buffer,
    lse: &mut Buffer,
) -> Result<()> {
    let width = op.heads.qkv_width();
    assert!(qkv.len() == segments.rows() * width);
    assert!(lse.len() == segments.rows() * op.heads.heads);
    let mut blocks = 0u32..;
    let sequence = |r: std::ops::Range<usize>| PagedSequence {
        row: r.start,
        count: r.len(),
        position: 0,
        blocks: blocks.by_ref().take(r.len().div_ceil(BLOCK)).collect(),
    };
    let rows = PagedRows { sequences: segments.iter().map(sequence).collect() };
    let mut cache = cpu.alloc(qkv.dtype(), cpu.cache_len(op.heads, blocks.start as usize))?;
    cpu.cache_write(op.heads, qkv, &rows, &mut cache)?;
    let lse = Some(Disjoint::new(f32s_mut(lse)));
    match qkv.dtype() {
        DType::F32 => attend::<f32>(cpu, op, (qkv, width), (&rows, &cache), out, lse),
        _ => attend::<u16>(cpu, op, (qkv, width), (&rows, &cache), out, lse),
    }
    Ok(())
}

/// Some query rows of one sequence and key head.
struct RowsTask<'a> {
    sequence: &'a PagedSequence,
    kv_head: usize,
    first: usize,
    count: usize,
}

/// The operands of all tasks.
struct RowsCall<'a, T> {
    op: Attention,
    /// Rows that start with queries, and the row width.
    queries: (&'a [T], usize),
    cache: &'a [T],
    out: Disjoint<'a, T>,
    lse: Option<Disjoint<'a, f32>>,
}

/// Attention of all rows, given with their width; `lse` has one element per row and query head.
pub(super) fn attend<T: Storage>(
    cpu: &Cpu,
    op: Attention,
    (queries, width): (&Buffer, usize),
    (rows, cache): (&PagedRows, &Buffer),
    out: &mut Buffer,
    lse: Option<Disjoint<'_, f32>>,
) {
    let heads = op.heads;
    let tokens = queries.len() / width;
    assert!(heads.heads.is_multiple_of(heads.kv_heads) && op.window != Some(0));
    assert!(queries.len() == tokens * width && width >= heads.out_width());
    assert!(out.len() == tokens * heads.out_width());
    let mut tasks = Vec::new();
    let mut row = 0;
    for sequence in &rows.sequences {
        assert!(sequence.row >= row && sequence.row + sequence.count <= tokens, "rows overlap");
        row = sequence.row + sequence.count;
        let all = sequence.count * (heads.heads / heads.kv_heads);
        // Longest first: the last rows attend to most keys.
        for first in (0..all).step_by(ROWS).rev() {
            let count = ROWS.min(all - first);
            tasks.extend((0..heads.kv_heads).map(|kv_head| RowsTask { sequence, kv_head, first, count }));
        }
    }
    let (queries, cache, out) = ((T::of(queries), width), T::of(cache), Disjoint::new(T::of_mut(out)));
    let call = RowsCall { op, queries, cache, out, lse };
    let room = 2 * matrix(heads) + ROWS * BLOCK + head_len(heads);
    cpu.pool.run(tasks.len(), |i| {
        with_scratch(room, |scratch| attend_rows(cpu.level, &call, &tasks[i], scratch));
    });
}

fn attend_rows<T: Storage>(
    level: Level,
    call: &RowsCall<'_, T>,
    task: &RowsTask<'_>,
    mut scratch: &mut [f32],
) {
    let RowsCall { op, queries: (queries, width), cache, out, lse } = call;
    let (heads, sequence) = (op.heads, task.sequence);
    let (panels, count) = (panels(heads), task.count);
    let rows = QueryRows::new(op, task.kv_head, sequence.position, task.first, count);
    let q = cut(&mut scratch, matrix(heads));
    let o = cut(&mut scratch, matrix(heads));
    let p = cut(&mut scratch, ROWS * BLOCK);
    let offsets = rows.offsets(sequence.row * width, *width, heads.head_dim);
    gather(level, queries, &offsets[..count], heads.head_dim, q, STRIDE);
    for panel in 0..panels {
        o[panel * STRIDE..][..count * PANEL].fill(0.0);
    }
    let (mut max, mut sum) = ([f32::NEG_INFINITY; ROWS], [0f32; ROWS]);
    for b in rows.blocks() {
        let key = b * BLOCK;
        let active = rows.seeing(key);
        let seen = &rows.seen[active.clone()];
        // Slots beyond what the last row attends to may be uninitialised: their scores are masked, their values not read.
        let valid = seen[seen.len() - 1].within(key).1;
        let from = sequence.blocks[b] as usize * block_len(heads) + task.kv_head * head_len(heads);
        let block = T::block(level, heads, &cache[from..from + head_len(heads)], valid, scratch);
        let (keys, values) = block.split_at(heads.head_dim * BLOCK);
        scores(level, heads, active.clone(), q, keys, p);
        let p = &mut p[active.start * BLOCK..active.end * BLOCK];
        let o = &mut o[active.start * PANEL..];
        let (max, sum) = (&mut max[active.clone()], &mut sum[active.clone()]);
        softmax_step(level, Scoring::of(op), (key, seen), p, (max, sum), (&mut *o, panels));
        let product = Product {
            rows: active.len(),
            units: valid,
            panels,
            a: p,
            piece: BLOCK,
            a_stride: 0,
            b: values,
            b_stride: BLOCK * PANEL,
            c: o,
            c_stride: STRIDE,
            resume: true,
        };
        multiply::<BLOCK, 1>(level, product);
    }
    if let Some(lse) = lse {
        for (r, (token, head)) in rows.place[..count].iter().enumerate() {
            // SAFETY: in bounds (asserted by the caller), and every row and head belongs to one task.
            unsafe {
                lse.part((sequence.row + token) * heads.heads + head, 1)[0] =
                    max[r] + ln(sum[r] as f64) as f32
            };
        }
    }
    let factors = sum.map(|s| 1.0 / s);
    let offsets = rows.offsets(sequence.row * heads.out_width(), heads.out_width(), heads.head_dim);
    // SAFETY: in bounds, and every row and head belongs to one task.
    let out = unsafe { TaskRows::new(*out) };
    scatter(level, (o, STRIDE), &factors, &offsets[..count], heads.head_dim, out);
}
