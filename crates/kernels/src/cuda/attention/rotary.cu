// RoPE of the queries and keys in qkv rows, alone and fused with its prologue and epilogue. N is the number of contiguous
// elements per thread of each half of a head: four if halves are multiples of four, else one.

template <int N, class T>
__device__ __forceinline__ void get(const T* p, u64 i, float* to) {
    if constexpr (N == 1) {
        to[0] = load(p, i);
    } else {
        const vec4 v = load4(p, i);
#pragma unroll
        for (int k = 0; k < 4; k++) to[k] = v.x[k];
    }
}
template <int N, class T>
__device__ __forceinline__ void put(T* p, u64 i, const float* from) {
    if constexpr (N == 1) {
        store(p, i, from[0]);
    } else {
        store4(p, i, {{from[0], from[1], from[2], from[3]}});
    }
}

// Rotates N pairs by the angles from `at` on; a sign of -1 is the inverse.
template <int N>
__device__ __forceinline__ void rotate(float* a, float* b, const float* cos, const float* sin, u64 at, float sign) {
    float c[N], s[N];
    get<N>(cos, at, c);
    get<N>(sin, at, s);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const float x = a[k], y = b[k], d = sign * s[k], e = 0.0f - d;
        a[k] = fmaf(x, c[k], y * e);
        b[k] = fmaf(y, c[k], x * d);
    }
}

// ---- in place, one block per row ---------------------------------------------------------------------------------

template <int N, class T>
__device__ __forceinline__ void rotary(T* qkv, const float* cos, const float* sin, const u32* positions, u32 rotated,
                                       u32 width, u32 dim, u32 half, float sign) {
    T* row = qkv + (u64)blockIdx.x * width;
    const u64 at = (u64)positions[blockIdx.x] * half;
    for (u32 n = N * threadIdx.x; n < rotated * half; n += N * blockDim.x) {
        const u32 low = n / half * dim + n % half, high = low + half;
        float a[N], b[N];
        get<N>(row, low, a);
        get<N>(row, high, b);
        rotate<N>(a, b, cos, sin, at + n % half, sign);
        put<N>(row, low, a);
        put<N>(row, high, b);
    }
}
#define ROTARY(name, T)                                                                                              \
    extern "C" __global__ void rotary_##name(T* qkv, const float* cos, const float* sin, const u32* positions,       \
                                             u32 rotated, u32 width, u32 dim, u32 half, float sign) {                 \
        if (half % 4 == 0 && dim % 4 == 0 && width % 4 == 0) {                                                       \
            rotary<4>(qkv, cos, sin, positions, rotated, width, dim, half, sign);                                     \
        } else {                                                                                                     \
            rotary<1>(qkv, cos, sin, positions, rotated, width, dim, half, sign);                                     \
        }                                                                                                            \
    }
ROTARY(f, float)
ROTARY(b, bf16)

// ---- epilogue of the QKV GEMM -------------------------------------------------------------------------------------

// Adds the bias, rounds to storage, applies RoPE to queries and keys, and writes keys and values to the cache if there are
// `slots` (see attention/cache.cu). One block per row; `qkv` may alias `sums`.
template <int N, class T>
__device__ __forceinline__ void finish_qkv(const T* sums, const float* bias, bf16* qkv, const float* cos,
                                           const float* sin, const u32* positions, const u32* slots, bf16* cache,
                                           u32 heads, u32 kv_heads, u32 dim) {
    const u32 half = dim / 2, all = heads + 2 * kv_heads, slot = slots ? slots[blockIdx.x] : ~0u;
    const u64 at = (u64)positions[blockIdx.x] * half;
    sums += (u64)blockIdx.x * all * dim, qkv += (u64)blockIdx.x * all * dim;
    for (u32 n = N * threadIdx.x; n < all * half; n += N * blockDim.x) {
        const u32 head = n / half, i = n % half, low = head * dim + i, high = low + half;
        float a[N], b[N];
        get<N>(sums, low, a);
        get<N>(sums, high, b);
        if (bias) {
            float c[N], d[N];
            get<N>(bias, low, c);
            get<N>(bias, high, d);
#pragma unroll
            for (int k = 0; k < N; k++) a[k] += c[k], b[k] += d[k];
        }
        if (head < heads + kv_heads) {
#pragma unroll
            for (int k = 0; k < N; k++) a[k] = stored(qkv, a[k]), b[k] = stored(qkv, b[k]);
            rotate<N>(a, b, cos, sin, at + i, 1.0f);
        }
        put<N>(qkv, low, a);
        put<N>(qkv, high, b);
        if (head < heads || slot == ~0u) continue;
        const u32 kv = (head - heads) % kv_heads, part = (head - heads) / kv_heads;
        const u64 to = ((((u64)(slot / 64) * kv_heads + kv) * 2 + part) * 64 + slot % 64) * dim + i;
        put<N>(cache, to, a);
        put<N>(cache, to + half, b);
    }
}
#define FINISH(name, T)                                                                                              \
    extern "C" __global__ void finish_qkv_##name(const T* sums, const float* bias, bf16* qkv, const float* cos,      \
                                                 const float* sin, const u32* positions, const u32* slots,           \
                                                 bf16* cache, u32 heads, u32 kv_heads, u32 dim) {                    \
        wait_for_earlier();                                                                                          \
        let_next_start();                                                                                            \
        if (dim % 8 == 0) {                                                                                          \
            finish_qkv<4>(sums, bias, qkv, cos, sin, positions, slots, cache, heads, kv_heads, dim);                 \
        } else {                                                                                                     \
            finish_qkv<1>(sums, bias, qkv, cos, sin, positions, slots, cache, heads, kv_heads, dim);                 \
        }                                                                                                            \
    }
