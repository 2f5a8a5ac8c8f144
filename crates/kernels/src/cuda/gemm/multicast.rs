//! Decode GEMM of 17 to 256 rows on Hopper with TMA multicast (multicast.cu). `stream` tries it, besides its own kernel and
//! cuBLASLt.

use crate::cuda::context::Cuda;
use crate::cuda::gemm::Gemm;
use crate::cuda::launch::{Grid, args};
use crate::cuda::memory::letter;
use crate::cuda::tensor_map::{BOX_COLUMNS, TensorMap};
use crate::error::Result;

/// Shared memory for a block's stages. The rest of a multiprocessor's is for the small kernels before and after.
const RING_BYTES: usize = 200 << 10;
/// Maximum stages, and the minimum that keeps memory busy.
const MOST_STAGES: usize = 16;
const FEWEST_STAGES: usize = 4;
/// Maximum features per block: half as many accumulators per thread.
const MOST_FEATURES: usize = 192;
/// Fraction of multiprocessors usable by clusters of more than two blocks: an H200 holds 30 of four and 15 of eight at a time.
const TOGETHER: [usize; 2] = [10, 11];
/// Waves beyond the minimum among which the best number of features is searched.
const ROUNDS: usize = 4;

/// Rows per block; blocks of a cluster along rows and features.
type TileCut = (usize, [usize; 2]);
/// The tilings to try, by maximum rows of the GEMM. The blocks of a cluster cover all rows.
const CUTS: [(usize, &[TileCut]); 4] = [
    (32, &[(32, [1, 2]), (32, [1, 4])]),
    (64, &[(64, [1, 2]), (64, [1, 4]), (64, [1, 8])]),
    (128, &[(64, [2, 2]), (64, [2, 4]), (128, [1, 4])]),
    (256, &[(128, [2, 1]), (128, [2, 2]), (128, [2, 4]), (64, [4, 2])]),
];
/// Minimum rows: below, stream.cu reads few rows of x relative to its weights.
const FEWEST_ROWS: usize = 17;

/// Variants to compile in tests.
pub const VARIANTS: &[&str] = &[
    "ROWS=32 FEATURES=32 CLUSTER_ROWS=1 CLUSTER_FEATURES=4 COLUMNS=128 RING=12",
    "ROWS=64 FEATURES=32 CLUSTER_ROWS=1 CLUSTER_FEATURES=8 COLUMNS=128 RING=8",
    "ROWS=64 FEATURES=192 CLUSTER_ROWS=1 CLUSTER_FEATURES=2 COLUMNS=64 RING=6",
    "ROWS=64 FEATURES=112 CLUSTER_ROWS=4 CLUSTER_FEATURES=2 COLUMNS=128 RING=4",
    "ROWS=128 FEATURES=56 CLUSTER_ROWS=2 CLUSTER_FEATURES=4 COLUMNS=128 RING=4",
    "ROWS=128 FEATURES=192 CLUSTER_ROWS=2 CLUSTER_FEATURES=1 COLUMNS=64 RING=5",
];

/// Tiling of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MulticastPlan {
    /// Rows and features per block.
    rows: usize,
    features: usize,
    /// Blocks per cluster along rows and features.
    cluster: [usize; 2],
    /// Elements of k per stage, and stages.
    columns: usize,
    stages: usize,
    /// Maximum concurrently resident blocks.
    most_blocks: usize,
}

/// Parts into which the lines of a panel are cut so that `sharers` blocks copy equally much (`CUTS` in multicast.cu).
fn line_cuts(sharers: usize, columns: usize) -> usize {
    (sharers * BOX_COLUMNS / columns).max(1)
}

impl MulticastPlan {
    /// Plans to try on a GPU with this many multiprocessors. Empty if the kernel does not support the shape.
    pub(super) fn all([m, n, k]: [usize; 3], processors: usize) -> Vec<MulticastPlan> {
        let served = m >= FEWEST_ROWS && n.is_multiple_of(8) && k.is_multiple_of(128);
        let cuts = CUTS.into_iter().find(|&(most, _)| served && m <= most);
        let cuts = cuts.map_or(&[][..], |(_, cuts)| cuts);
        cuts.iter().filter_map(|&cut| MulticastPlan::of(cut, n, processors)).collect()
    }

    fn of((rows, cluster): TileCut, n: usize, processors: usize) -> Option<MulticastPlan> {
        let blocks = cluster[0] * cluster[1];
        let found = if blocks > 2 { processors * TOGETHER[0] / TOGETHER[1] } else { processors };
        let most_blocks = found / blocks * blocks;
        [128, 64].into_iter().find_map(|columns| {
            let features = features((rows, cluster), n, most_blocks, 8 * line_cuts(cluster[0], columns))?;
            let stages = (RING_BYTES / ((rows + features) * columns * 2)).min(MOST_STAGES);
            let plan = MulticastPlan { rows, features, cluster, columns, stages, most_blocks };
            (stages >= FEWEST_STAGES).then_some(plan)
        })
    }

