//! Causal grouped-query attention, over packed sequences or over paged cache blocks of 64 tokens.
//!
//! `attention/forward.cu` handles bf16 with head widths that are multiples of 8, on tensor cores; `attention/simple.cu` the rest.
//! For decoding few sequences, `attention/decode.cu` processes several key tiles concurrently. On Hopper, wgmma kernels
//! (`attention/wgmma.cu`) handle many rows of heads of 64 and 128; the forward's bits are the same. All iterate over keys in
//! tiles of 64 from the start of a sequence, so training, prefill and decoding agree in every bit.

mod backward;
pub(crate) mod rotary;
mod tables;

use backward::attention_backward;
pub use tables::Tables;
pub(crate) use tables::stage;

use crate::backend::{Attention, AttentionOps, AttentionSaved, CacheOps, Heads, PagedRows, Segments};
use crate::cuda::Cuda;
use crate::cuda::context::CardInfo;
use crate::cuda::launch::{Arg, Grid, args};
use crate::cuda::memory::ptr;
use crate::{Buffer, DType, Result, shapes};
pub(crate) use tables::TOKENS;
use tables::{DECODE_ROWS, PackedUnit};

/// Sizes shared with the kernels, as definitions: a key tile is a cache block.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("KEYS", TOKENS), ("TOKENS", TOKENS)];
/// The same for the backward.
pub(crate) use backward::CONSTANTS as BACKWARD_CONSTANTS;
/// The same for the kernels without tensor cores.
pub(crate) const SIMPLE_CONSTANTS: &[(&str, usize)] =
    &[("KEYS", TOKENS), ("WARPS", SIMPLE.0 as usize / 32), ("ROWS", SIMPLE.1)];

/// Variants to compile in tests: a plain one, soft cap and window, odd groups, the widest head.
pub const VARIANTS: &[&str] = &[
    "HEAD_DIM=64 GROUP=7 SOFTCAP=0 WINDOW=0 PAGED=0 WARPS=4 TALL=2 STAGES=2",
    "HEAD_DIM=128 GROUP=2 SOFTCAP=0 WINDOW=0 PAGED=1 WARPS=4 TALL=1 STAGES=2 TILES=4",
    "HEAD_DIM=24 GROUP=5 SOFTCAP=1 WINDOW=1 PAGED=1 WARPS=8 TALL=1 STAGES=2 TILES=8",
    "HEAD_DIM=256 GROUP=1 SOFTCAP=1 WINDOW=1 PAGED=0 WARPS=4 TALL=1 STAGES=2",
];
/// The same for compute capability 9.0.
pub const WGMMA_VARIANTS: &[&str] = &[
    "HEAD_DIM=64 GROUP=7 SOFTCAP=0 WINDOW=0 PAGED=1 WARPS=8 TALL=1 STAGES=3 TILES=8 WGMMA_WARPS=8",
    "HEAD_DIM=128 GROUP=2 SOFTCAP=1 WINDOW=1 PAGED=1 WARPS=4 TALL=2 STAGES=3 TILES=4 WGMMA_WARPS=12",
];
/// The same for the backward.
pub const BACKWARD_VARIANTS: &[&str] = &[
    "HEAD_DIM=64 GROUP=7 SOFTCAP=0 WINDOW=0 KEY_TALL=2 ROW_TALL=2 STEP=32 KEY_STEP=32 SPLIT=1",
    "HEAD_DIM=128 GROUP=2 SOFTCAP=1 WINDOW=1 KEY_TALL=1 ROW_TALL=1 STEP=32 KEY_STEP=64 SPLIT=1",
    "HEAD_DIM=256 GROUP=1 SOFTCAP=0 WINDOW=0 KEY_TALL=1 ROW_TALL=1 STEP=32 KEY_STEP=32 SPLIT=2",
];
/// The same for the backward on compute capability 9.0.
pub const BACKWARD_WGMMA_VARIANTS: &[&str] = &[
    "HEAD_DIM=64 GROUP=7 SOFTCAP=0 WINDOW=0 KEY_TALL=1 ROW_TALL=2 STEP=64 KEY_STEP=32 SPLIT=1 TEAMS=1 PARTS=1",
    "HEAD_DIM=128 GROUP=2 SOFTCAP=1 WINDOW=1 KEY_TALL=1 ROW_TALL=2 STEP=32 KEY_STEP=32 SPLIT=1 TEAMS=2 PARTS=2",
];
/// The same for the kernels without tensor cores.
pub const SIMPLE_VARIANTS: &[&str] =
    &["ELEMENT=float HEAD_DIM=64 GROUP=7 PAGED=0", "ELEMENT=bf16 HEAD_DIM=33 GROUP=1 PAGED=1"];

