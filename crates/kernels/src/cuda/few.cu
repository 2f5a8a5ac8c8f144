// Linear layers of a few rows, for decoding: x · wᵀ with what comes before and after it in the same kernel.
//
// A warp has eight features of all rows (two times eight where two belong together) and meets k in ascending order, 16
// at a time, by the same instruction for every k: one chain of additions, the one that cuBLASLt's whole sums have (the
// launcher compares them before it believes that). Eight rows at most are the upper half of the 16-row operand.
//
// One row's time is the time to fetch weights. They depend on no earlier kernel, so a block asks for all of its weights
// before it waits for the kernel before it, and lets the next kernel begin to do the same.

#define THREADS 128
// Pieces of k that weights come in.
#define PIECES 4

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

// Σ over the block of a thread's four sums, in the order of `block_sum`. Rooms take turns, so that one barrier is enough.
__device__ __forceinline__ float row_sum(const float (&parts)[4], u32& turn) {
    __shared__ float room[2][THREADS / WARP];
    const float x = warp_sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
    turn ^= 1;
    if (threadIdx.x % WARP == 0) room[turn][threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = room[turn][0];
    for (int w = 1; w < THREADS / WARP; w++) sum += room[turn][w];
    return sum;
}

// Norms a row of the residual stream into shared memory: the sums of norm.cu, over elements that stay in registers.
// `weight` and, unless null, `bias` are in shared memory; a thread reads what it copied there. MOST fours a thread.
#define MOST 8
__device__ __forceinline__ void norm_row(const float* x, const Before& p, const float* weight, const float* bias,
                                         bf16* y, u32 width, u32& turn) {
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
        mean = row_sum(sum, turn) / (float)width;
    }
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        if (4 * (threadIdx.x + j * THREADS) < width) {
            for (int k = 0; k < 4; k++) square[k] = fmaf(v[j].x[k] - mean, v[j].x[k] - mean, square[k]);
        }
    }
    const float scale = 1.0f / sqrtf(row_sum(square, turn) / (float)width + p.eps);
