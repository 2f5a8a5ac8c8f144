// The backward over keys with wgmma (attention/wgmma.cu). A block works as attention_keys in attention/backward.cu, but rows are
// ordered by head: a step processes STEP tokens of one head, then those of the group's other heads, then earlier tokens. So rows
// have a fixed stride, and only steps on the diagonal are masked.
//
// A warpgroup owns 64 keys, a warp 16 of them; TEAMS warpgroups share the rows. The score GEMMs of a step overlap with storing
// the previous step's score gradients.
//
// Score gradients are stored in tiles of 64 tokens of one head and 64 keys: for token tile t, key tiles 0..=t of head 0, then of
// head 1, and so on. A tile is 4x4 left operands as attention_dq_wgmma multiplies them, four registers of 32 lanes each, those
// of its first 16 tokens first.
//
// If there are too few blocks for the GPU, PARTS blocks divide the heads of a group: each writes its sums in f32, and
// attention_keys_join adds them in order.
//
// Also set by the launcher: TEAMS, STEP, PARTS.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Ring stages; measured on an H200: 157 us with four, 172 with three for heads of 64, with two blocks per multiprocessor; 264 and
// 253 for heads of 128, with one.
#define RING (TEAMS == 1 ? 4 : 3)
// 16-byte units of a tile of score gradients.
#define TILE_UNITS 512
// Heads that a block processes.
#define OWN_HEADS (GROUP / PARTS)

// Start of a head's tiles within a token tile, counted in tiles.
__device__ __forceinline__ int head_tiles(int tile, int head) {
    return GROUP * (tile * (tile + 1) / 2) + head * (tile + 1);
}

