// RMSNorm and LayerNorm, a block of 128 threads per row whatever the number of rows: a single row must not wait for one warp. A
// thread has the same elements in every pass, so it may read what it wrote. Forward kernels launch early: the next GEMM
// prefetches its weights meanwhile.

struct Stats {
    float mean, scale;
};

// Calls four(i) or one(i) for every element of this thread, in groups of four if the width allows.
template <class F4, class F1>
__device__ __forceinline__ void each(u32 width, F4 four, F1 one) {
    if (width % 4 == 0) {
        for (u32 i = 4 * threadIdx.x; i < width; i += 4 * THREADS) four(i);
    } else {
        for (u32 i = threadIdx.x; i < width; i += THREADS) one(i);
    }
}

__device__ __forceinline__ float row_sum(const float* parts) {
    __shared__ float room[THREADS / WARP];
    return block_sum((parts[0] + parts[1]) + (parts[2] + parts[3]), room);
}

template <class T>
__device__ Stats stats_of(const T* row, u32 width, bool centred, float eps) {
    float mean = 0.0f;
    if (centred) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        each(
            width,
            [&](u32 i) {
                const vec4 v = load4(row, i);
                for (int k = 0; k < 4; k++) sum[k] += v.x[k];
            },
            [&](u32 i) { sum[0] += load(row, i); });
        mean = row_sum(sum) / (float)width;
    }
    float square[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    each(
        width,
        [&](u32 i) {
            const vec4 v = load4(row, i);
            for (int k = 0; k < 4; k++) square[k] = fmaf(v.x[k] - mean, v.x[k] - mean, square[k]);
        },
        [&](u32 i) {
            const float d = load(row, i) - mean;
            square[0] = fmaf(d, d, square[0]);
        });
    const float variance = row_sum(square) / (float)width;
    return {mean, 1.0f / sqrtf(variance + eps)};
}

__device__ __forceinline__ float normed(Stats s, float x) { return (x - s.mean) * s.scale; }

template <class T, class U>
__device__ void norm_row(const T* x, const float* weight, const float* bias, U* y, u32 width, bool centred,
                         float offset, float eps) {
    const Stats s = stats_of(x, width, centred, eps);
    each(
        width,
        [&](u32 i) {
            const vec4 v = load4(x, i), w = load4(weight, i);
            vec4 out;
            if (bias) {
                const vec4 b = load4(bias, i);
                for (int k = 0; k < 4; k++) out.x[k] = fmaf(normed(s, v.x[k]), w.x[k] + offset, b.x[k]);
            } else {
                for (int k = 0; k < 4; k++) out.x[k] = normed(s, v.x[k]) * (w.x[k] + offset);
            }
            store4(y, i, out);
        },
        [&](u32 i) {
            const float n = normed(s, load(x, i)), w = weight[i] + offset;
            store(y, i, bias ? fmaf(n, w, bias[i]) : n * w);
        });
}

#define NORM(name, T, U)                                                                                         \
    extern "C" __global__ void norm_##name(const T* x, const float* weight, const float* bias, U* y, u32 width, bool centred, float offset, float eps) {                   \
        wait_for_earlier();                                                                                      \
        let_next_start();                                                                                        \
        const u32 row = blockIdx.x;                                                                              \
        norm_row(x + (u64)row * width, weight, bias, y + (u64)row * width, width, centred, offset, eps);         \
    }
NORM(ff, float, float)
NORM(fb, float, bf16)
NORM(bf, bf16, float)
NORM(bb, bf16, bf16)

template <class T, class D, class U>
__device__ void add_norm(const T* x, const D* delta, const float* weight, const float* bias, float* sum, U* y, u32 width, bool centred, float offset, float eps) {
    wait_for_earlier();
    let_next_start();
    const u32 row = blockIdx.x;
    const u64 at = (u64)row * width;
    each(
        width,
        [&](u32 i) {
            const vec4 a = load4(x + at, i), b = load4(delta + at, i);
            store4(sum + at, i, {{a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]}});
        },
        [&](u32 i) { sum[at + i] = load(x, at + i) + load(delta, at + i); });
    norm_row(sum + at, weight, bias, y + at, width, centred, offset, eps);
}
#define ADD_NORM(name, T, D, U)                                                                                      \
    extern "C" __global__ void add_norm_##name(const T* x, const D* delta, const float* weight, const float* bias,   \
                                               float* sum, U* y, u32 width, bool centred, float offset,    \
                                               float eps) {                                                          \
        add_norm(x, delta, weight, bias, sum, y, width, centred, offset, eps);                                       \
    }
