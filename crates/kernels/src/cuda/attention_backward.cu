// Causal attention with grouped heads, backward, for packed sequences.
//
// Weights are computed again from the kept log-sum-exp. Two kernels, and every gradient has one owner that adds its
// terms in one order, so nothing is added atomically and the bits are those of every run:
// `attention_keys`: a block has 64 keys of one sequence and key head and meets the stacked rows that see them (all
// heads of the group, in the order of tokens). A warp has 16 keys: scores transposed, k qᵀ, leave it with weights that
// are the left operand of dv += pᵀ dout and dk += dsᵀ q as they lie in its registers.
// `attention_queries`: a block has 64 stacked rows, a warp 16 of them, and meets the key tiles in ascending order for
// dq += ds k.
// `attention_delta` before them: Σ dout · out for each row and head.
//
// Also set by the launcher: STEP (rows met at a time in attention_keys), KEY_STEP (keys met at a time in
// attention_queries), SPLIT (blocks that share the columns of dk and dv, each computing all scores).

#define OWN 64
#define THREADS 128
// Columns of dk and dv that a block has.
#define COLUMNS ((WIDE / 16 + SPLIT - 1) / SPLIT * 16)

extern "C" __global__ void attention_delta(const bf16 *out, const bf16 *dout, float *delta, int rows) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= rows)
        return;
    const u32 *a = (const u32 *)(out + (long long)row * HEAD_DIM), *b = (const u32 *)(dout + (long long)row * HEAD_DIM);
    float sum = 0.0f;
    for (int i = lane; i < HEAD_DIM / 2; i += 32) {
        sum = fmaf(low_half(a[i]), low_half(b[i]), sum);
        sum = fmaf(high_half(a[i]), high_half(b[i]), sum);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        delta[row] = sum;
}

// Writes a warp's 16 rows of results through its rows of `room`; `place(r)` is where row r goes, or null.
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

extern "C" __global__ void __launch_bounds__(THREADS)
attention_keys(const bf16 *qkv, const bf16 *dout, const float *lse, const float *delta, const Work *work, bf16 *dqkv,
               int heads, int kv_heads, float scale, float cap, int window, float factor) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *k = (bf16 *)shared, *v = k + OWN * PITCH, *ring = v + OWN * PITCH;
    // Of the rows in the ring: log-sum-exp in units of log 2, and delta.
    __shared__ float kept[2][2][STEP];
    const Work w = work[blockIdx.x / kv_heads];
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int columns = blockIdx.z * COLUMNS;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;
    // Tokens from `first` on see the first key; past `last` none sees any of the keys.
    const int first = w.first, keys = min(OWN, w.count - first);
