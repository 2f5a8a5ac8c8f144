// Choosing a token of each row of logits (f32, scaled).
//
// A block has one row. `sample` inverts the cumulative distribution in the order of token ids: the warps add up tiles of
// 1024 tokens, each in one order; then one warp walks the tiles in ascending order, and in the tile where the sum passes
// the draw it walks the tokens, 32 at a time with a prefix sum. So the chosen token depends on the row and its draw alone.

#define TILE 1024
#define THREADS 512

// Σ of lanes 0..=lane, in a fixed tree.
__device__ __forceinline__ float prefix_sum(float x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int d = 1; d < WARP; d <<= 1) {
        const float y = __shfl_up_sync(ALL, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

// The first token whose cumulative probability exceeds the draw; the first warp gets it. `sums` has room for every tile.
__device__ u32 sampled(const float* row, float sum, float draw, u32 vocab, float* sums) {
    const u32 tiles = (vocab + TILE - 1) / TILE, lane = threadIdx.x % WARP;
    for (u32 t = threadIdx.x / WARP; t < tiles; t += THREADS / WARP) {
        float part = 0.0f;
#pragma unroll 8
        for (u32 c = t * TILE + lane * 4; c < min((t + 1) * TILE, vocab); c += 128) {
            if (vocab % 4 == 0) {
                const vec4 v = load4(row, c);
#pragma unroll
                for (int i = 0; i < 4; i++) part += exp_(v.x[i] - sum);
            } else {
                for (int i = 0; i < 4 && c + i < vocab; i++) part += exp_(row[c + i] - sum);
            }
        }
        part = warp_sum(part);
        if (lane == 0) sums[t] = part;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return 0;
    float below = 0.0f;
    // The last token that can occur, for a draw above the last sum: rounding leaves a sliver there.
    u32 last = 0;
    for (u32 t = 0; t < tiles; t++) {
        if (below + sums[t] > draw) {
            for (u32 from = t * TILE; from < min((t + 1) * TILE, vocab); from += WARP) {
                const u32 c = from + lane;
                const float p = c < vocab ? exp_(row[c] - sum) : 0.0f;
                const float up_to = below + prefix_sum(p);
                const u32 passed = __ballot_sync(ALL, up_to > draw && p > 0.0f);
                if (passed) return from + __ffs(passed) - 1;
                below = __shfl_sync(ALL, up_to, WARP - 1);
            }
        } else {
            below += sums[t];
        }
        if (sums[t] > 0.0f) last = t;
    }
    u32 best = last * TILE;
    for (u32 from = last * TILE; from < min((last + 1) * TILE, vocab); from += WARP) {
        const u32 c = from + lane;
        const u32 there = __ballot_sync(ALL, c < vocab && exp_(row[min(c, vocab - 1)] - sum) > 0.0f);
        if (there) best = from + 31 - __clz(there);
    }
    return best;
}

// The first largest; the first thread gets it.
__device__ u32 largest(const float* row, u32 vocab) {
    __shared__ float tops[THREADS / WARP];
    __shared__ u32 places[THREADS / WARP];
    float top = -INFINITY_;
    u32 place = 0xffffffffu;
    for (u32 c = threadIdx.x; c < vocab; c += THREADS) {
        if (row[c] > top) {
            top = row[c];
            place = c;
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float t = __shfl_xor_sync(ALL, top, d);
        const u32 p = __shfl_xor_sync(ALL, place, d);
        if (t > top || (t == top && p < place)) {
            top = t;
            place = p;
        }
    }
    if (threadIdx.x % WARP == 0) {
        tops[threadIdx.x / WARP] = top;
        places[threadIdx.x / WARP] = place;
    }
    __syncthreads();
    if (threadIdx.x) return 0;
    for (int w = 1; w < THREADS / WARP; w++) {
        if (tops[w] > top || (tops[w] == top && places[w] < place)) {
            top = tops[w];
            place = places[w];
        }
    }
    // A row of NaN or -infinity has no largest.
    return place == 0xffffffffu ? 0 : place;
}

struct Choice {
    u32 token;
    float logit, lse;
};

// One token of each row: sampled with its draw, or the largest where the draw is negative. Without `lse` all draws are.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const float* logits, const float* lse, const float* draws, u32 vocab, Choice* chosen) {
    extern __shared__ float sums[];
    const float* row = logits + (u64)blockIdx.x * vocab;
    const float sum = lse ? lse[blockIdx.x] : 0.0f, draw = lse ? draws[blockIdx.x] : -1.0f;
    const u32 token = draw < 0.0f ? largest(row, vocab) : sampled(row, sum, draw, vocab, sums);
    if (threadIdx.x == 0) chosen[blockIdx.x] = {token, row[token], sum};
}