// Copies two floats from global to shared memory; zeros unless `valid`.
__device__ __forceinline__ void copy_pair(u32 to, const float2 *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

// Stores a left operand that a warp holds with keys as rows.
__device__ __forceinline__ void store_transposed(uint4 *to, const unsigned (&a)[4]) {
    *to = make_uint4(transposed(a[0]), transposed(a[2]), transposed(a[1]), transposed(a[3]));
}

extern "C" __global__ void __launch_bounds__(TEAMS * 128, 2 / TEAMS)
attention_keys_wgmma(const bf16 *qkv, const bf16 *dout, const float2 *rows, const Work *work, bf16 *dqkv, int tokens,
                    int heads, int kv_heads, float scale, float cap, int window, float factor, int first_kv,
                    int some_kv, uint4 *gradients, long long per_kv, float *sums) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int threads = TEAMS * 128;
    // Per row in the ring: log-sum-exp in units of log 2, and delta.
    __shared__ __align__(16) float2 kept[RING][STEP];
    const u32 keys_at = aligned(shared), values_at = keys_at + TEAMS * 64 * HEAD_DIM * 2;
    const u32 ring = values_at + TEAMS * 64 * HEAD_DIM * 2, stage_bytes = 2 * STEP * HEAD_DIM * 2;
    const Work w = work[blockIdx.x / (some_kv * PARTS)];
    const Scoring op = {scale, cap, window};
    const int kv = first_kv + blockIdx.x % some_kv, warp = own_warp(), lane = threadIdx.x & 31, team = warp / 4;
    const int shares = PARTS == 1 ? 0 : blockIdx.x / some_kv % PARTS, first_head = shares * OWN_HEADS;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM, out_width = heads * HEAD_DIM;

    // This thread copies 16 bytes of every APART-th row.
    const int APART = threads / UNITS, r0 = threadIdx.x / UNITS, c0 = threadIdx.x % UNITS * 8;
    {
        const bf16 *from = qkv + (long long)(w.row + w.first + r0) * width + (heads + kv) * HEAD_DIM + c0;
#pragma unroll
        for (int i = 0; i < TEAMS * 64 / APART; ++i) {
            const int r = r0 + i * APART;
            const u32 to = keys_at + r / 64 * (64 * HEAD_DIM * 2) + 2 * place<64>(r % 64, c0);
            const bool there = w.first + r < w.count;
            copy_to(to, from, there);
            copy_to(to + TEAMS * 64 * HEAD_DIM * 2, from + kv_heads * HEAD_DIM, there);
            from += (long long)APART * width;
        }
    }

    // Steps over the keys of the block, and of the warpgroup: from the last token tile that attends to any of them down to that
    // of the keys. So blocks of a sequence that start together read the same rows at the same time, one from memory and the
    // others from the L2 cache.
    const int a_tile = OWN_HEADS * (64 / STEP);
    auto last_of = [&](int last_key) {
#if WINDOW
        return ((int)min((long long)w.count, (long long)last_key + window) + 63) / 64;
#else
        return (w.count + 63) / 64;
#endif
    };
    const int first_tile = w.first / 64, last_tile = last_of(w.first + TEAMS * 64 - 1);
    const int steps = (last_tile - first_tile) * a_tile;
    const int own_tile = first_tile + team, own_last = last_of(own_tile * 64 + 63);
    const int from_step = (last_tile - own_last) * a_tile, to_step = (last_tile - own_tile) * a_tile;

    // The step to fetch next: its first token, its head, and this thread's source addresses.
    int token = (last_tile - 1) * 64, head = 0;
    const int query_head = kv * GROUP + first_head;
    const bf16 *q_from = qkv + (long long)(w.row + token + r0) * width + query_head * HEAD_DIM + c0;
    const bf16 *g_from = dout + (long long)(w.row + token + r0) * out_width + query_head * HEAD_DIM + c0;
    const float2 *rows_from = rows + (long long)query_head * tokens + w.row + token + threadIdx.x;
    const u32 own_place = ring + 2 * place<STEP>(r0, c0);
    auto fetch = [&](int step, int slot) {
        if (step < steps) {
            const u32 to = own_place + slot * stage_bytes;
            const bf16 *q = q_from, *g = g_from;
#pragma unroll
            for (int i = 0; i < STEP / APART; ++i) {
                const bool there = token + r0 + i * APART < w.count;
                copy_to(to + i * APART * 128, q, there);
                copy_to(to + i * APART * 128 + STEP * HEAD_DIM * 2, g, there);
                q += (long long)APART * width;
                g += (long long)APART * out_width;
            }
            if (threadIdx.x < STEP)
                copy_pair(shared_address(&kept[slot][threadIdx.x]), rows_from, token + (int)threadIdx.x < w.count);
            // One half of a tile's tokens, then the other, then the next head, then the previous tile.
            token += STEP;
            q_from += (long long)STEP * width, g_from += (long long)STEP * out_width, rows_from += STEP;
            if (token % 64 == 0) {
                const int back = ++head < OWN_HEADS ? 64 : 128, other = head < OWN_HEADS ? 1 : 1 - OWN_HEADS;
                token -= back;
                q_from += other * HEAD_DIM - (long long)back * width;
                g_from += other * HEAD_DIM - (long long)back * out_width;
                rows_from += (long long)other * tokens - back;
                head = head < OWN_HEADS ? head : 0;
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int s = 0; s < RING - 1; ++s)
        fetch(s, s);

    const u64 k = described(keys_at + team * (64 * HEAD_DIM * 2), 16);
    const u64 v = described(values_at + team * (64 * HEAD_DIM * 2), 16);
    float dk[HEAD_DIM / 8][4], dv[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dk[n][e] = dv[n][e] = 0.0f;
    settle(dk);
    settle(dv);
    float score_sums[STEP / 8][4], weight_sums[STEP / 8][4];
    unsigned weights[STEP / 16][4], changes[STEP / 16][4];

    // Starts the score GEMMs of a step whose rows are in shared memory.
    auto begin = [&](int slot) {
        const u64 q = described(ring + slot * stage_bytes, 16);
        products_begin();
        start_scores<STEP>(score_sums, k, q);
        products_commit();
        start_scores<STEP>(weight_sums, v, further(q, STEP * HEAD_DIM));
        products_commit();
    };
    // Wait until the rows of the next step have arrived; the reads of the step before last are complete.
    auto next = [&](int step, int &slot) {
        copy_wait<RING - 3>();
        products_see_copies();
        __syncthreads();
        fetch(step + RING - 1, slot == 0 ? RING - 1 : slot - 1);
        slot = slot == RING - 1 ? 0 : slot + 1;
    };
    const int own_key = own_tile * 64 + warp % 4 * 16 + lane / 4;
    // The current step: its position in the tile, its head, its tile.
    int part = 0, own_head = 0, tile = own_last - 1;
    float p[STEP / 8][4], slopes[SOFTCAP ? STEP / 8 : 1][4];
    // Turns the scores of a step into weights.
    auto weigh = [&](int slot) {
        products_wait<1>();
        settle(score_sums);
        const int first_row = tile * 64 + part * STEP;
        const bool whole = tile > own_tile && first_seen(op, first_row + STEP - 1) <= own_tile * 64;
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const float4 l = *(const float4 *)&kept[slot][n * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#if SOFTCAP
                p[n][e] = power2(score_and_slope(op, score_sums[n][e], slopes[n][e]) - (e & 1 ? l.z : l.x));
#else
                p[n][e] = power2(fmaf(score_sums[n][e], scale, -(e & 1 ? l.z : l.x)));
#endif
            }
        }
        if (!whole) {
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!sees(op, first_row + n * 8 + lane % 4 * 2 + (e & 1), own_key + (e >> 1) * 8))
                        p[n][e] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < STEP / 16; ++r)
            as_left(weights[r], p[2 * r], p[2 * r + 1]);
    };
    copy_wait<RING - 2>();
    products_see_copies();
    __syncthreads();
    int slot = 0;
    for (int step = 0; step < from_step; ++step)
        next(step, slot);
    begin(slot);
    weigh(slot);

    uint4 *keep = gradients + (kv - first_kv) * per_kv + w.blocks + warp % 4 * 32 + lane;
    for (int step = from_step; step < to_step; ++step) {
        const u64 q = described(ring + slot * stage_bytes, STEP * 128), g = further(q, STEP * HEAD_DIM);
        products_wait<0>();
        settle(weight_sums);
        products_begin();
        start_products<STEP>(dv, weights, g);
        products_commit();
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const float4 l = *(const float4 *)&kept[slot][n * 8 + lane % 4 * 2];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                p[n][e] *= weight_sums[n][e] - (e & 1 ? l.w : l.y);
                if (SOFTCAP)
                    p[n][e] *= slopes[SOFTCAP ? n : 0][e];
            }
        }
#pragma unroll
        for (int r = 0; r < STEP / 16; ++r)
            as_left(changes[r], p[2 * r], p[2 * r + 1]);
        products_begin();
        start_products<STEP>(dk, changes, q);
        products_commit();
        // After the last step this reads stale data; the results are discarded.
        next(step, slot);
        begin(slot);
        if (gradients) {
            const int at = head_tiles(tile, first_head + own_head) + own_tile;
            uint4 *to = keep + (long long)at * TILE_UNITS + part * (STEP / 16 * 128);
#pragma unroll
            for (int r = 0; r < STEP / 16; ++r)
                store_transposed(to + r * 128, changes[r]);
        }
        if (++part == 64 / STEP) {
            part = 0;
            if (++own_head == OWN_HEADS)
                own_head = 0, --tile;
        }
        weigh(slot);
    }
    for (int step = max(to_step, from_step); step < steps; ++step)
        next(step, slot);
    products_wait<0>();
    settle(dk);
    settle(dv);

    copy_wait<0>();
    __syncthreads();
    const int top = own_tile * 64 + warp % 4 * 16;
