// Causal grouped-query attention, forward: training, scoring, prefill and decoding.
//
// A block owns some stacked rows of one sequence and key head and iterates over the key tiles in ascending order, with an
// online-softmax step for each. A row's result is for each tile:  s = q kᵀ     one tensor-core chain over the width of the
// head, 16 at a time m' = max(m, s), l = l 2^(m-m') + Σ 2^(s-m'), o = o 2^(m-m') + bf16(2^(s-m')) v
// and no tile is split between blocks, so there is one order of additions. Four lanes share a row; each has a partial sum l over
// its columns, added up at the end. Within a tile a lane adds its 16 weights in groups of four (16 keys) and the four groups
// pairwise: an order that all kernels can follow.
//
// `attention_rows`: a warp owns 16 rows, or TALL times as many. For many rows.
// `attention_decode`: four warps share up to 16 rows; each computes the scores of 16 of a tile's 64 keys, and the output of a
// quarter of the head's columns. For decoding: few rows, many keys. The same products in the same order, so the same bits.
//
//
// A tile that is fully masked for a row leaves it unchanged: its weights are 0, the maximum stays. Keys and values beyond what
// the block attends to are never read (zeros are used instead), so uninitialised memory cannot reach a result.
//
// Also set by the launcher: PAGED (keys and values in cache blocks of KEYS tokens, [key head][keys, values][token]), and for
// attention_rows WARPS, TALL and STAGES (of the ring of tiles in shared memory).

#define ROWS (16 * TALL * WARPS)

// Addresses of the key tiles, in ascending order, and the stride between keys; the values are `values` elements further. The next
// cache block's index is prefetched.
struct Tiles {
    const bf16 *base;
    const int *blocks;
    long long stride, values;
    int kv, kv_heads, last, ahead;
    __device__ __forceinline__ const bf16 *take(int tile) {
#if PAGED
        const long long block = ahead;
        if (tile + 1 < last)
            ahead = blocks[tile + 1];
        return base + (block * kv_heads + kv) * (2 * KEYS * HEAD_DIM);
#else
        return base + (long long)tile * KEYS * stride;
#endif
    }
};

__device__ __forceinline__ Tiles tiles_of(const bf16 *qkv, const bf16 *cache, const int *blocks, const Work &w, int kv,
                                          int heads, int kv_heads, int first, int last) {
    Tiles t;
    t.last = last;
    t.kv = kv;
    t.kv_heads = kv_heads;
#if PAGED
    t.base = cache;
    t.blocks = blocks + w.blocks;
    t.ahead = t.blocks[first];
    t.stride = HEAD_DIM;
    t.values = KEYS * HEAD_DIM;
#else
    t.stride = (heads + 2 * kv_heads) * HEAD_DIM;
    t.base = qkv + w.row * t.stride + (heads + kv) * HEAD_DIM;
    t.blocks = blocks;
    t.ahead = first;
    t.values = kv_heads * HEAD_DIM;
#endif
    return t;
}

// Softmax state of a lane: rows g and g+8 of a 16-row tile.
struct Softmax {
    float max[2], sum[2];
    __device__ __forceinline__ void begin() {
        max[0] = max[1] = -INFINITY_;
        sum[0] = sum[1] = 0.0f;
    }
};

