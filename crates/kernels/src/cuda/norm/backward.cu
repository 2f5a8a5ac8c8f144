// One-pass backward of norms of the residual stream: a team of 128 threads has a row at a time in registers and prefetches its
// next one. A thread has the same columns in every row and accumulates its contributions to the gradients of weight and bias.
// VECTORS: groups of four elements per thread and row, for widths that are multiples of four; TEAMS: teams per block; CENTRED
// and BIAS: whether the mean is subtracted and whether the bias has a gradient.

// Four elements as stored.
__device__ __forceinline__ float4 fetch(const float* p, u64 i) { return *reinterpret_cast<const float4*>(p + i); }
__device__ __forceinline__ uint2 fetch(const bf16* p, u64 i) { return *reinterpret_cast<const uint2*>(p + i); }
__device__ __forceinline__ vec4 widened(float4 v) { return {{v.x, v.y, v.z, v.w}}; }
__device__ __forceinline__ vec4 widened(uint2 v) {
    return {{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)}};
}

// Column of a thread's n-th group of four.
__device__ __forceinline__ u32 column(u32 n) { return 4 * (threadIdx.x % TEAM) + 4 * TEAM * n; }

// A thread's elements of a row; zeros past its end and for absent operands.
template <class D>
struct Row {
    float4 x[VECTORS], dx[VECTORS];
    decltype(fetch((const D*)0, 0)) dy[VECTORS], delta[VECTORS];

    __device__ __forceinline__ void read(const D* from_dy, const float* from_x, const D* from_delta,
                                         const float* from_dx, u64 at, u32 width) {
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = column(n);
            x[n] = dx[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), dy[n] = delta[n] = {};
            if (i >= width) continue;
            x[n] = fetch(from_x, at + i), dy[n] = fetch(from_dy, at + i);
            if (from_delta) delta[n] = fetch(from_delta, at + i);
            if (from_dx) dx[n] = fetch(from_dx, at + i);
        }
    }
};

// Named barrier for the threads of a team; barrier 0 is the block's.
__device__ __forceinline__ void wait_for_team(u32 team) {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(TEAM) : "memory");
}

// Sums over a warp, and over a team's four warps, in the order of norm.cu: statistics have the bits of the forward.
__device__ __forceinline__ float of_warp(const float* sum) { return warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3])); }
__device__ __forceinline__ float of_team(const float* parts) {
    const float4 v = *reinterpret_cast<const float4*>(parts);
    return ((v.x + v.y) + v.z) + v.w;
}

