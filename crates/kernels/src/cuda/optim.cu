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

// Twice four elements a thread where all arrays allow it, a block's width apart, so that more reads are under way.
// `derived`, where given, takes the new values in its storage.
template <class P, class T>
__device__ __forceinline__ void adamw(const P& param, bool param_aligned, const float* grad, float* first,
                                      float* second, T* derived, u64 n, const AdamW& op) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const bool aligned =
        param_aligned && (((u64)grad | (u64)first | (u64)second) % 16 | (u64)derived % sizeof(T[4])) == 0;
    const u64 fours = aligned ? n / 4 : 0;
    const u64 at[2] = {2 * (i - threadIdx.x) + threadIdx.x, 2 * (i - threadIdx.x) + threadIdx.x + blockDim.x};
    vec4 w[2], g[2], m[2], v[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (at[h] >= fours) continue;
        w[h] = load4(param, 4 * at[h]), g[h] = load4(grad, 4 * at[h]);
        m[h] = load4(first, 4 * at[h]), v[h] = load4(second, 4 * at[h]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (at[h] >= fours) continue;
#pragma unroll
        for (int k = 0; k < 4; k++) op.step(w[h].x[k], g[h].x[k], m[h].x[k], v[h].x[k]);
        store4(param, 4 * at[h], w[h]);
        store4(first, 4 * at[h], m[h]);
        store4(second, 4 * at[h], v[h]);
        if (derived) store4(derived, 4 * at[h], w[h]);
    }
    for (u64 j = 4 * fours + i; j < n; j += (u64)gridDim.x * blockDim.x) {
        float x = load(param, j);
        op.step(x, grad[j], first[j], second[j]);
        store(param, j, x);
        if (derived) store(derived, j, x);
    }
}
#define ADAMW(name, T)                                                                                                 \
    extern "C" __global__ void adamw_##name(float* param, const float* grad, float* first, float* second, T* derived,  \
                                            u64 n, float grad_scale, float keep, float beta1, float rest1,             \
                                            float beta2, float rest2, float root_correction, float eps,                \
                                            float step_size) {                                                         \
        const AdamW op = {grad_scale, keep, beta1, rest1, beta2, rest2, root_correction, eps, step_size};              \
        adamw(param, (u64)param % 16 == 0, grad, first, second, derived, n, op);                                                             \
    }
ADAMW(f, float)
ADAMW(b, bf16)

// The parameter in halves, of which the upper one is what is derived from it.
extern "C" __global__ void adamw_halves(u16* lower, const float* grad, float* first, float* second, u16* upper, u64 n,
                                        float grad_scale, float keep, float beta1, float rest1, float beta2,
                                        float rest2, float root_correction, float eps, float step_size) {
    const AdamW op = {grad_scale, keep, beta1, rest1, beta2, rest2, root_correction, eps, step_size};
    const bool aligned = ((u64)lower | (u64)upper) % 8 == 0;
    adamw(Halves{lower, upper}, aligned, grad, first, second, (float*)nullptr, n, op);
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