/// Warps of attention_rows_wgmma for heads of 64 and of 128: two such blocks fit on a multiprocessor, or one.
const WGMMA_WARPS: [usize; 2] = [8, 12];
/// Static shared memory of attention_decode_parallel per tile.
const PARALLEL_BYTES: usize = 3456;
/// Threads per block of attention/simple.cu, and its stacked rows or keys.
const SIMPLE: (u32, usize) = (128, 16);

/// Tiling of the tensor-core kernels for a head and a GPU.
#[derive(Clone, Copy)]
struct TileShape {
    /// Warps of attention_rows, and multiples of 16 rows per warp.
    warps: usize,
    tall: usize,
    /// Ring stages (key tiles in shared memory).
    stages: usize,
    /// The same for attention_decode_parallel, if it fits.
    parallel: Option<usize>,
    /// Warps of attention_rows_wgmma, with 16 rows each, if it replaces attention_rows.
    wgmma: Option<usize>,
}

/// Whether the wgmma kernels apply: Hopper, and heads of whole panels.
fn uses_wgmma(card: &CardInfo, heads: Heads) -> bool {
    card.capability == (9, 0) && matches!(heads.head_dim, 64 | 128)
}

/// Bytes of a row in shared memory: the head padded to a multiple of 16, plus padding against bank conflicts.
fn pitch(heads: Heads) -> usize {
    (heads.head_dim.next_multiple_of(16) + 8) * 2
}

/// Whether tensor cores can handle the head.
fn fits_tensor_cores(heads: Heads, dtype: DType) -> bool {
    dtype == DType::Bf16 && heads.head_dim.is_multiple_of(8) && heads.head_dim <= 256
}

/// Dynamic shared memory available to a kernel.
fn room(card: &CardInfo) -> usize {
    card.shared.saturating_sub(4096)
}

/// Which decode kernel is used.
#[derive(Debug, PartialEq)]
enum Decode {
    /// `attention_decode_parallel`, with this many key tiles concurrently: for fewer blocks than multiprocessors.
    Parallel { tiles: usize },
    /// `attention_decode`: several blocks per multiprocessor, each with one tile after the other.
    InOrder,
}

impl TileShape {
    fn decode(self, blocks: usize, card: &CardInfo) -> Decode {
        match self.parallel {
            Some(tiles) if blocks <= card.processors as usize => Decode::Parallel { tiles },
            _ => Decode::InOrder,
        }
    }

