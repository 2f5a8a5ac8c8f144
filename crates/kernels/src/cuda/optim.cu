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

// A stretch of a parameter with its state; `derived`, where given, takes the new values, in bf16 where `narrow` says so.
// `start` is the number of its first chunk among those of all stretches.
struct Stretch {
    float* param;
    const float* grad;
    float *first, *second;
    void* derived;
    u64 n, start;
    AdamW op;
    u32 narrow;
};

// Elements from `from` to `to` by a block, in fours where all arrays allow it.
template <class T>
__device__ __forceinline__ void adamw(const Stretch& stretch, u64 from, u64 to) {
    float *param = stretch.param, *first = stretch.first, *second = stretch.second;
    const float* grad = stretch.grad;
    T* derived = (T*)stretch.derived;
    const AdamW op = stretch.op;
    const bool aligned = (((u64)param | (u64)grad | (u64)first | (u64)second) % 16 | (u64)derived % sizeof(T[4])) == 0;
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
        op.step(param[i], grad[i], first[i], second[i]);
        if (derived) store(derived, i, param[i]);
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
    if (stretch.narrow) {
        adamw<bf16>(stretch, from, to);
    } else {
        adamw<float>(stretch, from, to);
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
