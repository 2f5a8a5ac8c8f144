//! Decode GEMM: linear layers of a few rows, fused with prologue and epilogue.
//!
//! In exact mode a shape is served only if its sums are, bit for bit, cuBLASLt's for many rows; that is tested once per shape, on
//! operands that reveal a different order of additions (`rows`). Otherwise the operations run one by one (`composed`).

use crate::backend::{Activation, Affine, DecodeOps, Normed, PagedRows, QkvLayer};
use crate::cuda::attention::rotary::check_positions;
use crate::cuda::context::Cuda;
use crate::cuda::gemm::linear::form;
use crate::cuda::gemm::rows::{RowsKey, agreeing};
use crate::cuda::launch::{Arg, Grid, args};
use crate::cuda::memory::{f32_ptr, ptr};
use crate::cuda::norm::offset;
use crate::{Buffer, DType, Result, composed, lock, shapes};
use std::collections::HashMap;
use std::sync::Mutex;

/// Maximum rows, and minimum features of a tile: half of a tensor-core operand.
const ROWS: usize = 8;
const TILE: usize = 8;
/// Rows up to which the fused kernel is faster than cuBLASLt with separate kernels: measured on an H200.
pub const WORTH: usize = 4;
/// Threads per block of decode/gemm.cu.
const THREADS: u32 = 128;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("THREADS", THREADS as usize)];
/// Shared memory per block besides what is requested.
const RESERVED: usize = 2048;
/// The widest row that can be normed in the prologue.
const WIDEST: usize = 8192;
/// Features of a warp's tile in the ring kernel, and bytes of its stages: half of a multiprocessor's shared memory, so that the
/// next kernel's first stages can be prefetched while this one ends.
const RING_TILE: usize = 16;
const RING_BYTES: usize = 96 << 10;

/// Variants to compile in tests.
pub const VARIANTS: &[&str] = &[
    "FOURS=1 RING=0",
    "FOURS=8 RING=0",
    "FOURS=7 RING=6 COLUMNS=256 WARPS=2",
    "FOURS=7 RING=8 COLUMNS=128 WARPS=3",
    "FOURS=16 RING=6 COLUMNS=128 WARPS=4",
    "FOURS=1 RING=12 COLUMNS=256 WARPS=1",
];

/// Largest number of rows for which the kernel agrees with cuBLASLt, by shape (n, k, n of the full weight), bias, and resident or
/// streamed.
pub type DecodeLimits = Mutex<HashMap<([usize; 3], bool, bool), usize>>;

/// A decode GEMM of `rows` rows with its fusions: the arguments of the kernels.
struct DecodeGemm<'a> {
    layer: Affine<'a>,
    rows: usize,
    /// Output features per warp tile.
    features: usize,
    /// Parameter vectors of the norm: weight, and bias.
    norm: usize,
}

/// How a block gets its weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum DecodePlan {
    /// All its weights are in shared memory at once; a block has `tiles` tiles.
    Resident { tiles: usize },
    /// k streams through a ring of stages (decode/ring.cu); a group of features has `warps` tiles of 16.
    Ring { warps: usize, columns: usize, stages: usize },
}

/// Inputs of a plan.
#[derive(Clone, Copy, Debug)]
struct DecodeShape {
    rows: usize,
    n: usize,
    k: usize,
    /// Features of a warp's tile in the resident kernel.
    features: usize,
    /// Parameter vectors of the norm: weight, and bias.
    norm: usize,
}

/// GPU properties that a plan depends on.
#[derive(Clone, Copy, Debug)]
struct CardRoom {
    processors: usize,
    shared: usize,
    hopper: bool,
}

impl CardRoom {
    fn of(cuda: &Cuda) -> Self {
        let card = &cuda.card;
        let hopper = card.capability == (9, 0);
        CardRoom { processors: card.processors as usize, shared: card.shared, hopper }
    }
}