    /// `None` if attention/simple.cu must be used. Depends only on head and GPU, never on the batch.
    fn of(card: &CardInfo, heads: Heads, dtype: DType) -> Option<TileShape> {
        if !fits_tensor_cores(heads, dtype) {
            return None;
        }
        let (all, tile) = (room(card), 2 * TOKENS);
        let room = all / pitch(heads);
        // Measured on an H200: 32 rows per warp pay off for wide heads until registers run out.
        let (tall, most) = if heads.head_dim <= 64 || heads.head_dim > 128 { (1, 8) } else { (2, 4) };
        let warps =
            [8, 4, 2, 1].into_iter().filter(|w| *w <= most).find(|w| w * tall * 16 + 2 * tile <= room)?;
        let fits =
            |tiles: &usize| (DECODE_ROWS + tiles * tile) * pitch(heads) + tiles * PARALLEL_BYTES <= all;
        let parallel = [8, 6, 4, 2].into_iter().find(fits);
        let wgmma = uses_wgmma(card, heads).then_some(WGMMA_WARPS[usize::from(heads.head_dim > 64)]);
        let stages = if wgmma.is_some() { 3 } else { 2 };
        Some(TileShape { warps, tall, stages, parallel, wgmma })
    }
    /// Stacked rows per block of attention_rows.
    fn rows(self) -> usize {
        self.wgmma.unwrap_or(self.warps * self.tall) * 16
    }
    /// Threads per block of its kernel for many rows.
    fn threads(self) -> u32 {
        32 * self.wgmma.unwrap_or(self.warps) as u32
    }
    /// Source and name of its kernel for many rows.
    fn kernel(self) -> (&'static str, &'static str) {
        if self.wgmma.is_some() {
            ("attention_hopper", "attention_rows_wgmma")
        } else {
            ("attention", "attention_rows")
        }
    }
    fn rows_shared(self, heads: Heads) -> usize {
        if self.wgmma.is_some() {
            return 1024 + (self.rows() + self.stages * 2 * TOKENS) * heads.head_dim * 2;
        }
        (self.rows() + self.stages * 2 * TOKENS) * pitch(heads)
    }
    fn decode_shared(self, heads: Heads, stages: usize) -> usize {
        (DECODE_ROWS + stages * 2 * TOKENS) * pitch(heads)
    }
}

/// Definitions common to all tensor-core kernels.
fn tile_defines(op: &Attention) -> String {
    format!(
        "HEAD_DIM={} GROUP={} SOFTCAP={} WINDOW={}",
        op.heads.head_dim,
        op.heads.heads / op.heads.kv_heads,
        u8::from(op.softcap.is_some()),
        u8::from(op.window.is_some()),
    )
}

fn simple_defines(op: &Attention, dtype: DType, paged: bool) -> String {
    let element = if dtype == DType::F32 { "float" } else { "bf16" };
    let group = op.heads.heads / op.heads.kv_heads;
    format!("ELEMENT={element} HEAD_DIM={} GROUP={group} PAGED={}", op.heads.head_dim, u8::from(paged))
}

/// The window as the kernels' integer; no sequence is longer.
fn window(op: &Attention) -> i32 {
    op.window.map_or(0, |w| w.min(1 << 30) as i32)
}

/// Head counts, then the scoring in units of log 2: factor of `q . k`, factor of the cap's tanh, window.
fn tile_scoring(op: &Attention) -> [Arg; 5] {
    let log2_e = std::f32::consts::LOG2_E;
    let (scale, cap) = match op.softcap {
        None => (op.scale * log2_e, 0.0),
        Some(cap) => (op.scale / cap, cap * log2_e),
    };
    args![op.heads.heads as u32, op.heads.kv_heads as u32, scale, cap, window(op)]
}

/// The same for attention/simple.cu: the scale, the cap or 0, the window or 0.
fn simple_scoring(op: &Attention) -> [Arg; 5] {
    let (heads, kv_heads) = (op.heads.heads as u32, op.heads.kv_heads as u32);
    args![heads, kv_heads, op.scale, op.softcap.unwrap_or(0.0), window(op)]
}

fn check_shape(op: &Attention, dtype: DType) {
    assert!(op.heads.heads.is_multiple_of(op.heads.kv_heads) && op.window != Some(0));
    assert!(dtype.is_float());
}

