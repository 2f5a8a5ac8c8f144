// Decode GEMM of up to 64 rows: y[rows, n] = x[rows, k] · w[n, k]ᵀ, with k streaming through a ring of stages.
//
// Such a GEMM takes as long as reading its weights. cuBLASLt tiles n by 128 features, which gives too few tiles for the GPU if
// n is a model's width. Here a block has 16 to 64 features, and one block per multiprocessor iterates over groups of them
// (persistent) while the ring is never empty. Every output is one chain of additions over k, as in decode/products.cu.
//
// Weights are the left wgmma operand (64 features; those beyond the group read stale data), x the right one (N rows). Both are in
// panels of 64 columns with the 128-byte swizzle.
//
// Set by the launcher: RING, stages in shared memory; COLUMNS, elements of k per stage; WARPS, tiles of 16 features per group;
// N, rows of a wgmma. A group has at least AHEAD stages. Hopper only.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define MINE (16 * WARPS)
// Prefetch distance in stages. Two more are being read by products.
#define AHEAD (RING - 2)
// 16-byte units of a row per stage, and rows that all threads copy at once.
#define UNITS (COLUMNS / 8)
#define AT_ONCE (THREADS / UNITS)

__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

__device__ __forceinline__ void copy_weight(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_row(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Offset of a row's 8 columns in a stage with `rows` rows.
__device__ __forceinline__ u32 place(u32 row, u32 column, u32 rows) {
    return (column / 64 * rows + row) * 64 + ((column % 64 / 8) ^ (row & 7)) * 8;
}

// c += a b, or c = a b if `add` is 0.
__device__ __forceinline__ void multiply(float (&c)[N / 2], u64 a, u64 b, u32 add) {
#if N == 16
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "l"(a), "l"(b), "r"(add));
#elif N == 32
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "l"(a), "l"(b), "r"(add));
#else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "l"(a), "l"(b), "r"(add));
#endif
}

// A thread's copies: unit threadIdx.x % UNITS of every AT_ONCEth row.
struct Copies {
    const bf16 *w, *x;
    u32 unit, first;
    // Number of weight rows, their stride, and the group's first feature; the last group may be short.
    u32 n, k, feature;

    __device__ __forceinline__ void weights(bf16* stage, u32 column) const {
#pragma unroll
        for (int j = 0; j < MINE / AT_ONCE; j++) {
            const u32 i = first + j * AT_ONCE, f = min(feature + i, n - 1);
            copy_weight(stage + place(i, unit * 8, MINE), w + (u64)f * k + column + unit * 8);
        }
    }
    // Missing rows alias the last one; their results are discarded.
    __device__ __forceinline__ void rows(bf16* stage, u32 column, u32 rows) const {
#pragma unroll
        for (int j = 0; j < N / AT_ONCE; j++) {
            const u32 i = first + j * AT_ONCE;
            copy_row(stage + place(i, unit * 8, N), x + (u64)min(i, rows - 1) * k + column + unit * 8);
        }
    }
};

template <class T>
__device__ void stream(const bf16* w, const bf16* x, T* y, u32 rows, u32 n, u32 k) {
    extern __shared__ __align__(1024) unsigned char shared[];
    bf16 *weights = (bf16*)shared, *xs = weights + RING * MINE * COLUMNS;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 groups = (n + MINE - 1) / MINE, stages = k / COLUMNS;
    const u32 own = (groups - blockIdx.x + gridDim.x - 1) / gridDim.x, total = own * stages;
    let_next_start();

    // Position of the copies: the group's first feature, its stage, and the ring slot.
    Copies copies = {w, x, threadIdx.x % UNITS, threadIdx.x / UNITS, n, k, blockIdx.x * MINE};
    u32 stage = 0, slot = 0, fetched = 0;
#pragma unroll 1
    for (; fetched < AHEAD; fetched++) copies.weights(weights + fetched * MINE * COLUMNS, fetched * COLUMNS);
    wait_for_earlier();
#pragma unroll 1
    for (u32 i = 0; i < AHEAD; i++) {
        copies.rows(xs + i * N * COLUMNS, i * COLUMNS, rows);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    stage = slot = AHEAD;
    if (stage == stages) stage = 0, copies.feature += gridDim.x * MINE;

    const u64 layout = 1024ull >> 4 << 32 | 1ull << 62;
    const u32 base = shared_address(weights), x_base = shared_address(xs);
    float c[N / 2];
    u32 at = 0;
#pragma unroll 1
    for (u32 group = blockIdx.x; group < groups; group += gridDim.x) {
#pragma unroll 1
        for (u32 column = 0; column < k; column += COLUMNS) {
            // This stage has arrived for all threads, and all reads of the slot to be filled next are complete.
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            if (fetched < total) {
                copies.weights(weights + slot * MINE * COLUMNS, stage * COLUMNS);
                copies.rows(xs + slot * N * COLUMNS, stage * COLUMNS, rows);
                fetched++, slot = slot + 1 == RING ? 0 : slot + 1;
                if (++stage == stages) stage = 0, copies.feature += gridDim.x * MINE;
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            const u64 a = ((base + at * MINE * COLUMNS * 2) & 0x3ffff) >> 4 | layout;
            const u64 b = ((x_base + at * N * COLUMNS * 2) & 0x3ffff) >> 4 | layout;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            multiply(c, a, b, column);
#pragma unroll
            for (int j = 1; j < COLUMNS / 16; j++)
                multiply(c, a + j / 4 * MINE * 8 + j % 4 * 2, b + j / 4 * N * 8 + j % 4 * 2, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            at = at + 1 == RING ? 0 : at + 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        // A lane has features lane / 4 and lane / 4 + 8 of its warp's 16, and rows 2 (lane % 4) and the next of every eight.
        if (warp >= WARPS) continue;
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const u32 f = group * MINE + warp * 16 + lane / 4 + i / 2 % 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (f < n && row < rows) store(y, (u64)row * n + f, c[i]);
        }
    }
}

#else

// Never launched before Hopper.
template <class T>
__device__ void stream(const bf16*, const bf16*, T*, u32, u32, u32) {}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stream_f(const bf16* w, const bf16* x, float* y, u32 rows, u32 n, u32 k) {
    stream(w, x, y, rows, n, k);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    stream_b(const bf16* w, const bf16* x, bf16* y, u32 rows, u32 n, u32 k) {
    stream(w, x, y, rows, n, k);
}
