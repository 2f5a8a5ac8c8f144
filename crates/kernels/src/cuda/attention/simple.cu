// Causal attention without tensor cores, forward and backward: for f32, and for head widths that are not multiples of 8. Readable
// rather than fast.
//
// A warp owns one stacked row (see attention/tile.cu), or one key in the backward over keys. Keys come in tiles of 64 from the
// start of the sequence, ascending; a lane has two keys of a tile for the scores and every 32nd column for the sums over keys. A
// row's arithmetic depends only on its position.
//
// Set by the launcher: ELEMENT (float or bf16), HEAD_DIM, GROUP, PAGED.

#define PARTS ((HEAD_DIM + 31) / 32)

struct Work {
    int row, count, position, blocks, first, settled;
};

// Scale and soft cap of the scores, and the mask.
struct Scoring {
    float scale, cap;
    int window;
    __device__ float score(float dot, float &slope) const {
        float z = dot * scale;
        slope = 1.0f;
        if (cap == 0.0f)
            return z;
        float t = tanh_(z / cap);
        slope = 1.0f - t * t;
        return t * cap;
    }
    __device__ bool sees(int position, int key) const {
        return key <= position && (window == 0 || key > position - window);
    }
    __device__ int first_seen(int position) const { return window == 0 ? 0 : max(0, position + 1 - window); }
};

// Addresses within one sequence and key head.
struct Place {
    const ELEMENT *qkv, *cache;
    const int *blocks;
    Work w;
    int kv, heads, kv_heads;
    __device__ u64 width() const { return (u64)(heads + 2 * kv_heads) * HEAD_DIM; }
    // Offset of a stacked row's query head in `qkv`.
    __device__ u64 query(int row) const {
        return (w.row + row / GROUP) * width() + (kv * GROUP + row % GROUP) * HEAD_DIM;
    }
    // The same in the output, in heads.
    __device__ u64 head(int row) const { return (u64)(w.row + row / GROUP) * heads + kv * GROUP + row % GROUP; }
    __device__ const ELEMENT *key(int at) const {
#if PAGED
        u64 block = (u64)blocks[w.blocks + at / KEYS] * kv_heads + kv;
        return cache + (block * 2 * KEYS + at % KEYS) * HEAD_DIM;
#else
        return qkv + (w.row + at) * width() + (heads + kv) * HEAD_DIM;
#endif
    }
    __device__ const ELEMENT *value(int at) const {
#if PAGED
        return key(at) + KEYS * HEAD_DIM;
#else
        return key(at) + kv_heads * HEAD_DIM;
#endif
    }
};

__device__ float dot(const float *a, const ELEMENT *b) {
    float sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d)
        sum = fmaf(a[d], load(b, d), sum);
    return sum;
}

// Loads a row as f32 into the warp's shared memory.
__device__ void widen_row(float *to, const ELEMENT *from) {
    __syncwarp();
    for (int d = threadIdx.x & 31; d < HEAD_DIM; d += 32)
        to[d] = load(from, d);
    __syncwarp();
}

// sum[c] += weight * row[lane + 32 c]
__device__ __forceinline__ void add_row(float (&sum)[PARTS], float weight, const ELEMENT *row) {
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
        int d = c * 32 + (threadIdx.x & 31);
        if (d < HEAD_DIM)
            sum[c] = fmaf(weight, load(row, d), sum[c]);
    }
}

