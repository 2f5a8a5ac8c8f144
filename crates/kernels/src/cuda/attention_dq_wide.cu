// dq = ds k by the products of attention_wide.cu, from the gradients of dot products that attention_keys_wide kept: they lie
// as the left operand of a product wants them. Four warps have 64 stacked rows; two such teams share the tiles of keys.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define DQ_WARPS 8
#define DQ_STAGES 3
// 16-byte units of a warp's gradients for 64 keys.
#define DQ_UNITS 128

extern "C" __global__ void __launch_bounds__(DQ_WARPS * 32, 2)
attention_dq_wide(const bf16 *qkv, const Work *work, bf16 *dqkv, int heads, int kv_heads, int window, float factor,
                  int first_kv, int some_kv, const uint4 *gradients, long long per_kv) {
    extern __shared__ __align__(16) unsigned char shared[];
    // Swizzling counts from multiples of 1024.
    bf16 *ring = (bf16 *)(shared + (1024 - (shared_address(shared) & 1023)) % 1024);
    const int threads = DQ_WARPS * 32;
    const Work w = work[blockIdx.x / some_kv];
    const Scoring op = {0.0f, 0.0f, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + 16 * DQ_WARPS, w.count * GROUP);
    const int seen = (end - 1) / GROUP + 1;
    const int start = first_seen(op, w.first / GROUP) / 64 * 64;
    const bf16 *k_base = qkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;
    // The rows of this warp and the keys they see; those of its team.
    const int top = w.first + warp * 16, rows = top / 16;
    const int first_key = first_seen(op, top / GROUP);
    const int last_key = top < end ? (min(top + 16, end) - 1) / GROUP : -1;
    const int team_top = w.first + warp / 4 * 64, team_first = first_seen(op, team_top / GROUP);
    const int team_last = team_top < end ? (min(team_top + 64, end) - 1) / GROUP : -1;
    const uint4 *from = gradients + (kv - first_kv) * per_kv + w.blocks + tile_row(rows) * 32 + lane;
    uint4 *own = (uint4 *)(ring + DQ_STAGES * 64 * HEAD_DIM) + warp * (DQ_STAGES * DQ_UNITS) + lane;

    // Keys for all, and for the warp its gradients: what no row sees was not kept, and is zero. A lane reads what it copied.
    auto fetch = [&](int key) {
        if (key < seen) {
            const int stage = (key - start) / 64 % DQ_STAGES;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const int at = key + g * 16;
                const bool there = at <= last_key && at + 15 >= first_key && at / 16 <= rows / GROUP;
                copy_unit((bf16 *)(own + stage * DQ_UNITS + g * 32), (const bf16 *)(from + (there ? at / 16 * 32 : 0)),
                          there);
            }
            bf16 *to = ring + stage * (64 * HEAD_DIM);
#pragma unroll 4
            for (int i = threadIdx.x; i < 64 * UNITS; i += threads) {
                const int r = i / UNITS, c = i % UNITS * 8;
                const bool there = key + r < seen;
                copy_unit(to + place<64>(r, c), k_base + (there ? (long long)(key + r) * width + c : 0), there);
            }
        }
        copy_commit();
    };
    float dq[UNITS][4];
#pragma unroll
    for (int n = 0; n < UNITS; ++n)
        dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < DQ_STAGES - 1; ++s)
        fetch(start + 64 * s);
    for (int key = start; key < seen; key += 64) {
        copy_wait<DQ_STAGES - 2>();
        products_see_copies();
        __syncthreads();
        fetch(key + 64 * (DQ_STAGES - 1));
        if (key > team_last || key + 63 < team_first)
            continue;
        const int stage = (key - start) / 64 % DQ_STAGES;
        unsigned now[4][4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const uint4 v = own[stage * DQ_UNITS + g * 32];
            now[g][0] = v.x, now[g][1] = v.y, now[g][2] = v.z, now[g][3] = v.w;
        }
        products_begin();
        start_products<64>(dq, now, ring + stage * (64 * HEAD_DIM));
        products_commit();
        products_wait<0>();
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
    store_rows(ring + warp * 16 * PITCH, dq, factor, 0, [&](int r) {
        const int at = top + r;
        return at < end ? to + (long long)(at / GROUP) * width + at % GROUP * HEAD_DIM : (bf16 *)nullptr;
    });
}

#endif
