// GEMM without tensor cores: for f32, and for shapes that cuBLASLt cannot compute without split-k.

// C[m, n] = A[m, k] · B[n, k]ᵀ (+ bias) (+ C), with element (i, j) of A at i * a_row + j * a_col. Each element of C is a sum of
// chains of 1024 FMAs over ascending k, added in order (a single chain over a vocabulary would lose precision), whatever m is and
// whichever row it is: 64 x 64 per block, 4 x 4 per thread.
template <class T, class U>
__device__ void product(const T* a, u64 a_row, u64 a_col, const T* b, u64 b_row, u64 b_col, const float* bias, U* c,
                        u32 m, u32 n, u32 k, bool add) {
    __shared__ float left[16][65], right[16][65];
    const u32 row0 = blockIdx.y * 64, col0 = blockIdx.x * 64;
    const u32 ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    float sum[4][4] = {}, total[4][4] = {};
    for (u32 k0 = 0; k0 < k; k0 += 16) {
        for (u32 e = threadIdx.x; e < 1024; e += 256) {
            // Coalesced: adjacent threads read along the contiguous dimension.
            const u32 ai = a_col == 1 ? e / 16 : e % 64, ak = a_col == 1 ? e % 16 : e / 64;
            left[ak][ai] = row0 + ai < m && k0 + ak < k ? load(a, (row0 + ai) * a_row + (k0 + ak) * a_col) : 0.0f;
            const u32 bi = b_col == 1 ? e / 16 : e % 64, bk = b_col == 1 ? e % 16 : e / 64;
            right[bk][bi] = col0 + bi < n && k0 + bk < k ? load(b, (col0 + bi) * b_row + (k0 + bk) * b_col) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (u32 kk = 0; kk < 16; kk++) {
            float x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = left[kk][ty + 16 * i], y[i] = right[kk][tx + 16 * i];
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
            }
        }
        if (k0 % 1024 == 1008) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) total[i][j] += sum[i][j], sum[i][j] = 0.0f;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
            if (row >= m || col >= n) continue;
            float x = total[i][j] + sum[i][j];
            if (bias) x += bias[col];
            const u64 at = (u64)row * n + col;
            store(c, at, add ? load(c, at) + x : x);
        }
    }
}
#define PRODUCT(name, T, U)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        product_##name(const T* a, u64 a_row, u64 a_col, const T* b, u64 b_row, u64 b_col, const float* bias, U* c,  \
                       u32 m, u32 n, u32 k, bool add) {                                                              \
        product(a, a_row, a_col, b, b_row, b_col, bias, c, m, n, k, add);                                            \
    }
PRODUCT(ff, float, float)
PRODUCT(fb, float, bf16)
PRODUCT(bf, bf16, float)
PRODUCT(bb, bf16, bf16)

// y = x + bias, for rows of n.
template <class U>
__device__ void add_bias(const float* x, const float* bias, U* y, u64 count, u32 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n % 4 == 0) {
        if (4 * i >= count) return;
        const vec4 v = load4(x, 4 * i), b = load4(bias, 4 * i % n);
        store4(y, 4 * i, {{v.x[0] + b.x[0], v.x[1] + b.x[1], v.x[2] + b.x[2], v.x[3] + b.x[3]}});
    } else if (i < count) {
        store(y, i, x[i] + bias[i % n]);
    }
}
extern "C" __global__ void add_bias_f(const float* x, const float* bias, float* y, u64 count, u32 n) {
    add_bias(x, bias, y, count, n);
}
extern "C" __global__ void add_bias_b(const float* x, const float* bias, bf16* y, u64 count, u32 n) {
    add_bias(x, bias, y, count, n);
}

// y = sum of `parts` contiguous vectors of n, in order (split-k reduction); n is a multiple of four.
template <class U>
__device__ void join(const float* x, u64 n, u32 parts, U* y) {
    const u64 i = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    vec4 sum = load4(x, i);
#pragma unroll 4
    for (u32 p = 1; p < parts; p++) {
        const vec4 v = load4(x + p * n, i);
#pragma unroll
        for (int k = 0; k < 4; k++) sum.x[k] += v.x[k];
    }
    store4(y, i, sum);
}
extern "C" __global__ void join_f(const float* x, u64 n, u32 parts, float* y) { join(x, n, parts, y); }
extern "C" __global__ void join_b(const float* x, u64 n, u32 parts, bf16* y) { join(x, n, parts, y); }

// Pseudo-random numbers between -1 and 1, to time products with.
extern "C" __global__ void noise(bf16* x, u64 n, u32 seed) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 h = (u32)i * 0x9E3779B9u ^ seed;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    store(x, i, (float)((h ^ (h >> 16)) >> 8) / 8388608.0f - 1.0f);
}

// Adds to sums[0] a checksum of every word and its index, to sums[1] the number of non-zero words.
extern "C" __global__ void digest(const u32* words, u64 n, u64* sums) {
    u64 sum = 0, filled = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u64 h = (i << 32 | words[i]) * 0x9E3779B97F4A7C15ull;
        sum += (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
        filled += words[i] != 0;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        sum += __shfl_xor_sync(ALL, sum, d);
        filled += __shfl_xor_sync(ALL, filled, d);
    }
    if (threadIdx.x % WARP != 0) return;
    atomicAdd(sums, sum);
    atomicAdd(sums + 1, filled);
}

// Whether any bit differs.
extern "C" __global__ void differ(const u32* a, const u32* b, u64 words, u32* found) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words && a[i] != b[i]) atomicOr(found, 1u);
}