impl DecodeShape {
    /// The kernel for the shape, if any.
    fn plan(&self, card: CardRoom) -> Option<DecodePlan> {
        if !(1..=ROWS).contains(&self.rows) || !self.k.is_multiple_of(128) {
            return None;
        }
        let fits = |plan: &DecodePlan| self.shared(*plan) + RESERVED <= card.shared;
        let resident = DecodePlan::Resident { tiles: self.tiles(card) };
        if self.n.is_multiple_of(self.features) && fits(&resident) {
            return Some(resident);
        }
        (card.hopper && self.n.is_multiple_of(RING_TILE)).then(|| self.ring(card)).filter(fits)
    }

    /// Tiles per block: one if that keeps all multiprocessors busy, else three if all blocks are then resident at once, else two.
    fn tiles(&self, card: CardRoom) -> usize {
        let all = self.n / self.features;
        if all <= 2 * card.processors || self.features == TILE {
            return 1;
        }
        let at_once =
            card.shared / (self.shared(DecodePlan::Resident { tiles: 3 }) + RESERVED) * card.processors;
        if all.div_ceil(3) <= at_once { 3 } else { 2 }
    }

    /// Group size that fills the last wave of blocks, stages of 8 to 16 KiB, [`RING_BYTES`] in total.
    fn ring(&self, card: CardRoom) -> DecodePlan {
        let all = self.n / RING_TILE;
        let time = |warps: usize| all.div_ceil(warps).div_ceil(card.processors) * warps;
        let warps = (1..=4).rev().min_by_key(|&w| time(w)).unwrap_or(4);
        let columns = if warps <= 2 && self.k.is_multiple_of(256) { 256 } else { 128 };
        let stages = (RING_BYTES / (warps * RING_TILE * columns * 2)).min(self.k / columns + 2);
        DecodePlan::Ring { warps, columns, stages }
    }

    /// Shared memory per block: weights, rows and norm parameters. wgmma always reads the weights of 64 features and eight
    /// rows, valid or not.
    fn shared(&self, plan: DecodePlan) -> usize {
        let norm = self.norm * 4 * self.k;
        let behind = |features: usize| if features > TILE { (64 - features) * 128 } else { 0 };
        match plan {
            DecodePlan::Resident { tiles } => {
                let features = tiles * self.features;
                let rows = self.rows * (self.k + 8) * 2;
                features * (self.k + 8) * 2 + (ROWS * 16 + rows + norm).max(behind(features))
            }
            DecodePlan::Ring { warps, columns, stages } => {
                let features = warps * RING_TILE;
                let rows = if self.norm > 0 { self.k } else { stages * columns } * self.rows * 2;
                stages * features * columns * 2 + (ROWS * 16 + rows + norm).max(behind(features))
            }
        }
    }
}

/// Operands of a kernel, as its arguments.
struct KernelOperands {
    weights: u64,
    out: u64,
    /// The rows, and how they are normed.
    input: [Arg; 6],
    rotation: [Arg; 8],
    gelu: bool,
}

impl KernelOperands {
    /// Without RoPE and activation.
    fn new(weights: u64, out: u64, input: [Arg; 6]) -> Self {
        let rotation = args![0u64, 0u64, 0u64, 0u64, 0u64, 0u32, 0u32, 0u32];
        KernelOperands { weights, out, input, rotation, gelu: false }
    }
}