// Teams take rows round-robin; at the end a block adds up its teams' sums, in order: `sums` is [blocks][2][width], or null. The
// norm was of x + delta (delta may be null); `y`, if given, receives the recomputed norm; `rounded` receives dx in type D.
template <class D>
__device__ __forceinline__ void rows_backward(const D* dy, const float* x, const D* delta, const float* weight,
                                              const float* bias, float* dx, D* y, D* rounded, u32 rows, u32 width,
                                              float offset, float eps, bool add, float* sums) {
    let_next_start();
    // Double-buffered by row, so that one barrier suffices.
    __shared__ __align__(16) float parts[2][TEAMS][4][4];
    extern __shared__ __align__(16) float totals[];  // [weight, bias][TEAMS][width]
    const u32 team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / WARP;
    const bool leads = threadIdx.x % WARP == 0;
    const float* old = add ? dx : 0;
    const float count = (float)width;
    vec4 w[VECTORS], dweight[VECTORS], dbias[VECTORS];
#pragma unroll
    for (u32 n = 0; n < VECTORS; n++) {
        w[n] = dweight[n] = dbias[n] = vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
        if (column(n) < width) w[n] = load4(weight, column(n));
#pragma unroll
        for (int k = 0; k < 4; k++) w[n].x[k] += offset;
    }
    u32 row = blockIdx.x * TEAMS + team, buffer = 0;
    Row<D> next;
    if (row < rows) next.read(dy, x, delta, old, (u64)row * width, width);
    while (row < rows) {
        const u64 at = (u64)row * width;
        vec4 v[VECTORS], out[VECTORS];
        decltype(fetch(dy, 0)) d[VECTORS];
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            v[n] = widened(next.x[n]), out[n] = widened(next.dx[n]), d[n] = next.dy[n];
            if (!delta) continue;
            const vec4 more = widened(next.delta[n]);
#pragma unroll
            for (int k = 0; k < 4; k++) v[n].x[k] += more.x[k];
        }
        row += gridDim.x * TEAMS;
        if (row < rows) next.read(dy, x, delta, old, (u64)row * width, width);

        float(*const mine)[4] = parts[buffer][team];
        buffer ^= 1;
        if (CENTRED) {
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) {
#pragma unroll
                for (int k = 0; k < 4; k++) sum[k] += v[n].x[k];
            }
            const float part = of_warp(sum);
            if (leads) mine[3][warp] = part;
            wait_for_team(team);
            const float mean = of_team(mine[3]) / count;
#pragma unroll
            for (u32 n = 0; n < VECTORS; n++) {
                if (column(n) >= width) continue;
#pragma unroll
                for (int k = 0; k < 4; k++) v[n].x[k] -= mean;
            }
        }
        float square[4] = {0.0f, 0.0f, 0.0f, 0.0f}, slope[4] = {0.0f, 0.0f, 0.0f, 0.0f},
              flows[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const vec4 flow = widened(d[n]);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float g = flow.x[k] * w[n].x[k];
                square[k] = fmaf(v[n].x[k], v[n].x[k], square[k]);
                slope[k] = fmaf(g, v[n].x[k], slope[k]);
                flows[k] += g;
            }
        }
        const float a = of_warp(square), b = of_warp(slope), c = CENTRED ? of_warp(flows) : 0.0f;
        if (leads) mine[0][warp] = a, mine[1][warp] = b, mine[2][warp] = c;
        wait_for_team(team);
        const float scale = 1.0f / sqrtf(of_team(mine[0]) / count + eps);
        const float lean = of_team(mine[1]) * scale / count, shift = CENTRED ? of_team(mine[2]) / count : 0.0f;
#pragma unroll
        for (u32 n = 0; n < VECTORS; n++) {
            const u32 i = column(n);
            if (i >= width) continue;
            const vec4 flow = widened(d[n]), plus = y && bias ? load4(bias, i) : vec4{{0.0f, 0.0f, 0.0f, 0.0f}};
            vec4 output;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float normed = v[n].x[k] * scale;
                output.x[k] = bias ? fmaf(normed, w[n].x[k], plus.x[k]) : normed * w[n].x[k];
                dweight[n].x[k] = fmaf(flow.x[k], normed, dweight[n].x[k]);
                if (BIAS) dbias[n].x[k] += flow.x[k];
                const float g = fmaf(normed, -lean, fmaf(flow.x[k], w[n].x[k], -shift)) * scale;
                out[n].x[k] = add ? out[n].x[k] + g : g;
            }
            if (y) store4(y, at + i, output);
            store4(dx, at + i, out[n]);
            if (rounded) store4(rounded, at + i, out[n]);
        }
    }
    if (!sums) return;
#pragma unroll
    for (u32 n = 0; n < VECTORS; n++) {
        if (column(n) >= width) continue;
        store4(totals + team * width, column(n), dweight[n]);
        if (BIAS) store4(totals + (TEAMS + team) * width, column(n), dbias[n]);
    }
    __syncthreads();
    sums += 2 * (u64)blockIdx.x * width;
    for (u32 i = threadIdx.x; i < (BIAS ? 2 : 1) * width; i += blockDim.x) {
        const float* from = totals + i / width * (TEAMS * width) + i % width;
        float total = 0.0f;
        for (u32 t = 0; t < TEAMS; t++) total += from[t * width];
        sums[i] = total;
    }
}
#define ROWS_BACKWARD(name, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(TEAMS* TEAM)                                                          \
        rows_backward_##name(const D* dy, const float* x, const D* delta, const float* weight, const float* bias,      \
                             float* dx, D* y, D* rounded, u32 rows, u32 width, float offset, float eps, bool add,      \
                             float* sums) {                                                                            \
        rows_backward(dy, x, delta, weight, bias, dx, y, rounded, rows, width, offset, eps, add, sums);                \
    }
ROWS_BACKWARD(f, float)
ROWS_BACKWARD(b, bf16)
