// The middle of a feed-forward network. A curve's value is x * gate(x), with gate a sigmoid.

#define TWO_ROOT 1.595769f
#define CUBIC 0.044715f
#define FLAT 32.0f

struct Silu {
    static __device__ __forceinline__ float gate(float x) { return sigmoid_(x); }
    // Derivative of the sigmoid's argument, times x.
    static __device__ __forceinline__ float lean(float x) { return x; }
};

struct Gelu {
    static __device__ __forceinline__ float bounded(float x) { return fminf(FLAT, fmaxf(-FLAT, x)); }
    static __device__ __forceinline__ float gate(float x) {
        const float b = bounded(x);
        const float bend = fmaf(b * b, CUBIC, 1.0f);
        const float y = sigmoid_(b * TWO_ROOT * bend);
        return x != x ? x : y;
    }
    static __device__ __forceinline__ float lean(float x) {
        x = bounded(x);
        return x * TWO_ROOT * fmaf(x * x, 3.0f * CUBIC, 1.0f);
    }
};

template <class C>
__device__ __forceinline__ void both(float x, float& value, float& derivative) {
    const float gate = C::gate(x);
    derivative = fmaf(gate * (1.0f - gate), C::lean(x), gate);
    value = x * gate;
}

// Block x has a row, block y a stretch of it; a thread has eight elements, or one where the width is not whole.
#define EIGHT 8

template <class C, class T, class U>
__device__ void gated(const T* x, U* y, u32 width) {
    x += 2 * (u64)blockIdx.x * width, y += (u64)blockIdx.x * width;
    if (width % EIGHT == 0) {
        const u32 i = EIGHT * (blockIdx.y * blockDim.x + threadIdx.x);
        if (i >= width) return;
        vec4 g[2], u[2];
#pragma unroll
        for (int h = 0; h < 2; h++) g[h] = load4(x, i + 4 * h), u[h] = load4(x, width + i + 4 * h);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            vec4 out;
#pragma unroll
            for (int k = 0; k < 4; k++) out.x[k] = g[h].x[k] * C::gate(g[h].x[k]) * u[h].x[k];
            store4(y, i + 4 * h, out);
        }
    } else {
        for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
            const float g = load(x, i);
            store(y, i, g * C::gate(g) * load(x, width + i));
        }
    }
}

template <class C, class T, class U>
__device__ void plain(const T* x, U* y, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) store(y, i, load(x, i) * C::gate(load(x, i)));
}

template <class C, class T, class D, class U>
__device__ void gated_backward(const T* x, const D* dy, U* dx, u32 width) {
    x += 2 * (u64)blockIdx.x * width, dy += (u64)blockIdx.x * width, dx += 2 * (u64)blockIdx.x * width;
    if (width % EIGHT == 0) {
        const u32 i = EIGHT * (blockIdx.y * blockDim.x + threadIdx.x);
        if (i >= width) return;
        vec4 d[2], g[2], u[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            d[h] = load4(dy, i + 4 * h), g[h] = load4(x, i + 4 * h), u[h] = load4(x, width + i + 4 * h);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            vec4 dg, du;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float value, derivative;
                both<C>(g[h].x[k], value, derivative);
                dg.x[k] = d[h].x[k] * u[h].x[k] * derivative;
                du.x[k] = d[h].x[k] * value;
            }
            store4(dx, i + 4 * h, dg);
            store4(dx, width + i + 4 * h, du);
        }
    } else {
        for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
            const float d = load(dy, i), u = load(x, width + i);
            float value, derivative;
            both<C>(load(x, i), value, derivative);
            store(dx, i, d * u * derivative);
            store(dx, width + i, d * value);
        }
    }
}

template <class C, class T, class D, class U>
__device__ void plain_backward(const T* x, const D* dy, U* dx, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value, derivative;
    both<C>(load(x, i), value, derivative);
    store(dx, i, load(dy, i) * derivative);
}

#define FORWARD(name, T, U)                                                                                          \
    extern "C" __global__ void silu_gated_##name(const T* x, U* y, u64 rows, u32 width) {                            \
        gated<Silu>(x, y, width);                                                                              \
    }                                                                                                                \
    extern "C" __global__ void gelu_gated_##name(const T* x, U* y, u64 rows, u32 width) {                            \
        gated<Gelu>(x, y, width);                                                                              \
    }                                                                                                                \
    extern "C" __global__ void gelu_##name(const T* x, U* y, u64 rows, u32 width) { plain<Gelu>(x, y, rows * width); }
FORWARD(ff, float, float)
FORWARD(fb, float, bf16)
FORWARD(bf, bf16, float)
FORWARD(bb, bf16, bf16)

#define BACKWARD(name, T, D, U)                                                                                      \
    extern "C" __global__ void silu_gated_backward_##name(const T* x, const D* dy, U* dx, u64 rows, u32 width) {     \
        gated_backward<Silu>(x, dy, dx, width);                                                                \
    }                                                                                                                \
    extern "C" __global__ void gelu_gated_backward_##name(const T* x, const D* dy, U* dx, u64 rows, u32 width) {     \
        gated_backward<Gelu>(x, dy, dx, width);                                                                \
    }                                                                                                                \
    extern "C" __global__ void gelu_backward_##name(const T* x, const D* dy, U* dx, u64 rows, u32 width) {           \
        plain_backward<Gelu>(x, dy, dx, rows * width);                                                               \
    }
BACKWARD(fff, float, float, float)
BACKWARD(ffb, float, float, bf16)
BACKWARD(fbf, float, bf16, float)
BACKWARD(fbb, float, bf16, bf16)
BACKWARD(bff, bf16, float, float)
BACKWARD(bfb, bf16, float, bf16)
BACKWARD(bbf, bf16, bf16, float)
BACKWARD(bbb, bf16, bf16, bf16)
