// To try products on: operands whose rows repeat, and whether results repeat with them.

// Numbers between -1 and 1 without a pattern that matters, the same again after every `period`.
extern "C" __global__ void noise_again(bf16* x, u64 n, u64 period, u32 seed) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 h = (u32)(i % period) * 0x9E3779B9u ^ seed;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    store(x, i, (float)((h ^ (h >> 16)) >> 8) / 8388608.0f - 1.0f);
}

// Whether any bit of `a` differs from `b`, which has `period` words and is met again and again.
extern "C" __global__ void differ_again(const u32* a, const u32* b, u64 words, u64 period, u32* found) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words && a[i] != b[i % period]) atomicOr(found, 1u);
}
