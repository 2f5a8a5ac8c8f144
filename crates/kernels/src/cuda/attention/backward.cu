// Causal grouped-query attention, backward, for packed sequences.
//
// Softmax weights are recomputed from the stored log-sum-exp. Every gradient element has one owner that adds its terms in a
// fixed order: no atomics, and the same bits in every run.
// `attention_delta` runs first: Σ dout · out for each row and head.
// `attention_keys`: a block owns some keys of one sequence and key head and iterates over the stacked rows that attend to them
// (all heads of the group, in token order). A warp owns 16 or 32 of the keys: transposed scores k qᵀ leave the weights in
// registers in the layout of the left operand of dv += pᵀ dout and dk += dsᵀ q.
// It stores ds if there is memory for it, from which `attention_dq` computes dq += ds k: a block owns some stacked rows, a warp
// 16 or 32 of them, and iterates over the keys in ascending order.
// `attention_queries` does the same without that memory: it recomputes ds.
//
// Variants with wgmma (Hopper): attention/backward_keys_wgmma.cu and attention/backward_dq_wgmma.cu.
//
// Also set by the launcher: KEY_TALL and ROW_TALL (multiples of 16 keys, or rows, per warp), STEP (rows per iteration of
// attention_keys), KEY_STEP (keys per iteration of attention_queries), SPLIT (blocks that divide the columns of dk and dv among
// them, each computing all scores).

// Keys, and stacked rows, per block.
#define OWN_KEYS (64 * KEY_TALL)
#define OWN_ROWS (64 * ROW_TALL)
// Columns of dk and dv per block.
#define COLUMNS ((WIDE / 16 + SPLIT - 1) / SPLIT * 16)

// Lanes per row of attention_delta: one per 16 bytes if that is a power of two, else a warp.
#define SHARERS (HEAD_DIM / 8 <= 32 && (HEAD_DIM / 8 & (HEAD_DIM / 8 - 1)) == 0 ? HEAD_DIM / 8 : 32)

// If `both` is given, also writes pairs (log-sum-exp in units of log 2, delta), [head][token].
extern "C" __global__ void attention_delta(const bf16 *out, const bf16 *dout, const float *lse, float *delta,
                                           float2 *both, int heads, int rows) {
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = at / SHARERS, own = row < rows ? row : rows - 1;
    const int lane = at % SHARERS;
    const uint4 *a = (const uint4 *)(out + own * HEAD_DIM), *b = (const uint4 *)(dout + own * HEAD_DIM);
    float sum = 0.0f;
    for (int i = lane; i < HEAD_DIM / 8; i += SHARERS) {
        const uint4 x = a[i], y = b[i];
        const u32 u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum = fmaf(low_half(u[j]), low_half(v[j]), sum);
            sum = fmaf(high_half(u[j]), high_half(v[j]), sum);
        }
    }
#pragma unroll
    for (int d = SHARERS / 2; d > 0; d >>= 1)
        sum += __shfl_xor_sync(ALL, sum, d);
    if (lane == 0 && row < rows) {
        delta[row] = sum;
        if (both)
            both[row % heads * (rows / heads) + row / heads] = make_float2(lse[row] * LOG2_E, sum);
    }
}

// Score gradients are stored as the left operands that `attention_dq` multiplies: a tile of 16 stacked rows and 16 keys is four
// registers of 32 lanes. Row tile r has key tiles 0..=r / GROUP, consecutively. Start of a row tile's tiles:
__device__ __forceinline__ long long tile_row(int r) {
    const long long q = r / GROUP, m = r % GROUP;
    return GROUP * (q * (q - 1) / 2) + m * q + r;
}