#if WINDOW
    const int last = (int)min((long long)w.count, (long long)first + OWN - 1 + window);
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
            load_rows<STEP, THREADS>(to, q_base, width, row, end);
            load_rows<STEP, THREADS>(to + STEP * PITCH, dout_base, out_width, row, end);
            for (int i = threadIdx.x; i < STEP; i += THREADS) {
                int r = row + i;
                long long at = (long long)(w.row + r / GROUP) * heads + kv * GROUP + r % GROUP;
                kept[slot][0][i] = r < end ? lse[at] * LOG2_E : 0.0f;
                kept[slot][1][i] = r < end ? delta[at] : 0.0f;
            }
        }
        copy_commit();
    };
    load_tile<OWN, THREADS>(k, k_base, width, keys);
    load_tile<OWN, THREADS>(v, k_base + kv_heads * HEAD_DIM, width, keys);
    fetch(first * GROUP, 0);

    float dk[COLUMNS / 8][4], dv[COLUMNS / 8][4];
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dk[n][e] = dv[n][e] = 0.0f;

    // This lane's two keys, and those of its warp.
    const int top = first + warp * 16, key[2] = {top + lane / 4, top + lane / 4 + 8};
    int slot = 0;
    for (int row = first * GROUP; row < end; row += STEP, slot ^= 1) {
        copy_wait<0>();
        __syncthreads();
        fetch(row + STEP, slot ^ 1);
        const int low = row / GROUP, high = (min(row + STEP, end) - 1) / GROUP;
        // Whether some row sees some key of the warp, and whether all see all.
        if (high < top || first_seen(op, low) > top + 15)
            continue;
        const bool whole = low >= top + 15 && first_seen(op, high) <= top;
        const bf16 *q = ring + slot * (2 * STEP * PITCH), *g = q + STEP * PITCH;
        float p[STEP / 8][4], ds[STEP / 8][4];
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[n][e] = ds[n][e] = 0.0f;
#pragma unroll
        for (int d = 0; d < WIDE; d += 16) {
            unsigned a[4], b[4];
            load_left(a, k, warp * 16, d);
#pragma unroll
            for (int n = 0; n < STEP / 8; n += 2) {
                load_right_rows(b, q, n * 8, d);
                multiply(p[n], a, b[0], b[1]);
                multiply(p[n + 1], a, b[2], b[3]);
            }
            load_left(a, v, warp * 16, d);
#pragma unroll
            for (int n = 0; n < STEP / 8; n += 2) {
                load_right_rows(b, g, n * 8, d);
                multiply(ds[n], a, b[0], b[1]);
                multiply(ds[n + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const int i = n * 8 + lane % 4 * 2;
            const float2 l = *(const float2 *)&kept[slot][0][i], dl = *(const float2 *)&kept[slot][1][i];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float slope;
                float x = score_and_slope(op, p[n][e], slope) - (e & 1 ? l.y : l.x);
                if (!whole && !sees(op, (row + i + (e & 1)) / GROUP, key[e >> 1]))
                    x = -INFINITY_;
                p[n][e] = power2(x);
                ds[n][e] = p[n][e] * (ds[n][e] - (e & 1 ? dl.y : dl.x)) * slope;
            }
        }
#pragma unroll
        for (int r = 0; r < STEP; r += 16) {
            unsigned a[4], b[4];
            as_left(a, p[r / 8], p[r / 8 + 1]);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                if (SPLIT == 1 || columns + n * 8 < WIDE) {
                    load_right(b, g, r, columns + n * 8);
                    multiply(dv[n], a, b[0], b[1]);
                    multiply(dv[n + 1], a, b[2], b[3]);
                }
            }
            as_left(a, ds[r / 8], ds[r / 8 + 1]);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                if (SPLIT == 1 || columns + n * 8 < WIDE) {
                    load_right(b, q, r, columns + n * 8);
                    multiply(dk[n], a, b[0], b[1]);
                    multiply(dk[n + 1], a, b[2], b[3]);
                }
            }
        }
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;
    auto place = [&](int r) { return top + r < first + keys ? to + (long long)(top + r) * width : (bf16 *)nullptr; };
    store_rows(k + warp * 16 * PITCH, dk, factor, columns, place);
    to += kv_heads * HEAD_DIM;
    store_rows(v + warp * 16 * PITCH, dv, 1.0f, columns, place);
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_queries(const bf16 *qkv, const bf16 *dout, const float *lse, const float *delta, const Work *work, bf16 *dqkv,
                  int heads, int kv_heads, float scale, float cap, int window, float factor) {
    extern __shared__ __align__(16) unsigned char shared[];
    bf16 *q = (bf16 *)shared, *g = q + OWN * PITCH, *ring = g + OWN * PITCH;
    const Work w = work[blockIdx.x / kv_heads];
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;
    const int end = min(w.first + OWN, w.count * GROUP);
    const int seen = (end - 1) / GROUP + 1;
    const int start = first_seen(op, w.first / GROUP) / KEY_STEP * KEY_STEP;
    const bf16 *k_base = qkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;

    auto fetch = [&](int key, int slot) {
        if (key < seen) {
            bf16 *to = ring + slot * (2 * KEY_STEP * PITCH);
            const bf16 *from = k_base + (long long)key * width;
            load_tile<KEY_STEP, THREADS>(to, from, width, seen - key);
            load_tile<KEY_STEP, THREADS>(to + KEY_STEP * PITCH, from + kv_heads * HEAD_DIM, width, seen - key);
        }
        copy_commit();
    };
    load_rows<OWN, THREADS>(q, qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM, width, w.first, end);
    load_rows<OWN, THREADS>(g, dout + (long long)w.row * out_width + kv * GROUP * HEAD_DIM, out_width, w.first, end);
    fetch(start, 0);

    const int top = w.first + warp * 16, row[2] = {top + lane / 4, top + lane / 4 + 8};
    const int position[2] = {row[0] / GROUP, row[1] / GROUP};
    float kept[2] = {0.0f, 0.0f}, sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row[h] < end) {
            long long at = (long long)(w.row + position[h]) * heads + kv * GROUP + row[h] % GROUP;
            kept[h] = lse[at] * LOG2_E;
            sums[h] = delta[at];
        }
    }
    const int lowest = top / GROUP, highest = (min(top + 16, end) - 1) / GROUP;
    float dq[UNITS][4];
