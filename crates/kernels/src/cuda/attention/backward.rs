//! The backward pass: `attention/backward.cu`, its wgmma variants (`attention/backward_keys_wgmma.cu`,
//! `attention/backward_dq_wgmma.cu`), or `attention/simple.cu` without tensor cores.
//!
//! The pass over keys stores the score gradients, up to 1 GiB at a time, for the pass over queries.

use super::tables::{self, PackedUnit};
use super::{
    SIMPLE, TOKENS, check_shape, fits_tensor_cores, pitch, room, simple_defines, simple_scoring,
    tile_defines, tile_scoring, uses_wgmma, window,
};
use crate::backend::{Attention, AttentionSaved, Heads, Segments};
use crate::cuda::Cuda;
use crate::cuda::context::CardInfo;
use crate::cuda::launch::{Arg, Grid, args};
use crate::cuda::memory::CardMemory;
use crate::{Buffer, DType, Result};
use std::sync::Arc;

/// Threads per block; a block owns 1 or 2 times `OWN` keys or stacked rows.
const THREADS: u32 = 128;
const OWN: usize = 64;

/// Maximum bytes of score gradients stored between the passes.
const KEPT: usize = 1 << 30;

/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] =
    &[("KEYS", TOKENS), ("BLOCK_THREADS", THREADS as usize), ("DQ_WARPS", 4 * DQ_TEAMS)];

/// Tiling of the kernels for a head and a GPU.
struct Tiling {
    /// Multiples of 16 keys, and of 16 stacked rows, per warp.
    key_tall: usize,
    row_tall: usize,
    /// Rows per iteration of the pass over keys.
    step: usize,
    /// Keys per iteration of the pass over queries.
    key_step: usize,
    /// Blocks that divide the columns of a key tile's gradients: a thread's registers hold 128 of them.
    split: usize,
}

/// Which kernels are used.
enum Kernels {
    /// Without tensor cores.
    Simple,
    /// With `mma.sync`.
    Mma(Tiling),
    /// With Hopper's `wgmma`.
    Wgmma(Tiling, Wgmma),
}

impl Kernels {
    /// Depends only on GPU, head and storage type.
    fn of(card: &CardInfo, op: &Attention, dtype: DType) -> Kernels {
        match (Tiling::of(card, op.heads, dtype), Wgmma::of(card, op)) {
            (None, _) => Kernels::Simple,
            (Some(tiling), None) => Kernels::Mma(tiling),
            (Some(tiling), Some(wgmma)) => Kernels::Wgmma(tiling, wgmma),
        }
    }
}

impl Tiling {
    fn of(card: &CardInfo, heads: Heads, dtype: DType) -> Option<Tiling> {
        if !fits_tensor_cores(heads, dtype) {
            return None;
        }
        // Limited by registers; the fastest values on an H200; less if shared memory is small.
        let broad = heads.head_dim > 128;
        let fits = |tall, step| Tiling::shared(heads, tall, step) <= room(card);
        let step = [64, 32].into_iter().find(|&step| !(broad && step == 64) && fits(1, step))?;
        let row_tall = [2, 1].into_iter().find(|&tall| !(broad && tall == 2) && fits(tall, 32))?;
        Some(Tiling { key_tall: 1, row_tall, step, key_step: 32, split: heads.head_dim.div_ceil(128) })
    }
    fn shared(heads: Heads, tall: usize, step: usize) -> usize {
        (2 * OWN * tall + 4 * step) * pitch(heads)
    }
    fn defines(&self, op: &Attention, wgmma: Option<&Wgmma>) -> String {
        let Tiling { key_tall, row_tall, step, key_step, split } = self;
        let own = wgmma.map_or(format!(" STEP={step}"), |w| {
            format!(" STEP={} TEAMS={} PARTS={}", w.step, w.teams, w.parts)
        });
        let tile = tile_defines(op);
        format!("{tile} KEY_TALL={key_tall} ROW_TALL={row_tall} KEY_STEP={key_step} SPLIT={split}{own}")
    }
}

/// Tiling of the wgmma kernels.
struct Wgmma {
    /// Warpgroups per block of attention_keys_wgmma, each with `OWN` keys.
    teams: usize,
    /// Tokens of a head per iteration.
    step: usize,
    /// Blocks that divide the heads of a group.
    parts: usize,
}

/// Warpgroups per block of attention_dq_wgmma.
const DQ_TEAMS: usize = 2;

