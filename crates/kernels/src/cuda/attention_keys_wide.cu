// The backward over keys by the products of attention_wide.cu. The plan is that of attention_keys in
// attention_backward.cu: a block has 64 keys, a warp 16 of them, and meets the stacked rows that see them, STEP at a time.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

extern "C" __global__ void __launch_bounds__(128)
attention_keys_wide(const bf16 *qkv, const bf16 *dout, const float *lse, const float *delta, const Work *work,
                    bf16 *dqkv, int heads, int kv_heads, float scale, float cap, int window, float factor, int first_kv,
                    int some_kv, uint4 *gradients, long long per_kv) {
    extern __shared__ __align__(16) unsigned char shared[];
    // Swizzling counts from multiples of 1024.
    bf16 *k = (bf16 *)(shared + (1024 - (shared_address(shared) & 1023)) % 1024);
    bf16 *v = k + 64 * HEAD_DIM, *ring = v + 64 * HEAD_DIM;
    // Of the rows in the ring: log-sum-exp in units of log 2, and delta.
    __shared__ float kept[2][2][STEP];
    const Work w = work[blockIdx.x / some_kv];
    const Scoring op = {scale, cap, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;
    // Tokens from `first` on see the first key; past `last` none sees any of the keys.
    const int first = w.first, keys = min(64, w.count - first);
#if WINDOW
    const int last = (int)min((long long)w.count, (long long)first + 63 + window);
#else
    const int last = w.count;
#endif
    const int end = last * GROUP;
    const bf16 *q_base = qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM;
    const bf16 *dout_base = dout + (long long)w.row * out_width + kv * GROUP * HEAD_DIM;
    const bf16 *k_base = qkv + (long long)(w.row + first) * width + (heads + kv) * HEAD_DIM;

    auto fetch = [&](int row, int slot) {
        if (row < end) {
            bf16 *to = ring + slot * (2 * STEP * HEAD_DIM);
#pragma unroll 4
            for (int i = threadIdx.x; i < STEP * UNITS; i += 128) {
                const int r = i / UNITS, c = i % UNITS * 8, at = row + r < end ? row + r : 0;
                const long long head = at % GROUP * HEAD_DIM + c;
                copy_unit(to + place<STEP>(r, c), q_base + (long long)(at / GROUP) * width + head, row + r < end);
                copy_unit(to + STEP * HEAD_DIM + place<STEP>(r, c),
                          dout_base + (long long)(at / GROUP) * out_width + head, row + r < end);
            }
            for (int i = threadIdx.x; i < STEP; i += 128) {
                const int r = row + i;
                const long long at = (long long)(w.row + r / GROUP) * heads + kv * GROUP + r % GROUP;
                kept[slot][0][i] = r < end ? lse[at] * LOG2_E : 0.0f;
                kept[slot][1][i] = r < end ? delta[at] : 0.0f;
            }
        }
        copy_commit();
    };
#pragma unroll 4
    for (int i = threadIdx.x; i < 64 * UNITS; i += 128) {
        const int r = i / UNITS, c = i % UNITS * 8;
        const bf16 *from = k_base + (r < keys ? (long long)r * width + c : 0);
        copy_unit(k + place<64>(r, c), from, r < keys);
        copy_unit(v + place<64>(r, c), from + kv_heads * HEAD_DIM, r < keys);
    }
    fetch(first * GROUP, 0);

    float dk[HEAD_DIM / 8][4], dv[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dk[n][e] = dv[n][e] = 0.0f;

    const int top = first + warp * 16;
    int slot = 0;
    for (int row = first * GROUP; row < end; row += STEP, slot ^= 1) {
        copy_wait<0>();
        products_see_copies();
        __syncthreads();
        fetch(row + STEP, slot ^ 1);
        const bf16 *q = ring + slot * (2 * STEP * HEAD_DIM), *g = q + STEP * HEAD_DIM;
        float p[STEP / 8][4], ds[STEP / 8][4];
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                p[n][e] = ds[n][e] = 0.0f;
        products_begin();
        start_scores<STEP>(p, k, q);
        products_commit();
        start_scores<STEP>(ds, v, g);
        products_commit();
        products_wait<1>();
        const int low = row / GROUP, high = (min(row + STEP, end) - 1) / GROUP;
        const bool whole = low >= first + 63 && first_seen(op, high) <= first;
        unsigned weights[STEP / 16][4], changes[STEP / 16][4];
        float slopes[SOFTCAP ? STEP / 8 : 1][4];
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const int i = n * 8 + lane % 4 * 2;
            const float2 l = *(const float2 *)&kept[slot][0][i];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float slope;
                float x = score_and_slope(op, p[n][e], slope) - (e & 1 ? l.y : l.x);
                if (!whole && !sees(op, (row + i + (e & 1)) / GROUP, top + lane / 4 + (e >> 1) * 8))
                    x = -INFINITY_;
                p[n][e] = power2(x);
                if (SOFTCAP)
                    slopes[SOFTCAP ? n : 0][e] = slope;
            }
        }
#pragma unroll
        for (int r = 0; r < STEP / 16; ++r)
            as_left(weights[r], p[2 * r], p[2 * r + 1]);
        products_wait<0>();
        products_begin();
        start_products<STEP>(dv, weights, g);
        products_commit();
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const int i = n * 8 + lane % 4 * 2;
            const float2 dl = *(const float2 *)&kept[slot][1][i];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                ds[n][e] = p[n][e] * (ds[n][e] - (e & 1 ? dl.y : dl.x)) * (SOFTCAP ? slopes[SOFTCAP ? n : 0][e] : 1.0f);
        }
#pragma unroll
        for (int r = 0; r < STEP / 16; ++r)
            as_left(changes[r], ds[2 * r], ds[2 * r + 1]);
        products_begin();
        start_products<STEP>(dk, changes, q);
        products_commit();
        if (gradients) {
            uint4 *to = gradients + (kv - first_kv) * per_kv + w.blocks;
#pragma unroll
            for (int r = 0; r < STEP / 16; ++r) {
                const int rows = row / 16 + r;
                if (rows * 16 < w.count * GROUP && top / 16 <= rows / GROUP)
                    store_turned(to, rows, top / 16, ds[2 * r], ds[2 * r + 1]);
            }
        }
        products_wait<0>();
    }

    copy_wait<0>();
    __syncthreads();
    bf16 *to = dqkv + (long long)w.row * width + (heads + kv) * HEAD_DIM, *room = k + warp * 16 * PITCH;
    auto place_of = [&](int r) {
        return top + r < first + keys ? to + (long long)(top + r) * width : (bf16 *)nullptr;
    };
    store_rows(room, dk, factor, 0, place_of);
    to += kv_heads * HEAD_DIM;
    store_rows(room, dv, 1.0f, 0, place_of);
}

#endif
