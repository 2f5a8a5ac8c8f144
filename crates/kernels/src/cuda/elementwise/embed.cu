// Embedding lookup, and its gradient.

template <class P>
__device__ __forceinline__ void embed(const u32* ids, const P& table, float scale, bool add, u32 width, float* out) {
    const u64 row = (u64)ids[blockIdx.x] * width;
    out += (u64)blockIdx.x * width;
    for (u32 j = threadIdx.x; j < width; j += blockDim.x) {
        const float x = load(table, row + j);
        out[j] = add ? fmaf(scale, x, out[j]) : scale * x;
    }
}
extern "C" __global__ void embed_whole(const u32* ids, const float* table, u64, float scale, bool add, u32 width,
                                       float* out) {
    embed(ids, table, scale, add, width, out);
}
extern "C" __global__ void embed_split(const u32* ids, u16* lower, u16* upper, float scale, bool add, u32 width,
                                        float* out) {
    if (lower) embed(ids, SplitMaster{lower, upper}, scale, add, width, out);
    else embed(ids, reinterpret_cast<const bf16*>(upper), scale, add, width, out);
}

// Rows sorted by id: group g has id ids[g] and rows order[starts[g]..starts[g + 1]]; a thread has one column of a group.
template <class T>
__device__ void embed_backward(const u32* ids, const u32* starts, const u32* order, const T* dout, float scale,
                               u32 width, float* dtable) {
    const u32 g = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= width) return;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 i = starts[g]; i < starts[g + 1]; i++) {
        sum = fmaf(scale, load(dout, (u64)order[i] * width + column), sum);
    }
    dtable[(u64)ids[g] * width + column] += sum;
}
extern "C" __global__ void embed_backward_f(const u32* ids, const u32* starts, const u32* order, const float* dout,
                                            float scale, u32 width, float* dtable) {
    embed_backward(ids, starts, order, dout, scale, width, dtable);
}
extern "C" __global__ void embed_backward_b(const u32* ids, const u32* starts, const u32* order, const bf16* dout,
                                            float scale, u32 width, float* dtable) {
    embed_backward(ids, starts, order, dout, scale, width, dtable);
}
