// Split master: an f32 stored as a bf16 high half, which GEMMs read, and a 16-bit rest, the difference in ulps of f32. Lossless
// (except for NaN payloads), and nothing is stored twice. The high half rounds ties away from zero, so that the rest is within
// -32768 to 32767.

struct SplitMaster {
    u16* lower;
    u16* upper;
};

__device__ __forceinline__ float joined(u32 lower, u32 upper) {
    return __uint_as_float((upper << 16) + (u32)(int)(short)lower);
}
// Rounding up must not turn a NaN into a number.
__device__ __forceinline__ u32 upper_half(float x) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : (bits + 0x8000u) >> 16;
}
__device__ __forceinline__ u32 lower_half(float x) { return __float_as_uint(x) & 0xffffu; }

__device__ __forceinline__ float load(const SplitMaster& p, u64 i) { return joined(p.lower[i], p.upper[i]); }
__device__ __forceinline__ void store(const SplitMaster& p, u64 i, float x) {
    p.lower[i] = (u16)lower_half(x);
    p.upper[i] = (u16)upper_half(x);
}
__device__ __forceinline__ vec4 load4(const SplitMaster& p, u64 i) {
    const uint2 low = *reinterpret_cast<const uint2*>(p.lower + i), up = *reinterpret_cast<const uint2*>(p.upper + i);
    return {{joined(low.x, up.x & 0xffffu), joined(low.x >> 16, up.x >> 16), joined(low.y, up.y & 0xffffu),
             joined(low.y >> 16, up.y >> 16)}};
}
__device__ __forceinline__ void store4(const SplitMaster& p, u64 i, const vec4& v) {
    u32 low[4], up[4];
#pragma unroll
    for (int k = 0; k < 4; k++) low[k] = lower_half(v.x[k]), up[k] = upper_half(v.x[k]);
    *reinterpret_cast<uint2*>(p.lower + i) = make_uint2(low[0] | low[1] << 16, low[2] | low[3] << 16);
    *reinterpret_cast<uint2*>(p.upper + i) = make_uint2(up[0] | up[1] << 16, up[2] | up[3] << 16);
}
