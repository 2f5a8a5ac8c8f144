// Decode GEMM whose weights do not fit into shared memory: k streams through a ring of stages.
//
// The same chain of additions as decode/products.cu, so the same bits. One block per multiprocessor iterates over groups of
// features (persistent); the ring continues from one group to the next, so that memory is never idle between them. A block
// prefetches the first stages before the previous kernel has ended.
//
// Set by the launcher: RING, stages in shared memory; COLUMNS, elements of k per stage; WARPS, tiles of 16 features per group. A
// group has at least AHEAD stages. Hopper only.

#if RING && defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define MINE (16 * WARPS)
// Prefetch distance in stages. Two more are being read by products.
#define AHEAD (RING - 2)
// 16-byte units of a feature per stage, and copies per thread.
#define UNITS (COLUMNS / 8)
#define COPIES (MINE * UNITS / THREADS)

__device__ __forceinline__ void copy_stream(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// A thread's copies of weights: unit threadIdx.x % UNITS of every (THREADS / UNITS)th feature of a group.
template <int EPILOGUE>
struct Weights {
    const bf16* from[COPIES];
    __device__ __forceinline__ void group(const bf16* w, u32 group, u32 tiles, u32 n, u32 k, u32 dim) {
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            const u32 i = threadIdx.x / UNITS + j * (THREADS / UNITS), tile = group * WARPS + i / 16;
            // Missing tiles of the last group alias its last one; their sums are not stored.
            const u32 f = feature<EPILOGUE>(tile < tiles ? tile : tiles - 1, i % 16, n, dim);
            from[j] = w + (u64)f * k + threadIdx.x % UNITS * 8;
        }
    }
    __device__ __forceinline__ void copy(bf16* stage) {
#pragma unroll
        for (int j = 0; j < COPIES; j++) {
            const u32 i = threadIdx.x / UNITS + j * (THREADS / UNITS), column = threadIdx.x % UNITS * 8;
            copy_stream(stage + weight_place(i, column, MINE, 0), from[j]);
            from[j] += COLUMNS;
        }
    }
};