impl AttentionOps for Cuda {
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        shapes::attention(self, &op, qkv, segments, [out, lse])?;
        let (heads, tokens) = (op.heads, segments.rows());
        check_shape(&op, qkv.dtype());
        assert!(qkv.len() == tokens * heads.qkv_width() && lse.len() == tokens * heads.heads);
        assert!(out.len() == tokens * heads.out_width() && out.dtype() == qkv.dtype());
        let unit = PackedUnit::Rows { group: heads.heads / heads.kv_heads };
        let (none, shape) = (0u64, TileShape::of(&self.card, heads, qkv.dtype()));
        let step = shape.map_or(SIMPLE.1, TileShape::rows);
        let list = tables::packed(self, segments, unit, step)?;
        let mut arguments = args![qkv, none, none, &list.memory, out, lse].to_vec();
        let blocks = list.len * heads.kv_heads;
        let Some(shape) = shape else {
            arguments.extend(simple_scoring(&op));
            let defines = simple_defines(&op, qkv.dtype(), false);
            let grid = Grid::new(blocks, SIMPLE.0);
            return self.launch_variant("attention_simple", &defines, "simple_rows", grid, &arguments);
        };
        arguments.extend(tile_scoring(&op));
        let grid = Grid::new(blocks, shape.threads()).with_shared(shape.rows_shared(heads));
        let (source, kernel) = shape.kernel();
        self.launch_variant(source, &defines(&op, shape, false), kernel, grid, &arguments)
    }
    fn attention_backward(
        &self,
        op: Attention,
        saved: AttentionSaved<'_>,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        shapes::attention_backward(self, &op, saved, dout, segments, dqkv)?;
        attention_backward(self, op, saved, dout, segments, dqkv)
    }
}

impl CacheOps for Cuda {
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        shapes::cache_write(self, heads, qkv, rows, cache)?;
        let lists = lists(self, heads, qkv, rows, cache)?;
        let size = qkv.dtype().size();
        let unit = if (heads.head_dim * size).is_multiple_of(16) { 16 } else { size };
        let per = |elements: usize| (elements * size / unit) as u32;
        let (width, head) = (per(heads.qkv_width()), per(heads.head_dim));
        let threads = lists.rows * 2 * heads.kv_heads * head as usize;
        let (rows, kv_heads) = (lists.rows as u32, heads.kv_heads as u32);
        let arguments = args![qkv, &lists.slots, cache, rows, width, kv_heads, head];
        self.launch_flat("attention_cache", &format!("cache_write_{unit}"), threads, &arguments)
    }
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()> {
        shapes::cache_copies(self, heads, pairs, layers)?;
        let Some(first) = layers.first() else { return Ok(()) };
        let bytes = block_len(heads) * first.dtype().size();
        assert!(layers.iter().all(|l| l.len() == first.len() && l.dtype() == first.dtype()));
        assert!(pairs.iter().all(|&(a, b)| (a.max(b) as usize + 1) * block_len(heads) <= first.len()));
        // Addresses of the layers, then the pairs.
        let words =
            layers.iter().map(ptr).chain(pairs.iter().map(|&(a, b)| u64::from(a) | u64::from(b) << 32));
        let table = self.uploaded(&words.collect::<Vec<u64>>())?;
        let at = table.ptr() + (layers.len() * 8) as u64;
        let arguments = args![&table, at, (bytes / 16) as u32];
        self.launch(
            "attention_cache",
            "cache_copies",
            Grid::plane(pairs.len(), layers.len(), 256),
            &arguments,
        )
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
        let heads = op.heads;
        check_shape(&op, qkv.dtype());
        let lists = lists(self, heads, qkv, rows, cache)?;
        assert!(out.len() == lists.rows * heads.out_width() && out.dtype() == qkv.dtype());
        let no_lse = 0u64;
        let Some(shape) = TileShape::of(&self.card, heads, qkv.dtype()) else {
            let mut arguments = args![qkv, cache, &lists.blocks, &lists.many.memory, out, no_lse].to_vec();
            arguments.extend(simple_scoring(&op));
            let grid = Grid::new(lists.many.len * heads.kv_heads, SIMPLE.0);
            let defines = simple_defines(&op, qkv.dtype(), true);
            return self.launch_variant("attention_simple", &defines, "simple_rows", grid, &arguments);
        };
        let defines = defines(&op, shape, true);
        let (source, kernel) = shape.kernel();
        if lists.many.len > 0 {
            let mut arguments =
                args![qkv, cache, &lists.blocks, &lists.many.memory, &mut *out, no_lse].to_vec();
            arguments.extend(tile_scoring(&op));
            let grid = Grid::new(lists.many.len * heads.kv_heads, shape.threads());
            let grid = grid.with_shared(shape.rows_shared(heads));
            self.launch_variant(source, &defines, kernel, grid, &arguments)?;
        }
        let mut arguments = args![qkv, cache, &lists.blocks, &lists.decode.memory, out].to_vec();
        arguments.extend(tile_scoring(&op));
        // attention_decode needs several blocks per multiprocessor; with less than one each, the parallel kernel is used.
        let blocks = lists.decode.len * heads.kv_heads;
        let (kernel, threads, stages) = match shape.decode(blocks, &self.card) {
            Decode::Parallel { tiles } => ("attention_decode_parallel", 128 * tiles, tiles),
            Decode::InOrder => ("attention_decode", 128, 2),
        };
        let grid = Grid::new(blocks, threads as u32).with_shared(shape.decode_shared(heads, stages)).early();
        self.launch_variant(source, &defines, kernel, grid, &arguments)
    }
}