impl Wgmma {
    fn of(card: &CardInfo, op: &Attention) -> Option<Wgmma> {
        let broad = op.heads.head_dim > 64;
        // Registers allow two warpgroups per multiprocessor: two blocks, or one if shared memory has no room for two. A soft cap
        // costs the registers of half a step.
        let step = if broad && op.softcap.is_some() { 32 } else { 64 };
        uses_wgmma(card, op.heads).then_some(Wgmma { teams: if broad { 2 } else { 1 }, step, parts: 1 })
    }
    /// Divides the heads of a group if there are so few `blocks` that the GPU would wait for the longest: many rows attend to
    /// early keys.
    fn share(&mut self, card: &CardInfo, heads: Heads, blocks: usize) {
        let at_once = card.processors as usize * 2 / self.teams;
        if 2 * blocks < 3 * at_once && (heads.heads / heads.kv_heads).is_multiple_of(2) {
            self.parts = 2;
        }
    }
    /// Shared memory of attention_keys_wgmma: keys, values, and the RING steps' queries and output gradients.
    fn shared(&self, heads: Heads) -> usize {
        let ring = if self.teams == 1 { 4 } else { 3 };
        1024 + 2 * (OWN * self.teams + ring * self.step) * heads.head_dim * 2
    }
    /// Shared memory of attention_dq_wgmma: three stages of keys, and of each warp's score gradients.
    fn dq_shared(heads: Heads) -> usize {
        1024 + 3 * (OWN * heads.head_dim * 2 + 4 * DQ_TEAMS * 2048)
    }
}

/// Operands of a call.
struct BackwardCall<'a> {
    cuda: &'a Cuda,
    op: Attention,
    qkv: &'a Buffer,
    out: &'a Buffer,
    lse: &'a Buffer,
    dout: &'a Buffer,
    segments: &'a Segments,
    /// `Σ dout · out` per row and head.
    delta: CardMemory,
}

pub fn attention_backward(
    cuda: &Cuda,
    op: Attention,
    saved: AttentionSaved<'_>,
    dout: &Buffer,
    segments: &Segments,
    dqkv: &mut Buffer,
) -> Result<()> {
    let AttentionSaved { qkv, out, lse } = saved;
    let (heads, tokens) = (op.heads, segments.rows());
    check_shape(&op, qkv.dtype());
    assert!(qkv.len() == tokens * heads.qkv_width() && dqkv.len() == qkv.len());
    assert!(out.len() == tokens * heads.out_width() && dout.len() == out.len());
    assert!(lse.len() == tokens * heads.heads);
    assert!([out, dout, &*dqkv].iter().all(|b| b.dtype() == qkv.dtype()));
    let delta = cuda.arena.take(tokens * heads.heads * 4)?;
    let call = BackwardCall { cuda, op, qkv, out, lse, dout, segments, delta };
    match Kernels::of(&cuda.card, &op, qkv.dtype()) {
        Kernels::Simple => call.simple(dqkv),
        Kernels::Mma(tiling) => call.on_tensor_cores(tiling, None, dqkv),
        Kernels::Wgmma(tiling, wgmma) => call.on_tensor_cores(tiling, Some(wgmma), dqkv),
    }
}

impl<'a> BackwardCall<'a> {
    fn rows(&self) -> usize {
        self.segments.rows() * self.op.heads.heads
    }

    fn group(&self) -> usize {
        self.op.heads.heads / self.op.heads.kv_heads
    }

    fn list(&self, unit: PackedUnit, step: usize) -> Result<Arc<tables::WorkList>> {
        tables::packed(self.cuda, self.segments, unit, step)
    }

    /// Common arguments of all kernels except the wgmma ones.
    fn arguments(&self, list: &tables::WorkList, dqkv: &Buffer, scoring: [Arg; 5]) -> Vec<Arg> {
        let mut all = args![self.qkv, self.dout, self.lse, &self.delta, &list.memory, dqkv].to_vec();
        all.extend(scoring);
        all
    }

    /// Without tensor cores.
    fn simple(&self, dqkv: &Buffer) -> Result<()> {
        let (cuda, op, group) = (self.cuda, &self.op, self.group());
        let (module, defines) = ("attention_simple", simple_defines(op, self.qkv.dtype(), false));
        let grid = Grid::new(self.rows().div_ceil(4), SIMPLE.0);
        let arguments = args![self.out, self.dout, &self.delta, self.rows() as u32];
        cuda.launch_variant(module, &defines, "simple_delta", grid, &arguments)?;
        let passes =
            [(PackedUnit::Keys { group }, "simple_keys"), (PackedUnit::Rows { group }, "simple_queries")];
        for (unit, name) in passes {
            let list = self.list(unit, SIMPLE.1)?;
            let grid = Grid::new(list.len * op.heads.kv_heads, SIMPLE.0);
            let arguments = self.arguments(&list, dqkv, simple_scoring(op));
            cuda.launch_variant(module, &defines, name, grid, &arguments)?;
        }
        Ok(())
    }

