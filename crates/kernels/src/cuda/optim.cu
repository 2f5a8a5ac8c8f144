// Updates of parameters from their gradients, one thread an element.

extern "C" __global__ void adamw(float* param, const float* grad, float* first, float* second, u64 n, float grad_scale,
                                 float keep, float beta1, float rest1, float beta2, float rest2,
                                 float root_correction, float eps, float step_size) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = grad_scale * grad[i];
    const float m = fmaf(beta1, first[i], rest1 * g);
    const float v = fmaf(beta2, second[i], rest2 * (g * g));
    const float w = keep * param[i];
    const float denominator = sqrtf(v) / root_correction + eps;
    first[i] = m;
    second[i] = v;
    param[i] = fmaf(-step_size, m / denominator, w);
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
