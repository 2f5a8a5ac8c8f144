// Activations of the feed-forward network: x * gate(x), with gate a sigmoid.

#define TWO_ROOT 1.595769f
#define CUBIC 0.044715f
#define FLAT 32.0f

struct Silu {
    static __device__ __forceinline__ float gate(float x) { return sigmoid_(x); }
    // x times the derivative of the sigmoid's argument.
    static __device__ __forceinline__ float slope(float x) { return x; }
};

struct Gelu {
    static __device__ __forceinline__ float bounded(float x) { return fminf(FLAT, fmaxf(-FLAT, x)); }
    static __device__ __forceinline__ float gate(float x) {
        const float b = bounded(x);
        const float bend = fmaf(b * b, CUBIC, 1.0f);
        const float y = sigmoid_(b * TWO_ROOT * bend);
        return x != x ? x : y;
    }
    static __device__ __forceinline__ float slope(float x) {
        x = bounded(x);
        return x * TWO_ROOT * fmaf(x * x, 3.0f * CUBIC, 1.0f);
    }
};

template <class C>
__device__ __forceinline__ void both(float x, float& value, float& derivative) {
    const float gate = C::gate(x);
    derivative = fmaf(gate * (1.0f - gate), C::slope(x), gate);
    value = x * gate;
}

// blockIdx.x is a row, blockIdx.y a range of it; a thread has eight elements, or one if the width is not a multiple of eight.
#define EIGHT 8

struct vec8 {
    float x[EIGHT];
};

// Whole 16-byte units: half of one at a time costs in-place kernels a third of their speed.
__device__ __forceinline__ vec8 load8(const bf16* p, u64 i) {
    const uint4 v = *reinterpret_cast<const uint4*>(p + i);
    return {{low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y), low_half(v.z), high_half(v.z),
             low_half(v.w), high_half(v.w)}};
}
__device__ __forceinline__ vec8 load8(const float* p, u64 i) {
    const vec4 a = load4(p, i), b = load4(p, i + 4);
    return {{a.x[0], a.x[1], a.x[2], a.x[3], b.x[0], b.x[1], b.x[2], b.x[3]}};
}
__device__ __forceinline__ void store8(bf16* p, u64 i, const vec8& v) {
    *reinterpret_cast<uint4*>(p + i) = make_uint4(narrow2(v.x[0], v.x[1]), narrow2(v.x[2], v.x[3]),
                                                  narrow2(v.x[4], v.x[5]), narrow2(v.x[6], v.x[7]));
}
__device__ __forceinline__ void store8(float* p, u64 i, const vec8& v) {
    store4(p, i, {{v.x[0], v.x[1], v.x[2], v.x[3]}});
    store4(p, i + 4, {{v.x[4], v.x[5], v.x[6], v.x[7]}});
}

// Forward kernels launch early: the next GEMM prefetches its weights meanwhile.
template <class C, class T, class U>
__device__ void gated(const T* x, U* y, u32 width) {
    wait_for_earlier();
    let_next_start();
    x += 2 * (u64)blockIdx.x * width, y += (u64)blockIdx.x * width;
    if (width % EIGHT == 0) {
        const u32 i = EIGHT * (blockIdx.y * blockDim.x + threadIdx.x);
        if (i >= width) return;
        const vec8 g = load8(x, i), u = load8(x, width + i);
        vec8 out;
#pragma unroll
        for (int k = 0; k < EIGHT; k++) out.x[k] = g.x[k] * C::gate(g.x[k]) * u.x[k];
        store8(y, i, out);
    } else {
        for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
            const float g = load(x, i);
            store(y, i, g * C::gate(g) * load(x, width + i));
        }
    }
}

template <class C, class T, class U>
__device__ void plain(const T* x, U* y, u64 n) {
    wait_for_earlier();
    let_next_start();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) store(y, i, load(x, i) * C::gate(load(x, i)));
}

template <class C, class T, class D, class U>
__device__ void gated_backward(const T* x, const D* dy, U* dx, u32 width) {
    x += 2 * (u64)blockIdx.x * width, dy += (u64)blockIdx.x * width, dx += 2 * (u64)blockIdx.x * width;
    if (width % EIGHT == 0) {
        const u32 i = EIGHT * (blockIdx.y * blockDim.x + threadIdx.x);
        if (i >= width) return;
        const vec8 d = load8(dy, i), g = load8(x, i), u = load8(x, width + i);
        vec8 dg, du;
#pragma unroll
        for (int k = 0; k < EIGHT; k++) {
            float value, derivative;
            both<C>(g.x[k], value, derivative);
            dg.x[k] = d.x[k] * u.x[k] * derivative;
            du.x[k] = d.x[k] * value;
        }
        store8(dx, i, dg);
        store8(dx, width + i, du);
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

// In place, with one sigmoid, the bits of `gated` and `gated_backward`: dy becomes the value and x its gradient.
template <class C, class T>
__device__ void gated_recompute(T* x, T* dy, u32 width) {
    x += 2 * (u64)blockIdx.x * width, dy += (u64)blockIdx.x * width;
    auto recompute = [](float& d, float& g, float& u) {
        float value, derivative;
        both<C>(g, value, derivative);
        const float value_out = value * u, dg = d * u * derivative, du = d * value;
        d = value_out, g = dg, u = du;
    };
    if (width % EIGHT == 0) {
        const u32 i = EIGHT * (blockIdx.y * blockDim.x + threadIdx.x);
        if (i >= width) return;
        vec8 d = load8(dy, i), g = load8(x, i), u = load8(x, width + i);
#pragma unroll
        for (int k = 0; k < EIGHT; k++) recompute(d.x[k], g.x[k], u.x[k]);
        store8(dy, i, d);
        store8(x, i, g);
        store8(x, width + i, u);
    } else {
        for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x) {
            float d = load(dy, i), g = load(x, i), u = load(x, width + i);
            recompute(d, g, u);
            store(dy, i, d);
            store(x, i, g);
            store(x, width + i, u);
        }
    }
}

template <class C, class T>
__device__ void plain_recompute(T* x, T* dy, u64 n) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value, derivative;
    both<C>(load(x, i), value, derivative);
    const float d = load(dy, i);
    store(dy, i, value);
    store(x, i, d * derivative);
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

#define AGAIN(name, T)                                                                               \
    extern "C" __global__ void silu_gated_recompute_##name(T* x, T* dy, u64 rows, u32 width) {           \
        gated_recompute<Silu>(x, dy, width);                                                             \
    }                                                                                                \
    extern "C" __global__ void gelu_gated_recompute_##name(T* x, T* dy, u64 rows, u32 width) {           \
        gated_recompute<Gelu>(x, dy, width);                                                             \
    }                                                                                                \
    extern "C" __global__ void gelu_recompute_##name(T* x, T* dy, u64 rows, u32 width) {                 \
        plain_recompute<Gelu>(x, dy, rows * width);                                                      \
    }
AGAIN(f, float)
AGAIN(b, bf16)
