//! Decode GEMM of some rows with k streaming through shared memory (stream.cu, multicast.cu): used where its sums are, bit for
//! bit, cuBLASLt's, and it is faster. Both are tested once per shape.

use crate::cuda::context::Cuda;
use crate::cuda::gemm::Gemm;
use crate::cuda::gemm::multicast::MulticastPlan;
use crate::cuda::gemm::rows::{RowsKey, agrees};
use crate::cuda::gemm::tune::time;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::letter;
use crate::{Class, DType, Result, lock};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// Row counts of stream.cu; fewer rows are padded to the next.
const ROWS: [usize; 3] = [16, 32, 64];
/// Row classes of all kernels tried here: a plan serves all row counts that are padded to the same class.
const CLASSES: [usize; 5] = [16, 32, 64, 128, 256];
/// Minimum rows: below, decode/gemm.cu fuses more of a layer.
const FEWEST: usize = 5;
/// Threads per block, and features per warp tile.
const THREADS: u32 = 128;
/// Sizes shared with the kernels, as definitions.
pub(crate) const CONSTANTS: &[(&str, usize)] = &[("THREADS", THREADS as usize)];
const TILE: usize = 16;
/// Shared memory for a block's stages.
const RING_BYTES: usize = 160 << 10;
/// Bytes of the smallest weight that is tuned. (0.5B shape, one H200: 53.2k tok/s with 64 sequences and 16.4k with 16 from 1 MiB
/// on, 51.1k and 15.1k from 8 MiB on.)
const SMALLEST: usize = 1 << 20;
/// Timed launches, and bytes of distinct weights that they read: several times the L2 cache.
const TIMES: usize = 16;
const COLD: usize = 160 << 20;
/// Seconds by which our own kernel may be slower than cuBLASLt: in a model it launches before the previous kernel has ended and
/// prefetches weights meanwhile, up to 25 MB on an H200.
const EARLY: f64 = 2e-6;

/// Variants to compile in tests.
pub const VARIANTS: &[&str] = &[
    "RING=6 COLUMNS=256 WARPS=2 N=16",
    "RING=10 COLUMNS=128 WARPS=3 N=16",
    "RING=6 COLUMNS=128 WARPS=4 N=32",
    "RING=5 COLUMNS=128 WARPS=4 N=64",
];

/// Tuned plans by shape: rows, n, k, type of the result, output features of the full weight; and whether the plan was chosen in exact
/// mode: one chosen without may have other bits than cuBLASLt, and a run may have stages of both kinds.
pub type StreamPlans = Mutex<HashMap<(usize, usize, usize, DType, usize, bool), Option<ProductPlan>>>;

/// Which kernel computes a GEMM, and its tiling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ProductPlan {
    /// stream.cu.
    Stream(StreamPlan),
    /// multicast.cu.
    Multicast(MulticastPlan),
}

impl ProductPlan {
    /// Row class and plans to try. `None` if no kernel supports the shape, or the weight is too small.
    fn all(shape: [usize; 3], processors: usize) -> Option<(usize, Vec<ProductPlan>)> {
        let [m, n, k] = shape;
        let class = CLASSES.into_iter().find(|&rows| m <= rows)?;
        if n * k * 2 < SMALLEST {
            return None;
        }
        let multicast = MulticastPlan::all(shape, processors).into_iter().map(ProductPlan::Multicast);
        let all: Vec<_> =
            StreamPlan::all(shape).into_iter().map(ProductPlan::Stream).chain(multicast).collect();
        (!all.is_empty()).then_some((class, all))
    }

    /// The source file and its definitions.
    fn variant(&self) -> (&'static str, String) {
        match self {
            ProductPlan::Stream(plan) => ("stream", plan.defines()),
            ProductPlan::Multicast(plan) => ("multicast", plan.defines()),
        }
    }

    fn start(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        match self {
            ProductPlan::Stream(plan) => plan.start(cuda, g),
            ProductPlan::Multicast(plan) => plan.start(cuda, g),
        }
    }
}

/// Tiling of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamPlan {
    /// Rows per wgmma.
    rows: usize,
    /// Tiles of features per group.
    warps: usize,
    /// Elements of k per stage, and stages.
    columns: usize,
    stages: usize,
}

