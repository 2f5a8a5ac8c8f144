//! The backward pass: `attention/backward.cu`, its passes with Hopper's products (`attention/backward_keys_wgmma.cu`,
//! `attention/backward_dq_wgmma.cu`), or `attention/simple.cu` where tensor cores do not serve.
//!
//! The pass over keys keeps the gradients of scores, up to 1 GiB of them at a time, for the pass over queries.

use super::tables::{self, Unit};
use super::{
    SIMPLE, TOKENS, check_shape, fits_tensor_cores, pitch, room, simple_defines, simple_scoring,
    tile_defines, tile_scoring, uses_wgmma, window,
};
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

/// Sizes that the kernels share, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] =
    &[("KEYS", TOKENS), ("BLOCK_THREADS", THREADS as usize), ("DQ_WARPS", 4 * DQ_TEAMS)];

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
        let broad = heads.head_dim > 128;
        let fits = |tall, step| Cut::shared(heads, tall, step) <= room(cuda);
        let step = [64, 32].into_iter().find(|&step| !(broad && step == 64) && fits(1, step))?;
        let row_tall = [2, 1].into_iter().find(|&tall| !(broad && tall == 2) && fits(tall, 32))?;
        Some(Cut { key_tall: 1, row_tall, step, key_step: 32, split: heads.head_dim.div_ceil(128) })
    }
    fn shared(heads: Heads, tall: usize, step: usize) -> usize {
        (2 * OWN * tall + 4 * step) * pitch(heads)
    }
    fn defines(&self, op: &Attention, wgmma: Option<&Wgmma>) -> String {
        let Cut { key_tall, row_tall, step, key_step, split } = self;
        let own = wgmma.map_or(format!(" STEP={step}"), |w| {
            format!(" STEP={} TEAMS={} PARTS={}", w.step, w.teams, w.parts)
        });
        let tile = tile_defines(op);
        format!("{tile} KEY_TALL={key_tall} ROW_TALL={row_tall} KEY_STEP={key_step} SPLIT={split}{own}")
    }
}

/// How the kernels with Hopper's products are cut.
struct Wgmma {
    /// Teams of four warps to a block of attention_keys_wgmma, each with `OWN` keys.
    teams: usize,
    /// Tokens of a head met at a time there.
    step: usize,
    /// Blocks that share the heads of a group there.
    parts: usize,
}

/// Teams of four warps to a block of attention_dq_wgmma.
const DQ_TEAMS: usize = 2;

impl Wgmma {
    fn of(cuda: &Cuda, op: &Attention) -> Option<Wgmma> {
        let broad = op.heads.head_dim > 64;
        // Registers are for two teams on a processor: two blocks, or one where shared memory has no room for two. A cap
        // costs the registers of half a step.
        let step = if broad && op.softcap.is_some() { 32 } else { 64 };
        uses_wgmma(cuda, op.heads).then_some(Wgmma { teams: if broad { 2 } else { 1 }, step, parts: 1 })
    }
    /// Shares the heads of a group where `blocks` are so few that the card would wait for the longest of them: early keys
    /// are seen by many rows.
    fn share(&mut self, cuda: &Cuda, heads: Heads, blocks: usize) {
        let at_once = cuda.card.processors as usize * 2 / self.teams;
        if 2 * blocks < 3 * at_once && (heads.heads / heads.kv_heads).is_multiple_of(2) {
            self.parts = 2;
        }
    }
    /// Shared memory of attention_keys_wgmma: keys, values, and the queries and gradients of outputs of its RING steps.
    fn shared(&self, heads: Heads) -> usize {
        let ring = if self.teams == 1 { 4 } else { 3 };
        1024 + 2 * (OWN * self.teams + ring * self.step) * heads.head_dim * 2
    }
    /// Shared memory of attention_dq_wgmma: three tiles of keys, and of each warp's gradients.
    fn dq_shared(heads: Heads) -> usize {
        1024 + 3 * (OWN * heads.head_dim * 2 + 4 * DQ_TEAMS * 2048)
    }
}