#pragma unroll
    for (int n = 0; n < UNITS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dq[n][e] = 0.0f;

    int slot = 0;
    for (int key = start; key < seen; key += KEY_STEP, slot ^= 1) {
        copy_wait<0>();
        __syncthreads();
        fetch(key + KEY_STEP, slot ^ 1);
        if (top >= end || key > highest || key + KEY_STEP <= first_seen(op, lowest))
            continue;
        const bool whole = key + KEY_STEP - 1 <= lowest && key >= first_seen(op, highest);
        const bf16 *k = ring + slot * (2 * KEY_STEP * PITCH), *v = k + KEY_STEP * PITCH;
        float p[KEY_STEP / 8][4], ds[KEY_STEP / 8][4];
#pragma unroll
        for (int n = 0; n < KEY_STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[n][e] = ds[n][e] = 0.0f;
#pragma unroll
        for (int d = 0; d < WIDE; d += 16) {
            unsigned a[4], b[4];
            load_left(a, q, warp * 16, d);
#pragma unroll
            for (int n = 0; n < KEY_STEP / 8; n += 2) {
                load_right_rows(b, k, n * 8, d);
                multiply(p[n], a, b[0], b[1]);
                multiply(p[n + 1], a, b[2], b[3]);
            }
            load_left(a, g, warp * 16, d);
#pragma unroll
            for (int n = 0; n < KEY_STEP / 8; n += 2) {
                load_right_rows(b, v, n * 8, d);
                multiply(ds[n], a, b[0], b[1]);
                multiply(ds[n + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < KEY_STEP / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float slope;
                float x = score_and_slope(op, p[n][e], slope) - kept[e >> 1];
                if (!whole && !sees(op, position[e >> 1], key + n * 8 + lane % 4 * 2 + (e & 1)))
                    x = -INFINITY_;
                ds[n][e] = power2(x) * (ds[n][e] - sums[e >> 1]) * slope;
            }
        }
#pragma unroll
        for (int r = 0; r < KEY_STEP; r += 16) {
            unsigned a[4], b[4];
            as_left(a, ds[r / 8], ds[r / 8 + 1]);
#pragma unroll
            for (int n = 0; n < UNITS; n += 2) {
                load_right(b, k, r, n * 8);
                multiply(dq[n], a, b[0], b[1]);
                multiply(dq[n + 1], a, b[2], b[3]);
            }
        }
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
    store_rows(q + warp * 16 * PITCH, dq, factor, 0, [&](int r) {
        int at = top + r;
        return at < end ? to + (long long)(at / GROUP) * width + at % GROUP * HEAD_DIM : (bf16 *)nullptr;
    });
}