impl StreamPlan {
    /// Plans to try on any GPU: groups of one to four tiles. Empty if the kernel does not support the shape.
    fn all([m, _, k]: [usize; 3]) -> Vec<StreamPlan> {
        let rows = ROWS.into_iter().find(|&r| m <= r).filter(|_| m >= FEWEST);
        let Some(rows) = rows.filter(|_| k.is_multiple_of(128)) else {
            return Vec::new();
        };
        let plan = |warps: usize| {
            let columns = if warps * TILE + rows <= 48 && k.is_multiple_of(256) { 256 } else { 128 };
            let stages = (RING_BYTES / ((warps * TILE + rows) * columns * 2)).min(k / columns + 2);
            (stages >= 4).then_some(StreamPlan { rows, warps, columns, stages })
        };
        (1..=4).rev().filter_map(plan).collect()
    }

    fn defines(&self) -> String {
        let StreamPlan { rows, warps, columns, stages } = *self;
        format!("RING={stages} COLUMNS={columns} WARPS={warps} N={rows}")
    }

    fn start(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        let StreamPlan { rows, warps, columns, stages } = *self;
        let blocks = g.n.div_ceil(TILE * warps).min(cuda.card.processors as usize);
        // wgmma always reads 64 features, valid or not: beyond a group's lie at most the rows of x and the bytes added here.
        let shared = stages * (warps * TILE + rows) * columns * 2 + 64 * 128;
        let grid = Grid::new(blocks, THREADS).with_shared(shared).early();
        let name = format!("stream_{}", letter(g.out));
        let all = args![g.b, g.a, g.c, g.m as u32, g.n as u32, g.k as u32];
        cuda.launch_variant("stream", &self.defines(), &name, grid, &all)
    }
}

/// Launches `x[m, k] · w[n, k]ᵀ` if our own kernel is the better choice; `false` if `library` is. The weight is a shard of one
/// with `whole` output features, or that.
pub(crate) fn product(
    cuda: &Cuda,
    g: &Gemm,
    whole: usize,
    library: &dyn Fn(&Gemm) -> Result<()>,
) -> Result<bool> {
    let aligned = [g.a, g.b, g.c].iter().all(|at| at % 16 == 0);
    if cuda.card.capability != (9, 0) || g.beta != 0.0 || g.batch != 1 || !aligned {
        return Ok(false);
    }
    let Some((rows, plans)) = ProductPlan::all([g.m, g.n, g.k], cuda.card.processors as usize) else {
        return Ok(false);
    };
    let key = (rows, g.n, g.k, g.out, whole, cuda.exact());
    let known = lock(&cuda.streams).get(&key).copied();
    let best = match known {
        Some(known) => known,
        // No tests while a graph is captured.
        None if cuda.capturing.load(Ordering::Relaxed) => return Ok(false),
        None => {
            // cuBLASLt serves the shape meanwhile, so that GEMMs inside the test do not recurse.
            lock(&cuda.streams).insert(key, None);
            match fastest_plan(cuda, (g, whole), (rows, &plans), library) {
                Ok(best) => {
                    lock(&cuda.streams).insert(key, best);
                    best
                }
                // Without memory for the test cuBLASLt serves the shape from now on: the copies of the weight alone take 160 MiB or more.
                Err(e) if e.class == Class::Resource => {
                    cuda.profile.note(|| format!("stream {rows}x{}x{}: not tried: {e}", g.n, g.k));
                    None
                }
                Err(e) => return Err(e),
            }
        }
    };
    best.map_or(Ok(false), |plan| plan.start(cuda, g).map(|()| true))
}