/// See [`AttentionOps::attention_backward`](crate::backend::AttentionOps::attention_backward).
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
    let rows = tokens * heads.heads;
    let delta = cuda.arena.take(rows * 4)?;
    let group = heads.heads / heads.kv_heads;
    let common = |list: &tables::List, dqkv: &Buffer, scoring: [Arg; 5]| {
        let mut all = args![qkv, dout, lse, &delta, &list.memory, dqkv].to_vec();
        all.extend(scoring);
        all
    };
    let (keys, queries) = (Unit::Keys { group }, Unit::Rows { group });
    let Some(cut) = Cut::of(cuda, heads, qkv.dtype()) else {
        let (module, defines) = ("attention_simple", simple_defines(&op, qkv.dtype(), false));
        let grid = Grid::new(rows.div_ceil(4), SIMPLE.0);
        let arguments = args![out, dout, &delta, rows as u32];
        cuda.launch_variant(module, &defines, "simple_delta", grid, &arguments)?;
        for (unit, name) in [(keys, "simple_keys"), (queries, "simple_queries")] {
            let list = tables::packed(cuda, segments, unit, SIMPLE.1)?;
            let grid = Grid::new(list.len * heads.kv_heads, SIMPLE.0);
            cuda.launch_variant(module, &defines, name, grid, &common(&list, dqkv, simple_scoring(&op)))?;
        }
        return Ok(());
    };
    // Both passes with the products of Hopper's tensor cores: they cut rows, and keep gradients, in their own way.
    let mut wgmma = Wgmma::of(cuda, &op);
    let keys = match &wgmma {
        Some(wgmma) => tables::packed(cuda, segments, Unit::WgmmaKeys { group }, OWN * wgmma.teams)?,
        None => tables::packed(cuda, segments, keys, OWN * cut.key_tall)?,
    };
    // As many key heads at a time as there is room for what is kept; with room for none everything is computed twice.
    let (per_head, all) = (keys.kept * 16, heads.kv_heads);
    let some = (KEPT / per_head.max(1)).min(all);
    if let Some(wgmma) = &mut wgmma {
        wgmma.share(cuda, heads, keys.len * if some == 0 { all } else { some });
    }
    let defines = cut.defines(&op, wgmma.as_ref());
    let module = if wgmma.is_some() { "attention_backward_hopper" } else { "attention_backward" };
    let both = wgmma.as_ref().map(|_| cuda.arena.take(rows * 8)).transpose()?;
    let both_at = both.as_ref().map_or(0, |m| m.ptr());
    // As many lanes to a row as the kernel's SHARERS.
    let units = heads.head_dim / 8;
    let sharers = if units.is_power_of_two() && units <= 32 { units } else { 32 };
    let grid = Grid::new((rows * sharers).div_ceil(256), 256);
    let arguments = args![out, dout, lse, &delta, both_at, heads.heads as u32, rows as u32];
    cuda.launch_variant(module, &defines, "attention_delta", grid, &arguments)?;
    // What a score's gradient is multiplied by to become that of the dot product.
    let factor = op.scale;
    let room = cuda.arena.take(some * per_head)?;
    let queries = match &wgmma {
        Some(_) if some > 0 => tables::packed(cuda, segments, Unit::TileRows { group }, DQ_TEAMS)?,
        _ => tables::packed(cuda, segments, queries, OWN * cut.row_tall)?,
    };
    for first in (0..all).step_by(some.max(1)) {
        let count = if some == 0 { all } else { some.min(all - first) };
        let kept = if some == 0 { 0 } else { room.ptr() };
        let part = args![factor, first as u32, count as u32, kept, keys.kept];
        let (name, grid, mut arguments) = match &wgmma {
            Some(wgmma) => {
                let grid = Grid::new(keys.len * count * wgmma.parts, wgmma.teams as u32 * THREADS);
                let mut arguments = args![qkv, dout, both_at, &keys.memory, &*dqkv, tokens as u32].to_vec();
                arguments.extend(tile_scoring(&op));
                ("attention_keys_wgmma", grid.with_shared(wgmma.shared(heads)), arguments)
            }
            None => {
                let grid = Grid {
                    blocks: [(keys.len * count) as u32, 1, cut.split as u32],
                    ..Grid::new(0, THREADS)
                };
                let shared = Cut::shared(heads, cut.key_tall, cut.step);
                ("attention_keys", grid.with_shared(shared), common(&keys, dqkv, tile_scoring(&op)))
            }
        };
        arguments.extend(part);
        let parts = wgmma.as_ref().map_or(1, |w| w.parts);
        let columns = 2 * count * tokens * heads.head_dim;
        let sums = (parts > 1).then(|| cuda.arena.take(parts * columns * 4)).transpose()?;
        if wgmma.is_some() {
            arguments.extend(args![sums.as_ref().map_or(0, |m| m.ptr())]);
        }
        cuda.launch_variant(module, &defines, name, grid, &arguments)?;
        if let Some(sums) = &sums {
            let (all_heads, kv_heads) = (heads.heads as u32, heads.kv_heads as u32);
            let arguments =
                args![sums, &*dqkv, tokens as u32, all_heads, kv_heads, factor, first as u32, count as u32];
            let grid = Grid::new((columns / 4).div_ceil(256), 256);
            cuda.launch_variant(module, &defines, "attention_keys_join", grid, &arguments)?;
        }
        if some == 0 {
            break;
        }
        let (heads_, kv_heads) = (heads.heads as u32, heads.kv_heads as u32);
        let mut arguments = args![qkv, &queries.memory, &*dqkv, heads_, kv_heads, window(&op)].to_vec();
        arguments.extend(part);
        let (name, threads, shared) = match &wgmma {
            Some(_) => ("attention_dq_wgmma", DQ_TEAMS as u32 * THREADS, Wgmma::dq_shared(heads)),
            None => ("attention_dq", THREADS, 2 * OWN * pitch(heads)),
        };
        let grid = Grid::new(queries.len * count, threads).with_shared(shared);
        cuda.launch_variant(module, &defines, name, grid, &arguments)?;
    }
    if some > 0 {
        return Ok(());
    }
    let mut arguments = common(&queries, dqkv, tile_scoring(&op));
    arguments.extend(args![factor]);
    let grid =
        Grid::new(queries.len * all, THREADS).with_shared(Cut::shared(heads, cut.row_tall, cut.key_step));
    cuda.launch_variant(module, &defines, "attention_queries", grid, &arguments)
}
