// Updates of parameters from their gradients.

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

// How a stretch is stored: WHOLE, with a copy of its type or none; COPIED, whole with a copy in bf16; or SPLIT, a split
// master.

// A stretch of a parameter with its state; `derived`, where given, takes the new values, or their upper halves.
// `start` is the number of its first chunk among those of all stretches.
struct Stretch {
    void* param;
    const float* grad;
    float *first, *second;
    void* derived;
    u64 n, start;
    AdamW op;
    u32 storage;
};

// Elements from `from` to `to` by a block, in fours where all arrays allow it.
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

// A block has a chunk of some stretch of many.
extern "C" __global__ void __launch_bounds__(256) adamw(const Stretch* stretches, u32 count, u32 chunk) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        (stretches[middle].start <= blockIdx.x ? low : high) = middle;
    }
    const Stretch& stretch = stretches[low];
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
