// Shared by the sampling kernels (logits are f32, scaled).
//
// The sampled token is the first, in id order, whose cumulative probability exceeds the draw. Probabilities are added in f64, in
// groups of four: over 151936 tokens of similar probability, f32 sums pick a wrong one in every fortieth draw. The order is
// fixed: the token depends only on the row, its draw and its sampling parameters.

// Sampling parameters of a row: greedy if the draw is negative; without truncation top_k is 0, top_p 1, min_p 0.
struct SampleSpec {
    float draw, top_p, min_p;
    u32 top_k;
    __device__ __forceinline__ bool largest() const { return draw < 0.0f; }
    __device__ __forceinline__ bool truncates() const {
        return !largest() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f);
    }
};

// A token, its logit, the row's log-sum-exp, and the token's log-probability after truncation.
struct Choice {
    u32 token;
    float logit, lse, kept;
};

// The sum of a tile's probabilities if the row is sampled; else its first maximum.
struct Tile {
    double sum;
    float top;
    u32 place;
};

// Inclusive prefix sum over the lanes, in a fixed tree.
__device__ __forceinline__ double prefix_sum(double x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int d = 1; d < WARP; d <<= 1) {
        const double y = __shfl_up_sync(ALL, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// Exclusive prefix sum, from the inclusive one.
__device__ __forceinline__ double before(double up_to) {
    const double x = __shfl_up_sync(ALL, up_to, 1);
    return threadIdx.x % WARP ? x : 0.0;
}

// Four logits from `at` on; -infinity past the end of the vocabulary.
__device__ __forceinline__ vec4 four(const float* row, u32 at, u32 vocab) {
    if (vocab % 4 == 0 && at < vocab) return load4(row, at);
    vec4 v;
#pragma unroll
    for (int i = 0; i < 4; i++) v.x[i] = at + i < vocab ? row[at + i] : -INFINITY_;
    return v;
}

__device__ __forceinline__ double sum4(const float (&p)[4]) { return (double)((p[0] + p[1]) + (p[2] + p[3])); }

// The first token of a tile where `below` plus the weights up to it exceeds `goal`; the last with a weight if rounding prevents
// that. `weight(id, logit)`; every lane gets the token, ~0 if none has a weight.
template <class Weight>
__device__ u32 in_tile(const float* row, u32 tile, u32 vocab, double below, double goal, Weight weight) {
    const u32 lane = threadIdx.x % WARP;
    u32 last = ~0u;
    for (u32 from = tile * TILE; from < min((tile + 1) * TILE, vocab); from += 128) {
        const u32 c = from + lane * 4;
        const vec4 l = four(row, c, vocab);
        float w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = c + j < vocab ? weight(c + j, l.x[j]) : 0.0f;
        const double up_to = prefix_sum(sum4(w));
        u32 mine = ~0u;
        double sum = below + before(up_to);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (w[j] > 0.0f && !(sum > goal)) mine = c + j;
            sum += (double)w[j];
        }
        const u32 there = __ballot_sync(ALL, mine != ~0u);
        const u32 passed = __ballot_sync(ALL, mine != ~0u && below + up_to > goal);
        if (passed) return __shfl_sync(ALL, mine, __ffs(passed) - 1);
        if (there) last = __shfl_sync(ALL, mine, 31 - __clz(there));
        below += __shfl_sync(ALL, up_to, WARP - 1);
    }
    return last;
}

// The tile in which the sums exceed `goal`, and the sum before it; the last tile with a weight if rounding prevents that.
template <class Sum>
__device__ u32 which_tile(u32 count, double goal, double& below, Sum sum) {
    const u32 lane = threadIdx.x % WARP;
    below = 0.0;
    u32 last = 0;
    double before_last = 0.0;
    for (u32 from = 0; from < count; from += WARP) {
        const double s = from + lane < count ? sum(from + lane) : 0.0;
        const double up_to = prefix_sum(s), start = below + before(up_to);
        const u32 passed = __ballot_sync(ALL, s > 0.0 && below + up_to > goal), there = __ballot_sync(ALL, s > 0.0);
        if (passed) {
            const int at = __ffs(passed) - 1;
            below = __shfl_sync(ALL, start, at);
            return from + at;
        }
        if (there) {
            const int at = 31 - __clz(there);
            last = from + at;
            before_last = __shfl_sync(ALL, start, at);
        }
        below += __shfl_sync(ALL, up_to, WARP - 1);
    }
    below = before_last;
    return last;
}
