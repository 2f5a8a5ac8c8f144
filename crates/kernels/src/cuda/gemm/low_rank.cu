// LoRA merge.

// w[row, j] = base[row, j] + sum_r b[r, row] * a[r, j], rounded; the sum is an FMA chain over ascending r, like product()'s in
// linear.cu. A thread has 4 columns of 8 rows at a time, a block 1024 columns of ROWS rows; all pointers are at the first row.
template <class T, class U>
__device__ void load_adapted(const T* base, const float* a, const float* b, U* w, u32 rows, u32 k, u32 rank) {
    __shared__ float factors[PIECE][ROWS];
    const u32 row0 = blockIdx.y * ROWS, j = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    float sum[ROWS / 8][8][4];
#pragma unroll
    for (int g = 0; g < ROWS / 8; g++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) sum[g][i][c] = 0.0f;
        }
    }
    for (u32 r0 = 0; r0 < rank; r0 += PIECE) {
        const u32 here = min(PIECE, rank - r0);
        for (u32 e = threadIdx.x; e < here * ROWS; e += blockDim.x) {
            const u32 r = e / ROWS, i = e % ROWS;
            factors[r][i] = row0 + i < rows ? b[(u64)(r0 + r) * rows + row0 + i] : 0.0f;
        }
        __syncthreads();
        if (j < k) {
            for (u32 r = 0; r < here; r++) {
                const vec4 x = load4(a, (u64)(r0 + r) * k + j);
#pragma unroll
                for (int g = 0; g < ROWS / 8; g++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const float f = factors[r][8 * g + i];
#pragma unroll
                        for (int c = 0; c < 4; c++) sum[g][i][c] = fmaf(f, x.x[c], sum[g][i][c]);
                    }
                }
            }
        }
        __syncthreads();
    }
    if (j >= k) return;
#pragma unroll
    for (int g = 0; g < ROWS / 8; g++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 row = row0 + 8 * g + i;
            if (row >= rows) continue;
            const u64 at = (u64)row * k + j;
            const vec4 x = load4(base, at);
            store4(w, at, {{x.x[0] + sum[g][i][0], x.x[1] + sum[g][i][1], x.x[2] + sum[g][i][2], x.x[3] + sum[g][i][3]}});
        }
    }
}
#define LOAD_ADAPTED(name, T, U)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) load_adapted_##name(const T* base, const float* a,              \
                                                                          const float* b, U* w, u32 rows, u32 k,      \
                                                                          u32 rank) {                                 \
        load_adapted(base, a, b, w, rows, k, rank);                                                                  \
    }
LOAD_ADAPTED(ff, float, float)
LOAD_ADAPTED(fb, float, bf16)
LOAD_ADAPTED(bf, bf16, float)
LOAD_ADAPTED(bb, bf16, bf16)