    pub(super) fn defines(&self) -> String {
        let MulticastPlan { rows, features, cluster: [high, wide], columns, stages, .. } = *self;
        format!(
            "ROWS={rows} FEATURES={features} CLUSTER_ROWS={high} CLUSTER_FEATURES={wide} COLUMNS={columns} RING={stages}"
        )
    }

    pub(super) fn start(&self, cuda: &Cuda, g: &Gemm) -> Result<()> {
        let MulticastPlan { rows, features, cluster: [high, wide], columns, stages, most_blocks } = *self;
        let x = TensorMap::of(g.a, [g.m, g.k], rows / line_cuts(wide, columns))?;
        let w = TensorMap::of(g.b, [g.n, g.k], features / line_cuts(high, columns))?;
        let clusters = g.n.div_ceil(features * wide).min(most_blocks / (high * wide));
        let threads = (rows.div_ceil(64) * 128 + 32) as u32;
        // Two eight-byte barriers per stage follow the ring.
        let shared = stages * ((rows + features) * columns * 2 + 16);
        let grid = Grid::new(clusters * high * wide, threads).with_shared(shared).early();
        let all = args![g.c, g.m as u32, g.n as u32, g.k as u32];
        let name = format!("multicast_{}", letter(g.out));
        cuda.launch_mapped(("multicast", &self.defines()), &name, grid, &[x, w], &all)
    }
}

/// Features per block, a multiple of `unit`, that minimise what a multiprocessor loads over all waves. `None` if the GPU has no
/// room for a cluster.
fn features((rows, cluster): TileCut, n: usize, most_blocks: usize, unit: usize) -> Option<usize> {
    let abreast = most_blocks / (cluster[0] * cluster[1]) * cluster[1];
    if abreast == 0 {
        return None;
    }
    let fewest = n.div_ceil(abreast * (MOST_FEATURES / unit * unit));
    let each = |rounds: usize| (rounds, n.div_ceil(rounds * abreast).next_multiple_of(unit));
    let rounds = (fewest..fewest + ROUNDS).map(each);
    rounds.min_by_key(|&(rounds, features)| rounds * (features + rows)).map(|(_, features)| features)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: usize = 132;
    const NARROW: [usize; 8] = [896, 1152, 1536, 2048, 3584, 4608, 5120, 7168];
    const WIDE: [usize; 4] = [9728, 37888, 55296, 152064];

    #[test]
    fn a_plan_fits_the_kernel_and_the_card() {
        for m in [17, 32, 33, 64, 65, 128, 129, 256] {
            for n in NARROW.into_iter().chain(WIDE) {
                for processors in [78, 114, H200] {
                    for plan in MulticastPlan::all([m, n, 3584], processors) {
                        let MulticastPlan { rows, features, cluster: [high, wide], columns, stages, .. } =
                            plan;
                        assert!(
                            rows * high >= m && high * wide <= 8 && plan.most_blocks <= processors,
                            "{plan:?}"
                        );
                        // Boxes are whole units of the swizzle, and accumulators fit into registers.
                        assert!(rows % (8 * line_cuts(wide, columns)) == 0, "{plan:?}");
                        assert!(features % (8 * line_cuts(high, columns)) == 0, "{plan:?}");
                        assert!((8..=MOST_FEATURES).contains(&features), "{plan:?}");
                        assert!(stages * ((rows + features) * columns * 2 + 16) <= 227 << 10, "{plan:?}");
                        assert!((FEWEST_STAGES..=MOST_STAGES).contains(&stages), "{plan:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn no_plan_where_the_kernel_does_not_serve() {
        let count = |shape| MulticastPlan::all(shape, H200).len();
        assert_eq!(count([16, 3584, 18944]), 0, "rows that stream.cu serves");
        assert_eq!(count([257, 3584, 18944]), 0, "rows of a large product");
        assert_eq!(count([64, 3584, 18944 + 64]), 0, "half a stage");
        assert_eq!(count([64, 3588, 18944]), 0, "features that are no multiple of eight");
        assert_eq!(count([64, 3584, 18944]), 3);
        assert_eq!(count([256, 3584, 18944]), 4);
    }

    /// Few blocks idle in the last round: most of the card's features are those of the weight.
    #[test]
    fn weights_of_a_7b_model_fill_the_card() {
        for m in [64, 128, 256] {
            for n in [3584usize, 4608, 37888, 152064] {
                let used = |plan: &MulticastPlan| {
                    let abreast = plan.features * plan.most_blocks / plan.cluster[0];
                    100 * n / (n.div_ceil(abreast) * abreast)
                };
                let plans = MulticastPlan::all([m, n, 3584], H200);
                let best = plans.iter().map(used).max().unwrap();
                assert!(best >= 84, "{m} x {n}: {best} % at best, {plans:?}");
            }
        }
    }
}
