// Decode GEMM of 17 to 256 rows: y[rows, n] = x[rows, k] · w[n, k]ᵀ. TMA loads both operands into a ring of stages, multicast
// to the blocks of a cluster.
//
// Such a GEMM is bound by what each multiprocessor loads: its block's rows of x and its features' weights. In stream.cu every
// block reads all of x from the L2 cache. Here the CLUSTER_FEATURES blocks of a cluster that have the same rows each load a
// part of them and multicast it to the others, and likewise the CLUSTER_ROWS blocks that have the same features with the
// weights. Every output is one chain of additions over k, as in stream.cu.
//
// Warp-specialised: one producer warp copies; ROWS / 64 consumer warpgroups (at least one) multiply. x is the left operand (64
// rows per warpgroup; rows beyond the last read stale data), weights are the right one. Both are in panels of 64 columns with the
// 128-byte swizzle. A ring slot is refilled once the consumers of all blocks that receive its copies have released it. Clusters
// are persistent: they iterate over groups of CLUSTER_FEATURES * FEATURES features, and copies continue from one group to the
// next.
//
// Set by the launcher: ROWS and FEATURES per block; CLUSTER_ROWS and CLUSTER_FEATURES, blocks of a cluster along both; COLUMNS,
// elements of k per stage; RING, stages. Hopper only.

// The driver's CUtensorMap.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

#define GROUPS (ROWS > 64 ? ROWS / 64 : 1)
#define THREADS (GROUPS * 128 + 32)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define CLUSTER_DIMS __cluster_dims__(CLUSTER_ROWS * CLUSTER_FEATURES, 1, 1)
#define PANELS (COLUMNS / 64)
// Bytes per stage.
#define X_STAGE (ROWS * COLUMNS * 2)
#define W_STAGE (FEATURES * COLUMNS * 2)
// Blocks that share rows or features with a given one, itself included.
#define SHARERS (CLUSTER_ROWS + CLUSTER_FEATURES - 1)

// Accumulator operands of the wgmma for this number of features.
#define QUAD(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define NAMES_8 "%3, %4, %5, %6"
#define NAMES_16 NAMES_8 ", %7, %8, %9, %10"
#define NAMES_24 NAMES_16 ", %11, %12, %13, %14"
#define NAMES_32 NAMES_24 ", %15, %16, %17, %18"
#define NAMES_40 NAMES_32 ", %19, %20, %21, %22"
#define NAMES_48 NAMES_40 ", %23, %24, %25, %26"
#define NAMES_56 NAMES_48 ", %27, %28, %29, %30"
#define NAMES_64 NAMES_56 ", %31, %32, %33, %34"
#define NAMES_72 NAMES_64 ", %35, %36, %37, %38"
#define NAMES_80 NAMES_72 ", %39, %40, %41, %42"
#define NAMES_88 NAMES_80 ", %43, %44, %45, %46"
#define NAMES_96 NAMES_88 ", %47, %48, %49, %50"
#define NAMES_104 NAMES_96 ", %51, %52, %53, %54"
#define NAMES_112 NAMES_104 ", %55, %56, %57, %58"
#define NAMES_120 NAMES_112 ", %59, %60, %61, %62"
#define NAMES_128 NAMES_120 ", %63, %64, %65, %66"
#define NAMES_136 NAMES_128 ", %67, %68, %69, %70"
#define NAMES_144 NAMES_136 ", %71, %72, %73, %74"
#define NAMES_152 NAMES_144 ", %75, %76, %77, %78"
#define NAMES_160 NAMES_152 ", %79, %80, %81, %82"
#define NAMES_168 NAMES_160 ", %83, %84, %85, %86"
#define NAMES_176 NAMES_168 ", %87, %88, %89, %90"
#define NAMES_184 NAMES_176 ", %91, %92, %93, %94"
#define NAMES_192 NAMES_184 ", %95, %96, %97, %98"
#define SUMS_8 QUAD(0)
#define SUMS_16 SUMS_8, QUAD(4)
#define SUMS_24 SUMS_16, QUAD(8)
#define SUMS_32 SUMS_24, QUAD(12)
#define SUMS_40 SUMS_32, QUAD(16)
#define SUMS_48 SUMS_40, QUAD(20)
#define SUMS_56 SUMS_48, QUAD(24)
#define SUMS_64 SUMS_56, QUAD(28)
#define SUMS_72 SUMS_64, QUAD(32)
#define SUMS_80 SUMS_72, QUAD(36)
#define SUMS_88 SUMS_80, QUAD(40)
#define SUMS_96 SUMS_88, QUAD(44)
#define SUMS_104 SUMS_96, QUAD(48)
#define SUMS_112 SUMS_104, QUAD(52)
#define SUMS_120 SUMS_112, QUAD(56)
#define SUMS_128 SUMS_120, QUAD(60)
#define SUMS_136 SUMS_128, QUAD(64)
#define SUMS_144 SUMS_136, QUAD(68)
#define SUMS_152 SUMS_144, QUAD(72)
#define SUMS_160 SUMS_152, QUAD(76)
#define SUMS_168 SUMS_160, QUAD(80)
#define SUMS_176 SUMS_168, QUAD(84)
#define SUMS_184 SUMS_176, QUAD(88)
#define SUMS_192 SUMS_184, QUAD(92)
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

