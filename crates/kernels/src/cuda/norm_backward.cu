// The backward of norms of the residual stream in one pass: a row stays in the registers of its warp. VECTORS is the
// number of fours that a lane has of a row, for widths that are whole fours; BIAS says whether the bias has a gradient.

// Whether registers hold also what is added to, so that all reads of a row are under way at once.
#define AT_ONCE (VECTORS <= 4)

// Four elements as they are stored.
__device__ __forceinline__ float4 fetch(const float* p, u64 i) { return *reinterpret_cast<const float4*>(p + i); }
__device__ __forceinline__ uint2 fetch(const bf16* p, u64 i) { return *reinterpret_cast<const uint2*>(p + i); }
__device__ __forceinline__ vec4 widened(float4 v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ __forceinline__ vec4 widened(uint2 v) {
    return {{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)}};
}

// What a row's fours give by `term(sum, x)`, added up in the order of norm.cu: there the four n of a lane belongs to warp
// n % 4 of four, so statistics are those of the forward, to the last bit.
template <class F>
__device__ __forceinline__ float row_total(const vec4* v, F term) {
    float total = 0.0f;
#pragma unroll
    for (u32 w = 0; w < 4; w++) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = w; n < VECTORS; n += 4) {
#pragma unroll
            for (int k = 0; k < 4; k++) sum[k] = term(sum[k], v[n].x[k]);
        }
        const float part = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
        total = w == 0 ? part : total + part;
    }
    return total;
}

// A block has a chunk of rows, of which each of its eight warps takes every eighth, in order; the warps' sums of the
// gradients of weight and bias, in shared memory, are then added in their order. `sums` is [chunks][2][width], or absent. The norm was of
// x + delta, or of x where there is no delta; y, where given, takes it again; rounded takes dx in the storage D.
template <class D>
__device__ __forceinline__ void rows_backward(const D* dy, const float* x, const D* delta, const float* weight,
                                              const float* bias, float* dx, D* y, D* rounded, u32 rows, u32 width,
                                              bool centred, float offset, float eps, bool add, u32 chunk,
                                              float* sums) {
    extern __shared__ __align__(16) float room[];  // [weight, bias][8 warps][width]
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 first = blockIdx.x * chunk, last = min(first + chunk, rows);
    float *dweight = room + warp * width, *dbias = dweight + 8 * width;
    if (sums) {
        for (u32 i = 4 * lane; i < width; i += 4 * WARP) {
            store4(dweight, i, {{0.0f, 0.0f, 0.0f, 0.0f}});
            if (BIAS) store4(dbias, i, {{0.0f, 0.0f, 0.0f, 0.0f}});
        }
    }
    for (u32 row = first + warp; row < last; row += 8) {
        const u64 at = (u64)row * width;
        vec4 v[VECTORS], old[VECTORS];
        decltype(fetch(dy, 0)) d[VECTORS];
        // All reads under way before the first is used.
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            v[n] = old[n] = vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
            d[n] = {};
            if (i >= width) continue;
            v[n] = load4(x, at + i), d[n] = fetch(dy, at + i);
            if (add && AT_ONCE) old[n] = load4(dx, at + i);
        }
        if (delta) {
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) {
                const u32 i = 4 * lane + 4 * WARP * n;
                if (i >= width) continue;
                const vec4 more = load4(delta, at + i);
#pragma unroll
                for (int k = 0; k < 4; k++) v[n].x[k] += more.x[k];
            }
        }
        if (centred) {
            const float mean = row_total(v, [](float sum, float x) { return sum + x; }) / (float)width;
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) {
                if (4 * lane + 4 * WARP * n >= width) continue;
#pragma unroll
                for (int k = 0; k < 4; k++) v[n].x[k] -= mean;
            }
        }
        const float variance = row_total(v, [](float sum, float x) { return fmaf(x, x, sum); }) / (float)width;
        const float scale = 1.0f / sqrtf(variance + eps);
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, slope[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            if (i >= width) continue;
            const vec4 w = load4(weight, i), flow = widened(d[n]);
            vec4 again;
            const vec4 b = y && bias ? load4(bias, i) : vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float normed = v[n].x[k] * scale, g = flow.x[k] * (w.x[k] + offset);
                v[n].x[k] = normed;
                again.x[k] = bias ? fmaf(normed, w.x[k] + offset, b.x[k]) : normed * (w.x[k] + offset);
                sum[k] += g;
                slope[k] = fmaf(g, normed, slope[k]);
            }
            if (y) store4(y, at + i, again);
            if (sums) {
                vec4 total = load4(dweight, i);
#pragma unroll
                for (int k = 0; k < 4; k++) total.x[k] = fmaf(flow.x[k], v[n].x[k], total.x[k]);
                store4(dweight, i, total);
            }
            if (sums && BIAS) {
                vec4 total = load4(dbias, i);
#pragma unroll
                for (int k = 0; k < 4; k++) total.x[k] += flow.x[k];
                store4(dbias, i, total);
            }
        }
        const float shift = centred ? warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])) / (float)width : 0.0f;
        const float lean = warp_sum((slope[0] + slope[1]) + (slope[2] + slope[3])) / (float)width;
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = 4 * lane + 4 * WARP * n;
            if (i >= width) continue;
            const vec4 w = load4(weight, i), flow = widened(d[n]);
            if (add && !AT_ONCE) old[n] = load4(dx, at + i);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float g = fmaf(v[n].x[k], -lean, fmaf(flow.x[k], w.x[k] + offset, -shift)) * scale;
                old[n].x[k] = add ? old[n].x[k] + g : g;
            }
            store4(dx, at + i, old[n]);
            if (rounded) store4(rounded, at + i, old[n]);
        }
    }
    if (!sums) return;
    sums += 2 * (u64)blockIdx.x * width;
    __syncthreads();
    for (u32 i = threadIdx.x; i < (BIAS ? 2 : 1) * width; i += blockDim.x) {
        const float* from = room + i / width * (8 * width) + i % width;
        float total = 0.0f;
        for (u32 w = 0; w < 8; w++) total += from[w * width];
        sums[i] = total;
    }
}
#define ROWS_BACKWARD(name, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, VECTORS <= 8 ? 3 : VECTORS <= 12 ? 2 : 1)                                            \
        rows_backward_##name(const D* dy, const float* x, const D* delta, const float* weight, const float* bias,      \
                             float* dx, D* y, D* rounded, u32 rows, u32 width, bool centred, float offset, float eps,  \
                             bool add, u32 chunk, float* sums) {                                                       \
        rows_backward(dy, x, delta, weight, bias, dx, y, rounded, rows, width, centred, offset, eps, add, chunk, sums); \
    }
ROWS_BACKWARD(f, float)
ROWS_BACKWARD(b, bf16)
