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

// One thread for each element of y, or for four of them.
template <class C, class T, class U>
__device__ void gated(const T* x, U* y, u64 rows, u32 width) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (width % 4 == 0) {
        if (4 * n >= rows * width) return;
        const u64 row = 4 * n / width, i = 4 * n % width, at = 2 * row * width + i;
        const vec4 g = load4(x, at), u = load4(x, at + width);
        vec4 out;
        for (int k = 0; k < 4; k++) out.x[k] = g.x[k] * C::gate(g.x[k]) * u.x[k];
        store4(y, 4 * n, out);
    } else if (n < rows * width) {
        const u64 row = n / width, i = n % width, at = 2 * row * width + i;
        const float g = load(x, at);
        store(y, n, g * C::gate(g) * load(x, at + width));
    }
}

template <class C, class T, class U>
__device__ void plain(const T* x, U* y, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) store(y, i, load(x, i) * C::gate(load(x, i)));
}

template <class C, class T, class D, class U>
__device__ void gated_backward(const T* x, const D* dy, U* dx, u64 rows, u32 width) {
    const u64 n = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (width % 4 == 0) {
        if (4 * n >= rows * width) return;
        const u64 row = 4 * n / width, i = 4 * n % width, at = 2 * row * width + i;
        const vec4 d = load4(dy, 4 * n), g = load4(x, at), u = load4(x, at + width);
        vec4 dg, du;
        for (int k = 0; k < 4; k++) {
            float value, derivative;
            both<C>(g.x[k], value, derivative);
            dg.x[k] = d.x[k] * u.x[k] * derivative;
            du.x[k] = d.x[k] * value;
        }
        store4(dx, at, dg);
        store4(dx, at + width, du);
    } else if (n < rows * width) {
        const u64 row = n / width, i = n % width, at = 2 * row * width + i;
        const float d = load(dy, n), u = load(x, at + width);
        float value, derivative;
        both<C>(load(x, at), value, derivative);
        store(dx, at, d * u * derivative);
        store(dx, at + width, d * value);
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
        gated<Silu>(x, y, rows, width);                                                                              \
    }                                                                                                                \
    extern "C" __global__ void gelu_gated_##name(const T* x, U* y, u64 rows, u32 width) {                            \
        gated<Gelu>(x, y, rows, width);                                                                              \
    }                                                                                                                \
    extern "C" __global__ void gelu_##name(const T* x, U* y, u64 rows, u32 width) { plain<Gelu>(x, y, rows * width); }
FORWARD(ff, float, float)
FORWARD(fb, float, bf16)
FORWARD(bf, bf16, float)
FORWARD(bb, bf16, bf16)

#define BACKWARD(name, T, D, U)                                                                                      \
    extern "C" __global__ void silu_gated_backward_##name(const T* x, const D* dy, U* dx, u64 rows, u32 width) {     \
        gated_backward<Silu>(x, dy, dx, rows, width);                                                                \
    }                                                                                                                \
    extern "C" __global__ void gelu_gated_backward_##name(const T* x, const D* dy, U* dx, u64 rows, u32 width) {     \
        gated_backward<Gelu>(x, dy, dx, rows, width);                                                                \
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
