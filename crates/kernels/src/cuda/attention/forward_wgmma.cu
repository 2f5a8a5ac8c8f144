// Attention of many rows with wgmma (attention/wgmma.cu). The algorithm is that of attention_rows in attention/forward.cu, and so
// are the bits: with either instruction the tensor cores add 16 products at a time to an accumulator. A warpgroup owns 64 stacked
// rows; WGMMA_WARPS / 4 warpgroups share the tiles of keys and values. The score GEMM of the next tile is issued right after the
// output GEMM of a tile.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define WGMMA_ROWS (16 * WGMMA_WARPS)

extern "C" __global__ void __launch_bounds__(WGMMA_WARPS * 32)
attention_rows_wgmma(const bf16 *qkv, const bf16 *cache, const int *blocks, const Work *work, bf16 *out, float *lse,
                    int heads, int kv_heads, float scale, float cap, int window) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int threads = WGMMA_WARPS * 32;
    const u32 q_at = aligned(shared), ring = q_at + WGMMA_ROWS * HEAD_DIM * 2, stage_bytes = 2 * KEYS * HEAD_DIM * 2;
    const Work w = work[blockIdx.x / kv_heads];
    if (w.count == 0)
        return;
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = own_warp(), lane = threadIdx.x & 31, team = warp / 4;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + WGMMA_ROWS, w.count * GROUP);
    const int seen = w.position + (end - 1) / GROUP + 1;
    const int first_tile = first_seen(op, w.position + w.first / GROUP) / KEYS;
    const int last_tile = (seen + KEYS - 1) / KEYS;
    Tiles tiles = tiles_of(qkv, cache, blocks, w, kv, heads, kv_heads, first_tile, last_tile);

    // This thread copies 16 bytes of every APART-th row.
    const int APART = threads / UNITS, r0 = threadIdx.x / UNITS, c0 = threadIdx.x % UNITS * 8;
    const u32 own_place = ring + 2 * place<KEYS>(r0, c0);
    const long long own_from = r0 * tiles.stride + c0;
    auto fetch = [&](int tile, int slot) {
        if (tile < last_tile) {
            const bf16 *from = tiles.take(tile) + own_from;
            const u32 to = own_place + slot * stage_bytes;
            const int there = seen - tile * KEYS - r0;
#pragma unroll
            for (int i = 0; i < (KEYS + APART - 1) / APART; ++i) {
                if (KEYS % APART != 0 && r0 + i * APART >= KEYS)
                    break;
                copy_to(to + i * APART * 128, from, i * APART < there);
                copy_to(to + i * APART * 128 + KEYS * HEAD_DIM * 2, from + tiles.values, i * APART < there);
                from += APART * tiles.stride;
            }
        }
        copy_commit();
    };
    const bf16 *q_base = qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM + c0;
#pragma unroll
    for (int i = 0; i < WGMMA_ROWS / APART; ++i) {
        const int r = r0 + i * APART, at = w.first + r;
        const bf16 *from = q_base + (long long)(at / GROUP) * width + at % GROUP * HEAD_DIM;
        copy_to(q_at + r / 64 * (64 * HEAD_DIM * 2) + 2 * place<64>(r % 64, c0), from, at < end);
    }
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        fetch(first_tile + s, s);

    // The rows of this warp and the tiles to which all of them attend fully; the rows of its warpgroup and the tiles to which
    // any attends.
    const int top = w.first + warp * 16, bottom = min(top + 16, end);
    const int lowest = w.position + top / GROUP, highest = w.position + (bottom - 1) / GROUP;
    const int whole_from = first_seen(op, highest), whole_to = lowest + 1;
    const int team_top = w.first + team * 64, team_bottom = min(team_top + 64, end);
    const int tile_from = first_seen(op, w.position + team_top / GROUP) / KEYS;
    const int tile_to = team_top < end ? (w.position + (team_bottom - 1) / GROUP) / KEYS : -1;

    Softmax state;
    state.begin();
    float o[UNITS][4];
#pragma unroll
    for (int n = 0; n < UNITS; ++n)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;

    // Wait until the next tile has arrived; the reads of the tile before last are complete.
    int slot = 0;
    auto next = [&](int tile) {
        copy_wait<STAGES - 3>();
        products_see_copies();
        __syncthreads();
        fetch(tile + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    };
    const u64 q = described(q_at + team * (64 * HEAD_DIM * 2), 16);
    float s[KEYS / 8][4];
    copy_wait<STAGES - 2>();
    products_see_copies();
    __syncthreads();
    int tile = first_tile;
    for (; tile < min(tile_from, last_tile); ++tile)
        next(tile);
    products_begin();
    start_scores<KEYS>(s, q, described(ring + slot * stage_bytes, 16));
    products_commit();
    products_wait<0>();
    settle(s);
    for (; tile <= tile_to; ++tile) {
        const bool whole = tile * KEYS >= whole_from && (tile + 1) * KEYS <= whole_to;
        if (whole)
            step<true>(op, s, state, o, 0, 0, 0);
        else
            step<false>(op, s, state, o, tile * KEYS + lane % 4 * 2, w.position + (top + lane / 4) / GROUP,
                        w.position + (top + lane / 4 + 8) / GROUP);
        unsigned weights[KEYS / 16][4];
#pragma unroll
        for (int g = 0; g < KEYS / 16; ++g)
            as_left(weights[g], s[2 * g], s[2 * g + 1]);
        settle(o);
        products_begin();
        start_products<KEYS>(o, weights, described(ring + slot * stage_bytes + KEYS * HEAD_DIM * 2, KEYS * 128));
        products_commit();
        // After the last tile this reads stale data; the results are discarded.
        next(tile);
        products_begin();
        start_scores<KEYS>(s, q, described(ring + slot * stage_bytes, 16));
        products_commit();
        products_wait<0>();
        settle(o);
        settle(s);
    }
    for (; tile < last_tile; ++tile)
        next(tile);

    // Stage through the ring for 16-byte stores.
    copy_wait<0>();
    __syncthreads();
    bf16 *room = (bf16 *)(shared + (ring - shared_address(shared))) + warp * 16 * PITCH;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = top + lane / 4 + 8 * h;
        float sum = quad_sum(state.sum[h]);
        float factor = 1.0f / sum;
        if (lane % 4 == 0 && row < end && lse)
            store_lse(lse + (long long)(w.row + row / GROUP) * heads + kv * GROUP + row % GROUP, state.max[h], sum);
        unsigned *to = (unsigned *)(room + (lane / 4 + 8 * h) * PITCH + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < UNITS; ++n)
            to[n * 4] = narrow2(o[n][2 * h] * factor + 0.0f, o[n][2 * h + 1] * factor + 0.0f);
    }
    __syncwarp();
    for (int i = lane; i < 16 * UNITS; i += 32) {
        const int r = top + i / UNITS, c = i % UNITS * 8;
        if (r < end) {
            bf16 *to = out + ((long long)(w.row + r / GROUP) * heads + kv * GROUP + r % GROUP) * HEAD_DIM + c;
            *(uint4 *)to = *(const uint4 *)(room + i / UNITS * PITCH + c);
        }
    }
}

#endif