impl DecodeGemm<'_> {
    fn shape(&self) -> DecodeShape {
        let w = self.layer.weight;
        DecodeShape { rows: self.rows, n: w.n, k: w.k, features: self.features, norm: self.norm }
    }

    fn plan(&self, cuda: &Cuda) -> Option<DecodePlan> {
        self.shape().plan(CardRoom::of(cuda)).filter(|_| self.layer.weight.compute == DType::Bf16)
    }

    /// The ring plan, even if the weights would fit.
    fn streamed(&self, cuda: &Cuda) -> Option<DecodePlan> {
        let (shape, room) = (self.shape(), CardRoom::of(cuda));
        let plan = shape.ring(room);
        (shape.shared(plan) + RESERVED <= room.shared).then_some(plan)
    }

    fn launch(&self, cuda: &Cuda, plan: DecodePlan, kernel: &str, operands: KernelOperands) -> Result<()> {
        let KernelOperands { weights, out, input, rotation, gelu } = operands;
        let w = self.layer.weight;
        // Groups of four elements of a normed row per thread.
        let fours = if self.norm > 0 { w.k.div_ceil(4 * THREADS as usize) } else { 1 };
        let (blocks, warps, defines) = match plan {
            DecodePlan::Resident { tiles } => {
                ((w.n / self.features).div_ceil(tiles), tiles, format!("FOURS={fours} RING=0"))
            }
            DecodePlan::Ring { warps, columns, stages } => {
                let groups = (w.n / RING_TILE).div_ceil(warps);
                let defines = format!("FOURS={fours} RING={stages} COLUMNS={columns} WARPS={warps}");
                (groups.min(cuda.card.processors as usize), warps, defines)
            }
        };
        let mut all = args![weights, self.layer.bias, out].to_vec();
        all.extend(input);
        all.extend(rotation);
        all.extend(args![gelu, self.rows as u32, w.n as u32, w.k as u32, warps as u32]);
        let grid = Grid::new(blocks, THREADS).with_shared(self.shape().shared(plan)).early();
        cuda.launch_variant("decode_gemm", &defines, kernel, grid, &all)
    }
}

/// Rows of `x`, not normed.
fn as_it_is(x: u64) -> [Arg; 6] {
    args![x, 0u64, 0u64, 0f32, 0f32, 0u32]
}

/// Rows of the residual stream, normed.
fn normed(norm: Normed<'_>, x: &Buffer) -> [Arg; 6] {
    let Normed { op, weight, bias } = norm;
    args![f32_ptr(x), f32_ptr(weight), bias, offset(op), op.eps, u32::from(op.centred)]
}

/// The plan, if the kernel's sums are cuBLASLt's; tested once per shape.
fn serves(cuda: &Cuda, gemm: &DecodeGemm<'_>) -> Result<Option<DecodePlan>> {
    let Some(plan) = gemm.plan(cuda) else { return Ok(None) };
    // Without exactness any sums will do, and these are faster.
    if !cuda.exact() {
        return Ok(Some(plan));
    }
    let (w, biased, ring) =
        (gemm.layer.weight, gemm.layer.bias.is_some(), matches!(plan, DecodePlan::Ring { .. }));
    let key = ([w.n, w.k, w.whole], biased, ring);
    let known = lock(&cuda.decode_gemms).get(&key).copied();
    if let Some(rows) = known {
        return Ok((gemm.rows <= rows).then_some(plan));
    }
    // Before a bias is added, sums are not rounded.
    let out = if biased { DType::F32 } else { DType::Bf16 };
    let rows =
        agreeing(cuda, RowsKey { n: w.n, k: w.k, out, whole: w.whole }, ROWS, |rows, x, weights, to| {
            let trial = DecodeGemm { layer: Affine { weight: w, bias: None }, rows, features: TILE, norm: 0 };
            // Test the kernel that will be used: resident or ring depends on the norm's shared memory, too.
            let plan = if ring { trial.streamed(cuda) } else { trial.plan(cuda) };
            let Some(plan) = plan else { return Ok(false) };
            let operands = KernelOperands::new(weights, to, as_it_is(x));
            trial.launch(cuda, plan, "decode_gemm_sums", operands).map(|()| true)
        })?;
    cuda.profile
        .note(|| format!("few rows of {}x{}: the library's sums up to {rows} of {ROWS} rows", w.n, w.k));
    lock(&cuda.decode_gemms).insert(key, rows);
    Ok((gemm.rows <= rows).then_some(plan))
}

