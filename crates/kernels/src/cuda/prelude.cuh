// Prepended to every kernel source: storage types, reductions in a fixed order, and mathematics of our own. The compiler does
// not contract (--fmad=false): FMAs are written fmaf.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY_ __int_as_float(0x7f800000)
#define WARP 32
#define ALL 0xffffffffu

// ---- storage ------------------------------------------------------------------------------------------------

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest even.
__device__ __forceinline__ bf16 narrow(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two at once: `low` in the lower half.
__device__ __forceinline__ u32 narrow2(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float load(const float* p, u64 i) { return p[i]; }
__device__ __forceinline__ float load(const bf16* p, u64 i) { return widen(p[i]); }
__device__ __forceinline__ void store(float* p, u64 i, float x) { p[i] = x; }
__device__ __forceinline__ void store(bf16* p, u64 i, float x) { p[i] = narrow(x); }
// The value after a store: rounded to the storage type.
__device__ __forceinline__ float stored(const float*, float x) { return x; }
__device__ __forceinline__ float stored(const bf16*, float x) { return widen(narrow(x)); }

// Four elements, at a multiple of four from an aligned start.
struct vec4 {
    float x[4];
};

__device__ __forceinline__ vec4 load4(const float* p, u64 i) {
    float4 v = *reinterpret_cast<const float4*>(p + i);
    return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ vec4 load4(const bf16* p, u64 i) {
    uint2 v = *reinterpret_cast<const uint2*>(p + i);
    return {{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y)}};
}
__device__ __forceinline__ void store4(float* p, u64 i, const vec4& v) {
    *reinterpret_cast<float4*>(p + i) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
}
__device__ __forceinline__ void store4(bf16* p, u64 i, const vec4& v) {
    *reinterpret_cast<uint2*>(p + i) = make_uint2(narrow2(v.x[0], v.x[1]), narrow2(v.x[2], v.x[3]));
}

// ---- reductions: the same tree whatever the launch ------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, d));
    return x;
}

// Sum over a block of at most 32 whole warps; `room` holds one value per warp. Every thread gets the result.
template <class T>
__device__ __forceinline__ T block_sum(T x, T* room) {
    x = warp_sum(x);
    const int warps = blockDim.x / WARP;
    __syncthreads();
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
    __syncthreads();
    T sum = room[0];
    for (int w = 1; w < warps; w++) sum += room[w];
    return sum;
}
__device__ __forceinline__ float block_max(float x, float* room) {
    x = warp_max(x);
    const int warps = blockDim.x / WARP;
    __syncthreads();
    if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
    __syncthreads();
    float max = room[0];
    for (int w = 1; w < warps; w++) max = fmaxf(max, room[w]);
    return max;
}

// ---- mathematics: the same polynomials as on the CPU ------------------------------------------------------------

__device__ __forceinline__ float pow2_(float n) { return __int_as_float(((int)n + 127) << 23); }

// e^x; 0 below -87.3, infinity above 88.7.
__device__ __forceinline__ float exp_(float x) {
    const float low = -87.33654f, high = 88.72283f;
    const float clamped = fminf(high, fmaxf(low, x));
    const float n = rintf(clamped * 1.44269504f);
    float r = fmaf(n, -0.6933594f, clamped);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 0.16666666f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r * r, r + 1.0f);
    // n = 128 would overflow the scale alone: split it.
    const float half = rintf(n * 0.5f);
    float y = p * pow2_(half) * pow2_(n - half);
    y = x < low ? 0.0f : y;
    y = high < x ? INFINITY_ : y;
    return x != x ? x : y;
}

// Natural logarithm of a positive normal number.
__device__ __forceinline__ float log_(float x) {
    if (x == 0.0f) return -INFINITY_;
    if (!(x > 0.0f)) return __int_as_float(0x7fffffff);
    if (x == INFINITY_) return x;
    // In f64, rounded once; used for a few numbers per row.
    u64 bits = (u64)__double_as_longlong((double)x);
    int e = (int)((bits >> 52) & 0x7ff) - 1023;
    double m = __longlong_as_double((long long)((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e += 1;
    }
    const double t = (m - 1.0) / (m + 1.0), t2 = t * t;
    double series = 0.0;
    for (int k = 11; k >= 0; k--) series = series * t2 + 1.0 / (double)(2 * k + 1);
    return (float)(2.0 * t * series + (double)e * 0.6931471805599453);
}

// Hyperbolic tangent: odd polynomial near zero, exponentials elsewhere.
__device__ __forceinline__ float tanh_(float x) {
    const float bounded = fminf(20.0f, fmaxf(-20.0f, x));
    const float e = exp_(2.0f * bounded);
    const float far = 1.0f - 2.0f / (e + 1.0f);
    const float square = bounded * bounded;
    float p = -5.7049885e-3f;
    p = fmaf(p, square, 2.063909e-2f);
    p = fmaf(p, square, -5.3739714e-2f);
    p = fmaf(p, square, 0.13331442f);
    p = fmaf(p, square, -0.33333283f);
    const float near = fmaf(p * square, bounded, bounded);
    const float y = square < 0.390625f ? near : far;
    return x != x ? x : y;
}

// 1 / (1 + e^-x), by the GPU's exp2 and reciprocal instructions: within 3e-6; used for every activation of every token.
__device__ __forceinline__ float sigmoid_(float x) {
    float e, y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504f));
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

// Waits until the previous kernels are complete and their results visible. A kernel with `Grid::early` calls it in every thread
// before it accesses what they read or write.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start, if it has `Grid::early`, as soon as all blocks have called this. Before its own wait, that kernel
// may read weights: a kernel that calls this before its own wait must follow one that does not, or weights written before both
// might be read too soon.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
