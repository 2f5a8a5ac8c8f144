// dq = ds k with wgmma (attention/wgmma.cu), from the score gradients that attention_keys_wgmma stored in the layout of a left
// operand. A warpgroup owns 64 tokens of one head; two warpgroups, adjacent in storage order, share the key tiles.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define DQ_STAGES 3
// 16-byte units of a warp's score gradients for 64 keys.
#define DQ_UNITS 128

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, 2)
attention_dq_wgmma(const bf16 *qkv, const Work *work, bf16 *dqkv, int heads, int kv_heads, int window, float factor,
                  int first_kv, int some_kv, const uint4 *gradients, long long per_kv) {
    extern __shared__ __align__(16) unsigned char shared[];
    const u32 ring = aligned(shared), stage_bytes = 64 * HEAD_DIM * 2;
    const Work w = work[blockIdx.x / some_kv];
    const Scoring op = {0.0f, 0.0f, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = own_warp(), lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    // A tile row is a tile of tokens and a head.
    const int all = (w.count + 63) / 64 * GROUP, row = w.first + warp / 4, last_row = min(w.first + 1, all - 1);
    const int start = first_seen(op, w.first / GROUP * 64) / 64, end = last_row / GROUP + 1;
    const int tile = row / GROUP, head = row % GROUP;
    const int own_start = first_seen(op, tile * 64) / 64, own_end = row < all ? tile + 1 : 0;
    const uint4 *from = gradients + (kv - first_kv) * per_kv + w.blocks + warp % 4 * DQ_UNITS + lane;
    from += (long long)head_tiles(tile, head) * TILE_UNITS;
    uint4 *own = (uint4 *)(shared + (ring - shared_address(shared)) + DQ_STAGES * stage_bytes) +
                 warp * (DQ_STAGES * DQ_UNITS) + lane;
    const u32 own_at = shared_address(own);

    // Keys for all, and each warp's score gradients; tiles to which no row attends were not stored. A lane reads what it copied.
    const int APART = DQ_WARPS * 32 / UNITS, r0 = threadIdx.x / UNITS, c0 = threadIdx.x % UNITS * 8;
    const bf16 *k_from = qkv + (long long)(w.row + start * 64 + r0) * width + (heads + kv) * HEAD_DIM + c0;
    const u32 own_place = ring + 2 * place<64>(r0, c0);
    auto fetch = [&](int at, int stage) {
        if (at < end) {
            if (at >= own_start && at < own_end) {
#pragma unroll
                for (int g = 0; g < 4; ++g)
                    copy_to(own_at + (stage * DQ_UNITS + g * 32) * 16, (const bf16 *)(from + at * TILE_UNITS + g * 32),
                            true);
            }
            const bf16 *k = k_from;
#pragma unroll
            for (int i = 0; i < 64 / APART; ++i) {
                copy_to(own_place + stage * stage_bytes + i * APART * 128, k, at * 64 + r0 + i * APART < w.count);
                k += (long long)APART * width;
            }
            k_from += 64ll * width;
        }
        copy_commit();
    };
    float dq[UNITS][4];
#pragma unroll
    for (int n = 0; n < UNITS; ++n)
        dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < DQ_STAGES - 1; ++s)
        fetch(start + s, s);
    int stage = 0;
    for (int at = start; at < end; ++at) {
        copy_wait<DQ_STAGES - 2>();
        products_see_copies();
        __syncthreads();
        fetch(at + DQ_STAGES - 1, stage == 0 ? DQ_STAGES - 1 : stage - 1);
        if (at >= own_start && at < own_end) {
            unsigned now[4][4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const uint4 v = own[stage * DQ_UNITS + g * 32];
                now[g][0] = v.x, now[g][1] = v.y, now[g][2] = v.z, now[g][3] = v.w;
            }
            products_begin();
            start_products<64>(dq, now, described(ring + stage * stage_bytes, 64 * 128));
            products_commit();
            products_wait<0>();
        }
        stage = stage == DQ_STAGES - 1 ? 0 : stage + 1;
    }

    copy_wait<0>();
    __syncthreads();
    const int top = tile * 64 + warp % 4 * 16;
    bf16 *to = dqkv + (long long)w.row * width + (kv * GROUP + head) * HEAD_DIM;
    bf16 *room = (bf16 *)(shared + (ring - shared_address(shared))) + warp * 16 * PITCH;
    store_rows(room, dq, factor, 0, [&](int r) {
        return row < all && top + r < w.count ? to + (long long)(top + r) * width : (bf16 *)nullptr;
    });
}

#endif