// c += a b, or c = a b if `add` is 0. (Read-only operands are declared read-write, so that their numbering does not depend on
// FEATURES.)
__device__ __forceinline__ void multiply(float (&c)[FEATURES / 2], u64 a, u64 b, u32 add) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; wgmma.mma_async.sync.aligned.m64n" TEXT(FEATURES)
                 "k16.f32.bf16.bf16 {" JOIN(NAMES_, FEATURES) "}, %0, %1, p, 1, 1, 0, 0; }"
                 : "+l"(a), "+l"(b), "+r"(add), JOIN(SUMS_, FEATURES));
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Cluster barrier. mbarriers, which are all of shared memory that threads write, have a fence of their own.
__device__ __forceinline__ void cluster_sync() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Waits until the barrier's phase of this parity is complete. With POLLS, a hang becomes an error (for tests). Shared memory is
// written by TMA and read by wgmma only, which barriers order by themselves: cluster-scope acquire and release would be a
// device-wide fence at every stage (0.7 us).
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#ifdef POLLS
    u32 polls = 0;
#endif
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#ifdef POLLS
        if (++polls > POLLS) __trap();
#endif
    } while (!done);
}

// Arrives at a full barrier and sets the number of bytes that copies will bring, from this block and others.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Copies a box of 64 columns to the same offset in all blocks of `mask`, and counts its bytes at their barriers.
template <int SHARED_BY>
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 column, u32 row, u32 barrier, u32 mask, u64 policy) {
    if constexpr (SHARED_BY > 1)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
            "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)mask), "l"(policy)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
            : "memory");
}

// Copies this block's part of a stage, the `own`th of SHARED_BY with the same LINES lines: whole panels if there are enough,
// else some lines of one. The launcher's tensor maps have boxes of as many lines.
template <int LINES, int SHARED_BY>
__device__ __forceinline__ void copy_part(u32 stage, const TensorMap* map, u32 column, u32 line, u32 own, u32 barrier, u32 mask,
                                          u64 policy) {
    constexpr int CUTS = SHARED_BY > PANELS ? SHARED_BY / PANELS : 1, BOXES = PANELS * CUTS / SHARED_BY;
    static_assert(BOXES * SHARED_BY == PANELS * CUTS && LINES % (8 * CUTS) == 0, "boxes of whole units of the swizzle");
#pragma unroll
    for (int i = 0; i < BOXES; i++) {
        const u32 box = own * BOXES + i, panel = box / CUTS, first = box % CUTS * (LINES / CUTS);
        copy_box<SHARED_BY>(stage + (panel * LINES + first) * 128, map, column + panel * 64, line + first, barrier, mask, policy);
    }
}

// Stores two adjacent features of a row.
__device__ __forceinline__ void store2(float* y, u64 i, float a, float b) { *(float2*)(y + i) = make_float2(a, b); }
__device__ __forceinline__ void store2(bf16* y, u64 i, float a, float b) { *(u32*)(y + i) = narrow2(a, b); }

