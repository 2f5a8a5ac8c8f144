// Rotary position embedding, in place on the queries and keys of fused rows: a block a row.

template <class T>
__device__ void rotary(T* qkv, const float* cos, const float* sin, const u32* positions, u32 normed, u32 width,
                       u32 dim, u32 half, float sign) {
    T* row = qkv + (u64)blockIdx.x * width;
    const u64 at = (u64)positions[blockIdx.x] * half;
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