// Transposes an 8x8 matrix across a warp.
__device__ __forceinline__ unsigned transposed(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Stores a tile that a warp holds with keys as rows: columns 0..8 in x, 8..16 in y.
__device__ __forceinline__ void store_transposed(uint4 *to, int rows, int keys, const float (&x)[4], const float (&y)[4]) {
    unsigned a[4];
    as_left(a, x, y);
    const uint4 v = make_uint4(transposed(a[0]), transposed(a[2]), transposed(a[1]), transposed(a[3]));
    to[(tile_row(rows) + keys) * 32 + (threadIdx.x & 31)] = v;
}

// Stores a warp's 16 result rows through its staging rows `room`; `place(r)` is row r's destination, or null.
template <int N, class Place>
__device__ __forceinline__ void store_rows(bf16 *room, const float (&x)[N][4], float factor, int column, Place place) {
    int lane = threadIdx.x & 31;
    for (int h = 0; h < 2; ++h) {
        u32 *to = (u32 *)(room + (lane / 4 + 8 * h) * PITCH + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < N; ++n)
            to[n * 4] = narrow2(x[n][2 * h] * factor, x[n][2 * h + 1] * factor);
    }
    __syncwarp();
    for (int i = lane; i < 16 * N; i += 32) {
        int r = i / N, c = column + i % N * 8;
        bf16 *to = place(r);
        if (to && c < HEAD_DIM)
            *(uint4 *)(to + c) = *(const uint4 *)(room + r * PITCH + i % N * 8);
    }
    __syncwarp();
}

// x += a bᵀ: rows of `a` from `top` on, all N rows of `b`, over the width of the head.
template <int T, int N>
__device__ __forceinline__ void scores(float (&x)[T][N][4], const bf16 *a, int top, const bf16 *b) {
#pragma unroll
    for (int d = 0; d < WIDE; d += 16) {
        unsigned left[T][4];
#pragma unroll
        for (int t = 0; t < T; ++t)
            load_left(left[t], a, top + t * 16, d);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_right_rows(right, b, n * 8, d);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                multiply(x[t][n], left[t], right[0], right[1]);
                multiply(x[t][n + 1], left[t], right[2], right[3]);
            }
        }
    }
}

