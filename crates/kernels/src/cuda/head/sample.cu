// Sampling without truncation: `tiles` reduces all tiles of 1024 entries concurrently, `pick` samples the token of each row.

// The maximum over the lanes' (value, index) pairs (ties: lower index), in every lane.
__device__ __forceinline__ void warp_largest(float& top, u32& place) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const float t = __shfl_xor_sync(ALL, top, d);
        const u32 p = __shfl_xor_sync(ALL, place, d);
        if (t > top || (t == top && p < place)) top = t, place = p;
    }
}

// One warp per tile and row.
extern "C" __global__ void __launch_bounds__(256)
    tiles(const float* logits, const float* lse, const SampleSpec* specs, u32 rows, u32 vocab, u32 count, Tile* out) {
    let_next_start();
    wait_for_earlier();
    const u64 id = (u64)blockIdx.x * 8 + threadIdx.x / WARP;
    const u32 row = id / count, lane = threadIdx.x % WARP, from = id % count * TILE;
    if (row >= rows) return;
    vec4 l[TILE / 128];
    // Issue all loads before the first use.
#pragma unroll
    for (int i = 0; i < TILE / 128; i++) l[i] = four(logits + (u64)row * vocab, from + i * 128 + lane * 4, vocab);
    if (!specs[row].largest() && !specs[row].truncates()) {
        const float sum = lse[row];
        double part = 0.0;
#pragma unroll
        for (int i = 0; i < TILE / 128; i++) {
            float p[4];
#pragma unroll
            for (int j = 0; j < 4; j++) p[j] = exp_(l[i].x[j] - sum);
            part += sum4(p);
        }
        part = warp_sum(part);
        if (lane == 0) out[id] = {part, 0.0f, 0};
        return;
    }
    float top = -INFINITY_;
    u32 place = ~0u;
#pragma unroll
    for (int i = 0; i < TILE / 128; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (l[i].x[j] > top) top = l[i].x[j], place = from + i * 128 + lane * 4 + j;
        }
    }
    warp_largest(top, place);
    if (lane == 0) out[id] = {0.0, top, place};
}

// One warp per row.
extern "C" __global__ void __launch_bounds__(WARP)
    pick(const float* logits, const float* lse, const SampleSpec* specs, u32 vocab, u32 count, const Tile* tiles,
         Choice* chosen) {
    wait_for_earlier();
    const u32 lane = threadIdx.x;
    const SampleSpec spec = specs[blockIdx.x];
    const float* row = logits + (u64)blockIdx.x * vocab;
    const float sum = lse ? lse[blockIdx.x] : 0.0f;
    tiles += (u64)blockIdx.x * count;
    if (spec.truncates()) return;
    u32 token = ~0u;
    if (spec.largest()) {
        float top = -INFINITY_;
        for (u32 t = lane; t < count; t += WARP) {
            if (tiles[t].top > top) top = tiles[t].top, token = tiles[t].place;
        }
        warp_largest(top, token);
    } else {
        double below;
        const u32 tile = which_tile(count, (double)spec.draw, below, [&](u32 t) { return tiles[t].sum; });
        token = in_tile(row, tile, vocab, below, (double)spec.draw, [&](u32, float l) { return exp_(l - sum); });
    }
    // A row of NaN or -infinity has no maximum.
    token = token == ~0u ? 0 : token;
    if (lane == 0) chosen[blockIdx.x] = {token, row[token], sum, spec.largest() ? 0.0f : row[token] - sum};
}

// Copies sampled tokens to the next step's ids: that of row from[i] to index to[i].
extern "C" __global__ void feed(const Choice* chosen, const u32* from, const u32* to, u32 count, u32* ids) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) ids[to[i]] = chosen[from[i]].token;
}
