// The backward of norms of the residual stream in one pass: a row stays in the registers of its warp. VECTORS is the
// number of fours that a lane has of a row, for widths that are whole fours; BIAS says whether there is one.

// A block has a chunk of rows, of which each of its eight warps takes every eighth, in order; the warps' sums of the
// gradients of weight and bias are then added in their order. `sums` is [chunks][2][width], or absent.
template <class D>
__device__ void norm_backward_rows(const D* dy, const float* x, const float* weight, float* dx, u32 rows, u32 width,
                                   bool centred, float offset, float eps, bool add, u32 chunk, float* sums) {
    extern __shared__ float room[];  // [8][width]
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 first = blockIdx.x * chunk, last = min(first + chunk, rows);
    float dweight[VECTORS][4] = {}, dbias[BIAS ? VECTORS : 1][4] = {};
    for (u32 row = first + warp; row < last; row += 8) {
        const u64 at = (u64)row * width;
        vec4 v[VECTORS];
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            v[n] = i < width ? load4(x, at + i) : vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
        }
        float mean = 0.0f;
        if (centred) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) {
                for (int k = 0; k < 4; k++) sum[k] += v[n].x[k];
            }
            mean = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)width;
        }
        float square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const bool inside = 4 * lane + 4 * WARP * n < width;
            for (int k = 0; k < 4; k++) {
                v[n].x[k] = inside ? v[n].x[k] - mean : 0.0f;
                square[k] = fmaf(v[n].x[k], v[n].x[k], square[k]);
            }
        }
        const float variance = warp_sum((square[0] + square[1]) + (square[2] + square[3])) / (float)width;
        const float scale = 1.0f / sqrtf(variance + eps);
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, slope[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            if (i >= width) continue;
            const vec4 w = load4(weight, i), d = load4(dy, at + i);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float y = v[n].x[k] * scale, g = d.x[k] * (w.x[k] + offset);
                v[n].x[k] = y;
                sum[k] += g;
                slope[k] = fmaf(g, y, slope[k]);
                dweight[n][k] = fmaf(d.x[k], y, dweight[n][k]);
                if (BIAS) dbias[BIAS ? n : 0][k] += d.x[k];
            }
        }
        const float shift = centred ? warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)width : 0.0f;
        const float lean = warp_sum((slope[0] + slope[1]) + (slope[2] + slope[3])) / (float)width;
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            if (i >= width) continue;
            const vec4 w = load4(weight, i), d = load4(dy, at + i);
            vec4 out = {{0.0f, 0.0f, 0.0f, 0.0f}};
            if (add) out = load4(dx, at + i);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float g = fmaf(v[n].x[k], -lean, fmaf(d.x[k], w.x[k] + offset, -shift)) * scale;
                out.x[k] = add ? out.x[k] + g : g;
            }
            store4(dx, at + i, out);
        }
    }
    if (!sums) return;
    sums += 2 * (u64)blockIdx.x * width;
    for (int which = 0; which < (BIAS ? 2 : 1); which++) {
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            if (i >= width) continue;
#pragma unroll
            for (int k = 0; k < 4; k++) room[warp * width + i + k] = which ? dbias[BIAS ? n : 0][k] : dweight[n][k];
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < width; i += blockDim.x) {
            float total = 0.0f;
            for (u32 w = 0; w < 8; w++) total += room[w * width + i];
            sums[which * width + i] = total;
        }
    }
}
extern "C" __global__ void __launch_bounds__(256, VECTORS <= 8 ? 3 : 1)
    norm_backward_rows_f(const float* dy, const float* x, const float* weight, float* dx, u32 rows, u32 width,
                         bool centred, float offset, float eps, bool add, u32 chunk, float* sums) {
    norm_backward_rows(dy, x, weight, dx, rows, width, centred, offset, eps, add, chunk, sums);
}
extern "C" __global__ void __launch_bounds__(256, VECTORS <= 8 ? 3 : 1)
    norm_backward_rows_b(const bf16* dy, const float* x, const float* weight, float* dx, u32 rows, u32 width,
                         bool centred, float offset, float eps, bool add, u32 chunk, float* sums) {
    norm_backward_rows(dy, x, weight, dx, rows, width, centred, offset, eps, add, chunk, sums);
}