    fn on_tensor_cores(self, tiling: Tiling, mut wgmma: Option<Wgmma>, dqkv: &Buffer) -> Result<()> {
        let (cuda, heads, group) = (self.cuda, self.op.heads, self.group());
        // The wgmma kernels tile rows, and store score gradients, in their own layout.
        let keys = match &wgmma {
            Some(wgmma) => self.list(PackedUnit::WgmmaKeys { group }, OWN * wgmma.teams)?,
            None => self.list(PackedUnit::Keys { group }, OWN * tiling.key_tall)?,
        };
        // As many key heads at a time as score gradients fit; if none fits, scores are computed twice.
        let (per_head, all) = (keys.kept * 16, heads.kv_heads);
        let some = (KEPT / per_head.max(1)).min(all);
        if let Some(wgmma) = &mut wgmma {
            wgmma.share(&cuda.card, heads, keys.len * if some == 0 { all } else { some });
        }
        let defines = tiling.defines(&self.op, wgmma.as_ref());
        let module = if wgmma.is_some() { "attention_backward_hopper" } else { "attention_backward" };
        let both = wgmma.as_ref().map(|_| cuda.arena.take(self.rows() * 8)).transpose()?;
        let passes = Passes { call: self, tiling, wgmma, module, defines, both, keys };
        passes.delta()?;
        let room = cuda.arena.take(some * per_head)?;
        let call = &passes.call;
        let queries = match &passes.wgmma {
            Some(_) if some > 0 => call.list(PackedUnit::TileRows { group }, DQ_TEAMS)?,
            _ => call.list(PackedUnit::Rows { group }, OWN * passes.tiling.row_tall)?,
        };
        if some == 0 {
            passes.over_keys(HeadPart { first: 0, count: all, kept: 0 }, dqkv)?;
            return passes.over_queries(&queries, dqkv);
        }
        for first in (0..all).step_by(some) {
            let part = HeadPart { first, count: some.min(all - first), kept: room.ptr() };
            passes.over_keys(part, dqkv)?;
            passes.dq(part, &queries, dqkv)?;
        }
        Ok(())
    }
}

/// A range of key heads, and where their score gradients are stored (0: nowhere).
#[derive(Clone, Copy)]
struct HeadPart {
    first: usize,
    count: usize,
    kept: u64,
}

/// The tensor-core passes.
struct Passes<'a> {
    call: BackwardCall<'a>,
    tiling: Tiling,
    wgmma: Option<Wgmma>,
    module: &'static str,
    defines: String,
    /// For wgmma: log-sum-exp and delta of each row.
    both: Option<CardMemory>,
    keys: Arc<tables::WorkList>,
}

