// Vectors: conversion, dot products, gather of rows, column sums.

#define PAIRS(M) M(ff, float, float) M(fb, float, bf16) M(bf, bf16, float) M(bb, bf16, bf16)

template <class T, class U>
__device__ void convert(const T* src, U* dst, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 aligned = ((u64)src % (4 * sizeof(T)) | (u64)dst % (4 * sizeof(U))) == 0 ? n / 8 : 0;
    if (i < aligned) {
        const vec4 a = load4(src, 8 * i), b = load4(src, 8 * i + 4);
        store4(dst, 8 * i, a);
        store4(dst, 8 * i + 4, b);
    }
    const u64 rest = 8 * aligned;
    for (u64 j = rest + i; j < n; j += (u64)gridDim.x * blockDim.x) store(dst, j, load(src, j));
}
#define CONVERT(name, T, U) \
    extern "C" __global__ void convert_##name(const T* src, U* dst, u64 n) { convert(src, dst, n); }
PAIRS(CONVERT)

template <class T, class U>
__device__ void axpy(float a, const T* x, U* y, u64 n) {
    const u64 i = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 4 <= n) {
        const vec4 v = load4(x, i);
        vec4 w = load4(y, i);
#pragma unroll
        for (int k = 0; k < 4; k++) w.x[k] = fmaf(a, v.x[k], w.x[k]);
        store4(y, i, w);
    } else {
        for (u64 j = i; j < n; j++) store(y, j, fmaf(a, load(x, j), load(y, j)));
    }
}
#define AXPY(name, T, U) \
    extern "C" __global__ void axpy_##name(float a, const T* x, U* y, u64 n) { axpy(a, x, y, n); }
PAIRS(AXPY)

// A block's f64 dot product of the 4096 elements from `from` on: each thread adds its sixteen as four sums of four.
template <class T, class U>
__device__ double chunk_dot(const T* x, const U* y, u64 n, u64 from) {
    __shared__ double room[8];
    double sum = 0.0;
    if (from + 4096 <= n) {
        double part[4] = {0.0, 0.0, 0.0, 0.0};
#pragma unroll
        for (u32 i = 4 * threadIdx.x; i < 4096; i += 1024) {
            const vec4 a = load4(x, from + i), b = load4(y, from + i);
#pragma unroll
            for (int k = 0; k < 4; k++) part[k] += (double)a.x[k] * (double)b.x[k];
        }
        sum = (part[0] + part[1]) + (part[2] + part[3]);
    } else {
        for (u32 i = threadIdx.x; from + i < n; i += 256) {
            sum += (double)load(x, from + i) * (double)load(y, from + i);
        }
    }
    return block_sum(sum, room);
}
#define DOT(name, T, U)                                                                          \
    extern "C" __global__ void dot_##name(const T* x, const U* y, u64 n, double* sums) {         \
        const double sum = chunk_dot(x, y, n, 4096 * (u64)blockIdx.x);                           \
        if (threadIdx.x == 0) sums[blockIdx.x] = sum;                                            \
    }
PAIRS(DOT)

// Two vectors, and the index of their first chunk among those of all pairs.
struct Pair {
    const float *x, *y;
    u64 n, first;
};

// One block per chunk of any pair.
extern "C" __global__ void dots(const Pair* pairs, u32 count, double* sums) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        (pairs[middle].first <= blockIdx.x ? low : high) = middle;
    }
    const Pair pair = pairs[low];
    const double sum = chunk_dot(pair.x, pair.y, pair.n, 4096 * (blockIdx.x - pair.first));
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block per pair: adds its chunk sums, from starts[i] to starts[i + 1].
extern "C" __global__ void add_up(const double* sums, const u64* starts, double* totals) {
    __shared__ double room[32];
    double sum = 0.0;
    for (u64 i = starts[blockIdx.x] + threadIdx.x; i < starts[blockIdx.x + 1]; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) totals[blockIdx.x] = sum;
}

// Index of the first non-finite element; atomicMin, so the order of blocks does not matter.
template <class T>
__device__ void non_finite(const T* x, u64 n, u64* first) {
    u64 found = ~0ull;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        if (!(fabsf(load(x, i)) < INFINITY_)) {
            found = i;
            break;
        }
    }
    if (found != ~0ull) atomicMin(first, found);
}
extern "C" __global__ void non_finite_f(const float* x, u64 n, u64* first) { non_finite(x, n, first); }
extern "C" __global__ void non_finite_b(const bf16* x, u64 n, u64* first) { non_finite(x, n, first); }