/// Parameter vectors of a norm.
fn vectors(norm: Normed<'_>) -> usize {
    1 + usize::from(norm.bias.is_some())
}

/// Whether the prologue can norm these rows.
fn norms(norm: Normed<'_>, x: &Buffer) -> bool {
    x.dtype() == DType::F32 && norm.op.width.is_multiple_of(4) && norm.op.width <= WIDEST
}

/// See [`DecodeOps::normed_qkv`](crate::backend::DecodeOps::normed_qkv); `false` if it must be composed.
pub fn normed_qkv(
    cuda: &Cuda,
    norm: Normed<'_>,
    x: &Buffer,
    layer: QkvLayer<'_>,
    (rows, cache): (&PagedRows, &Buffer),
    qkv: &mut Buffer,
) -> Result<bool> {
    let QkvLayer { linear: layer, heads, rotation } = layer;
    let gemm = DecodeGemm { layer, rows: x.len() / norm.op.width, features: 2 * TILE, norm: vectors(norm) };
    let Some(rotation) = rotation.filter(|r| r.dim == heads.head_dim && r.dim.is_multiple_of(16)) else {
        return Ok(false);
    };
    let whole = layer.weight.n == heads.qkv_width() && qkv.dtype() == DType::Bf16;
    if !whole || !norms(norm, x) {
        return Ok(false);
    }
    let Some(plan) = serves(cuda, &gemm)? else { return Ok(false) };
    assert_eq!(qkv.len(), gemm.rows * heads.qkv_width());
    check_positions(&rotation, gemm.rows);
    let slots = crate::cuda::attention::slots(cuda, heads, qkv, rows, cache)?;
    let rotation = args![
        f32_ptr(rotation.cos),
        f32_ptr(rotation.sin),
        rotation.positions,
        &slots,
        cache,
        heads.heads as u32,
        heads.kv_heads as u32,
        heads.head_dim as u32
    ];
    let operands = KernelOperands::new(form(layer.weight), ptr(qkv), normed(norm, x));
    gemm.launch(cuda, plan, "decode_gemm_rope", KernelOperands { rotation, ..operands })?;
    Ok(true)
}

