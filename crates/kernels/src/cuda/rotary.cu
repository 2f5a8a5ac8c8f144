// Rotary position embedding, in place on the queries and keys of fused rows: a block a row, four pairs of elements a
// thread where halves of heads are whole fours.

template <class T>
__device__ void rotary(T* qkv, const float* cos, const float* sin, const u32* positions, u32 normed, u32 width,
                       u32 dim, u32 half, float sign) {
    T* row = qkv + (u64)blockIdx.x * width;
    const u64 at = (u64)positions[blockIdx.x] * half;
    if (half % 4 == 0 && dim % 4 == 0 && width % 4 == 0) {
        for (u32 n = 4 * threadIdx.x; n < normed * half; n += 4 * blockDim.x) {
            const u32 head = n / half, i = n % half, low = head * dim + i, high = low + half;
            const vec4 c = load4(cos, at + i), s = load4(sin, at + i), a = load4(row, low), b = load4(row, high);
            vec4 x, y;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float d = sign * s.x[k], e = 0.0f - d;
                x.x[k] = fmaf(a.x[k], c.x[k], b.x[k] * e);
                y.x[k] = fmaf(b.x[k], c.x[k], a.x[k] * d);
            }
            store4(row, low, x);
            store4(row, high, y);
        }
        return;
    }
    for (u32 n = threadIdx.x; n < normed * half; n += blockDim.x) {
        const u32 head = n / half, i = n % half;
        const u64 low = (u64)head * dim + i, high = low + half;
        const float c = cos[at + i], d = sign * sin[at + i], e = 0.0f - d;
        const float a = load(row, low), b = load(row, high);
        store(row, low, fmaf(a, c, b * e));
        store(row, high, fmaf(b, c, a * d));
    }
}
#define ROTARY(name, T)                                                                                              \
    extern "C" __global__ void rotary_##name(T* qkv, const float* cos, const float* sin, const u32* positions,       \
                                             u32 normed, u32 width, u32 dim, u32 half, float sign) {                 \
        rotary(qkv, cos, sin, positions, normed, width, dim, half, sign);                                            \
    }
ROTARY(f, float)
ROTARY(b, bf16)
