// AdamW (f32 and 8-bit) and SGD steps.

struct AdamW {
    float grad_scale, keep, beta1, rest1, beta2, rest2, root_correction, eps, step_size;
    __device__ __forceinline__ void step(float& param, float grad, float& first, float& second) const {
        const float g = grad_scale * grad;
        first = fmaf(beta1, first, rest1 * g);
        second = fmaf(beta2, second, rest2 * (g * g));
        const float denominator = sqrtf(second) / root_correction + eps;
        param = fmaf(-step_size, first / denominator, keep * param);
    }
};

// Storage of a range: WHOLE, f32 with an f32 copy or none; COPIED, f32 with a bf16 copy; or SPLIT, a split master.

// A range of a parameter with its state; `derived`, if given, receives the new values, or their bf16 high halves. `start` is
// the index of its first chunk among those of all ranges.
struct Stretch {
    void* param;
    const float* grad;
    float *first, *second;
    void* derived;
    u64 n, start;
    // For 8-bit moments, `first` and `second` are codes, and these the absmax of their blocks.
    float *first_absmax, *second_absmax;
    AdamW op;
    u32 storage;
};

// A block's elements `from` to `to`, in groups of four if alignment allows.
template <class P, class T>
__device__ __forceinline__ void adamw(const Stretch& stretch, const P& param, bool fours, T* derived, u64 from,
                                      u64 to) {
    float *first = stretch.first, *second = stretch.second;
    const float* grad = stretch.grad;
    const AdamW op = stretch.op;
    const bool aligned = fours && (((u64)grad | (u64)first | (u64)second) % 16 | (u64)derived % sizeof(T[4])) == 0;
    const u64 whole = aligned ? to / 4 * 4 : from;
    for (u64 i = from + 4 * threadIdx.x; i < whole; i += 4 * blockDim.x) {
        vec4 w = load4(param, i), m = load4(first, i), v = load4(second, i);
        const vec4 g = load4(grad, i);
#pragma unroll
        for (int k = 0; k < 4; k++) op.step(w.x[k], g.x[k], m.x[k], v.x[k]);
        store4(param, i, w);
        store4(first, i, m);
        store4(second, i, v);
        if (derived) store4(derived, i, w);
    }
    for (u64 i = whole + threadIdx.x; i < to; i += blockDim.x) {
        float w = load(param, i);
        op.step(w, grad[i], first[i], second[i]);
        store(param, i, w);
        if (derived) store(derived, i, w);
    }
}

// The range that contains the block's chunk.
__device__ __forceinline__ const Stretch& stretch_of(const Stretch* stretches, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        (stretches[middle].start <= blockIdx.x ? low : high) = middle;
    }
    return stretches[low];
}

// One block per chunk of any range.
extern "C" __global__ void __launch_bounds__(256) adamw(const Stretch* stretches, u32 count, u32 chunk) {
    const Stretch& stretch = stretch_of(stretches, count);
    const u64 from = chunk * (blockIdx.x - stretch.start), to = min(from + chunk, stretch.n);
    float* whole = (float*)stretch.param;
    const bool fours = (u64)whole % 16 == 0;
    if (stretch.storage == SPLIT) {
        const SplitMaster split = {(u16*)stretch.param, (u16*)stretch.derived};
        adamw(stretch, split, ((u64)split.lower | (u64)split.upper) % 8 == 0, (float*)nullptr, from, to);
    } else if (stretch.storage == COPIED) {
        adamw(stretch, whole, fours, (bf16*)stretch.derived, from, to);
    } else {
        adamw(stretch, whole, fours, (float*)stretch.derived, from, to);
    }
}

// A code table: values, and their midpoints as a binary search tree (`CodeTable::tree` of codes.rs), so that the lanes of a
// warp read from different banks.
struct CodeTable {
    float values[256], tree[256];
};

// As on the CPU: the number of midpoints below `x`, 0 for NaN.
__device__ __forceinline__ u32 code_of(const float* tree, float x) {
    u32 k = 1;
#pragma unroll
    for (int step = 0; step < 8; step++) k = 2 * k + (tree[k] < x ? 1 : 0);
    return k - 256;
}

// 1 / absmax, as on the CPU.
__device__ __forceinline__ float code_factor(float absmax) { return 1.0f / fmaxf(absmax, 1e-38f); }

// Elements per lane of an 8-bit block.
#define LANE (CODES / WARP)