#define TRIPLES(M)                                                                                                   \
    M(fff, float, float, float)                                                                                      \
    M(ffb, float, float, bf16)                                                                                       \
    M(fbf, float, bf16, float)                                                                                       \
    M(fbb, float, bf16, bf16)                                                                                        \
    M(bff, bf16, float, float)                                                                                       \
    M(bfb, bf16, float, bf16)                                                                                        \
    M(bbf, bf16, bf16, float)                                                                                        \
    M(bbb, bf16, bf16, bf16)
TRIPLES(ADD_NORM)

// ---- backward ---------------------------------------------------------------------------------------------------

// Writes dx, or adds to it. `stats`, if given, receives the rows' mean and scale for the sums over rows.
template <class D, class T, class U>
__device__ void norm_backward(const D* dy, const T* x, const float* weight, U* dx, u32 width, bool centred,
                              float offset, float eps, bool add, Stats* stats) {
    const u32 row = blockIdx.x;
    dy += (u64)row * width, x += (u64)row * width, dx += (u64)row * width;
    const Stats s = stats_of(x, width, centred, eps);
    if (stats && threadIdx.x == 0) stats[row] = s;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, slope[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    each(
        width,
        [&](u32 i) {
            const vec4 d = load4(dy, i), v = load4(x, i), w = load4(weight, i);
            for (int k = 0; k < 4; k++) {
                const float g = d.x[k] * (w.x[k] + offset);
                sum[k] += g;
                slope[k] = fmaf(g, normed(s, v.x[k]), slope[k]);
            }
        },
        [&](u32 i) {
            const float g = load(dy, i) * (weight[i] + offset);
            sum[0] += g;
            slope[0] = fmaf(g, normed(s, load(x, i)), slope[0]);
        });
    const float mean = centred ? row_sum(sum) / (float)width : 0.0f;
    const float lean = row_sum(slope) / (float)width;
    auto gradient = [&](float d, float v, float w) {
        const float g = fmaf(d, w + offset, -mean);
        return fmaf(normed(s, v), -lean, g) * s.scale;
    };
    each(
        width,
        [&](u32 i) {
            const vec4 d = load4(dy, i), v = load4(x, i), w = load4(weight, i);
            vec4 out = {{0.0f, 0.0f, 0.0f, 0.0f}};
            if (add) out = load4(dx, i);
            for (int k = 0; k < 4; k++) {
                const float g = gradient(d.x[k], v.x[k], w.x[k]);
                out.x[k] = add ? out.x[k] + g : g;
            }
            store4(dx, i, out);
        },
        [&](u32 i) {
            const float g = gradient(load(dy, i), load(x, i), weight[i]);
            store(dx, i, add ? load(dx, i) + g : g);
        });
}
#define NORM_BACKWARD(name, D, T, U)                                                                                 \
    extern "C" __global__ void norm_backward_##name(const D* dy, const T* x, const float* weight, U* dx, u32 width, bool centred, float offset, float eps, bool add,      \
                                                    Stats* stats) {                                                  \
        norm_backward(dy, x, weight, dx, width, centred, offset, eps, add, stats);                             \
    }
TRIPLES(NORM_BACKWARD)

// Gradients of weight and bias over a chunk of rows, in row order; either may be null.
template <class D, class T>
__device__ void norm_sums(const D* dy, const T* x, const Stats* stats, u32 rows, u32 width, u32 chunk, float* dweight,
                          float* dbias) {
    const u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    const u32 from = blockIdx.y * chunk, to = min(from + chunk, rows);
    float weight = 0.0f, bias = 0.0f;
#pragma unroll 4
    for (u32 r = from; r < to; r++) {
        const u64 i = (u64)r * width + column;
        const float d = load(dy, i);
        weight = fmaf(d, normed(stats[r], load(x, i)), weight);
        bias += d;
    }
    if (dweight) dweight[(u64)blockIdx.y * width + column] = weight;
    if (dbias) dbias[(u64)blockIdx.y * width + column] = bias;
}
#define NORM_SUMS(name, D, T)                                                                                        \
    extern "C" __global__ void norm_sums_##name(const D* dy, const T* x, const Stats* stats, u32 rows, u32 width,    \
                                                u32 chunk, float* dweight, float* dbias) {                           \
        norm_sums(dy, x, stats, rows, width, chunk, dweight, dbias);                                                 \
    }
NORM_SUMS(ff, float, float)
NORM_SUMS(fb, float, bf16)
NORM_SUMS(bf, bf16, float)
NORM_SUMS(bb, bf16, bf16)