// Updates the maximum; returns the decay of earlier sums. `base` is to be subtracted from scores.
__device__ __forceinline__ float raise(float &max, float here, float &base) {
    float m = fmaxf(max, here);
    base = m == -INFINITY_ ? 0.0f : m;
    float decay = power2(max - base);
    max = m;
    return decay;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x = x + __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Writes a row's log-sum-exp; `max` is in units of log 2.
__device__ __forceinline__ void store_lse(float *lse, float max, float sum) {
    *lse = __fmaf_rn(max, LN_2, log_(sum));
}

// Online-softmax step of a warp's 16 rows: scores become weights, and sums and outputs decay to the new maximum. Unless the
// tile is WHOLE (unmasked), `key` is the lane's first key and the positions are its rows'.
template <bool WHOLE>
__device__ __forceinline__ void step(const Scoring &op, float (&s)[KEYS / 8][4], Softmax &state, float (&o)[UNITS][4],
                                     int key, int upper, int lower) {
    float here[2] = {-INFINITY_, -INFINITY_};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float x = score(op, s[n][e]);
            if (!WHOLE && !sees(op, e >> 1 ? lower : upper, key + n * 8 + (e & 1)))
                x = -INFINITY_;
            s[n][e] = x;
            here[e >> 1] = fmaxf(here[e >> 1], x);
        }
    }
    float base[2], decay[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
        decay[h] = raise(state.max[h], quad_max(here[h]), base[h]);
    float part[2][4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
#pragma unroll
        for (int n = 2 * g; n < 2 * g + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[n][e] = power2(s[n][e] - base[e >> 1]);
        part[0][g] = (s[2 * g][0] + s[2 * g][1]) + (s[2 * g + 1][0] + s[2 * g + 1][1]);
        part[1][g] = (s[2 * g][2] + s[2 * g][3]) + (s[2 * g + 1][2] + s[2 * g + 1][3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
        state.sum[h] =
            __fmaf_rn(state.sum[h], decay[h], (part[h][0] + part[h][1]) + (part[h][2] + part[h][3]));
    // Maxima seldom rise after the first few tiles.
    if (__any_sync(~0u, decay[0] != 1.0f || decay[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < UNITS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                o[n][e] *= decay[e >> 1];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
attention_rows(const bf16 *qkv, const bf16 *cache, const int *blocks, const Work *work, bf16 *out, float *lse,
               int heads, int kv_heads, float scale, float cap, int window) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *q = (bf16 *)shared;
    bf16 *ring = q + ROWS * PITCH;
    const Work w = work[blockIdx.x / kv_heads];
    if (w.count == 0)
        return;
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + ROWS, w.count * GROUP);
    const int seen = w.position + (end - 1) / GROUP + 1;
    const int first_tile = first_seen(op, w.position + w.first / GROUP) / KEYS;
    const int last_tile = (seen + KEYS - 1) / KEYS;
    Tiles tiles = tiles_of(qkv, cache, blocks, w, kv, heads, kv_heads, first_tile, last_tile);

    auto fetch = [&](int tile) {
        if (tile < last_tile) {
            const bf16 *from = tiles.take(tile);
            bf16 *to = ring + (tile - first_tile) % STAGES * (2 * KEYS * PITCH);
            load_tile<KEYS, WARPS * 32>(to, from, tiles.stride, seen - tile * KEYS);
            load_tile<KEYS, WARPS * 32>(to + KEYS * PITCH, from + tiles.values, tiles.stride, seen - tile * KEYS);
        }
        copy_commit();
    };
    load_rows<ROWS, WARPS * 32>(q, qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM, width, w.first, end);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        fetch(first_tile + s);

    // The rows of this warp, the tiles to which any of them attends, and those to which all attend fully.
    const int top = w.first + warp * TALL * 16, bottom = min(top + TALL * 16, end);
    const int lowest = w.position + top / GROUP, highest = w.position + (bottom - 1) / GROUP;
    const int whole_from = first_seen(op, highest), whole_to = lowest + 1;
    const int tile_from = top < end ? first_seen(op, lowest) / KEYS : last_tile;
    const int tile_to = top < end ? highest / KEYS : -1;

    Softmax state[TALL];
    float o[TALL][UNITS][4];
#pragma unroll
    for (int t = 0; t < TALL; ++t) {
        state[t].begin();
#pragma unroll
        for (int n = 0; n < UNITS; ++n)
            o[t][n][0] = o[t][n][1] = o[t][n][2] = o[t][n][3] = 0.0f;
    }

    for (int tile = first_tile; tile < last_tile; ++tile) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        fetch(tile + STAGES - 1);
        if (tile < tile_from || tile > tile_to)
            continue;
        const bf16 *k = ring + (tile - first_tile) % STAGES * (2 * KEYS * PITCH), *v = k + KEYS * PITCH;
        float s[TALL][KEYS / 8][4];
#pragma unroll
        for (int t = 0; t < TALL; ++t)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
                s[t][n][0] = s[t][n][1] = s[t][n][2] = s[t][n][3] = 0.0f;
#pragma unroll
        for (int d = 0; d < WIDE; d += 16) {
            unsigned a[TALL][4];
#pragma unroll
            for (int t = 0; t < TALL; ++t)
                load_left(a[t], q, (warp * TALL + t) * 16, d);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n += 2) {
                unsigned b[4];
                load_right_rows(b, k, n * 8, d);
#pragma unroll
                for (int t = 0; t < TALL; ++t) {
                    multiply(s[t][n], a[t], b[0], b[1]);
                    multiply(s[t][n + 1], a[t], b[2], b[3]);
                }
            }
        }
        const bool whole = tile * KEYS >= whole_from && (tile + 1) * KEYS <= whole_to;
#pragma unroll
        for (int t = 0; t < TALL; ++t) {
            if (whole)
                step<true>(op, s[t], state[t], o[t], 0, 0, 0);
            else
                step<false>(op, s[t], state[t], o[t], tile * KEYS + lane % 4 * 2,
                            w.position + (top + t * 16 + lane / 4) / GROUP,
                            w.position + (top + t * 16 + lane / 4 + 8) / GROUP);
        }
#pragma unroll
        for (int g = 0; g < KEYS / 16; ++g) {
            unsigned a[TALL][4];
#pragma unroll
            for (int t = 0; t < TALL; ++t)
                as_left(a[t], s[t][2 * g], s[t][2 * g + 1]);
#pragma unroll
            for (int n = 0; n < UNITS; n += 2) {
                unsigned b[4];
                load_right(b, v, g * 16, n * 8);
#pragma unroll
                for (int t = 0; t < TALL; ++t) {
                    multiply(o[t][n], a[t], b[0], b[1]);
                    multiply(o[t][n + 1], a[t], b[2], b[3]);
                }
            }
        }
    }

    // Stage through the warp's own rows of q for 16-byte stores.
    copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int t = 0; t < TALL; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = t * 16 + lane / 4 + 8 * h, row = top + at;
            float sum = quad_sum(state[t].sum[h]);
            float factor = 1.0f / sum;
            if (lane % 4 == 0 && row < end && lse)
                store_lse(lse + (long long)(w.row + row / GROUP) * heads + kv * GROUP + row % GROUP, state[t].max[h],
                          sum);
            unsigned *to = (unsigned *)(q + (warp * TALL * 16 + at) * PITCH + lane % 4 * 2);
            // Stores -0 as +0: masked tiles may have given sums either sign.
#pragma unroll
            for (int n = 0; n < UNITS; ++n)
                to[n * 4] = narrow2(o[t][n][2 * h] * factor + 0.0f, o[t][n][2 * h + 1] * factor + 0.0f);
        }
    }
    __syncwarp();
    for (int i = lane; i < TALL * 16 * (HEAD_DIM / 8); i += 32) {
        int r = top + i / (HEAD_DIM / 8), c = i % (HEAD_DIM / 8) * 8;
        if (r < end) {
            bf16 *to = out + ((long long)(w.row + r / GROUP) * heads + kv * GROUP + r % GROUP) * HEAD_DIM + c;
            *(uint4 *)to = *(const uint4 *)(q + (r - w.first) * PITCH + c);
        }
    }
}

// Pairs of 8-column output accumulators per warp of attention_decode.
#define PAIRS ((WIDE / 16 + 3) / 4)

// Ring stages of attention_decode.
#define DECODE_STAGES 2

extern "C" __global__ void __launch_bounds__(128)
attention_decode(const bf16 *qkv, const bf16 *cache, const int *blocks, const Work *work, bf16 *out, int heads,
              int kv_heads, float scale, float cap, int window) {
    extern __shared__ __align__(16) unsigned char decode_shared[];
    bf16 *q = (bf16 *)decode_shared;
    bf16 *ring = q + 16 * PITCH;
    // Exchanged between warps, per tile: weights as left operands, their sums by lane, maxima by row.
    __shared__ uint4 weights[4][32];
    __shared__ float sums[4][2][32], tops[4][16];
    let_next_start();
    const Work w = work[blockIdx.x / kv_heads];
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    wait_for_earlier();
    if (w.count == 0)
        return;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + 16, w.count * GROUP);
    const int seen = w.position + (end - 1) / GROUP + 1;
    const int lowest = w.position + w.first / GROUP;
    const int first_tile = first_seen(op, lowest) / KEYS;
    const int last_tile = (seen + KEYS - 1) / KEYS;
    Tiles tiles = tiles_of(qkv, cache, blocks, w, kv, heads, kv_heads, first_tile, last_tile);

    auto fetch = [&](int tile) {
        if (tile < last_tile) {
            const bf16 *from = tiles.take(tile);
            bf16 *to = ring + (tile - first_tile) % DECODE_STAGES * (2 * KEYS * PITCH);
            load_tile<KEYS, 128>(to, from, tiles.stride, seen - tile * KEYS);
            load_tile<KEYS, 128>(to + KEYS * PITCH, from + tiles.values, tiles.stride, seen - tile * KEYS);
        }
        copy_commit();
    };
    load_rows<16, 128>(q, qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM, width, w.first, end);
#pragma unroll
    for (int s = 0; s < DECODE_STAGES - 1; ++s)
        fetch(first_tile + s);

    const int row[2] = {w.first + lane / 4, w.first + lane / 4 + 8};
    const int position[2] = {w.position + row[0] / GROUP, w.position + row[1] / GROUP};
    const int whole_from = first_seen(op, seen - 1), whole_to = lowest + 1;
    Softmax state;
    state.begin();
    float o[2 * PAIRS][4];
#pragma unroll
    for (int n = 0; n < 2 * PAIRS; ++n)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;

    for (int tile = first_tile; tile < last_tile; ++tile) {
        copy_wait<DECODE_STAGES - 2>();
        __syncthreads();
        fetch(tile + DECODE_STAGES - 1);
        const bf16 *k = ring + (tile - first_tile) % DECODE_STAGES * (2 * KEYS * PITCH), *v = k + KEYS * PITCH;
        float s[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int d = 0; d < WIDE; d += 16) {
            unsigned a[4], b[4];
            load_left(a, q, 0, d);
            load_right_rows(b, k, warp * 16, d);
            multiply(s[0], a, b[0], b[1]);
            multiply(s[1], a, b[2], b[3]);
        }
        const bool whole = tile * KEYS >= whole_from && (tile + 1) * KEYS <= whole_to;
        float here[2] = {-INFINITY_, -INFINITY_};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = score(op, s[n][e]);
                if (!whole && !sees(op, position[e >> 1], tile * KEYS + warp * 16 + n * 8 + lane % 4 * 2 + (e & 1)))
                    x = -INFINITY_;
                s[n][e] = x;
                here[e >> 1] = fmaxf(here[e >> 1], x);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = quad_max(here[h]);
            if (lane % 4 == 0)
                tops[warp][lane / 4 + 8 * h] = m;
        }
        __syncthreads();
        float base[2], decay[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int r = lane / 4 + 8 * h;
            float m = fmaxf(fmaxf(tops[0][r], tops[1][r]), fmaxf(tops[2][r], tops[3][r]));
            decay[h] = raise(state.max[h], m, base[h]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s[n][e] = power2(s[n][e] - base[e >> 1]);
        sums[warp][0][lane] = (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]);
        sums[warp][1][lane] = (s[0][2] + s[0][3]) + (s[1][2] + s[1][3]);
        unsigned mine[4];
        as_left(mine, s[0], s[1]);
        weights[warp][lane] = make_uint4(mine[0], mine[1], mine[2], mine[3]);
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            state.sum[h] = __fmaf_rn(state.sum[h], decay[h],
                                     (sums[0][h][lane] + sums[1][h][lane]) + (sums[2][h][lane] + sums[3][h][lane]));
#pragma unroll
        for (int n = 0; n < 2 * PAIRS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                o[n][e] *= decay[e >> 1];
#pragma unroll
        for (int g = 0; g < KEYS / 16; ++g) {
            uint4 u = weights[g][lane];
            unsigned a[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
                int column = (p * 4 + warp) * 16;
                if (column < WIDE) {
                    unsigned b[4];
                    load_right(b, v, g * 16, column);
                    multiply(o[2 * p], a, b[0], b[1]);
                    multiply(o[2 * p + 1], a, b[2], b[3]);
                }
            }
        }
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float factor = 1.0f / quad_sum(state.sum[h]);
        if (row[h] < end) {
            bf16 *to = out + ((long long)(w.row + row[h] / GROUP) * heads + kv * GROUP + row[h] % GROUP) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; ++n) {
                int column = (n / 2 * 4 + warp) * 16 + n % 2 * 8 + lane % 4 * 2;
                if (column < HEAD_DIM)
                    *(unsigned *)(to + column) =
                        narrow2(o[n][2 * h] * factor + 0.0f, o[n][2 * h + 1] * factor + 0.0f);
            }
        }
    }
}
