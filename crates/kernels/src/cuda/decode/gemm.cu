// Decode GEMM (few rows): x · wᵀ, fused with the norm before it (prologue) and the epilogue after it.
//
// A block owns some tiles of features for all rows, and multiplies as in decode/products.cu: one FMA chain per output, the same
// chain as cuBLASLt without split-k (the launcher verifies this before relying on it).
//
// A step with one row takes as long as fetching the weights. They do not depend on earlier kernels, so a block prefetches its
// weights before it waits for the previous kernel (programmatic dependent launch), and lets the next kernel start early to do the
// same.
//
// Set by the launcher: FOURS, the maximum number of groups of four elements of a normed row per thread.

// Epilogues: the sums as they are, for comparison, ...
#define SUMS 0
// ... added to the residual stream, ...
#define ADD 1
// ... activation(gate) * up, ...
#define GATED 2
// ... or RoPE of queries and keys, and a write of keys and values to the cache.
#define ROPE 3

// Prologue: x as it is or, for GATED and ROPE, the norm of rows of the residual stream (LayerNorm if centred).
struct Prologue {
    const void* x;
    const float *weight, *bias;
    float offset, eps;
    u32 centred;
};

// For ROPE: head counts, RoPE tables, and the rows' cache positions.
struct Rope {
    const float *cos, *sin;
    const u32 *positions, *slots;
    bf16* cache;
    u32 heads, kv_heads, dim;
};

// The activation's gate, as in activation.cu: 0 is SiLU, 1 is GELU.
__device__ __forceinline__ float gate(float x, bool gelu) {
    if (!gelu) return sigmoid_(x);
    const float b = fminf(32.0f, fmaxf(-32.0f, x));
    const float y = sigmoid_(b * 1.595769f * fmaf(b * b, 0.044715f, 1.0f));
    return x != x ? x : y;
}

// Sum of each thread's four partial sums over the block, in the order of `block_sum`. Alternating buffers, so that one barrier
// suffices.
__device__ __forceinline__ float row_sum(const float (&parts)[4], u32& phase) {
    __shared__ float room[2][THREADS / WARP];
    const float x = warp_sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
    phase ^= 1;
    if (threadIdx.x % WARP == 0) room[phase][threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = room[phase][0];
    for (int w = 1; w < THREADS / WARP; w++) sum += room[phase][w];
    return sum;
}

// Norm of a row of the residual stream into shared memory: the sums of norm.cu, over elements kept in registers. `weight` and,
// unless null, `bias` are in shared memory; a thread reads what it copied there itself.
__device__ __forceinline__ void norm_row(const Prologue& p, const float* weight, const float* bias, bf16* xs, u32 row,
                                         u32 rows, u32 width, u32& phase) {
    const float* x = (const float*)p.x + (u64)row * width;
    vec4 v[FOURS];
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const u32 i = 4 * (threadIdx.x + j * THREADS);
        if (i < width) v[j] = load4(x, i);
    }
    float mean = 0.0f;
    if (p.centred) {
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            if (4 * (threadIdx.x + j * THREADS) < width) {
                for (int k = 0; k < 4; k++) sum[k] += v[j].x[k];
            }
        }
        mean = row_sum(sum, phase) / (float)width;
    }
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        if (4 * (threadIdx.x + j * THREADS) < width) {
            for (int k = 0; k < 4; k++) square[k] = fmaf(v[j].x[k] - mean, v[j].x[k] - mean, square[k]);
        }
    }
    const float scale = 1.0f / sqrtf(row_sum(square, phase) / (float)width + p.eps);
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
        const u32 i = 4 * (threadIdx.x + j * THREADS);
        if (i >= width) continue;
        const vec4 w = load4(weight, i);
        vec4 out;
        if (bias) {
            const vec4 b = load4(bias, i);
            for (int k = 0; k < 4; k++) out.x[k] = fmaf((v[j].x[k] - mean) * scale, w.x[k] + p.offset, b.x[k]);
        } else {
            for (int k = 0; k < 4; k++) out.x[k] = (v[j].x[k] - mean) * scale * (w.x[k] + p.offset);
        }
        store4(xs, x_place(row, i, rows, width), out);
    }
}

// A warp's tile is contiguous features; for paired outputs (gate and up, RoPE halves) it is two groups of eight.
#if RING
#define PLAIN_TILE 16
#else
#define PLAIN_TILE 8
#endif