__device__ __forceinline__ void store_row(ELEMENT *to, const float (&x)[PARTS], float factor) {
#pragma unroll
    for (int c = 0; c < PARTS; ++c) {
        int d = c * 32 + (threadIdx.x & 31);
        // Stores -0 as +0.
        if (d < HEAD_DIM)
            store(to, d, x[c] * factor + 0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
simple_rows(const ELEMENT *qkv, const ELEMENT *cache, const int *blocks, const Work *work, ELEMENT *out, float *lse,
            int heads, int kv_heads, float scale, float cap, int window) {
    __shared__ float room[WARPS][HEAD_DIM];
    const Place at = {qkv, cache, blocks, work[blockIdx.x / kv_heads], (int)(blockIdx.x % kv_heads), heads, kv_heads};
    if (at.w.count == 0)
        return;
    const Scoring op = {scale, cap, window};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int end = min(at.w.first + ROWS, at.w.count * GROUP);
    for (int row = at.w.first + warp; row < end; row += WARPS) {
        widen_row(room[warp], qkv + at.query(row));
        const int position = at.w.position + row / GROUP;
        float max = -INFINITY_, sum = 0.0f, o[PARTS];
        for (int c = 0; c < PARTS; ++c)
            o[c] = 0.0f;
        for (int tile = op.first_seen(position) / KEYS; tile <= position / KEYS; ++tile) {
            float s[2], slope;
            for (int i = 0; i < 2; ++i) {
                int key = tile * KEYS + i * 32 + lane;
                s[i] = op.sees(position, key) ? op.score(dot(room[warp], at.key(key)), slope) : -INFINITY_;
            }
            // The row attends to some key of each of these tiles, so the maximum is finite.
            float m = fmaxf(max, warp_max(fmaxf(s[0], s[1])));
            float decay = exp_(max - m);
            max = m;
            for (int i = 0; i < 2; ++i)
                s[i] = exp_(s[i] - m);
            sum = fmaf(sum, decay, warp_sum(s[0] + s[1]));
            for (int c = 0; c < PARTS; ++c)
                o[c] *= decay;
            for (int j = 0; j < KEYS && tile * KEYS + j <= position; ++j)
                add_row(o, __shfl_sync(ALL, s[j / 32], j % 32), at.value(tile * KEYS + j));
        }
        if (lse && lane == 0)
            lse[at.head(row)] = max + log_(sum);
        store_row(out + at.head(row) * HEAD_DIM, o, 1.0f / sum);
    }
}

#if !PAGED

// Σ dout · out for each row and head.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
simple_delta(const ELEMENT *out, const ELEMENT *dout, float *delta, int rows) {
    int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (row >= rows)
        return;
    float sum = 0.0f;
    for (int d = lane; d < HEAD_DIM; d += 32)
        sum = fmaf(load(out, (u64)row * HEAD_DIM + d), load(dout, (u64)row * HEAD_DIM + d), sum);
    sum = warp_sum(sum);
    if (lane == 0)
        delta[row] = sum;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
simple_queries(const ELEMENT *qkv, const ELEMENT *dout, const float *lse, const float *delta, const Work *work,
               ELEMENT *dqkv, int heads, int kv_heads, float scale, float cap, int window) {
    __shared__ float room[WARPS][2][HEAD_DIM];
    const Place at = {qkv, qkv, nullptr, work[blockIdx.x / kv_heads], (int)(blockIdx.x % kv_heads), heads, kv_heads};
    const Scoring op = {scale, cap, window};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int end = min(at.w.first + ROWS, at.w.count * GROUP);
    for (int row = at.w.first + warp; row < end; row += WARPS) {
        widen_row(room[warp][0], qkv + at.query(row));
        widen_row(room[warp][1], dout + at.head(row) * HEAD_DIM);
        const int position = row / GROUP;
        const float own = lse[at.head(row)], sum = delta[at.head(row)];
        float dq[PARTS];
        for (int c = 0; c < PARTS; ++c)
            dq[c] = 0.0f;
        for (int tile = op.first_seen(position) / KEYS; tile <= position / KEYS; ++tile) {
            float ds[2];
            for (int i = 0; i < 2; ++i) {
                int key = tile * KEYS + i * 32 + lane;
                ds[i] = 0.0f;
                if (op.sees(position, key)) {
                    float slope;
                    float p = exp_(op.score(dot(room[warp][0], at.key(key)), slope) - own);
                    ds[i] = p * (dot(room[warp][1], at.value(key)) - sum) * slope * scale;
                }
            }
            for (int j = 0; j < KEYS && tile * KEYS + j <= position; ++j)
                add_row(dq, __shfl_sync(ALL, ds[j / 32], j % 32), at.key(tile * KEYS + j));
        }
        store_row(dqkv + at.query(row), dq, 1.0f);
    }
}

// Gradients of keys and values: rows head by head of the group, tokens ascending.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
simple_keys(const ELEMENT *qkv, const ELEMENT *dout, const float *lse, const float *delta, const Work *work,
            ELEMENT *dqkv, int heads, int kv_heads, float scale, float cap, int window) {
    __shared__ float room[WARPS][2][HEAD_DIM];
    const Place at = {qkv, qkv, nullptr, work[blockIdx.x / kv_heads], (int)(blockIdx.x % kv_heads), heads, kv_heads};
    const Scoring op = {scale, cap, window};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int end = min(at.w.first + ROWS, at.w.count);
    for (int key = at.w.first + warp; key < end; key += WARPS) {
        widen_row(room[warp][0], at.key(key));
        widen_row(room[warp][1], at.value(key));
        const int last = window == 0 ? at.w.count : min(at.w.count, key + window);
        float dk[PARTS], dv[PARTS];
        for (int c = 0; c < PARTS; ++c)
            dk[c] = dv[c] = 0.0f;
        for (int head = 0; head < GROUP; ++head) {
            for (int token = key; token < last; token += 32) {
                float p = 0.0f, ds = 0.0f;
                if (token + lane < last) {
                    int row = (token + lane) * GROUP + head;
                    float slope;
                    p = exp_(op.score(dot(room[warp][0], qkv + at.query(row)), slope) - lse[at.head(row)]);
                    float dp = dot(room[warp][1], dout + at.head(row) * HEAD_DIM);
                    ds = p * (dp - delta[at.head(row)]) * slope * scale;
                }
                for (int j = 0; j < 32 && token + j < last; ++j) {
                    int row = (token + j) * GROUP + head;
                    add_row(dv, __shfl_sync(ALL, p, j), dout + at.head(row) * HEAD_DIM);
                    add_row(dk, __shfl_sync(ALL, ds, j), qkv + at.query(row));
                }
            }
        }
        ELEMENT *to = dqkv + (at.w.row + key) * at.width() + (heads + at.kv) * HEAD_DIM;
        store_row(to, dk, 1.0f);
        store_row(to + kv_heads * HEAD_DIM, dv, 1.0f);
    }
}

#endif
