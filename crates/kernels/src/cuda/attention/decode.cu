// Decode attention for few sequences, with fewer blocks than multiprocessors: the bits of `attention_decode` (see
// attention/forward.cu), with several key tiles concurrently instead of one after the other.
//
// Scores of all tiles are independent; weights need the maximum up to their tile, which the tiles' maxima give; only the
// additions to the output are ordered. So up to TILES tiles are processed at a time, in four phases: scores (four warps per tile,
// 16 keys each), maxima (one thread per row), weights (as scores), outputs (16 columns per warp). Most of the time is spent
// reading shared memory.
//
// Also set by the launcher: TILES, an even number, if they fit; keys and values are in the cache.

#if PAGED && defined(TILES)

#define PARALLEL_WARPS (4 * TILES)
// Pairs of 8-column output accumulators per warp.
#define PARALLEL_PAIRS ((WIDE / 16 + PARALLEL_WARPS - 1) / PARALLEL_WARPS)

extern "C" __global__ void __launch_bounds__(PARALLEL_WARPS * 32)
attention_decode_parallel(const bf16 *qkv, const bf16 *cache, const int *blocks, const Work *work, bf16 *out, int heads,
                     int kv_heads, float scale, float cap, int window) {
    extern __shared__ __align__(16) unsigned char parallel_shared[];
    bf16 *q = (bf16 *)parallel_shared;
    bf16 *ring = q + 16 * PITCH;
    // Exchanged between warps, per tile: weights of 16 keys as left operands; for each four times 16 keys, sums of weights by
    // lane and maxima by row; the base subtracted from a row's scores, and the decay of its earlier sums.
    __shared__ uint4 weights[TILES][4][32];
    __shared__ float4 sums[TILES][2][32], tops[TILES][16];
    __shared__ float bases[TILES][16], decays[TILES][16];
    let_next_start();
    const Work w = work[blockIdx.x / kv_heads];
    const Scoring op = {scale, cap, window};
    const int kv = blockIdx.x % kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int width = (heads + 2 * kv_heads) * HEAD_DIM;
    const int end = min(w.first + 16, w.count * GROUP);
    const int seen = w.count == 0 ? 0 : w.position + (end - 1) / GROUP + 1;
    const int lowest = w.position + w.first / GROUP;
    const int first_tile = first_seen(op, lowest) / KEYS;
    const int last_tile = (seen + KEYS - 1) / KEYS;
    // If not all tiles fit at once, one half of the ring is loaded while the other is used.
    const int batch = last_tile - first_tile <= TILES ? TILES : TILES / 2;

    auto fetch = [&](int from, int to) {
#pragma unroll 1
        for (int tile = from; tile < min(to, last_tile); ++tile) {
            const bf16 *at = cache + ((long long)blocks[w.blocks + tile] * kv_heads + kv) * (2 * KEYS * HEAD_DIM);
            bf16 *place = ring + (tile - first_tile) % TILES * (2 * KEYS * PITCH);
            // Keys, then values.
#pragma unroll 1
            for (int i = threadIdx.x; i < 2 * KEYS * UNITS; i += PARALLEL_WARPS * 32) {
                const int r = i / UNITS, c = i % UNITS * 8;
                const bool valid = tile * KEYS + r % KEYS < seen && c < HEAD_DIM;
                copy_unit(place + r * PITCH + c, valid ? at + r * HEAD_DIM + c : at, valid);
            }
        }
    };
    // Tiles that this step does not write were complete before it started.
    const int settled = min(max(w.settled, first_tile), first_tile + TILES);
    fetch(first_tile, settled);
    wait_for_earlier();
    if (w.count == 0)
        return;
    load_rows<16, PARALLEL_WARPS * 32>(q, qkv + (long long)w.row * width + kv * GROUP * HEAD_DIM, width, w.first, end);
    fetch(settled, first_tile + TILES);
    copy_commit();

    const int own = warp / 4, quarter = warp % 4;
    const int row[2] = {w.first + lane / 4, w.first + lane / 4 + 8};
    const int whole_from = first_seen(op, seen - 1), whole_to = lowest + 1;
    float highest = -INFINITY_, sum[2] = {0.0f, 0.0f}, o[2 * PARALLEL_PAIRS][4];
#pragma unroll
    for (int n = 0; n < 2 * PARALLEL_PAIRS; ++n)
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;

#pragma unroll 1
    for (int from = first_tile; from < last_tile; from += batch) {
        // The next batch may still be in flight, except at the beginning.
        if (from == first_tile)
            copy_wait<0>();
        else
            copy_wait<1>();
        __syncthreads();
        const int count = min(batch, last_tile - from), slot = (from - first_tile) % TILES;
        float s[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
        if (own < count) {
#pragma unroll
            for (int d = 0; d < WIDE; d += 16) {
                unsigned a[4], b[4];
                load_left(a, q, 0, d);
                load_right_rows(b, ring + (slot + own) * (2 * KEYS * PITCH), quarter * 16, d);
                multiply(s[0], a, b[0], b[1]);
                multiply(s[1], a, b[2], b[3]);
            }
            const int start = (from + own) * KEYS;
            const bool whole = start >= whole_from && start + KEYS <= whole_to;
            float here[2] = {-INFINITY_, -INFINITY_};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float x = score(op, s[n][e]);
                    if (!whole && !sees(op, w.position + row[e >> 1] / GROUP,
                                        start + quarter * 16 + n * 8 + lane % 4 * 2 + (e & 1)))
                        x = -INFINITY_;
                    s[n][e] = x;
                    here[e >> 1] = fmaxf(here[e >> 1], x);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float m = quad_max(here[h]);
                if (lane % 4 == 0)
                    ((float *)&tops[own][lane / 4 + 8 * h])[quarter] = m;
            }
        }
        __syncthreads();

        if (threadIdx.x < 16) {
            float here[TILES];
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const float4 m = tops[t][threadIdx.x];
                here[t] = fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w));
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                if (t < count) {
                    float base;
                    decays[t][threadIdx.x] = raise(highest, here[t], base);
                    bases[t][threadIdx.x] = base;
                }
            }
        }
        __syncthreads();

        if (own < count) {
            const float base[2] = {bases[own][lane / 4], bases[own][lane / 4 + 8]};
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[n][e] = power2(s[n][e] - base[e >> 1]);
            ((float *)&sums[own][0][lane])[quarter] = (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]);
            ((float *)&sums[own][1][lane])[quarter] = (s[0][2] + s[0][3]) + (s[1][2] + s[1][3]);
            unsigned mine[4];
            as_left(mine, s[0], s[1]);
            weights[own][quarter][lane] = make_uint4(mine[0], mine[1], mine[2], mine[3]);
        }
        __syncthreads();

        if (warp * 16 < WIDE) {
#pragma unroll 2
            for (int t = 0; t < count; ++t) {
                float decay[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float4 x = sums[t][h][lane];
                    decay[h] = decays[t][lane / 4 + 8 * h];
                    sum[h] = __fmaf_rn(sum[h], decay[h], (x.x + x.y) + (x.z + x.w));
                }
                const bf16 *v = ring + (slot + t) * (2 * KEYS * PITCH) + KEYS * PITCH;
#pragma unroll
                for (int n = 0; n < 2 * PARALLEL_PAIRS; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        o[n][e] *= decay[e >> 1];
#pragma unroll
                for (int g = 0; g < KEYS / 16; ++g) {
                    uint4 u = weights[t][g][lane];
                    unsigned a[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
                    for (int p = 0; p < PARALLEL_PAIRS; ++p) {
                        const int column = (p * PARALLEL_WARPS + warp) * 16;
                        if (column < WIDE) {
                            unsigned b[4];
                            load_right(b, v, g * 16, column);
                            multiply(o[2 * p], a, b[0], b[1]);
                            multiply(o[2 * p + 1], a, b[2], b[3]);
                        }
                    }
                }
            }
        }
        if (from + batch >= last_tile)
            break;
        __syncthreads();
        fetch(from + TILES, from + TILES + batch);
        copy_commit();
    }
    if (warp * 16 >= WIDE)
        return;

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float factor = 1.0f / quad_sum(sum[h]);
        if (row[h] < end) {
            bf16 *to = out + ((long long)(w.row + row[h] / GROUP) * heads + kv * GROUP + row[h] % GROUP) * HEAD_DIM;
#pragma unroll
            for (int n = 0; n < 2 * PARALLEL_PAIRS; ++n) {
                const int column = (n / 2 * PARALLEL_WARPS + warp) * 16 + n % 2 * 8 + lane % 4 * 2;
                if (column < HEAD_DIM)
                    *(unsigned *)(to + column) =
                        narrow2(o[n][2 * h] * factor + 0.0f, o[n][2 * h + 1] * factor + 0.0f);
            }
        }
    }
}

#endif
