// Linear layers of a few rows, for decoding: x · wᵀ with what comes before and after it in the same kernel.
//
// A warp has eight features of all rows (two times eight where two belong together) and meets k in ascending order, 16
// at a time, by the same instruction for every k: one chain of additions, the one that cuBLASLt's whole sums have (the
// launcher compares them before it believes that). Eight rows at most are the upper half of the 16-row operand.
//
// One row's time is the time to fetch weights. They depend on no earlier kernel, so a block asks for all of its weights
// before it waits for the kernel before it, and lets the next kernel begin to do the same.

#define THREADS 128
#define PIECES 8

// What is done with the sums: kept as they are, to be compared, ...
#define SUMS 0
// ... added to the residual stream, ...
#define ADD 1
// ... gate and up made one, ...
#define GATED 2
// ... or queries and keys turned, and keys and values also stored in the cache.
#define TURNED 3

// Before the product: x as it is, or rows of the residual stream normed (LayerNorm if centred).
struct Before {
    const void* x;
    const float *weight, *bias;
    float offset, eps;
    u32 normed, centred;
};

// Heads of a row of TURNED, the turns, and where rows go in the cache.
struct Turns {
    const float *cos, *sin;
    const u32 *positions, *slots;
    bf16* cache;
    u32 heads, kv_heads, dim;
};

__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

// Until this thread's copies of a piece are there; the number that may be left has to be a constant.
__device__ __forceinline__ void wait_for_piece(u32 piece) {
    switch (PIECES - 1 - piece) {
        case 7: asm volatile("cp.async.wait_group 7;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(0u), "r"(a2), "r"(0u), "r"(b0), "r"(b1));
}

// The gate of an activation, as in activation.cu: 0 is SiLU, 1 is GELU.
__device__ __forceinline__ float gate(float x, bool gelu) {
    if (!gelu) return sigmoid_(x);
    const float b = fminf(32.0f, fmaxf(-32.0f, x));
    const float y = sigmoid_(b * 1.595769f * fmaf(b * b, 0.044715f, 1.0f));
    return x != x ? x : y;
}

// Norms a row of the residual stream into shared memory: the sums of norm.cu, over elements that stay in registers.
// MOST fours a thread.
#define MOST 8
__device__ void norm_row(const float* x, const Before& p, bf16* y, u32 width) {
    __shared__ float room[THREADS / WARP];
    vec4 v[MOST];
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        const u32 i = 4 * (threadIdx.x + j * THREADS);
        if (i < width) v[j] = load4(x, i);
    }
    float mean = 0.0f;
    if (p.centred) {
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (4 * (threadIdx.x + j * THREADS) < width) {
                for (int k = 0; k < 4; k++) sum[k] += v[j].x[k];
            }
        }
        mean = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]), room) / (float)width;
    }
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        if (4 * (threadIdx.x + j * THREADS) < width) {
            for (int k = 0; k < 4; k++) square[k] = fmaf(v[j].x[k] - mean, v[j].x[k] - mean, square[k]);
        }
    }
    const float variance = block_sum((square[0] + square[1]) + (square[2] + square[3]), room) / (float)width;
    const float scale = 1.0f / sqrtf(variance + p.eps);
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        const u32 i = 4 * (threadIdx.x + j * THREADS);
        if (i >= width) continue;
        const vec4 w = load4(p.weight, i);
        vec4 out;
        if (p.bias) {
            const vec4 b = load4(p.bias, i);
            for (int k = 0; k < 4; k++) out.x[k] = fmaf((v[j].x[k] - mean) * scale, w.x[k] + p.offset, b.x[k]);
        } else {
            for (int k = 0; k < 4; k++) out.x[k] = (v[j].x[k] - mean) * scale * (w.x[k] + p.offset);
        }
        store4(y, i, out);
    }
}

// The feature that row `i` (of 8 for each chain) of a warp's tile is.
template <int AFTER>
__device__ __forceinline__ u32 feature(u32 tile, u32 i, u32 n, u32 dim) {
    if (AFTER == GATED) return i / 8 * (n / 2) + tile * 8 + i % 8;
    if (AFTER == TURNED) {
        const u32 pairs = dim / 16;
        return tile / pairs * dim + i / 8 * (dim / 2) + tile % pairs * 8 + i % 8;
    }
    return tile * 8 + i;
}