/// See [`DecodeOps::linear_add`](crate::backend::DecodeOps::linear_add); `false` if it must be composed.
pub fn linear_add(cuda: &Cuda, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<bool> {
    let gemm = DecodeGemm { layer, rows: x.len() / layer.weight.k, features: TILE, norm: 0 };
    if x.dtype() != DType::Bf16 {
        return Ok(false);
    }
    let Some(plan) = serves(cuda, &gemm)? else { return Ok(false) };
    assert_eq!(to.len(), gemm.rows * layer.weight.n);
    let operands = KernelOperands::new(form(layer.weight), f32_ptr(to), as_it_is(ptr(x)));
    gemm.launch(cuda, plan, "decode_gemm_add", operands)?;
    Ok(true)
}

/// See [`DecodeOps::normed_activation`](crate::backend::DecodeOps::normed_activation); `false` if it must be composed.
pub fn normed_activation(
    cuda: &Cuda,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    op: Activation,
    y: &mut Buffer,
) -> Result<bool> {
    let gemm = DecodeGemm { layer, rows: x.len() / norm.op.width, features: 2 * TILE, norm: vectors(norm) };
    let served = op != Activation::Gelu && y.dtype() == DType::Bf16 && norms(norm, x);
    if !served {
        return Ok(false);
    }
    let Some(plan) = serves(cuda, &gemm)? else { return Ok(false) };
    assert_eq!(y.len(), gemm.rows * layer.weight.n / 2);
    let gelu = op == Activation::GeluGated;
    let operands = KernelOperands::new(form(layer.weight), ptr(y), normed(norm, x));
    gemm.launch(cuda, plan, "decode_gemm_gated", KernelOperands { gelu, ..operands })?;
    Ok(true)
}

impl DecodeOps for Cuda {
    fn decode_rows(&self, widest: usize) -> usize {
        let down = DecodeShape { rows: ROWS, n: widest, k: widest, features: TILE, norm: 0 };
        if matches!(down.plan(CardRoom::of(self)), Some(DecodePlan::Ring { .. })) { ROWS } else { WORTH }
    }
    fn normed_qkv(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: QkvLayer<'_>,
        cache: (&PagedRows, &mut Buffer),
        qkv: &mut Buffer,
    ) -> Result<()> {
        let to = (cache.0, &*cache.1);
        shapes::normed_qkv(self, norm, x, layer, to, qkv)?;
        match normed_qkv(self, norm, x, layer, to, qkv)? {
            true => Ok(()),
            false => composed::normed_qkv(self, norm, x, layer, cache, qkv),
        }
    }
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        shapes::linear_add(self, x, layer, to)?;
        match linear_add(self, x, layer, to)? {
            true => Ok(()),
            false => composed::linear_add(self, x, layer, to),
        }
    }
    fn normed_activation(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        op: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        shapes::normed_activation(self, norm, x, layer, op, y)?;
        match normed_activation(self, norm, x, layer, op, y)? {
            true => Ok(()),
            false => composed::normed_activation(self, norm, x, layer, op, y),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: CardRoom = CardRoom { processors: 132, shared: 232_448, hopper: true };

    /// Hidden width, qkv width, feed-forward width of published models, 0.1B to 32B.
    const MODELS: &[(&str, usize, usize, usize)] = &[
        ("SmolLM2 135M", 576, 960, 1536),
        ("Qwen2.5 0.5B", 896, 1152, 4864),
        ("Llama 3.2 1B", 2048, 3072, 8192),
        ("Qwen2.5 1.5B", 1536, 2048, 8960),
        ("Qwen2.5 3B", 2048, 2560, 11008),
        ("Llama 3.2 3B", 3072, 5120, 8192),
        ("Qwen2.5 7B", 3584, 4608, 18944),
        ("Llama 3.1 8B", 4096, 6144, 14336),
        ("Mistral 7B", 4096, 6144, 14336),
        ("Qwen2.5 14B", 5120, 7168, 13824),
        ("Qwen2.5 32B", 5120, 7168, 27648),
    ];

    #[test]
    fn every_published_shape_has_a_decode_kernel_on_hopper() {
        for &(name, hidden, qkv, ffn) in MODELS {
            for rows in 1..=WORTH {
                let shape = |n, k, features, norm| DecodeShape { rows, n, k, features, norm };
                let layers = [
                    shape(qkv, hidden, 2 * TILE, 1),
                    shape(hidden, hidden, TILE, 0),
                    shape(2 * ffn, hidden, 2 * TILE, 1),
                    shape(hidden, ffn, TILE, 0),
                ];
                for layer in layers {
                    let plan = layer.plan(H200);
                    // 576 is not a multiple of 128.
                    assert!(plan.is_some() || !layer.k.is_multiple_of(128), "{name}: {layer:?}");
                    if let Some(DecodePlan::Ring { columns, stages, .. }) = plan {
                        assert!(stages >= 4 && stages - 2 <= layer.k / columns, "{name}: {layer:?} {plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn weights_that_fit_stay_resident() {
        let shape = |n, k, norm| DecodeShape { rows: 1, n, k, features: if norm > 0 { 16 } else { 8 }, norm };
        assert_eq!(shape(1152, 896, 1).plan(H200), Some(DecodePlan::Resident { tiles: 1 }));
        assert_eq!(shape(896, 4864, 0).plan(H200), Some(DecodePlan::Resident { tiles: 1 }));
        let down = shape(3584, 18944, 0).plan(H200);
        assert_eq!(down, Some(DecodePlan::Ring { warps: 2, columns: 256, stages: 6 }));
        let older = CardRoom { hopper: false, ..H200 };
        assert_eq!(shape(3584, 18944, 0).plan(older), None);
    }
}
