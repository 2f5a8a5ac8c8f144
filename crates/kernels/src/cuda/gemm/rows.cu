// Test data for GEMM algorithms: operands with repeating rows, and comparison of the results.

// Numbers of many magnitudes, exact in bf16, repeating with `period`. The second half of each row of `width` repeats the first,
// negated if `negated`: dot products of such rows with others cancel to zero, up to rounding.
extern "C" __global__ void cancelling(bf16* x, u64 n, u64 period, u64 width, u32 seed, bool negated) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const u64 at = i % period, column = at % width, half = width / 2;
    const bool second = column >= half;
    u32 h = (u32)(second ? at - half : at) * 0x9E3779B9u ^ seed;
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    h ^= h >> 16;
    // A sign, an exponent from -9 to 0, seven mantissa bits.
    const u32 sign = (h & 0x80000000u) ^ (second && negated ? 0x80000000u : 0u);
    const u32 exponent = 127u - (h >> 8) % 10u;
    store(x, i, __uint_as_float(sign | exponent << 23 | (h & 0x7Fu) << 16));
}

// Whether any bit of `a` differs from `b`, which has `period` words and repeats.
extern "C" __global__ void differ_periodic(const u32* a, const u32* b, u64 words, u64 period, u32* found) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words && a[i] != b[i % period]) atomicOr(found, 1u);
}
