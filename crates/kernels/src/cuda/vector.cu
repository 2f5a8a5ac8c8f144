// Plain vectors: filling, conversion, sums and rows picked by number.

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
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) store(y, i, fmaf(a, load(x, i), load(y, i)));
}
#define AXPY(name, T, U) \
    extern "C" __global__ void axpy_##name(float a, const T* x, U* y, u64 n) { axpy(a, x, y, n); }
PAIRS(AXPY)

// One sum a block of 4096 elements, in f64: of each thread's sixteen, four sums of four.
template <class T, class U>
__device__ void dot(const T* x, const U* y, u64 n, double* sums) {
    __shared__ double room[8];
    const u64 from = (u64)blockIdx.x * 4096;
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
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
#define DOT(name, T, U) \
    extern "C" __global__ void dot_##name(const T* x, const U* y, u64 n, double* sums) { dot(x, y, n, sums); }
PAIRS(DOT)

// One block: the sums of all chunks.
extern "C" __global__ void add_up(const double* sums, u64 n, double* total) {
    __shared__ double room[32];
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) *total = sum;
}

// The smallest index wins, whoever comes first.
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

// Row i of dst is row rows[i] of src; zero where there is none (all ones).
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

// Sums of the columns of a chunk of rows, in row order: chunk blockIdx.y, one thread a column.
template <class T>
__device__ void column_sums(const T* x, u32 rows, u32 width, u32 chunk, float* sums) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const u32 from = blockIdx.y * chunk, to = min(from + chunk, rows);
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

// Adds the sums of all chunks, in their order, in one addition.
extern "C" __global__ void add_chunks(const float* sums, u32 stride, u32 chunks, u32 width, float* to) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 c = 0; c < chunks; c++) sum += sums[(u64)c * stride + i];
    to[i] += sum;
}

// The same for many chunks: eight strands of consecutive chunks for each column, added in the order of the strands.
extern "C" __global__ void add_many_chunks(const float* sums, u32 stride, u32 chunks, u32 width, float* to) {
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
    to[column] += sum;
}
