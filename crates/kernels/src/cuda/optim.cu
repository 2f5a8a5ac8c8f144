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

// Four elements a thread where all four arrays allow it.
extern "C" __global__ void adamw(float* param, const float* grad, float* first, float* second, u64 n, float grad_scale,
                                 float keep, float beta1, float rest1, float beta2, float rest2,
                                 float root_correction, float eps, float step_size) {
    const AdamW op = {grad_scale, keep, beta1, rest1, beta2, rest2, root_correction, eps, step_size};
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 fours = (((u64)param | (u64)grad | (u64)first | (u64)second) % 16) == 0 ? n / 4 : 0;
    if (i < fours) {
        vec4 w = load4(param, 4 * i), m = load4(first, 4 * i), v = load4(second, 4 * i);
        const vec4 g = load4(grad, 4 * i);
#pragma unroll
        for (int k = 0; k < 4; k++) op.step(w.x[k], g.x[k], m.x[k], v.x[k]);
        store4(param, 4 * i, w);
        store4(first, 4 * i, m);
        store4(second, 4 * i, v);
    }
    for (u64 j = 4 * fours + i; j < n; j += (u64)gridDim.x * blockDim.x) {
        op.step(param[j], grad[j], first[j], second[j]);
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