fn defines(op: &Attention, shape: TileShape, paged: bool) -> String {
    let TileShape { warps, tall, stages, parallel, wgmma } = shape;
    let parallel = parallel.map_or(String::new(), |tiles| format!(" TILES={tiles}"));
    let wgmma = wgmma.map_or(String::new(), |w| format!(" WGMMA_WARPS={w}"));
    format!(
        "{} PAGED={} WARPS={warps} TALL={tall} STAGES={stages}{parallel}{wgmma}",
        tile_defines(op),
        u8::from(paged)
    )
}

pub(crate) fn block_len(heads: Heads) -> usize {
    2 * heads.kv_heads * heads.head_dim * TOKENS
}

/// The work lists for these rows; shared by `cache_write` and `attention_paged`.
fn lists(
    cuda: &Cuda,
    heads: Heads,
    qkv: &Buffer,
    rows: &PagedRows,
    cache: &Buffer,
) -> Result<std::sync::Arc<tables::Paged>> {
    assert!(qkv.len().is_multiple_of(heads.qkv_width()) && cache.dtype() == qkv.dtype());
    let shape = TileShape::of(&cuda.card, heads, qkv.dtype());
    let cut = tables::PagedTiling {
        group: heads.heads / heads.kv_heads,
        step: shape.map_or(SIMPLE.1, TileShape::rows),
        decode: shape.is_some(),
        batch: qkv.len() / heads.qkv_width(),
    };
    let lists = tables::paged(cuda, rows, cut)?;
    assert!(lists.needed * block_len(heads) <= cache.len(), "no such cache block");
    Ok(lists)
}

/// Cache positions of the rows, in tokens; `u32::MAX` for rows that are not written.
pub(crate) fn slots(
    cuda: &Cuda,
    heads: Heads,
    qkv: &Buffer,
    rows: &PagedRows,
    cache: &Buffer,
) -> Result<std::sync::Arc<crate::cuda::memory::CardMemory>> {
    Ok(lists(cuda, heads, qkv, rows, cache)?.slots.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(capability: (u32, u32), shared: usize) -> CardInfo {
        CardInfo { capability, shared, processors: 132, ..CardInfo::default() }
    }

    #[test]
    fn kernels_of_the_forward_by_card_and_head() {
        let (hopper, ada) = (card((9, 0), 232_448), card((8, 9), 101_376));
        let of = |card: &CardInfo, head_dim, dtype| {
            TileShape::of(card, Heads { heads: 8, kv_heads: 2, head_dim }, dtype)
        };
        assert!(of(&hopper, 64, DType::F32).is_none() && of(&hopper, 33, DType::Bf16).is_none());
        let wgmma = |card, dim| of(card, dim, DType::Bf16).and_then(|shape| shape.wgmma);
        assert_eq!([64, 128, 96].map(|dim| wgmma(&hopper, dim)), [Some(8), Some(12), None]);
        assert_eq!([64, 128].map(|dim| wgmma(&ada, dim)), [None, None]);
        let Some(shape) = of(&hopper, 64, DType::Bf16) else { panic!("served by tensor cores") };
        assert_eq!(shape.decode(132, &hopper), Decode::Parallel { tiles: 8 });
        assert_eq!(shape.decode(133, &hopper), Decode::InOrder, "more blocks than multiprocessors");
    }
}
