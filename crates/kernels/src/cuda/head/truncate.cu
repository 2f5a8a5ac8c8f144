// Sampling with top-k, top-p or min-p: one block per row.

// Order-preserving map to integers: larger logits have larger keys.
__device__ __forceinline__ u32 key_of(float l) {
    const u32 bits = __float_as_uint(l);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The tokens that remain: keys above `key`, and keys equal to it up to the token `last`.
struct Edge {
    u32 key, last;
    __device__ __forceinline__ bool keeps(u32 k, u32 id) const { return k > key || (k == key && id <= last); }
};

// e^x for x <= 0, by the GPU's 2^x instruction.
__device__ __forceinline__ float exp_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

// Calls f(id, logit) for every element of this thread, in ascending order.
template <class F>
__device__ __forceinline__ void each_of(const float* row, u32 vocab, F f) {
#pragma unroll 2
    for (u32 c = 4 * threadIdx.x; c < vocab; c += 4 * THREADS) {
        const vec4 v = four(row, c, vocab);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (c + j < vocab) f(c + j, v.x[j]);
        }
    }
}

#define BINS 32

// Shared memory of a block: sums of each thread's tokens per bin, sums of the bins, and results of the first thread.
struct Room {
    float parts[BINS][THREADS];
    double bins[BINS];
    double above, found;
    u32 prefix, ties;
};

// Radix select: the most probable tokens of `edge` whose weights together reach the goal; a token remains while the sum before it
// (larger logits, and equal ones with lower ids) is below. With `counted` every token weighs 1 (top-k); otherwise it weighs its
// probability relative to the best (top-p), and the goal is a fraction of the sum. Finds the last token's key five bits at a
// time.
__device__ __noinline__ Edge narrowed(const float* row, u32 vocab, Edge edge, Room& room, bool counted, float best,
                                      double goal) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto weight = [=](float l) { return counted ? 1.0f : exp_fast(l - best); };
    double above = 0.0;
    u32 prefix = 0;
    for (int shift = 27; ; shift = max(shift - 5, 0)) {
        // The last digit has two bits.
        const u32 digits = shift == 0 ? 3u : 31u, upper = shift == 27 ? 32 : shift == 0 ? 2 : shift + 5;
        for (int b = 0; b < BINS; b++) room.parts[b][threadIdx.x] = 0.0f;
        each_of(row, vocab, [&](u32 id, float l) {
            const u32 key = key_of(l);
            if ((upper < 32 && key >> upper != prefix) || !edge.keeps(key, id)) return;
            room.parts[key >> shift & digits][threadIdx.x] += weight(l);
        });
        __syncthreads();
        for (u32 b = warp; b < BINS; b += THREADS / WARP) {
            double sum = 0.0;
            for (u32 t = lane; t < THREADS; t += WARP) sum += (double)room.parts[b][t];
            sum = warp_sum(sum);
            if (lane == 0) room.bins[b] = sum;
        }
        __syncthreads();
        if (shift == 27) {
            double all = 0.0;
            for (int b = BINS - 1; b >= 0; b--) all += room.bins[b];
            if (!counted) goal *= all;
        }
        // Every thread scans the same bins. If rounding keeps the sum below the goal, takes the lowest non-empty bin.
        int bin = -1;
        double start = above;
        for (int b = digits; b >= 0; b--) {
            if (!(room.bins[b] > 0.0)) continue;
            bin = b, start = above;
            if (above + room.bins[b] >= goal) break;
            above += room.bins[b];
        }
        __syncthreads();
        if (bin < 0) return edge;
        above = start;
        prefix = prefix << (shift == 0 ? 2 : 5) | (u32)bin;
        if (shift > 0) continue;
        // All tokens with this key weigh the same: how many of them are needed, and which is the last?
        const float l = __uint_as_float(prefix >> 31 ? prefix & 0x7fffffffu : ~prefix);
        const double each = (double)weight(l), ties = rint(room.bins[bin] / each);
        const double wanted = fmax(1.0, ceil((goal - above) / each));
        Edge found = {prefix, ~0u};
        if (wanted >= ties) {
            if (edge.key == prefix) found.last = edge.last;
            return found;
        }
        // Threads have scattered groups of four tokens, so the first warp counts in id order.
        if (warp == 0) {
            double left = wanted;
            for (u32 from = 0; from < vocab; from += WARP) {
                const u32 id = from + lane;
                const bool tie = id < vocab && key_of(row[min(id, vocab - 1)]) == prefix && edge.keeps(prefix, id);
                const u32 there = __ballot_sync(ALL, tie);
                const double before = (double)__popc(there & ((1u << lane) - 1u));
                const u32 last = __ballot_sync(ALL, tie && before + 1.0 == left);
                if (last) {
                    if (lane == 0) room.ties = from + __ffs(last) - 1;
                    break;
                }
                left -= (double)__popc(there);
            }
        }
        __syncthreads();
        found.last = room.ties;
        __syncthreads();
        return found;
    }
}

// One block per row; rows without truncation were handled by `pick`. Shared memory: a Room, then one sum per tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    truncated(const float* logits, const float* lse, const SampleSpec* specs, u32 vocab, u32 count, const Tile* tiles,
              Choice* chosen) {
    extern __shared__ __align__(16) unsigned char shared[];
    Room& room = *(Room*)shared;
    double* sums = (double*)(shared + sizeof(Room));
    const SampleSpec spec = specs[blockIdx.x];
    if (!spec.truncates()) return;
    const float* row = logits + (u64)blockIdx.x * vocab;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float best = -INFINITY_;
    for (u32 t = lane; t < count; t += WARP) best = fmaxf(best, tiles[(u64)blockIdx.x * count + t].top);
    best = warp_max(best);
    Edge edge = {0, ~0u};
    if (spec.top_k > 0 && spec.top_k < vocab) edge = narrowed(row, vocab, edge, room, true, best, (double)spec.top_k);
    if (spec.top_p < 1.0f) edge = narrowed(row, vocab, edge, room, false, best, (double)spec.top_p);
    const float least = spec.min_p;
    const auto weight = [=](u32 id, float l) {
        const float w = exp_fast(l - best);
        return edge.keeps(key_of(l), id) && w >= least ? w : 0.0f;
    };
    for (u32 t = warp; t < count; t += THREADS / WARP) {
        double part = 0.0;
#pragma unroll
        for (u32 i = 0; i < TILE / 128; i++) {
            const u32 c = t * TILE + i * 128 + lane * 4;
            const vec4 v = four(row, c, vocab);
            float w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) w[j] = c + j < vocab ? weight(c + j, v.x[j]) : 0.0f;
            part += sum4(w);
        }
        part = warp_sum(part);
        if (lane == 0) sums[t] = part;
    }
    __syncthreads();
    if (warp > 0) return;
    double all = 0.0, below;
    for (u32 t = 0; t < count; t++) all += sums[t];
    const double goal = (double)spec.draw * all;
    const u32 tile = which_tile(count, goal, below, [&](u32 t) { return sums[t]; });
    u32 token = in_tile(row, tile, vocab, below, goal, weight);
    token = token == ~0u ? 0 : token;
    if (lane == 0) chosen[blockIdx.x] = {token, row[token], lse[blockIdx.x], row[token] - best - log_((float)all)};
}