// One 8-bit block, elements from `from` to `to`, per warp.
template <class P, class T>
__device__ __forceinline__ void adamw_coded(const Stretch& stretch, const P& param, T* derived, u64 from, u64 to,
                                            const CodeTable* tables) {
    unsigned char *first = (unsigned char*)stretch.first, *second = (unsigned char*)stretch.second;
    const u64 at = from + LANE * (threadIdx.x % WARP), block = from / CODES;
    const int n = at < to ? (int)min((u64)LANE, to - at) : 0;
    const float m_absmax = stretch.first_absmax[block], v_absmax = stretch.second_absmax[block];
    float w[LANE], g[LANE], m[LANE], v[LANE];
    if (n == LANE) {
        // Blocks are aligned: they start at multiples of 256 elements.
        const uint2 m_codes = *reinterpret_cast<const uint2*>(first + at);
        const uint2 v_codes = *reinterpret_cast<const uint2*>(second + at);
#pragma unroll
        for (int k = 0; k < LANE; k++) {
            m[k] = tables[0].values[(k < 4 ? m_codes.x : m_codes.y) >> 8 * (k % 4) & 0xffu];
            v[k] = tables[1].values[(k < 4 ? v_codes.x : v_codes.y) >> 8 * (k % 4) & 0xffu];
        }
#pragma unroll
        for (int k = 0; k < LANE; k += 4) {
            const vec4 ws = load4(param, at + k), gs = load4(stretch.grad, at + k);
#pragma unroll
            for (int j = 0; j < 4; j++) w[k + j] = ws.x[j], g[k + j] = gs.x[j];
        }
    } else {
#pragma unroll
        for (int k = 0; k < LANE; k++) {
            if (k < n) {
                w[k] = load(param, at + k), g[k] = stretch.grad[at + k];
                m[k] = tables[0].values[first[at + k]], v[k] = tables[1].values[second[at + k]];
            } else {
                w[k] = g[k] = m[k] = v[k] = 0.0f;
            }
        }
    }
    const AdamW op = stretch.op;
    float m_most = 0.0f, v_most = 0.0f;
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        m[k] *= m_absmax, v[k] *= v_absmax;
        if (k < n) op.step(w[k], g[k], m[k], v[k]);
        m_most = fmaxf(m_most, fabsf(m[k])), v_most = fmaxf(v_most, fabsf(v[k]));
    }
    m_most = warp_max(m_most), v_most = warp_max(v_most);
    const float m_factor = code_factor(m_most), v_factor = code_factor(v_most);
    u32 m_codes[LANE], v_codes[LANE];
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        m_codes[k] = code_of(tables[0].tree, m[k] * m_factor);
        // Rounded to zero, it would make a later step divide by almost nothing.
        v_codes[k] = max(code_of(tables[1].tree, v[k] * v_factor), v[k] > 0.0f ? 1u : 0u);
    }
    if (threadIdx.x % WARP == 0) stretch.first_absmax[block] = m_most, stretch.second_absmax[block] = v_most;
    if (n == LANE) {
        u32 m_words[2] = {0, 0}, v_words[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < LANE; k++)
            m_words[k / 4] |= m_codes[k] << 8 * (k % 4), v_words[k / 4] |= v_codes[k] << 8 * (k % 4);
        *reinterpret_cast<uint2*>(first + at) = make_uint2(m_words[0], m_words[1]);
        *reinterpret_cast<uint2*>(second + at) = make_uint2(v_words[0], v_words[1]);
#pragma unroll
        for (int k = 0; k < LANE; k += 4) {
            const vec4 ws = {{w[k], w[k + 1], w[k + 2], w[k + 3]}};
            store4(param, at + k, ws);
            if (derived) store4(derived, at + k, ws);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < LANE; k++) {
        if (k >= n) continue;
        first[at + k] = (unsigned char)m_codes[k], second[at + k] = (unsigned char)v_codes[k];
        store(param, at + k, w[k]);
        if (derived) store(derived, at + k, w[k]);
    }
}

// `adamw` with 8-bit moments: a warp processes several blocks, so that the tables are loaded once.
extern "C" __global__ void __launch_bounds__(256)
    adamw8(const Stretch* stretches, u32 count, u32 chunk, const CodeTable* tables) {
    __shared__ CodeTable room[2];
    __shared__ Stretch stretch;
    if (threadIdx.x == 0) stretch = stretch_of(stretches, count);
    for (u32 i = threadIdx.x; i < sizeof(room) / sizeof(float); i += blockDim.x)
        ((float*)room)[i] = ((const float*)tables)[i];
    __syncthreads();
    const u64 start = chunk * (blockIdx.x - stretch.start), end = min(start + chunk, stretch.n);
    for (u64 from = start + CODES * (threadIdx.x / WARP); from < end; from += CODES * (blockDim.x / WARP)) {
        const u64 to = min(from + CODES, stretch.n);
        if (stretch.storage == SPLIT) {
            const SplitMaster split = {(u16*)stretch.param, (u16*)stretch.derived};
            adamw_coded(stretch, split, (float*)nullptr, from, to, room);
        } else if (stretch.storage == COPIED) {
            adamw_coded(stretch, (float*)stretch.param, (bf16*)stretch.derived, from, to, room);
        } else {
            adamw_coded(stretch, (float*)stretch.param, (float*)stretch.derived, from, to, room);
        }
    }
}

extern "C" __global__ void sgd(float* param, const float* grad, float* velocity, u64 n, float grad_scale, float decay,
                               float momentum, float lr) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float w = param[i];
    float g = fmaf(decay, w, grad_scale * grad[i]);
    if (velocity) {
        g = fmaf(momentum, velocity[i], g);
        velocity[i] = g;
    }
    param[i] = fmaf(-lr, g, w);
}
