// Conversion of split masters to f32, and back.

extern "C" __global__ void join(u16* lower, u16* upper, float* to, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = lower ? load(SplitMaster{lower, upper}, i) : joined(0, upper[i]);
}

extern "C" __global__ void split(const float* from, u16* lower, u16* upper, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (lower) lower[i] = (u16)lower_half(from[i]);
    upper[i] = (u16)upper_half(from[i]);
}