FINISH(f, float)
FINISH(b, bf16)

// ---- backward, and the gradient of the bias -----------------------------------------------------------------------

// A block rotates back some columns of a chunk of rows; each strand of threads takes every STRANDS-th row. The chunk's column
// sums, of the stored values, go to `sums`, [chunks][width]. Halves of heads are multiples of four.
#define STRANDS (256 / FOURS)

template <class T>
__device__ __forceinline__ void rotate_back(T* dqkv, const float* cos, const float* sin, const u32* positions, u32 rows,
                                          u32 rotated, u32 all, u32 dim, u32 chunk, float* sums) {
    let_next_start();
    __shared__ __align__(16) float room[STRANDS][2][4 * FOURS];
    const u32 half = dim / 2, width = all * dim, lane = threadIdx.x % FOURS, strand = threadIdx.x / FOURS;
    const u32 n = 4 * (blockIdx.x * FOURS + lane), low = n / half * dim + n % half, high = low + half;
    const u32 first = blockIdx.y * chunk, last = min(first + chunk, rows);
    float left[4] = {0.0f, 0.0f, 0.0f, 0.0f}, right[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (n < all * half) {
        for (u32 r = first + strand; r < last; r += STRANDS) {
            T* row = dqkv + (u64)r * width;
            float a[4], b[4];
            get<4>(row, low, a);
            get<4>(row, high, b);
            if (n / half < rotated) {
                rotate<4>(a, b, cos, sin, (u64)positions[r] * half + n % half, -1.0f);
                put<4>(row, low, a);
                put<4>(row, high, b);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) left[k] += stored(row, a[k]), right[k] += stored(row, b[k]);
        }
    }
    put<4>(room[strand][0], 4 * lane, left);
    put<4>(room[strand][1], 4 * lane, right);
    __syncthreads();
    for (u32 t = threadIdx.x; t < 8 * FOURS; t += blockDim.x) {
        const u32 side = t / (4 * FOURS), c = t % (4 * FOURS), m = 4 * blockIdx.x * FOURS + c;
        if (m >= all * half) continue;
        float sum = 0.0f;
#pragma unroll
        for (u32 s = 0; s < STRANDS; s++) sum += room[s][side][c];
        sums[(u64)blockIdx.y * width + m / half * dim + m % half + side * half] = sum;
    }
}
#define TURN_BACK(name, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        rotate_back_##name(T* dqkv, const float* __restrict__ cos, const float* __restrict__ sin,                      \
                         const u32* __restrict__ positions, u32 rows, u32 rotated, u32 all, u32 dim, u32 chunk,       \
                         float* sums) {                                                                              \
        rotate_back(dqkv, cos, sin, positions, rows, rotated, all, dim, chunk, sums);                                   \
    }
TURN_BACK(f, float)
TURN_BACK(b, bf16)

// Column sums of a chunk of rows in the order of the rotation's backward: strands of every STRANDS-th row, then the strands in
// order. One thread per column; chunk blockIdx.y.
template <class T>
__device__ __forceinline__ void rotated_sums(const T* x, u32 rows, u32 width, u32 chunk, float* sums) {
    let_next_start();
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 first = blockIdx.y * chunk, last = min(first + chunk, rows);
    if (column >= width) return;
    float strands[STRANDS];
#pragma unroll
    for (u32 s = 0; s < STRANDS; s++) strands[s] = 0.0f;
    for (u32 from = first; from < last; from += STRANDS) {
#pragma unroll
        for (u32 s = 0; s < STRANDS; s++) {
            if (from + s < last) strands[s] += load(x, (u64)(from + s) * width + column);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (u32 s = 0; s < STRANDS; s++) sum += strands[s];
    sums[(u64)blockIdx.y * width + column] = sum;
}
#define ROTATED_SUMS(name, T)                                                                                        \
    extern "C" __global__ void rotated_sums_##name(const T* x, u32 rows, u32 width, u32 chunk, float* sums) {        \
        rotated_sums(x, rows, width, chunk, sums);                                                                   \
    }
ROTATED_SUMS(f, float)
ROTATED_SUMS(b, bf16)
