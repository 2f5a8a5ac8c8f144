//! The backward pass: `attention_backward.cu`, or `attention_simple.cu` where tensor cores do not serve.
//!
//! The pass over keys keeps the gradients of scores, up to 1 GiB of them at a time, for the pass over queries.

use super::tables::{self, Unit};
use super::{SIMPLE, check_shape, fits_tensor_cores, is_wide, pitch, room};
use super::{simple_defines, simple_scoring, tile_defines, tile_scoring, window};
use crate::backend::{Attention, Heads, Segments};
use crate::buffer::{Buffer, DType};
use crate::cuda::Cuda;
use crate::cuda::launch::{Arg, Grid, args};
use crate::error::Result;

/// Threads of a block, which owns `OWN` times 1 or 2 keys or stacked rows.
const THREADS: u32 = 128;
const OWN: usize = 64;

/// Bytes at most for gradients of scores that one pass keeps for the next.
const KEPT: usize = 1 << 30;

/// How the kernels are cut to a head and a card.
struct Cut {
    /// How many times 16 keys, and stacked rows, a warp has.
    key_tall: usize,
    row_tall: usize,
    /// Rows met at a time in the pass over keys.
    step: usize,
    /// Keys met at a time in the pass over queries.
    key_step: usize,
    /// Blocks that share the columns of a key tile's gradients: a thread's registers hold 128 of them.
    split: usize,
}

impl Cut {
    fn of(cuda: &Cuda, heads: Heads, dtype: DType) -> Option<Cut> {
        if !fits_tensor_cores(heads, dtype) {
            return None;
        }
        // What the registers of a thread hold, and what was fastest on an H200; less where shared memory is small.
        let wide = heads.head_dim > 128;
        let fits = |tall, step| Cut::shared(heads, tall, step) <= room(cuda);
        let step = [64, 32].into_iter().find(|&step| !(wide && step == 64) && fits(1, step))?;
        let row_tall = [2, 1].into_iter().find(|&tall| !(wide && tall == 2) && fits(tall, 32))?;
        Some(Cut { key_tall: 1, row_tall, step, key_step: 32, split: heads.head_dim.div_ceil(128) })
    }
    fn shared(heads: Heads, tall: usize, step: usize) -> usize {
        (2 * OWN * tall + 4 * step) * pitch(heads)
    }
}