/// The fastest plan, if faster than cuBLASLt, among those whose sums are cuBLASLt's for many rows. So timing decides no bit of
/// any result.
fn fastest_plan(
    cuda: &Cuda,
    (g, whole): (&Gemm, usize),
    (m, plans): (usize, &[ProductPlan]),
    library: &dyn Fn(&Gemm) -> Result<()>,
) -> Result<Option<ProductPlan>> {
    let (n, k, _trials) = (g.n, g.k, cuda.profile.trials());
    // Each launch reads another copy of the weight, so that none is in the L2 cache, as in a model.
    let copies = (COLD / (n * k * 2)).clamp(1, TIMES);
    let (x, w) = (cuda.arena.take(m * k * 2)?, cuda.arena.take(copies * n * k * 2)?);
    let y = cuda.arena.take(m * n * g.out.size())?;
    cuda.launch_flat("linear", "noise", m * k, &args![&x, m * k, 3u32])?;
    cuda.launch_flat("linear", "noise", copies * n * k, &args![&w, copies * n * k, 4u32])?;
    let timed = |i: usize| {
        let w = w.ptr() + (i % copies * n * k * 2) as u64;
        Gemm::forward([m, n, k], x.ptr(), w, (y.ptr(), g.out))
    };
    let variants: Vec<_> = plans.iter().map(ProductPlan::variant).collect();
    cuda.modules.compile_together(&variants);
    library(&timed(0))?; // warm-up: its own tuning is not timed
    let advised = time(cuda, TIMES, |i| library(&timed(i)))?;
    let (mut shortest, mut best) = (advised + EARLY, None);
    for plan in plans {
        // A plan that the GPU or compiler refuses is skipped.
        if let Err(e) = plan.start(cuda, &timed(0)) {
            cuda.profile.note(|| format!("stream {m}x{n}x{k}: {plan:?} is not used: {e}"));
            continue;
        }
        let seconds = time(cuda, TIMES, |i| plan.start(cuda, &timed(i)))?;
        let trial = |x, w, y| plan.start(cuda, &Gemm::forward([m, n, k], x, w, (y, g.out)));
        // Without exactness any sums will do.
        if seconds < shortest
            && (!cuda.exact() || agrees(cuda, RowsKey { n, k, out: g.out, whole }, m, trial)?)
        {
            (shortest, best) = (seconds, Some(*plan));
        }
    }
    cuda.profile.note(|| {
        let rate = |seconds: f64| (n * k * 2) as f64 / seconds * 1e-12;
        let (library, own) = (rate(advised), rate(best.map_or(advised, |_| shortest)));
        format!("stream {m}x{n}x{k}: {own:.2} TB/s of weights, the library {library:.2}; {best:?}")
    });
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_as_many_stages_as_are_asked_for_ahead() {
        for m in FEWEST..=64 {
            for n in [896, 1152, 3584, 4608, 37888, 152064] {
                for k in [896, 1536, 3584, 4864, 8960, 18944] {
                    for plan in StreamPlan::all([m, n, k]) {
                        assert!(plan.rows >= m && k % plan.columns == 0, "{plan:?}");
                        assert!((4..=k / plan.columns + 2).contains(&plan.stages), "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_class_of_rows_has_its_kernels() {
        for (m, class, stream, multicast) in
            [(5, 16, 4, 0), (16, 16, 4, 0), (17, 32, 4, 2), (64, 64, 4, 3), (65, 128, 0, 3), (256, 256, 0, 4)]
        {
            let (rows, plans) = ProductPlan::all([m, 3584, 18944], 132).unwrap();
            let streams = plans.iter().filter(|plan| matches!(plan, ProductPlan::Stream(_))).count();
            assert_eq!((rows, streams, plans.len() - streams), (class, stream, multicast), "{m} rows");
        }
        assert!(ProductPlan::all([4, 3584, 18944], 132).is_none(), "decode/gemm.cu");
        assert!(ProductPlan::all([257, 3584, 18944], 132).is_none(), "the library");
    }

    #[test]
    fn decode_rows_of_large_weights_stream() {
        for m in [5, 16, 64] {
            assert_eq!(StreamPlan::all([m, 3584, 18944]).len(), 4, "{m} rows");
        }
        assert!(
            StreamPlan::all([65, 3584, 18944]).is_empty() && StreamPlan::all([4, 3584, 18944]).is_empty()
        );
        assert_eq!(StreamPlan::all([16, 896, 896]).len(), 4, "the smallest weight of a 0.5B model");
        assert!(ProductPlan::all([16, 256, 256], 132).is_none(), "a weight that is not worth trying");
    }
}
