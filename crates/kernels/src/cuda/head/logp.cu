// From raw logits (GEMM of hidden states and head, f32, some rows at a time) to log-probabilities.
//
// The vocabulary is processed in tiles of 1024 entries. A warp reduces one row and tile to three numbers (`Fold`); a lane's
// elements are fixed (every 128th group of four), lanes are combined in a fixed tree. `finish` combines a row's tiles: lane i
// has tiles i, i + 32, ... in ascending order, then lanes are combined in a fixed tree. Nothing depends on other rows or on
// their number, so decoding has the bits of training.

// Statistics of logits: maximum m, s = Σ e^(l-m), w = Σ e^(l-m) (l-m).
struct Fold {
    float m, s, w;
};

__device__ __forceinline__ Fold join(const Fold& a, const Fold& b) {
    if (b.s == 0.0f) return a;
    if (a.s == 0.0f) return b;
    const float m = fmaxf(a.m, b.m), d1 = a.m - m, d2 = b.m - m;
    const float a1 = exp_(d1), a2 = exp_(d2);
    return {m, a.s * a1 + b.s * a2, a1 * (a.w + d1 * a.s) + a2 * (b.w + d2 * b.s)};
}

// Not inlined: few heads have a soft cap, and the common path should be short.
__device__ __noinline__ vec4 capped(Head head, vec4 raw) {
#pragma unroll
    for (int j = 0; j < 4; j++) raw.x[j] = head.scale(raw.x[j]);
    return raw;
}

// Folds of all tiles of all rows; writes the scaled logits of requested tokens to `found` ([rows][1 + extra], target first)
// and, with `keep`, all scaled logits in place.
extern "C" __global__ void __launch_bounds__(256)
    fold(float* logits, u32 rows, u32 vocab, u32 tiles, float inverse, float temperature, float cap, bool keep,
         const u32* targets, const u32* others, u32 extra, float* found, Fold* folds) {
    const u32 id = blockIdx.x * 8 + threadIdx.x / WARP;
    const u32 row = id / tiles, tile = id % tiles, lane = threadIdx.x % WARP, from = tile * TILE;
    if (row >= rows) return;
    const Head head = {inverse, temperature, cap};
    const bool whole = from + TILE <= vocab;
    float* at = logits + (u64)row * vocab;
    // Loaded early to hide the latency.
    auto wanted = [&](u32 j) { return j == 0 ? targets[row] : others[(u64)row * extra + j - 1]; };
    const u32 soon = found && lane < 1 + extra ? wanted(lane) : ~0u;
    vec4 l[TILE / 128];
    // Issue all loads before the first use.
    if (whole && vocab % 4 == 0) {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) l[i] = load4(at, from + i * 128 + lane * 4);
    } else {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) l[i] = raw4(at, from + i * 128 + lane * 4, vocab, 0.0f);
    }
    if (cap == 0.0f) {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) l[i].x[j] = head.scale(l[i].x[j]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) l[i] = capped(head, l[i]);
    }
    if (keep) {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
            const u32 c = from + i * 128 + lane * 4;
            if (vocab % 4 == 0) {
                if (c < vocab) store4(at, c, l[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (c + j < vocab) at[c + j] = l[i].x[j];
                }
            }
        }
    }
    if (!whole) {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (from + i * 128 + lane * 4 + j >= vocab) l[i].x[j] = -INFINITY_;
            }
        }
    }
    float m = -INFINITY_;
#pragma unroll
    for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) m = fmaxf(m, l[i].x[j]);
    }
    m = warp_max(m);
    // Four sums per lane for instruction-level parallelism.
    float s[4] = {}, w[4] = {};
    if (whole) {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float d = l[i].x[j] - m, e = weight(d);
                s[j] += e;
                w[j] = fmaf(e, d, w[j]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool there = from + i * 128 + lane * 4 + j < vocab;
                const float d = there ? l[i].x[j] - m : 0.0f, e = there ? weight(d) : 0.0f;
                s[j] += e;
                w[j] = fmaf(e, d, w[j]);
            }
        }
    }
    const float sum = warp_sum((s[0] + s[1]) + (s[2] + s[3])), weighted = warp_sum((w[0] + w[1]) + (w[2] + w[3]));
    if (lane == 0) folds[id] = {m, sum, weighted};
    // With `keep` the token's lane may have stored the scaled logit already: both cases read the scaled one.
    if (!found) return;
    __syncwarp();
    for (u32 j = lane; j < 1 + extra; j += WARP) {
        const u32 token = j < WARP ? soon : wanted(j);
        if (token >= from && token < from + TILE && token < vocab)
            found[(u64)row * (1 + extra) + j] = keep ? at[token] : head.scale(at[token]);
    }
}

// Combines the tiles of each row. Outputs that are not requested are null; `other_logp` is [rows, extra].
extern "C" __global__ void __launch_bounds__(256)
    finish(const Fold* folds, const float* found, u32 rows, u32 tiles, u32 extra, float* logp, float* entropy,
           float* lse, float* other_logp) {
    const u32 row = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    Fold f = {-INFINITY_, 0.0f, 0.0f};
    for (u32 t = lane; t < tiles; t += WARP) f = join(f, folds[(u64)row * tiles + t]);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const Fold g = {__shfl_down_sync(ALL, f.m, d), __shfl_down_sync(ALL, f.s, d), __shfl_down_sync(ALL, f.w, d)};
        f = join(f, g);
    }
    float log_sum = 0.0f, sum = 0.0f;
    if (lane == 0) {
        log_sum = log_(f.s);
        sum = f.m + log_sum;
        lse[row] = sum;
        if (entropy) entropy[row] = log_sum - f.w / f.s;
    }
    sum = __shfl_sync(ALL, sum, 0);
    if (!found) return;
    for (u32 j = lane; j < 1 + extra; j += WARP) {
        const float l = found[(u64)row * (1 + extra) + j] - sum;
        if (j == 0) {
            logp[row] = l;
        } else {
            other_logp[(u64)row * extra + j - 1] = l;
        }
    }
}