#if PARTS > 1
    float *own = sums + ((long long)(shares * some_kv + kv - first_kv) * tokens + w.row + top + lane / 4) * (2 * HEAD_DIM) +
                 lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (top + lane / 4 + half * 8 < w.count) {
            float *to = own + half * 8 * (2 * HEAD_DIM);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                *(float2 *)(to + n * 8) = make_float2(dk[n][2 * half], dk[n][2 * half + 1]);
                *(float2 *)(to + HEAD_DIM + n * 8) = make_float2(dv[n][2 * half], dv[n][2 * half + 1]);
            }
        }
    }
#else
    bf16 *room = (bf16 *)(shared + (keys_at - shared_address(shared))) + warp * 16 * PITCH;
    bf16 *to = dqkv + (long long)w.row * width + (heads + kv) * HEAD_DIM;
    auto place_of = [&](int r) { return top + r < w.count ? to + (long long)(top + r) * width : (bf16 *)nullptr; };
    store_rows(room, dk, factor, 0, place_of);
    to += kv_heads * HEAD_DIM;
    store_rows(room, dv, 1.0f, 0, place_of);
#endif
}

// Adds the sums of PARTS blocks, in order; a thread has four columns of a token's keys or values.
extern "C" __global__ void attention_keys_join(const float *sums, bf16 *dqkv, int tokens, int heads, int kv_heads,
                                               float factor, int first_kv, int some_kv) {
    const long long i = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x), each = 2ll * some_kv * tokens * HEAD_DIM;
    if (i >= each)
        return;
    vec4 x = load4(sums, i);
#pragma unroll
    for (int s = 1; s < PARTS; ++s) {
        const vec4 more = load4(sums, s * each + i);
        for (int e = 0; e < 4; ++e)
            x.x[e] += more.x[e];
    }
    const int column = i % HEAD_DIM, of_values = i / HEAD_DIM % 2;
    const long long row = i / (2 * HEAD_DIM) % tokens;
    const int kv = first_kv + (int)(i / (2ll * HEAD_DIM * tokens));
    for (int e = 0; e < 4; ++e)
        x.x[e] *= of_values ? 1.0f : factor;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    store4(dqkv, row * width + (heads + kv + of_values * kv_heads) * HEAD_DIM + column, x);
}

#endif
