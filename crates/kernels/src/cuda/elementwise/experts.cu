// Weighted sums of gathered rows: combines the outputs of a token's experts.

// One block per row of out; terms are added in order.
template <class T, class U>
__device__ void mix(const T* src, const u32* rows, const float* weights, u32 k, u64 width, U* out) {
    const u64 t = blockIdx.x;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 j = 0; j < k; j++) sum = fmaf(weights[t * k + j], load(src, rows[t * k + j] * width + i), sum);
        store(out, t * width + i, sum);
    }
}
#define MIX(name, T, U)                                                                          \
    extern "C" __global__ void mix_##name(const T* src, const u32* rows, const float* weights,   \
                                          u32 k, u64 width, U* out) {                            \
        mix(src, rows, weights, k, width, out);                                                  \
    }
MIX(ff, float, float)
MIX(fb, float, bf16)
MIX(bf, bf16, float)
MIX(bb, bf16, bf16)

// One block per row of src, which is a term of exactly one row of out.
template <class T, class U, class V>
__device__ void mix_backward(const T* src, const U* dout, const u32* rows, const float* weights, u32 k, u64 width,
                             V* dsrc, float* dweights) {
    __shared__ float room[4];
    const u64 at = rows[blockIdx.x] * width, from = blockIdx.x / k * width;
    const float weight = weights[blockIdx.x];
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        const float d = load(dout, from + i);
        store(dsrc, at + i, weight * d);
        sum = fmaf(d, load(src, at + i), sum);
    }
    sum = block_sum(sum, room);
    if (threadIdx.x == 0) dweights[blockIdx.x] = sum;
}
#define MIX_BACKWARD(name, T, U, V)                                                                    \
    extern "C" __global__ void mix_backward_##name(const T* src, const U* dout, const u32* rows,       \
                                                   const float* weights, u32 k, u64 width, V* dsrc,    \
                                                   float* dweights) {                                  \
        mix_backward(src, dout, rows, weights, k, width, dsrc, dweights);                              \
    }
MIX_BACKWARD(fff, float, float, float)
MIX_BACKWARD(ffb, float, float, bf16)
MIX_BACKWARD(fbf, float, bf16, float)
MIX_BACKWARD(fbb, float, bf16, bf16)
MIX_BACKWARD(bff, bf16, float, float)
MIX_BACKWARD(bfb, bf16, float, bf16)
MIX_BACKWARD(bbf, bf16, bf16, float)
MIX_BACKWARD(bbb, bf16, bf16, bf16)