#pragma unroll
    for (int j = 0; j < MOST; j++) {
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

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void matrices(u32 (&f)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// STEP of k: of eight rows, and of the eight features of each chain. All of it is read before the chain goes on: with one
// read for each addition, the chain of 4864 took 13 us instead of 8.
#define STEP 128
template <int CHAINS>
struct Operands {
    u32 a[STEP / 32][4], b[STEP / 32][CHAINS][4];
    __device__ __forceinline__ void read(const bf16* x, const bf16* w, u32 pitch) {
#pragma unroll
        for (int i = 0; i < STEP / 32; i++) {
            matrices(a[i], x + 32 * i);
#pragma unroll
            for (int c = 0; c < CHAINS; c++) matrices(b[i][c], w + c * 8 * pitch + 32 * i);
        }
    }
    __device__ __forceinline__ void add_to(float (&sum)[CHAINS][4]) const {
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
            const int j = i / 2, h = i % 2 * 2;
#pragma unroll
            for (int c = 0; c < CHAINS; c++) multiply(sum[c], a[j][h], a[j][h + 1], b[j][c][h], b[j][c][h + 1]);
        }
    }
};

// `warps` of the block's four multiply; all of them copy. Shared memory: the parameters of the norm, the weights of the
// block, then x, rows of k + 8. Whatever does not depend on earlier kernels is asked for before they are waited for, and
// what does right after: each read from far away takes as long as a thousand additions.
template <int AFTER>
__device__ void few(const bf16* w, const float* bias, void* out, const Before& before, const Turns& turns, bool gelu,
                    u32 rows, u32 n, u32 k, u32 warps) {
    constexpr int CHAINS = AFTER >= GATED ? 2 : 1;
    extern __shared__ __align__(16) unsigned char shared[];
    const u32 pitch = k + 8, mine = warps * CHAINS * 8, tiles = n / (8 * CHAINS), dim = turns.dim;
    float *norm_weight = (float*)shared, *norm_bias = norm_weight + (before.normed ? k : 0);
    bf16 *weights = (bf16*)(norm_bias + (before.normed && before.bias ? k : 0)), *xs = weights + (u64)mine * pitch;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tile = blockIdx.x * warps + warp;
    const u32 row = lane / 4;
    const bool multiplies = warp < warps && tile < tiles, has_row = multiplies && row < rows;
    let_next_start();

    if (before.normed) {
        for (u32 i = 4 * threadIdx.x; i < k; i += 4 * THREADS) {
            copy16(norm_weight + i, before.weight + i);
            if (before.bias) copy16(norm_bias + i, before.bias + i);
        }
    }
    // In pieces of k, so that the first can be used soon.
    const u32 piece = (k / STEP + PIECES - 1) / PIECES * STEP;
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        const u32 from = g * piece, units = from < k ? min(piece, k - from) / 8 : 0;
        if (units) {
            const u32 row_step = THREADS / units, unit_step = THREADS % units;
            u32 i = threadIdx.x / units, unit = threadIdx.x % units;
            while (i < mine) {
                const u32 of = blockIdx.x * warps + i / (CHAINS * 8);
                if (of < tiles) {
                    const u32 f = feature<AFTER>(of, i % (CHAINS * 8), n, dim);
                    copy16(weights + i * pitch + from + unit * 8, w + (u64)f * k + from + unit * 8);
                }
                i += row_step, unit += unit_step;
                if (unit >= units) unit -= units, i++;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    // A lane has two neighbouring features of each chain, of one row.
    const u32 f = feature<AFTER>(tile, lane % 4 * 2, n, dim);
    float2 shift[CHAINS] = {};
    if (bias && has_row) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            shift[c] = *(const float2*)(bias + feature<AFTER>(tile, c * 8 + lane % 4 * 2, n, dim));
    }
    wait_for_earlier();

    float2 old = {}, cosine = {}, sine = {};
    u32 slot = ~0u;
    if (has_row) {
        if constexpr (AFTER == ADD) old = *(const float2*)((const float*)out + (u64)row * n + f);
        if constexpr (AFTER == TURNED) {
            const u64 angle = (u64)turns.positions[row] * (dim / 2) + f % dim;
            cosine = *(const float2*)(turns.cos + angle), sine = *(const float2*)(turns.sin + angle);
            slot = turns.slots[row];
        }
    }
    if (before.normed) {
        // The norm's parameters came with the first piece; a thread reads what it copied itself.
        wait_for_piece(0);
        u32 turn = 0;
#pragma unroll 1
        for (u32 r = 0; r < rows; r++) {
            norm_row((const float*)before.x + (u64)r * k, before, norm_weight, before.bias ? norm_bias : nullptr,
                     xs + r * pitch, k, turn);
        }
    } else {
#pragma unroll 1
        for (u32 r = 0; r < rows; r++) {
            const uint4* from = (const uint4*)((const bf16*)before.x + (u64)r * k);
#pragma unroll 4
            for (u32 i = threadIdx.x; i < k / 8; i += THREADS) *(uint4*)(xs + r * pitch + i * 8) = from[i];
        }
    }

    float sum[CHAINS][4] = {};
    // A lane names a row of each matrix; rows that are not there are the first again, and nobody reads what comes of them.
    const bf16* x = xs + (lane % 8 < rows ? lane % 8 : 0) * pitch + lane / 8 * 8;
    const bf16* at = weights + (warp * CHAINS * 8 + lane % 8) * pitch + lane / 8 * 8;
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        const u32 from = g * piece, to = min(from + piece, k);
        wait_for_piece(g);
        __syncthreads();
        if (!multiplies || from >= to) continue;
#pragma unroll 1
        for (u32 i = from; i < to; i += STEP) {
            Operands<CHAINS> now;
            now.read(x + i, at + i, pitch);
            now.add_to(sum);
        }
    }
    if (!has_row) return;

#pragma unroll
    for (int c = 0; c < CHAINS; c++) {
        if (bias) sum[c][0] += shift[c].x, sum[c][1] += shift[c].y;
    }
    if constexpr (AFTER == SUMS) {
        *(float2*)((float*)out + (u64)row * n + f) = make_float2(sum[0][0], sum[0][1]);
    } else if constexpr (AFTER == ADD) {
        *(float2*)((float*)out + (u64)row * n + f) =
            make_float2(old.x + widen(narrow(sum[0][0])), old.y + widen(narrow(sum[0][1])));
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
                const float a = low[j], b = high[j], c = j ? cosine.y : cosine.x;
                const float d = 1.0f * (j ? sine.y : sine.x), e = 0.0f - d;
                low[j] = fmaf(a, c, b * e), high[j] = fmaf(b, c, a * d);
            }
        }
        const u32 first = narrow2(low[0], low[1]), second = narrow2(high[0], high[1]);
        bf16* to = (bf16*)out + (u64)row * n + f;
        *(u32*)to = first, *(u32*)(to + half) = second;
        if (head < turns.heads || slot == ~0u) return;
        const u32 kv = (head - turns.heads) % turns.kv_heads, part = (head - turns.heads) / turns.kv_heads;
        // As in attention_cache.cu: [block][key head][keys, values][token][head_dim], 64 tokens to a block.
        to = turns.cache + ((((u64)(slot / 64) * turns.kv_heads + kv) * 2 + part) * 64 + slot % 64) * dim + i;
        *(u32*)to = first, *(u32*)(to + half) = second;
    }
}

#define FEW(name, AFTER)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 6)                                                         \
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