// Feature index of row `i` of a warp's tile (8 rows per group).
template <int EPILOGUE>
__device__ __forceinline__ u32 feature(u32 tile, u32 i, u32 n, u32 dim) {
    if (EPILOGUE == GATED) return i / 8 * (n / 2) + tile * 8 + i % 8;
    if (EPILOGUE == ROPE) {
        const u32 pairs = dim / 16;
        return tile / pairs * dim + i / 8 * (dim / 2) + tile % pairs * 8 + i % 8;
    }
    return tile * PLAIN_TILE + i;
}

// Epilogue operands of a lane besides the sums: prefetched before the product.
template <int CHAINS>
struct EpilogueOperands {
    float2 shift[CHAINS];
    float2 old[CHAINS];
    float2 cosine, sine;
    u32 slot;
};

// The first of a lane's two adjacent features of a group.
template <int EPILOGUE>
__device__ __forceinline__ u32 lane_feature(u32 tile, int chain, u32 n, u32 dim) {
    return feature<EPILOGUE>(tile, chain * 8 + threadIdx.x % 4 * 2, n, dim);
}

// Operands independent of earlier kernels. So are positions and slots: they were written before the step's first kernel.
template <int EPILOGUE, int CHAINS>
__device__ __forceinline__ void fetch_early(EpilogueOperands<CHAINS>& b, const float* bias, const Rope& rope, u32 tile, u32 row,
                                            u32 n) {
    if (bias) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            b.shift[c] = *(const float2*)(bias + lane_feature<EPILOGUE>(tile, c, n, rope.dim));
    }
    if constexpr (EPILOGUE == ROPE) {
        const u32 f = lane_feature<EPILOGUE>(tile, 0, n, rope.dim);
        const u64 angle = (u64)rope.positions[row] * (rope.dim / 2) + f % rope.dim;
        b.cosine = *(const float2*)(rope.cos + angle), b.sine = *(const float2*)(rope.sin + angle);
        b.slot = rope.slots[row];
    }
}

// Operands that the previous kernel may have written.
template <int EPILOGUE, int CHAINS>
__device__ __forceinline__ void fetch_late(EpilogueOperands<CHAINS>& b, const void* out, u32 tile, u32 row, u32 n) {
    if constexpr (EPILOGUE == ADD) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            b.old[c] = *(const float2*)((const float*)out + (u64)row * n + lane_feature<EPILOGUE>(tile, c, n, 1));
    }
}

// Epilogue: from a lane's sums (of `row` and two adjacent features per group) to the output.
template <int EPILOGUE, int CHAINS>
__device__ __forceinline__ void finish(float (&sum)[CHAINS][2], const EpilogueOperands<CHAINS>& b, bool biased, void* out,
                                       const Rope& rope, bool gelu, u32 tile, u32 row, u32 n) {
    const u32 dim = rope.dim, f = lane_feature<EPILOGUE>(tile, 0, n, dim);
#pragma unroll
    for (int c = 0; c < CHAINS; c++) {
        if (biased) sum[c][0] += b.shift[c].x, sum[c][1] += b.shift[c].y;
    }
    if constexpr (EPILOGUE == SUMS || EPILOGUE == ADD) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
            float2* to = (float2*)((float*)out + (u64)row * n + lane_feature<EPILOGUE>(tile, c, n, dim));
            if constexpr (EPILOGUE == SUMS) {
                *to = make_float2(sum[c][0], sum[c][1]);
            } else {
                *to = make_float2(b.old[c].x + widen(narrow(sum[c][0])), b.old[c].y + widen(narrow(sum[c][1])));
            }
        }
    } else if constexpr (EPILOGUE == GATED) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float g = widen(narrow(sum[0][i])), u = widen(narrow(sum[1][i]));
            y[i] = g * gate(g, gelu) * u;
        }
        *(u32*)((bf16*)out + (u64)row * (n / 2) + f) = narrow2(y[0], y[1]);
    } else {
        const u32 half = dim / 2, head = f / dim, i = f % dim;
        float low[2], high[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            low[j] = widen(narrow(sum[0][j])), high[j] = widen(narrow(sum[1][j]));
            if (head < rope.heads + rope.kv_heads) {
                const float a = low[j], b_ = high[j], c = j ? b.cosine.y : b.cosine.x;
                const float d = 1.0f * (j ? b.sine.y : b.sine.x), e = 0.0f - d;
                low[j] = fmaf(a, c, b_ * e), high[j] = fmaf(b_, c, a * d);
            }
        }
        const u32 first = narrow2(low[0], low[1]), second = narrow2(high[0], high[1]);
        bf16* to = (bf16*)out + (u64)row * n + f;
        *(u32*)to = first, *(u32*)(to + half) = second;
        if (head < rope.heads || b.slot == ~0u) return;
        const u32 kv = (head - rope.heads) % rope.kv_heads, part = (head - rope.heads) / rope.kv_heads;
        // As in attention/cache.cu: [block][key head][keys, values][token][head_dim], 64 tokens per block.
        to = rope.cache + ((((u64)(b.slot / 64) * rope.kv_heads + kv) * 2 + part) * 64 + b.slot % 64) * dim + i;
        *(u32*)to = first, *(u32*)(to + half) = second;
    }
}

