// QK norm per head inside rows of qkv; one warp per head. The head's elements stay in registers: MOST, set by the launcher, is
// the maximum per lane.

struct Head {
    float x[MOST];
};

template <class T>
__device__ __forceinline__ Head head_of(const T* p, u32 dim) {
    Head h;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        const u32 i = k * WARP + threadIdx.x % WARP;
        h.x[k] = i < dim ? load(p, i) : 0.0f;
    }
    return h;
}

// Normalises in place; returns the scale.
__device__ __forceinline__ float normalise(Head& h, u32 dim, bool centred, float eps) {
    float mean = 0.0f, square = 0.0f;
    if (centred) {
        float sum = 0.0f;
#pragma unroll
        for (u32 k = 0; k < MOST; k++) sum += h.x[k];
        mean = warp_sum(sum) / (float)dim;
    }
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        const u32 i = k * WARP + threadIdx.x % WARP;
        h.x[k] = i < dim ? h.x[k] - mean : 0.0f;
        square = fmaf(h.x[k], h.x[k], square);
    }
    const float scale = 1.0f / sqrtf(warp_sum(square) / (float)dim + eps);
#pragma unroll
    for (u32 k = 0; k < MOST; k++) h.x[k] *= scale;
    return scale;
}

// One warp per head of each row, including values (which are copied).
template <class T, class U>
__device__ void head_norm(const T* qkv, const float* q_weight, const float* k_weight, U* out, u32 rows, u32 heads,
                          u32 kv_heads, u32 dim, bool centred, float offset, float eps) {
    const u32 per_row = heads + 2 * kv_heads, warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (warp >= rows * per_row) return;
    const u32 head = warp % per_row;
    const u64 at = (u64)warp * dim;
    if (head >= heads + kv_heads) {
        for (u32 i = threadIdx.x % WARP; i < dim; i += WARP) store(out, at + i, load(qkv, at + i));
        return;
    }
    Head h = head_of(qkv + at, dim);
    normalise(h, dim, centred, eps);
    const float* weight = head < heads ? q_weight : k_weight;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        const u32 i = k * WARP + threadIdx.x % WARP;
        if (i < dim) store(out, at + i, h.x[k] * (weight[i] + offset));
    }
}
#define HEAD_NORM(name, T, U)                                                                                        \
    extern "C" __global__ void head_norm_##name(const T* qkv, const float* q_weight, const float* k_weight, U* out,  \
                                                u32 rows, u32 heads, u32 kv_heads, u32 dim, bool centred,            \
                                                float offset, float eps) {                                           \
        wait_for_earlier();                                                                                          \
        let_next_start();                                                                                            \
        head_norm(qkv, q_weight, k_weight, out, rows, heads, kv_heads, dim, centred, offset, eps);                   \
    }
HEAD_NORM(ff, float, float)
HEAD_NORM(fb, float, bf16)
HEAD_NORM(bf, bf16, float)
HEAD_NORM(bb, bf16, bf16)

// One block per chunk of rows; a warp takes every eighth (row, head) in order and accumulates its own sums, which are then
// added in warp order. `sums` is [chunks][2][dim].
template <class T, class U>
__device__ void head_norm_backward(const T* qkv, const float* q_weight, const float* k_weight, U* dqkv, u32 rows,
                                   u32 heads, u32 kv_heads, u32 dim, bool centred, float offset, float eps, u32 chunk,
                                   float* sums) {
    extern __shared__ float room[];  // [warps][2][dim]
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const u32 normed = heads + kv_heads, per_row = heads + 2 * kv_heads;
    const u32 first = blockIdx.x * chunk, last = min(first + chunk, rows);
    Head query = {}, key = {};
    for (u32 n = warp; n < (last - first) * normed; n += warps) {
        const u32 head = n % normed;
        const u64 at = ((u64)(first + n / normed) * per_row + head) * dim;
        const float* weight = head < heads ? q_weight : k_weight;
        Head x = head_of(qkv + at, dim);
        const Head dy = head_of(dqkv + at, dim);
        const float scale = normalise(x, dim, centred, eps);
        float sum = 0.0f, slope = 0.0f;
#pragma unroll
        for (u32 k = 0; k < MOST; k++) {
            const u32 i = k * WARP + lane;
            const float g = i < dim ? dy.x[k] * (weight[i] + offset) : 0.0f;
            sum += g;
            slope = fmaf(g, x.x[k], slope);
        }
        const float mean = centred ? warp_sum(sum) / (float)dim : 0.0f;
        const float lean = warp_sum(slope) / (float)dim;
#pragma unroll
        for (u32 k = 0; k < MOST; k++) {
            const u32 i = k * WARP + lane;
            if (i >= dim) continue;
            const float g = fmaf(dy.x[k], weight[i] + offset, -mean);
            store(dqkv, at + i, fmaf(x.x[k], -lean, g) * scale);
            if (head < heads) {
                query.x[k] = fmaf(dy.x[k], x.x[k], query.x[k]);
            } else {
                key.x[k] = fmaf(dy.x[k], x.x[k], key.x[k]);
            }
        }
    }
    if (!sums) return;
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        const u32 i = k * WARP + lane;
        if (i >= dim) continue;
        room[(2 * warp) * dim + i] = query.x[k];
        room[(2 * warp + 1) * dim + i] = key.x[k];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 w = 0; w < warps; w++) sum += room[2 * w * dim + i];
        sums[(u64)blockIdx.x * 2 * dim + i] = sum;
    }
}
#define HEAD_NORM_BACKWARD(name, T, U)                                                                               \
    extern "C" __global__ void head_norm_backward_##name(const T* qkv, const float* q_weight, const float* k_weight, \
                                                         U* dqkv, u32 rows, u32 heads, u32 kv_heads, u32 dim,        \
                                                         bool centred, float offset, float eps, u32 chunk,           \
                                                         float* sums) {                                              \
        head_norm_backward(qkv, q_weight, k_weight, dqkv, rows, heads, kv_heads, dim, centred, offset, eps, chunk,   \
                           sums);                                                                                    \
    }
HEAD_NORM_BACKWARD(ff, float, float)
HEAD_NORM_BACKWARD(fb, float, bf16)
HEAD_NORM_BACKWARD(bf, bf16, float)
HEAD_NORM_BACKWARD(bb, bf16, bf16)