/// See [`crate::Backend::attention_backward`].
pub fn attention_backward(
    cuda: &Cuda,
    op: Attention,
    qkv: &Buffer,
    out: &Buffer,
    lse: &Buffer,
    dout: &Buffer,
    segments: &Segments,
    dqkv: &mut Buffer,
) -> Result<()> {
    let (heads, tokens) = (op.heads, segments.rows());
    check_shape(&op, qkv.dtype());
    assert!(qkv.len() == tokens * heads.qkv_width() && dqkv.len() == qkv.len());
    assert!(out.len() == tokens * heads.out_width() && dout.len() == out.len());
    assert!(lse.len() == tokens * heads.heads);
    assert!([out, dout, &*dqkv].iter().all(|b| b.dtype() == qkv.dtype()));
    let delta = cuda.arena.take(tokens * heads.heads * 4)?;
    let rows = tokens * heads.heads;
    let group = heads.heads / heads.kv_heads;
    let (keys, queries) = (Unit::Keys { group }, Unit::Rows { group });
    let delta_args = args![out, dout, &delta, rows as u32];
    let common = |list: &tables::List, dqkv: &Buffer, scoring: [Arg; 5]| {
        let mut all = args![qkv, dout, lse, &delta, &list.memory, dqkv].to_vec();
        all.extend(scoring);
        all
    };
    let Some(cut) = Cut::of(cuda, heads, qkv.dtype()) else {
        let (module, defines) = ("attention_simple", simple_defines(&op, qkv.dtype(), false));
        let grid = Grid::new(rows.div_ceil(4), SIMPLE.0);
        cuda.launch_variant(module, &defines, "simple_delta", grid, &delta_args)?;
        for (unit, name) in [(keys, "simple_keys"), (queries, "simple_queries")] {
            let list = tables::packed(cuda, segments, unit, SIMPLE.1)?;
            let grid = Grid::new(list.len * heads.kv_heads, SIMPLE.0);
            cuda.launch_variant(module, &defines, name, grid, &common(&list, dqkv, simple_scoring(&op)))?;
        }
        return Ok(());
    };
    let Cut { key_tall, row_tall, step, key_step, split } = cut;
    // The same pass over keys with the products of Hopper's tensor cores; a cap costs the registers of a step.
    let wide = is_wide(cuda, heads);
    let step = if wide && heads.head_dim == 128 && op.softcap.is_some() { 32 } else { step };
    let (module, over_keys, shared) = if wide {
        let shared = 1024 + (2 * OWN + 4 * step) * heads.head_dim * 2;
        ("attention_backward_hopper", "attention_keys_wide", shared)
    } else {
        ("attention_backward", "attention_keys", Cut::shared(heads, key_tall, step))
    };
    let defines = format!(
        "{} KEY_TALL={key_tall} ROW_TALL={row_tall} STEP={step} KEY_STEP={key_step} SPLIT={split}",
        tile_defines(&op)
    );
    // As many lanes to a row as the kernel's SHARERS.
    let units = heads.head_dim / 8;
    let sharers = if units.is_power_of_two() && units <= 32 { units } else { 32 };
    let grid = Grid::new((rows * sharers).div_ceil(256), 256);
    cuda.launch_variant(module, &defines, "attention_delta", grid, &delta_args)?;
    // What a score's gradient is multiplied by to become that of the dot product.
    let factor = op.scale;
    let keys = tables::packed(cuda, segments, keys, OWN * key_tall)?;
    let queries = tables::packed(cuda, segments, queries, OWN * row_tall)?;
    let grid = |list: &tables::List, kv_heads: usize, split: usize, shared: usize| Grid {
        blocks: [(list.len * kv_heads) as u32, 1, split as u32],
        threads: THREADS,
        shared,
        early: false,
    };
    // Where products are wide, the pass over queries has twice the warps for as many rows, and shared memory for three
    // tiles of keys and of each warp's gradients.
    let (over_queries, more) = if wide { ("attention_dq_wide", 2) } else { ("attention_dq", 1) };
    let queries_shared =
        if wide { 1024 + 3 * (OWN * heads.head_dim * 2 + 8 * 2048) } else { 2 * OWN * pitch(heads) };
    // As many key heads at a time as there is room for what is kept; with room for none everything is computed twice.
    let (per_head, all) = (keys.kept * 16, heads.kv_heads);
    let some = (KEPT / per_head.max(1)).min(all);
    let room = cuda.arena.take(some * per_head)?;
    for first in (0..all).step_by(some.max(1)) {
        let count = if some == 0 { all } else { some.min(all - first) };
        let kept = if some == 0 { 0 } else { room.ptr() };
        let part = args![factor, first as u32, count as u32, kept, keys.kept];
        let mut arguments = common(&keys, dqkv, tile_scoring(&op));
        arguments.extend(part);
        cuda.launch_variant(module, &defines, over_keys, grid(&keys, count, split, shared), &arguments)?;
        if some == 0 {
            break;
        }
        let (heads_, kv_heads) = (heads.heads as u32, heads.kv_heads as u32);
        let mut arguments = args![qkv, &queries.memory, &*dqkv, heads_, kv_heads, window(&op)].to_vec();
        arguments.extend(part);
        let grid = grid(&queries, count, 1, queries_shared);
        let grid = Grid { threads: more * THREADS, ..grid };
        cuda.launch_variant(module, &defines, over_queries, grid, &arguments)?;
    }
    if some > 0 {
        return Ok(());
    }
    let mut arguments = common(&queries, dqkv, tile_scoring(&op));
    arguments.extend(args![factor]);
    let grid = grid(&queries, all, 1, Cut::shared(heads, row_tall, key_step));
    cuda.launch_variant(module, &defines, "attention_queries", grid, &arguments)
}