template <class T>
__device__ __forceinline__ void multicast(const TensorMap* x, const TensorMap* w, T* y, u32 rows, u32 n, u32 k) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // wgmmas of fewer than 64 rows read beyond them: x is placed before the weights, so that they stay within the ring.
    const u32 xs = shared_address(shared), weights = xs + RING * X_STAGE;
    const u32 full = weights + RING * W_STAGE, empty = full + RING * 8;
    const u32 lane = threadIdx.x % WARP, warp = __shfl_sync(ALL, threadIdx.x / WARP, 0);
    const u32 rank = cluster_rank(), of_rows = rank % CLUSTER_ROWS, of_features = rank / CLUSTER_ROWS;
    const u32 clusters = gridDim.x / (CLUSTER_ROWS * CLUSTER_FEATURES);
    const u32 cluster = blockIdx.x / (CLUSTER_ROWS * CLUSTER_FEATURES), width = CLUSTER_FEATURES * FEATURES;
    const u32 groups = (n + width - 1) / width, stages = k / COLUMNS, row = of_rows * ROWS;
    const u32 own = cluster < groups ? (groups - cluster + clusters - 1) / clusters : 0, total = own * stages;
    let_next_start();

    if (threadIdx.x == 0) {
        for (u32 i = 0; i < RING; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, SHARERS * GROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // No block copies to another or arrives at its barriers before they are initialised.
    cluster_sync();

    if (warp == GROUPS * 4) {
        if (lane == 0) {
            asm volatile("prefetch.tensormap [%0];" ::"l"(w) : "memory");
            asm volatile("prefetch.tensormap [%0];" ::"l"(x) : "memory");
            const u32 row_mask = ((1u << CLUSTER_ROWS) - 1) << of_features * CLUSTER_ROWS;
            u32 feature_mask = 0;
#pragma unroll
            for (int i = 0; i < CLUSTER_FEATURES; i++) feature_mask |= 1u << i * CLUSTER_ROWS + of_rows;
            u64 once, often;
            asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
            asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(often));
            const u32 first = min(total, RING);
            u32 feature = cluster * width + of_features * FEATURES, column = 0;
            const auto copy_weights = [&](u32 slot) {
                copy_part<FEATURES, CLUSTER_ROWS>(weights + slot * W_STAGE, w, column, feature, of_rows, full + slot * 8, row_mask, once);
            };
            const auto copy_rows = [&](u32 slot, u32 column) {
                copy_part<ROWS, CLUSTER_FEATURES>(xs + slot * X_STAGE, x, column, row, of_features, full + slot * 8, feature_mask, often);
            };
            const auto advance = [&] {
                column += COLUMNS;
                if (column == k) column = 0, feature += clusters * width;
            };
            // Weights do not depend on the previous kernels.
#pragma unroll 1
            for (u32 i = 0; i < first; i++) {
                expect_bytes(full + i * 8, X_STAGE + W_STAGE);
                copy_weights(i);
                advance();
            }
            wait_for_earlier();
#pragma unroll 1
            for (u32 i = 0, column = 0; i < first; i++) {
                copy_rows(i, column);
                column = column + COLUMNS == k ? 0 : column + COLUMNS;
            }
            u32 slot = 0, parity = 0;
#pragma unroll 1
            for (u32 i = first; i < total; i++) {
                barrier_wait(empty + slot * 8, parity);
                expect_bytes(full + slot * 8, X_STAGE + W_STAGE);
                copy_weights(slot);
                copy_rows(slot, column);
                advance();
                if (++slot == RING) slot = 0, parity ^= 1;
            }
        }
    } else {
        wait_for_earlier();
        // Each lane releases slots for one of the blocks that copy to this one.
        const u32 other = lane - CLUSTER_ROWS, skipped = other + (other >= of_features);
        const u32 sharer = lane < CLUSTER_ROWS ? of_features * CLUSTER_ROWS + lane : skipped * CLUSTER_ROWS + of_rows;
        const u64 layout = 1024ull >> 4 << 32 | 1ull << 62;
        float c[FEATURES / 2];
        u32 slot = 0, parity = 0;
        // Stages whose slots are refilled. Only these are released: a block waits for every arrival at its barriers, so it
        // never exits before one. The last RING slots are not refilled, and nobody would wait for their release.
        u32 refilled = total > RING ? total - RING : 0;
        const auto release = [&](u32 slot) {
            if (refilled) {
                refilled--;
                if (lane < SHARERS) arrive_at(empty + slot * 8, sharer);
            }
        };
#pragma unroll 1
        for (u32 group = cluster; group < groups; group += clusters) {
            u32 before = 0;
#pragma unroll 1
            for (u32 stage = 0; stage < stages; stage++) {
                barrier_wait(full + slot * 8, parity);
                const u64 a = ((xs + slot * X_STAGE + warp / 4 * 64 * 128) & 0x3ffff) >> 4 | layout;
                const u64 b = ((weights + slot * W_STAGE) & 0x3ffff) >> 4 | layout;
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                multiply(c, a, b, stage);
#pragma unroll
                for (int j = 1; j < COLUMNS / 16; j++)
                    multiply(c, a + j / 4 * ROWS * 8 + j % 4 * 2, b + j / 4 * FEATURES * 8 + j % 4 * 2, 1);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                // wgmmas of the previous stage are complete.
                if (stage) release(before);
                before = slot;
                if (++slot == RING) slot = 0, parity ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            release(before);
            // A lane has rows lane / 4 and lane / 4 + 8 of its warp's 16, and features 2 (lane % 4) and the next of every eight.
            const u32 r = row + warp * 16 + lane / 4, feature = group * width + of_features * FEATURES + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < FEATURES / 8; i++) {
                const u32 f = feature + i * 8;
                if (f < n && r < rows) store2(y, (u64)r * n + f, c[4 * i], c[4 * i + 1]);
                if (f < n && r + 8 < rows) store2(y, (u64)(r + 8) * n + f, c[4 * i + 2], c[4 * i + 3]);
            }
        }
    }
}

#else

#define CLUSTER_DIMS

// Never launched before Hopper.
template <class T>
__device__ void multicast(const TensorMap*, const TensorMap*, T*, u32, u32, u32) {}

#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    multicast_f(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* y, u32 rows, u32 n, u32 k) {
    multicast(&x, &w, y, rows, n, k);
}
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    multicast_b(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, u32 rows, u32 n, u32 k) {
    multicast(&x, &w, y, rows, n, k);
}