// `warps` of the block's four have a tile each; all of them copy. Shared memory: the block's weights, x, then the norm's
// parameters. Reads that do not depend on earlier kernels are issued before waiting for those, the others right after: a read
// from global memory takes as long as a thousand additions.
template <int EPILOGUE>
__device__ void decode_gemm(const bf16* w, const float* bias, void* out, const Prologue& prologue, const Rope& rope, bool gelu,
                    u32 rows, u32 n, u32 k, u32 warps) {
    constexpr bool NORMED = EPILOGUE >= GATED;
    constexpr int CHAINS = EPILOGUE >= GATED ? 2 : 1;
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 mine = warps * CHAINS * 8, tiles = n / (8 * CHAINS), dim = rope.dim;
    bf16 *weights = (bf16*)shared, *xs = weights + (u64)mine * (k + 8);
    float *norm_weight = (float*)(xs + rows * (k + 8)), *norm_bias = norm_weight + k;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tile = blockIdx.x * warps + warp;
    const u32 row = lane / 4;
    const bool has_row = warp < warps && tile < tiles && row < rows;
    let_next_start();

    if constexpr (NORMED) {
        for (u32 i = 4 * threadIdx.x; i < k; i += 4 * THREADS) {
            copy16(norm_weight + i, prologue.weight + i);
            if (prologue.bias) copy16(norm_bias + i, prologue.bias + i);
        }
    }
    // In pieces of k, so that the first can be used soon.
    const u32 piece = piece_of(k);
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        const u32 from = g * piece, units = from < k ? min(piece, k - from) / 8 : 0;
        // Division by multiplication: exact for numbers this small.
        const u32 inverse = units ? ~0u / units + 1 : 0;
#pragma unroll 4
        for (u32 j = threadIdx.x; j < mine * units; j += THREADS) {
            const u32 i = __umulhi(j, inverse), column = from + (j - i * units) * 8;
            const u32 of = blockIdx.x * warps + i / (CHAINS * 8);
            if (of < tiles) {
                const u32 f = feature<EPILOGUE>(of, i % (CHAINS * 8), n, dim);
                copy16(weights + weight_place(i, column, mine, k), w + (u64)f * k + column);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    EpilogueOperands<CHAINS> operands = {};
    if (has_row) fetch_early<EPILOGUE>(operands, bias, rope, tile, row, n);
    wait_for_earlier();

    if (has_row) fetch_late<EPILOGUE>(operands, out, tile, row, n);
    if constexpr (NORMED) {
        // The norm's parameters arrived with the first piece; a thread reads what it copied itself.
        wait_for_piece(0);
        u32 phase = 0;
#pragma unroll 1
        for (u32 r = 0; r < rows; r++)
            norm_row(prologue, norm_weight, prologue.bias ? norm_bias : nullptr, xs, r, rows, k, phase);
    } else {
#pragma unroll 1
        for (u32 r = 0; r < rows; r++) {
            const uint4* from = (const uint4*)((const bf16*)prologue.x + (u64)r * k);
#pragma unroll 5
            for (u32 i = threadIdx.x; i < k / 8; i += THREADS) *(uint4*)(xs + x_place(r, i * 8, rows, k)) = from[i];
        }
    }

    float sum[CHAINS][2];
    product<CHAINS>(sum, weights, xs, mine, rows, k);
    if (has_row) finish<EPILOGUE>(sum, operands, bias, out, rope, gelu, tile, row, n);
}

