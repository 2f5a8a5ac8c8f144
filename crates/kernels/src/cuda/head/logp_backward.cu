// From gradients of log-probabilities to those of raw logits, element-wise and in place (`overwrite`).

// Loads PER adjacent logits of a row of `vocab`; nothing past its end.
template <int PER>
__device__ __forceinline__ void read(const float* row, u32 at, u32 vocab, float* to) {
    if (at >= vocab) return;
    if constexpr (PER == 1) {
        to[0] = row[at];
    } else {
        const vec4 a = load4(row, at), b = load4(row, at + 4);
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = a.x[i], to[4 + i] = b.x[i];
    }
}
template <int PER, class T>
__device__ __forceinline__ void write(T* row, u32 at, const float* from) {
    if constexpr (PER == 1) {
        store(row, at, from[0]);
    } else if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint4*>(row + at) = make_uint4(narrow2(from[0], from[1]), narrow2(from[2], from[3]),
                                                         narrow2(from[4], from[5]), narrow2(from[6], from[7]));
    } else {
        store4(row, at, {{from[0], from[1], from[2], from[3]}});
        store4(row, at + 4, {{from[4], from[5], from[6], from[7]}});
    }
}

// Replaces every raw logit of a row by gradient(token, logit), in type T, in place. A block iterates over a row from its start:
// what it overwrites was read before the preceding barrier. PER is 8 if the row length is a multiple of eight, else 1.
template <int PER, class T, class F>
__device__ __forceinline__ void overwrite(float* row, u32 vocab, F gradient) {
    T* out = reinterpret_cast<T*>(row);
    const u32 step = PER * blockDim.x;
    u32 at = PER * threadIdx.x;
    float now[PER], next[PER];
    read<PER>(row, at, vocab, now);
    for (u32 from = 0; from < vocab; from += step, at += step) {
        read<PER>(row, at + step, vocab, next);
        __syncthreads();
        if (at < vocab) {
#pragma unroll
            for (int i = 0; i < PER; i++) now[i] = gradient(at + i, now[i]);
            write<PER>(out, at, now);
        }
#pragma unroll
        for (int i = 0; i < PER; i++) now[i] = next[i];
    }
}

// Block blockIdx.x has one row; row statistics are those of `finish`, followed by their gradients.
template <int PER, class T>
__device__ __forceinline__ void dlogits(float* logits, u32 vocab, const Head& head, const u32* targets,
                                        const u32* others, u32 extra, const float* lse, const float* entropy,
                                        const float* dlogp, const float* dentropy, const float* dothers) {
    const u32 row = blockIdx.x, target = targets[row];
    others += (u64)row * extra, dothers += (u64)row * extra;
    const float own = dlogp[row], sum = lse[row], h = entropy[row], de = dentropy ? dentropy[row] : 0.0f;
    float total = own;
    for (u32 j = 0; j < extra; j++) total += dothers[j];
    overwrite<PER, T>(logits + (u64)row * vocab, vocab, [&](u32 token, float raw) {
        const float x = head.scale(raw), slope = head.slope(x), logp = x - sum;
        const float pull = fmaf(de, logp + h, total);
        float d = (0.0f - weight(logp)) * pull * slope;
        if (token == target) d += own * slope;
        for (u32 j = 0; j < extra; j++) {
            if (token == others[j]) d += dothers[j] * slope;
        }
        return d;
    });
}
#define TURNING(M) M(f8, 8, float) M(b8, 8, bf16) M(f1, 1, float) M(b1, 1, bf16)
#define DLOGITS(name, PER, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(768, 2)                                                               \
        dlogits_##name(float* logits, u32 vocab, float inverse, float temperature, float cap, const u32* targets,      \
                       const u32* others, u32 extra, const float* lse, const float* entropy, const float* dlogp,       \
                       const float* dentropy, const float* dothers) {                                                  \
        dlogits<PER, T>(logits, vocab, Head{inverse, temperature, cap}, targets, others, extra, lse, entropy, dlogp,   \
                        dentropy, dothers);                                                                            \
    }
TURNING(DLOGITS)

// ---- KL(p || q) -----------------------------------------------------------------------------------------------------

// Σ p (log p - log q) of every tile, from the raw logits of both.
extern "C" __global__ void __launch_bounds__(256)
    kl_tiles(const float* p, const float* q, u32 rows, u32 vocab, u32 tiles, float inverse, float temperature,
             float cap, const float* p_lse, const float* q_lse, float* parts) {
    const u64 id = (u64)blockIdx.x * 8 + threadIdx.x / WARP;
    const u32 row = id / tiles, tile = id % tiles, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const Head head = {inverse, temperature, cap};
    float sum = 0.0f;
    for (int i = 0; i < TILE / 128; i++) {
        const u32 c = tile * TILE + i * 128 + lane * 4;
        const vec4 a = raw4(p + (u64)row * vocab, c, vocab, 0.0f), b = raw4(q + (u64)row * vocab, c, vocab, 0.0f);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float lp = head.scale(a.x[j]) - p_lse[row], lq = head.scale(b.x[j]) - q_lse[row];
            if (c + j < vocab) sum += weight(lp) * (lp - lq);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) parts[id] = sum;
}

// Adds the tiles of a row: lane i has tiles i, i + 32, ...
extern "C" __global__ void __launch_bounds__(256) kl_finish(const float* parts, u32 rows, u32 tiles, float* kl) {
    const u32 row = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    float sum = 0.0f;
    for (u32 t = lane; t < tiles; t += WARP) sum += parts[(u64)row * tiles + t];
    sum = warp_sum(sum);
    if (lane == 0) kl[row] = sum;
}

// Gradient with respect to p's raw logits, in place: dkl * p (log p - log q - KL).
template <int PER, class T>
__device__ __forceinline__ void kl_dlogits(float* p, const float* q, u32 vocab, const Head& head, const float* p_lse,
                                           const float* q_lse, const float* kl, const float* dkl) {
    const u32 row = blockIdx.x;
    const float p_sum = p_lse[row], q_sum = q_lse[row], all = kl[row], flow = dkl[row];
    q += (u64)row * vocab;
    overwrite<PER, T>(p + (u64)row * vocab, vocab, [&](u32 token, float raw) {
        const float x = head.scale(raw), lp = x - p_sum, lq = head.scale(q[token]) - q_sum;
        return flow * (weight(lp) * (lp - lq - all)) * head.slope(x);
    });
}
#define KL_DLOGITS(name, PER, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                               \
        kl_dlogits_##name(float* p, const float* q, u32 vocab, float inverse, float temperature, float cap,            \
                          const float* p_lse, const float* q_lse, const float* kl, const float* dkl) {                 \
        kl_dlogits<PER, T>(p, q, vocab, Head{inverse, temperature, cap}, p_lse, q_lse, kl, dkl);                       \
    }
TURNING(KL_DLOGITS)