// dst[i] = src[rows[i]], by rows; zeros for ~0.
template <class T, class U>
__device__ void gather(const T* src, const u32* rows, u64 width, U* dst) {
    const u32 row = rows[blockIdx.x];
    U* to = dst + (u64)blockIdx.x * width;
    const T* from = src + (u64)row * width;
    for (u64 j = threadIdx.x; j < width; j += blockDim.x) store(to, j, row == ~0u ? 0.0f : load(from, j));
}
#define GATHER(name, T, U)                                                                       \
    extern "C" __global__ void gather_##name(const T* src, const u32* rows, u64 width, U* dst) { \
        gather(src, rows, width, dst);                                                           \
    }
PAIRS(GATHER)

// Column sums of a chunk of rows, in row order: chunk blockIdx.y, one column per thread, or four if the width is a multiple of
// four.
template <class T>
__device__ void column_sums(const T* x, u32 rows, u32 width, u32 chunk, float* sums) {
    let_next_start();
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 from = blockIdx.y * chunk, to = min(from + chunk, rows);
    if (width % 4 == 0) {
        if (4 * column >= width) return;
        vec4 sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 8
        for (u32 r = from; r < to; r++) {
            const vec4 v = load4(x, (u64)r * width + 4 * column);
#pragma unroll
            for (int k = 0; k < 4; k++) sum.x[k] += v.x[k];
        }
        store4(sums, (u64)blockIdx.y * width + 4 * column, sum);
        return;
    }
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 r = from; r < to; r++) sum += load(x, (u64)r * width + column);
    sums[(u64)blockIdx.y * width + column] = sum;
}
extern "C" __global__ void column_sums_f(const float* x, u32 rows, u32 width, u32 chunk, float* sums) {
    column_sums(x, rows, width, chunk, sums);
}
extern "C" __global__ void column_sums_b(const bf16* x, u32 rows, u32 width, u32 chunk, float* sums) {
    column_sums(x, rows, width, chunk, sums);
}

// Adds all chunks in order; writes the total, or adds it once.
extern "C" __global__ void add_chunks(const float* sums, u32 stride, u32 chunks, u32 width, float* to, bool add) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (stride % 4 == 0 && width % 4 == 0 && ((u64)sums | (u64)to) % 16 == 0) {
        if (4 * i >= width) return;
        vec4 sum = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 8
        for (u32 c = 0; c < chunks; c++) {
            const vec4 v = load4(sums + (u64)c * stride, 4 * i);
#pragma unroll
            for (int k = 0; k < 4; k++) sum.x[k] += v.x[k];
        }
        const vec4 old = add ? load4(to, 4 * i) : vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int k = 0; k < 4; k++) sum.x[k] = add ? old.x[k] + sum.x[k] : sum.x[k];
        store4(to, 4 * i, sum);
        return;
    }
    if (i >= width) return;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 c = 0; c < chunks; c++) sum += sums[(u64)c * stride + i];
    to[i] = add ? to[i] + sum : sum;
}

// The same for many chunks: eight strands of consecutive chunks per column, added in strand order.
extern "C" __global__ void add_many_chunks(const float* sums, u32 stride, u32 chunks, u32 width, float* to,
                                           bool add) {
    wait_for_earlier();
    __shared__ float room[8][32];
    const u32 column = blockIdx.x * 32 + threadIdx.x % 32, strand = threadIdx.x / 32;
    const u32 each = (chunks + 7) / 8, last = min((strand + 1) * each, chunks);
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 8
        for (u32 c = strand * each; c < last; c++) sum += sums[(u64)c * stride + column];
    }
    room[strand][threadIdx.x % 32] = sum;
    __syncthreads();
    if (strand > 0 || column >= width) return;
    for (u32 s = 1; s < 8; s++) sum += room[s][threadIdx.x];
    to[column] = add ? to[column] + sum : sum;
}

// Dequantises NF4, two codes per byte with the first in the upper half; eight per thread.
extern "C" __global__ void decode_nf4(const unsigned char* codes, const float* absmax, const float* table, float* out,
                                      u64 n, u32 block) {
    const u64 from = 8 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (from >= n) return;
    const int count = (int)min((u64)8, n - from);
    if (count == 8) {
        // Buffers are aligned to more than four bytes.
        const u32 word = *reinterpret_cast<const u32*>(codes + from / 2);
#pragma unroll
        for (int k = 0; k < 8; k += 4) {
            vec4 v;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 byte = word >> 8 * ((k + j) / 2), code = (k + j) % 2 == 0 ? byte >> 4 & 15 : byte & 15;
                v.x[j] = table[code] * absmax[(from + k + j) / block];
            }
            store4(out, from + k, v);
        }
        return;
    }
    for (int k = 0; k < count; k++) {
        const u32 byte = codes[(from + k) / 2], code = k % 2 == 0 ? byte >> 4 : byte & 15;
        out[from + k] = table[code] * absmax[(from + k) / block];
    }
}
