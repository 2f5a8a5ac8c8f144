// Rotary position embedding, in place on the queries and keys of fused rows: a block a row, four pairs of elements a
// thread where halves of heads are whole fours.

template <class T>
__device__ void rotary(T* qkv, const float* cos, const float* sin, const u32* positions, u32 normed, u32 width,
                       u32 dim, u32 half, float sign) {
    T* row = qkv + (u64)blockIdx.x * width;
    const u64 at = (u64)positions[blockIdx.x] * half;
    if (half % 4 == 0 && dim % 4 == 0 && width % 4 == 0) {
        for (u32 n = 4 * threadIdx.x; n < normed * half; n += 4 * blockDim.x) {
            const u32 head = n / half, i = n % half, low = head * dim + i, high = low + half;
            const vec4 c = load4(cos, at + i), s = load4(sin, at + i), a = load4(row, low), b = load4(row, high);
            vec4 x, y;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float d = sign * s.x[k], e = 0.0f - d;
                x.x[k] = fmaf(a.x[k], c.x[k], b.x[k] * e);
                y.x[k] = fmaf(b.x[k], c.x[k], a.x[k] * d);
            }
            store4(row, low, x);
            store4(row, high, y);
        }
        return;
    }
    for (u32 n = threadIdx.x; n < normed * half; n += blockDim.x) {
        const u32 head = n / half, i = n % half;
        const u64 low = (u64)head * dim + i, high = low + half;
        const float c = cos[at + i], d = sign * sin[at + i], e = 0.0f - d;
        const float a = load(row, low), b = load(row, high);
        store(row, low, fmaf(a, c, b * e));
        store(row, high, fmaf(b, c, a * d));
    }
}
#define ROTARY(name, T)                                                                                              \
    extern "C" __global__ void rotary_##name(T* qkv, const float* cos, const float* sin, const u32* positions,       \
                                             u32 normed, u32 width, u32 dim, u32 half, float sign) {                 \
        rotary(qkv, cos, sin, positions, normed, width, dim, half, sign);                                            \
    }
ROTARY(f, float)
ROTARY(b, bf16)

// What comes after the product that makes queries, keys and values: the bias is added, the result rounded to storage,
// queries and keys turned, keys and values also stored in the cache (see attention_cache.cu). A block a row; `qkv` may be
// where the sums are.
template <class T>
__device__ void finish_qkv(const T* sums, const float* bias, bf16* qkv, const float* cos, const float* sin,
                           const u32* positions, const u32* slots, bf16* cache, u32 heads, u32 kv_heads, u32 dim) {
    wait_for_earlier();
    const u32 half = dim / 2, all = heads + 2 * kv_heads, slot = slots[blockIdx.x];
    const u64 at = (u64)positions[blockIdx.x] * half;
    sums += (u64)blockIdx.x * all * dim, qkv += (u64)blockIdx.x * all * dim;
    for (u32 n = threadIdx.x; n < all * half; n += blockDim.x) {
        const u32 head = n / half, i = n % half, low = head * dim + i, high = low + half;
        float a = load(sums, low), b = load(sums, high);
        if (bias) a += bias[low], b += bias[high];
        a = stored(qkv, a), b = stored(qkv, b);
        if (head < heads + kv_heads) {
            const float x = a, y = b, c = cos[at + i], d = 1.0f * sin[at + i], e = 0.0f - d;
            a = fmaf(x, c, y * e), b = fmaf(y, c, x * d);
        }
        store(qkv, low, a);
        store(qkv, high, b);
        if (head < heads || slot == ~0u) continue;
        const u32 kv = (head - heads) % kv_heads, part = (head - heads) / kv_heads;
        const u64 to = ((((u64)(slot / 64) * kv_heads + kv) * 2 + part) * 64 + slot % 64) * dim + i;
        store(cache, to, a);
        store(cache, to + half, b);
    }
}
#define FINISH(name, T)                                                                                              \
    extern "C" __global__ void finish_qkv_##name(const T* sums, const float* bias, bf16* qkv, const float* cos,      \
                                                 const float* sin, const u32* positions, const u32* slots,           \
                                                 bf16* cache, u32 heads, u32 kv_heads, u32 dim) {                    \
        finish_qkv(sums, bias, qkv, cos, sin, positions, slots, cache, heads, kv_heads, dim);                        \
    }
FINISH(f, float)
FINISH(b, bf16)