// `warps` of the block's four multiply; all of them copy. Shared memory: the weights of the block, then x, rows of k + 8.
template <int AFTER>
__device__ void few(const bf16* w, const float* bias, void* out, const Before& before, const Turns& turns, bool gelu,
                    u32 rows, u32 n, u32 k, u32 warps) {
    constexpr int CHAINS = AFTER >= GATED ? 2 : 1;
    extern __shared__ __align__(16) unsigned char shared[];
    const u32 pitch = k + 8, mine = warps * CHAINS * 8, tiles = n / (8 * CHAINS), dim = turns.dim;
    bf16 *weights = (bf16*)shared, *xs = weights + (u64)mine * pitch;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tile = blockIdx.x * warps + warp;
    let_next_start();

    // All weights are on their way before anything is waited for: in pieces of k, so that the first can be used soon.
    const u32 piece = (k / 32 + PIECES - 1) / PIECES * 32;
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        const u32 from = g * piece, units = from < k ? min(piece, k - from) / 8 : 0;
        if (units) {
            const u32 row_step = THREADS / units, unit_step = THREADS % units;
            u32 row = threadIdx.x / units, unit = threadIdx.x % units;
            while (row < mine) {
                const u32 of = blockIdx.x * warps + row / (CHAINS * 8);
                if (of < tiles) {
                    const bf16* at = w + (u64)feature<AFTER>(of, row % (CHAINS * 8), n, dim) * k + from + unit * 8;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                                     shared_address(weights + row * pitch + from + unit * 8)),
                                 "l"(at)
                                 : "memory");
                }
                row += row_step, unit += unit_step;
                if (unit >= units) unit -= units, row++;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    wait_for_earlier();
    if (before.normed) {
#pragma unroll 1
        for (u32 r = 0; r < rows; r++) norm_row((const float*)before.x + (u64)r * k, before, xs + r * pitch, k);
    } else {
#pragma unroll 1
        for (u32 r = 0; r < rows; r++) {
            const uint4* from = (const uint4*)((const bf16*)before.x + (u64)r * k);
            for (u32 i = threadIdx.x; i < k / 8; i += THREADS) *(uint4*)(xs + r * pitch + i * 8) = from[i];
        }
    }

    float sum[CHAINS][4] = {};
    const u32 row = lane / 4;
    const bf16* x = xs + row * pitch + lane % 4 * 2;
    const bf16* at = weights + (warp * CHAINS * 8 + lane % 8) * pitch + lane / 8 * 8;
    auto multiply_piece = [&](u32 g) {
        __syncthreads();
        if (warp >= warps || tile >= tiles) return;
#pragma unroll 4
        for (u32 i = g * piece; i < min((g + 1) * piece, k); i += 32) {
            u32 a[4];
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = row < rows ? *(const u32*)(x + i + 8 * j) : 0u;
#pragma unroll
            for (int c = 0; c < CHAINS; c++) {
                u32 b[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                             : "r"(shared_address(at + c * 8 * pitch + i))
                             : "memory");
                multiply(sum[c], a[0], a[1], b[0], b[1]);
                multiply(sum[c], a[2], a[3], b[2], b[3]);
            }
        }
    };
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        wait_for_piece(g);
        multiply_piece(g);
    }
    if (warp >= warps || tile >= tiles || row >= rows) return;

    // A lane has two neighbouring features of each chain, of one row.
#pragma unroll
    for (int c = 0; c < CHAINS; c++) {
        if (!bias) break;
        const u32 f = feature<AFTER>(tile, c * 8 + lane % 4 * 2, n, dim);
        sum[c][0] += bias[f], sum[c][1] += bias[f + 1];
    }
    const u32 f = feature<AFTER>(tile, lane % 4 * 2, n, dim);
    if constexpr (AFTER == SUMS) {
        *(float2*)((float*)out + (u64)row * n + f) = make_float2(sum[0][0], sum[0][1]);
    } else if constexpr (AFTER == ADD) {
        float2* to = (float2*)((float*)out + (u64)row * n + f);
        const float2 old = *to;
        *to = make_float2(old.x + widen(narrow(sum[0][0])), old.y + widen(narrow(sum[0][1])));
    } else if constexpr (AFTER == GATED) {
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
            if (head < turns.heads + turns.kv_heads) {
                const u64 angle = (u64)turns.positions[row] * half + i + j;
                const float a = low[j], b = high[j];
                const float c = turns.cos[angle], d = 1.0f * turns.sin[angle], e = 0.0f - d;
                low[j] = fmaf(a, c, b * e), high[j] = fmaf(b, c, a * d);
            }
        }
        const u32 first = narrow2(low[0], low[1]), second = narrow2(high[0], high[1]);
        bf16* to = (bf16*)out + (u64)row * n + f;
        *(u32*)to = first, *(u32*)(to + half) = second;
        const u32 slot = turns.slots[row];
        if (head < turns.heads || slot == ~0u) return;
        const u32 kv = (head - turns.heads) % turns.kv_heads, part = (head - turns.heads) / turns.kv_heads;
        // As in attention_cache.cu: [block][key head][keys, values][token][head_dim], 64 tokens to a block.
        to = turns.cache + ((((u64)(slot / 64) * turns.kv_heads + kv) * 2 + part) * 64 + slot % 64) * dim + i;
        *(u32*)to = first, *(u32*)(to + half) = second;
    }
}

#define FEW(name, AFTER)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
        name(const bf16* w, const float* bias, void* out, const void* x, const float* norm_weight,                   \
             const float* norm_bias, float offset, float eps, u32 normed, u32 centred, const float* cos,             \
             const float* sin, const u32* positions, const u32* slots, bf16* cache, u32 heads, u32 kv_heads,         \
             u32 dim, bool gelu, u32 rows, u32 n, u32 k, u32 warps) {                                                \
        const Before before = {x, norm_weight, norm_bias, offset, eps, normed, centred};                             \
        const Turns turns = {cos, sin, positions, slots, cache, heads, kv_heads, dim};                               \
        few<AFTER>(w, bias, out, before, turns, gelu, rows, n, k, warps);                                            \
    }
FEW(few_sums, SUMS)
FEW(few_add, ADD)
FEW(few_gated, GATED)
FEW(few_turned, TURNED)