impl Passes<'_> {
    fn launch(&self, name: &str, grid: Grid, arguments: &[Arg]) -> Result<()> {
        self.call.cuda.launch_variant(self.module, &self.defines, name, grid, arguments)
    }

    fn both_at(&self) -> u64 {
        self.both.as_ref().map_or(0, |m| m.ptr())
    }

    /// The factor from a scaled score's gradient to that of `q . k`, the buffer, and the head range.
    fn part(&self, part: HeadPart) -> [Arg; 5] {
        args![self.call.op.scale, part.first as u32, part.count as u32, part.kept, self.keys.kept]
    }

    fn delta(&self) -> Result<()> {
        let BackwardCall { op, out, dout, lse, delta, .. } = &self.call;
        let (heads, rows) = (op.heads, self.call.rows());
        // As many lanes per row as the kernel's SHARERS.
        let units = heads.head_dim / 8;
        let sharers = if units.is_power_of_two() && units <= 32 { units } else { 32 };
        let grid = Grid::new((rows * sharers).div_ceil(256), 256);
        let arguments = args![*out, *dout, *lse, delta, self.both_at(), heads.heads as u32, rows as u32];
        self.launch("attention_delta", grid, &arguments)
    }

    /// Gradients of keys and values.
    fn over_keys(&self, part: HeadPart, dqkv: &Buffer) -> Result<()> {
        let (call, keys) = (&self.call, &self.keys);
        let (cuda, op, tokens) = (call.cuda, &call.op, call.segments.rows());
        let Some(wgmma) = &self.wgmma else {
            let blocks = [(keys.len * part.count) as u32, 1, self.tiling.split as u32];
            let grid = Grid { blocks, ..Grid::new(0, THREADS) };
            let shared = Tiling::shared(op.heads, self.tiling.key_tall, self.tiling.step);
            let mut arguments = call.arguments(keys, dqkv, tile_scoring(op));
            arguments.extend(self.part(part));
            return self.launch("attention_keys", grid.with_shared(shared), &arguments);
        };
        let grid = Grid::new(keys.len * part.count * wgmma.parts, wgmma.teams as u32 * THREADS);
        let mut arguments =
            args![call.qkv, call.dout, self.both_at(), &keys.memory, dqkv, tokens as u32].to_vec();
        arguments.extend(tile_scoring(op));
        arguments.extend(self.part(part));
        let columns = 2 * part.count * tokens * op.heads.head_dim;
        let parts = wgmma.parts;
        let sums = (parts > 1).then(|| cuda.arena.take(parts * columns * 4)).transpose()?;
        arguments.extend(args![sums.as_ref().map_or(0, |m| m.ptr())]);
        self.launch("attention_keys_wgmma", grid.with_shared(wgmma.shared(op.heads)), &arguments)?;
        let Some(sums) = &sums else { return Ok(()) };
        let (heads, kv_heads) = (op.heads.heads as u32, op.heads.kv_heads as u32);
        let (first, count) = (part.first as u32, part.count as u32);
        let arguments = args![sums, dqkv, tokens as u32, heads, kv_heads, op.scale, first, count];
        self.launch("attention_keys_join", Grid::new((columns / 4).div_ceil(256), 256), &arguments)
    }

    /// Gradients of queries, from the score gradients that the pass over keys stored.
    fn dq(&self, part: HeadPart, queries: &tables::WorkList, dqkv: &Buffer) -> Result<()> {
        let op = &self.call.op;
        let (heads, kv_heads) = (op.heads.heads as u32, op.heads.kv_heads as u32);
        let mut arguments = args![self.call.qkv, &queries.memory, dqkv, heads, kv_heads, window(op)].to_vec();
        arguments.extend(self.part(part));
        let (name, threads, shared) = match &self.wgmma {
            Some(_) => ("attention_dq_wgmma", DQ_TEAMS as u32 * THREADS, Wgmma::dq_shared(op.heads)),
            None => ("attention_dq", THREADS, 2 * OWN * pitch(op.heads)),
        };
        let grid = Grid::new(queries.len * part.count, threads).with_shared(shared);
        self.launch(name, grid, &arguments)
    }

    /// Gradients of queries without stored score gradients.
    fn over_queries(&self, queries: &tables::WorkList, dqkv: &Buffer) -> Result<()> {
        let op = &self.call.op;
        let mut arguments = self.call.arguments(queries, dqkv, tile_scoring(op));
        arguments.extend(args![op.scale]);
        let shared = Tiling::shared(op.heads, self.tiling.row_tall, self.tiling.key_step);
        let grid = Grid::new(queries.len * op.heads.kv_heads, THREADS).with_shared(shared);
        self.launch("attention_queries", grid, &arguments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernels(capability: (u32, u32), shared: usize, head_dim: usize, dtype: DType) -> Kernels {
        let heads = Heads { heads: 8, kv_heads: 2, head_dim };
        let op = Attention { heads, scale: 1.0, softcap: None, window: None };
        Kernels::of(&CardInfo { capability, shared, processors: 132, ..CardInfo::default() }, &op, dtype)
    }

    #[test]
    fn kernels_of_the_backward_by_card_and_head() {
        let (hopper, ada) = (((9, 0), 232_448), ((8, 9), 101_376));
        let of = |card: ((u32, u32), usize), dim, dtype| kernels(card.0, card.1, dim, dtype);
        assert!(matches!(of(hopper, 64, DType::F32), Kernels::Simple), "f32 has no tensor cores");
        assert!(matches!(of(hopper, 33, DType::Bf16), Kernels::Simple), "no whole units of 16 bytes");
        assert!(matches!(of(hopper, 64, DType::Bf16), Kernels::Wgmma(_, Wgmma { teams: 1, .. })));
        assert!(matches!(of(hopper, 128, DType::Bf16), Kernels::Wgmma(_, Wgmma { teams: 2, .. })));
        assert!(matches!(of(hopper, 96, DType::Bf16), Kernels::Mma(_)), "wgmma has whole panels of 64");
        assert!(matches!(of(hopper, 256, DType::Bf16), Kernels::Mma(Tiling { split: 2, row_tall: 1, .. })));
        assert!(matches!(of(ada, 128, DType::Bf16), Kernels::Mma(Tiling { step: 32, row_tall: 1, .. })));
    }

    #[test]
    fn heads_are_shared_where_blocks_are_few() {
        let card = CardInfo { capability: (9, 0), processors: 132, shared: 232_448, ..CardInfo::default() };
        let heads = Heads { heads: 12, kv_heads: 2, head_dim: 128 };
        let parts = |blocks| {
            let mut wgmma = Wgmma { teams: 2, step: 64, parts: 1 };
            wgmma.share(&card, heads, blocks);
            wgmma.parts
        };
        assert_eq!((parts(128), parts(256)), (2, 1));
    }
}