// x += bf16(w) b: all rows of `b`, its columns from `column` on.
template <int T, int M, int N>
__device__ __forceinline__ void add_products(float (&x)[T][M][4], const float (&w)[T][N][4], const bf16 *b,
                                             int column) {
#pragma unroll
    for (int r = 0; r < N; r += 2) {
        unsigned left[T][4];
#pragma unroll
        for (int t = 0; t < T; ++t)
            as_left(left[t], w[t][r], w[t][r + 1]);
#pragma unroll
        for (int n = 0; n < M; n += 2) {
            if (M * 8 < WIDE && column + n * 8 >= WIDE)
                continue;
            unsigned right[4];
            load_right(right, b, r * 8, column + n * 8);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                multiply(x[t][n], left[t], right[0], right[1]);
                multiply(x[t][n + 1], left[t], right[2], right[3]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
attention_keys(const bf16 *qkv, const bf16 *dout, const float *lse, const float *delta, const Work *work, bf16 *dqkv,
               int heads, int kv_heads, float scale, float cap, int window, float factor, int first_kv, int some_kv,
               uint4 *gradients, long long per_kv) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *k = (bf16 *)shared, *v = k + OWN_KEYS * PITCH, *ring = v + OWN_KEYS * PITCH;
    // Per row in the ring: log-sum-exp in units of log 2, and delta.
    __shared__ float kept[2][2][STEP];
    const Work w = work[blockIdx.x / some_kv];
    const Scoring op = {scale, cap, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int columns = blockIdx.z * COLUMNS;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;
    // Tokens from `first` on attend to the first key; none from `last` on attends to any of the keys.
    const int first = w.first, keys = min(OWN_KEYS, w.count - first);
#if WINDOW
    const int last = (int)min((long long)w.count, (long long)first + OWN_KEYS - 1 + window);
#else
    const int last = w.count;
#endif
    const int end = last * GROUP;
    const bf16 *q_base = qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
    const bf16 *dout_base = dout + (long long)w.row * out_width + kv * GROUP * HEAD_DIM;
    const bf16 *k_base = qkv + (long long)(w.row + first) * width + (heads + kv) * HEAD_DIM;

    auto fetch = [&](int row, int slot) {
        if (row < end) {
            bf16 *to = ring + slot * (2 * STEP * PITCH);
            load_rows<STEP, BLOCK_THREADS>(to, q_base, width, row, end);
            load_rows<STEP, BLOCK_THREADS>(to + STEP * PITCH, dout_base, out_width, row, end);
            for (int i = threadIdx.x; i < STEP; i += BLOCK_THREADS) {
                int r = row + i;
                long long at = (long long)(w.row + r / GROUP) * heads + kv * GROUP + r % GROUP;
                kept[slot][0][i] = r < end ? lse[at] * LOG2_E : 0.0f;
                kept[slot][1][i] = r < end ? delta[at] : 0.0f;
            }
        }
        copy_commit();
    };
    load_tile<OWN_KEYS, BLOCK_THREADS>(k, k_base, width, keys);
    load_tile<OWN_KEYS, BLOCK_THREADS>(v, k_base + kv_heads * HEAD_DIM, width, keys);
    fetch(first * GROUP, 0);

    float dk[KEY_TALL][COLUMNS / 8][4], dv[KEY_TALL][COLUMNS / 8][4];
#pragma unroll
    for (int t = 0; t < KEY_TALL; ++t)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dk[t][n][e] = dv[t][n][e] = 0.0f;

    // First and last key of this warp.
    const int top = first + warp * 16 * KEY_TALL, bottom = top + 16 * KEY_TALL - 1;
    int slot = 0;
    for (int row = first * GROUP; row < end; row += STEP, slot ^= 1) {
        copy_wait<0>();
        __syncthreads();
        fetch(row + STEP, slot ^ 1);
        const int low = row / GROUP, high = (min(row + STEP, end) - 1) / GROUP;
        // Whether any row attends to any key of the warp, and whether all attend to all.
        if (high < top || first_seen(op, low) > bottom)
            continue;
        const bool whole = low >= bottom && first_seen(op, high) <= top;
        const bf16 *q = ring + slot * (2 * STEP * PITCH), *g = q + STEP * PITCH;
        float p[KEY_TALL][STEP / 8][4], ds[KEY_TALL][STEP / 8][4];
#pragma unroll
        for (int t = 0; t < KEY_TALL; ++t)
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    p[t][n][e] = ds[t][n][e] = 0.0f;
        scores<KEY_TALL>(p, k, warp * 16 * KEY_TALL, q);
        scores<KEY_TALL>(ds, v, warp * 16 * KEY_TALL, g);
#pragma unroll
        for (int t = 0; t < KEY_TALL; ++t) {
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
                const int i = n * 8 + lane % 4 * 2;
                const float2 l = *(const float2 *)&kept[slot][0][i], dl = *(const float2 *)&kept[slot][1][i];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float slope;
                    float x = score_and_slope(op, p[t][n][e], slope) - (e & 1 ? l.y : l.x);
                    const int key = top + t * 16 + lane / 4 + (e >> 1) * 8;
                    if (!whole && !sees(op, (row + i + (e & 1)) / GROUP, key))
                        x = -INFINITY_;
                    p[t][n][e] = power2(x);
                    ds[t][n][e] = p[t][n][e] * (ds[t][n][e] - (e & 1 ? dl.y : dl.x)) * slope;
                }
            }
        }
        add_products<KEY_TALL>(dv, p, g, columns);
        add_products<KEY_TALL>(dk, ds, q, columns);
        if (gradients && blockIdx.z == 0) {
            uint4 *to = gradients + (kv - first_kv) * per_kv + w.blocks;
#pragma unroll
            for (int t = 0; t < KEY_TALL; ++t) {
#pragma unroll
                for (int r = 0; r < STEP / 16; ++r) {
                    const int rows = row / 16 + r, keys = top / 16 + t;
                    if (rows * 16 < w.count * GROUP && keys <= rows / GROUP)
                        store_transposed(to, rows, keys, ds[t][2 * r], ds[t][2 * r + 1]);
                }
            }
        }
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;
#pragma unroll
    for (int t = 0; t < KEY_TALL; ++t) {
        const int from = top + t * 16, values = kv_heads * HEAD_DIM;
        auto place = [&](int r) {
            return from + r < first + keys ? to + (long long)(from + r) * width : (bf16 *)nullptr;
        };
        bf16 *room = k + (warp * KEY_TALL + t) * 16 * PITCH;
        store_rows(room, dk[t], factor, columns, place);
        to += values;
        store_rows(room, dv[t], 1.0f, columns, place);
        to -= values;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
attention_queries(const bf16 *qkv, const bf16 *dout, const float *lse, const float *delta, const Work *work, bf16 *dqkv,
                  int heads, int kv_heads, float scale, float cap, int window, float factor) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *q = (bf16 *)shared, *g = q + OWN_ROWS * PITCH, *ring = g + OWN_ROWS * PITCH;
    const Work w = work[blockIdx.x / kv_heads];
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;
    const int end = min(w.first + OWN_ROWS, w.count * GROUP);
    const int seen = (end - 1) / GROUP + 1;
    const int start = first_seen(op, w.first / GROUP) / KEY_STEP * KEY_STEP;
    const bf16 *k_base = qkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;

    auto fetch = [&](int key, int slot) {
        if (key < seen) {
            bf16 *to = ring + slot * (2 * KEY_STEP * PITCH);
            const bf16 *from = k_base + (long long)key * width;
            load_tile<KEY_STEP, BLOCK_THREADS>(to, from, width, seen - key);
            load_tile<KEY_STEP, BLOCK_THREADS>(to + KEY_STEP * PITCH, from + kv_heads * HEAD_DIM, width, seen - key);
        }
        copy_commit();
    };
    load_rows<OWN_ROWS, BLOCK_THREADS>(q, qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM, width, w.first, end);
    load_rows<OWN_ROWS, BLOCK_THREADS>(g, dout + (long long)w.row * out_width + kv * GROUP * HEAD_DIM, out_width, w.first, end);
    fetch(start, 0);

    const int top = w.first + warp * 16 * ROW_TALL, bottom = min(top + 16 * ROW_TALL, end);
    // Per row of this lane: log-sum-exp in units of log 2, and delta.
    float kept[ROW_TALL][2], sums[ROW_TALL][2];
    float dq[ROW_TALL][UNITS][4];
#pragma unroll
    for (int t = 0; t < ROW_TALL; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = top + t * 16 + lane / 4 + h * 8;
            const long long at = (long long)(w.row + row / GROUP) * heads + kv * GROUP + row % GROUP;
            kept[t][h] = row < end ? lse[at] * LOG2_E : 0.0f;
            sums[t][h] = row < end ? delta[at] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < UNITS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dq[t][n][e] = 0.0f;
    }
    const int lowest = top / GROUP, highest = (bottom - 1) / GROUP;

    int slot = 0;
    for (int key = start; key < seen; key += KEY_STEP, slot ^= 1) {
        copy_wait<0>();
        __syncthreads();
        fetch(key + KEY_STEP, slot ^ 1);
        if (top >= end || key > highest || key + KEY_STEP <= first_seen(op, lowest))
            continue;
        const bool whole = key + KEY_STEP - 1 <= lowest && key >= first_seen(op, highest);
        const bf16 *k = ring + slot * (2 * KEY_STEP * PITCH), *v = k + KEY_STEP * PITCH;
        float p[ROW_TALL][KEY_STEP / 8][4], ds[ROW_TALL][KEY_STEP / 8][4];
#pragma unroll
        for (int t = 0; t < ROW_TALL; ++t)
#pragma unroll
            for (int n = 0; n < KEY_STEP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    p[t][n][e] = ds[t][n][e] = 0.0f;
        scores<ROW_TALL>(p, q, warp * 16 * ROW_TALL, k);
        scores<ROW_TALL>(ds, g, warp * 16 * ROW_TALL, v);
#pragma unroll
        for (int t = 0; t < ROW_TALL; ++t) {
            const int upper = (top + t * 16 + lane / 4) / GROUP, lower = (top + t * 16 + lane / 4 + 8) / GROUP;
#pragma unroll
            for (int n = 0; n < KEY_STEP / 8; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float slope;
                    float x = score_and_slope(op, p[t][n][e], slope) - kept[t][e >> 1];
                    if (!whole && !sees(op, e >> 1 ? lower : upper, key + n * 8 + lane % 4 * 2 + (e & 1)))
                        x = -INFINITY_;
                    ds[t][n][e] = power2(x) * (ds[t][n][e] - sums[t][e >> 1]) * slope;
                }
            }
        }
        add_products<ROW_TALL>(dq, ds, k, 0);
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
#pragma unroll
    for (int t = 0; t < ROW_TALL; ++t) {
        const int from = top + t * 16;
        store_rows(q + (warp * ROW_TALL + t) * 16 * PITCH, dq[t], factor, 0, [&](int r) {
            const int at = from + r;
            return at < end ? to + (long long)(at / GROUP) * width + at % GROUP * HEAD_DIM : (bf16 *)nullptr;
        });
    }
}

// dq = ds k, from the score gradients that attention_keys stored.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
attention_dq(const bf16 *qkv, const Work *work, bf16 *dqkv, int heads, int kv_heads, int window, float factor,
             int first_kv, int some_kv, const uint4 *gradients, long long per_kv) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *ring = (bf16 *)shared;
    const Work w = work[blockIdx.x / some_kv];
    const Scoring op = {0.0f, 0.0f, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + OWN_ROWS, w.count * GROUP);
    const int seen = (end - 1) / GROUP + 1;
    const int start = first_seen(op, w.first / GROUP) / 64 * 64;
    const bf16 *k_base = qkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;
    const uint4 *from = gradients + (kv - first_kv) * per_kv + w.blocks + lane;
    const int top = w.first + warp * 16 * ROW_TALL, bottom = min(top + 16 * ROW_TALL, end);
    const int first_key = first_seen(op, top / GROUP), last_key = top < end ? (bottom - 1) / GROUP : -1;

    auto fetch = [&](int key, int slot) {
        if (key < seen)
            load_tile<64, BLOCK_THREADS>(ring + slot * (64 * PITCH), k_base + (long long)key * width, width, seen - key);
        copy_commit();
    };
    // The warp's tiles of 64 keys; tiles to which no row attends were not stored, and read as zero.
    auto read = [&](uint4 (&to)[ROW_TALL][4], int key) {
#pragma unroll
        for (int t = 0; t < ROW_TALL; ++t) {
            const int rows = top / 16 + t;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const int at = key + g * 16;
                const bool there = rows * 16 < w.count * GROUP && at <= last_key && at + 15 >= first_key &&
                                   at / 16 <= rows / GROUP;
                to[t][g] = there ? from[(tile_row(rows) + at / 16) * 32] : make_uint4(0, 0, 0, 0);
            }
        }
    };
    float dq[ROW_TALL][UNITS][4];
#pragma unroll
    for (int t = 0; t < ROW_TALL; ++t)
#pragma unroll
        for (int n = 0; n < UNITS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dq[t][n][e] = 0.0f;
    uint4 next[ROW_TALL][4];
    fetch(start, 0);
    read(next, start);
    int slot = 0;
    for (int key = start; key < seen; key += 64, slot ^= 1) {
        uint4 now[ROW_TALL][4];
#pragma unroll
        for (int t = 0; t < ROW_TALL; ++t)
#pragma unroll
            for (int g = 0; g < 4; ++g)
                now[t][g] = next[t][g];
        copy_wait<0>();
        __syncthreads();
        fetch(key + 64, slot ^ 1);
        read(next, key + 64);
        if (key > last_key || key + 63 < first_key)
            continue;
        const bf16 *k = ring + slot * (64 * PITCH);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
#pragma unroll
            for (int n = 0; n < UNITS; n += 2) {
                unsigned right[4];
                load_right(right, k, g * 16, n * 8);
#pragma unroll
                for (int t = 0; t < ROW_TALL; ++t) {
                    const unsigned left[4] = {now[t][g].x, now[t][g].y, now[t][g].z, now[t][g].w};
                    multiply(dq[t][n], left, right[0], right[1]);
                    multiply(dq[t][n + 1], left, right[2], right[3]);
                }
            }
        }
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
#pragma unroll
    for (int t = 0; t < ROW_TALL; ++t) {
        const int first = top + t * 16;
        store_rows(ring + (warp * ROW_TALL + t) * 16 * PITCH, dq[t], factor, 0, [&](int r) {
            const int at = first + r;
            return at < end ? to + (long long)(at / GROUP) * width + at % GROUP * HEAD_DIM : (bf16 *)nullptr;
        });
    }
}