// Copies a stage's columns of x (not normed).
__device__ __forceinline__ void copy_x(bf16* stage, const bf16* x, u32 column, u32 rows, u32 k) {
    for (u32 j = threadIdx.x; j < rows * UNITS; j += THREADS) {
        const u32 row = j / UNITS, unit = j % UNITS;
        copy16(stage + (unit * rows + row) * 8, x + (u64)row * k + column + unit * 8);
    }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int EPILOGUE>
__device__ void decode_gemm_ring(const bf16* w, const float* bias, void* out, const Prologue& prologue, const Rope& rope, bool gelu,
                         u32 rows, u32 n, u32 k, u32) {
    constexpr bool NORMED = EPILOGUE >= GATED;
    extern __shared__ __align__(1024) unsigned char shared[];
    bf16 *weights = (bf16*)shared, *xs = weights + RING * MINE * COLUMNS;
    float *norm_weight = (float*)(xs + (u64)rows * k), *norm_bias = norm_weight + k;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = lane / 4;
    const u32 tiles = n / 16, groups = (tiles + WARPS - 1) / WARPS, stages = k / COLUMNS;
    const u32 own = blockIdx.x < groups ? (groups - blockIdx.x + gridDim.x - 1) / gridDim.x : 0, total = own * stages;
    let_next_start();

    if constexpr (NORMED) {
        for (u32 i = 4 * threadIdx.x; i < k; i += 4 * THREADS) {
            copy16(norm_weight + i, prologue.weight + i);
            if (prologue.bias) copy16(norm_bias + i, prologue.bias + i);
        }
        commit_copies();
    }
    // Position of the copies: group, stage, and ring slot.
    Weights<EPILOGUE> source;
    u32 group = blockIdx.x, stage = 0, slot = 0, fetched = 0;
    source.group(w, min(group, groups - 1), tiles, n, k, rope.dim);
    const bf16* x = (const bf16*)prologue.x;
#pragma unroll 1
    for (; fetched < AHEAD && fetched < total; fetched++) {
        source.copy(weights + fetched * MINE * COLUMNS);
        if constexpr (NORMED) commit_copies();
    }
    const u32 first = fetched;
    EpilogueOperands<2> operands = {};
    u32 tile = group * WARPS + warp;
    bool has_row = warp < WARPS && tile < tiles && row < rows;
    if (has_row) fetch_early<EPILOGUE>(operands, bias, rope, tile, row, n);
    wait_for_earlier();

    if (has_row) fetch_late<EPILOGUE>(operands, out, tile, row, n);
    if constexpr (NORMED) {
        for (u32 i = first; i < AHEAD; i++) commit_copies(); // empty groups keep the wait count constant
        asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
        u32 phase = 0;
#pragma unroll 1
        for (u32 r = 0; r < rows; r++)
            norm_row(prologue, norm_weight, prologue.bias ? norm_bias : nullptr, xs, r, rows, k, phase);
    } else {
#pragma unroll 1
        for (u32 i = 0; i < AHEAD; i++) {
            if (i < first) copy_x(xs + i * rows * COLUMNS, x, i * COLUMNS, rows, k);
            commit_copies();
        }
    }
    stage = first, slot = first % RING;
    if (stage == stages) stage = 0, group += gridDim.x;
    if (stage == 0 && group < groups) source.group(w, group, tiles, n, k, rope.dim);

    const u64 left = 1024ull >> 4 << 32 | 1ull << 62, right = (u64)rows << 16;
    const u32 base = shared_address(weights), x_base = shared_address(xs);
    float c[4];
    u32 at = 0;
#pragma unroll 1
    for (u32 now = blockIdx.x; now < groups; now += gridDim.x) {
#pragma unroll 1
        for (u32 column = 0; column < k; column += COLUMNS) {
            // This stage has arrived for all threads, and all reads of the slot to be filled next are complete.
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            if (fetched < total) {
                source.copy(weights + slot * MINE * COLUMNS);
                if constexpr (!NORMED) copy_x(xs + slot * rows * COLUMNS, x, stage * COLUMNS, rows, k);
                fetched++, slot = slot + 1 == RING ? 0 : slot + 1;
                if (++stage == stages) {
                    stage = 0, group += gridDim.x;
                    if (group < groups) source.group(w, group, tiles, n, k, rope.dim);
                }
            }
            commit_copies();
            const u64 a = ((base + at * MINE * COLUMNS * 2) & 0x3ffff) >> 4 | left;
            const u32 from = NORMED ? column / 8 * rows * 16 : at * rows * COLUMNS * 2;
            const u64 b = ((x_base + from) & 0x3ffff) >> 4 | right;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            // The group's first product overwrites the sums: zeroing them would have to wait for the previous group's.
            multiply(c, a, b, column);
#pragma unroll
            for (int j = 1; j < COLUMNS / 16; j++)
                multiply(c, a + j / 4 * MINE * 8 + j % 4 * 2, b + j * 2 * rows, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            at = at + 1 == RING ? 0 : at + 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        float sum[2][2];
        by_rows<2>(sum, c);
        if (has_row) finish<EPILOGUE>(sum, operands, bias, out, rope, gelu, tile, row, n);
        tile += gridDim.x * WARPS, has_row = warp < WARPS && tile < tiles && row < rows;
        if (has_row) {
            fetch_early<EPILOGUE>(operands, bias, rope, tile, row, n);
            fetch_late<EPILOGUE>(operands, out, tile, row, n);
        }
    }
}

#elif RING

// Never launched before Hopper.
template <int EPILOGUE>
__device__ void decode_gemm_ring(const bf16*, const float*, void*, const Prologue&, const Rope&, bool, u32, u32, u32, u32) {}

#endif
