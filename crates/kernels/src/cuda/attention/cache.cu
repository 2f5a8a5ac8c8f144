// Writes keys and values to the paged cache. A block holds 64 tokens; layout [block][key head][keys, values][token][head_dim].
//
// A thread copies one unit of one row (16 bytes if rows allow it, else one element).

// `slots[row]` is the token's position in the cache, in tokens. A row is `width` units, of which the last 2 * kv_heads * head are
// keys and values.
template <class Unit>
__device__ __forceinline__ void write(const Unit *qkv, const u32 *slots, Unit *cache, u32 rows, u32 width, u32 kv_heads,
                                      u32 head) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 per_row = 2 * kv_heads * head;
    u32 row = i / per_row, at = i % per_row;
    if (row >= rows || slots[row] == ~0u)
        return;
    u32 part = at / (kv_heads * head), kv = at / head % kv_heads, unit = at % head;
    u64 block = slots[row] / TOKENS, token = slots[row] % TOKENS;
    u64 to = (((block * kv_heads + kv) * 2 + part) * TOKENS + token) * head + unit;
    cache[to] = qkv[(u64)row * width + (width - per_row) + at];
}

#define WRITE(name, unit)                                                                                              \
    extern "C" __global__ void name(const unit *qkv, const u32 *slots, unit *cache, u32 rows, u32 width, u32 kv_heads, \
                                    u32 head) {                                                                        \
        write(qkv, slots, cache, rows, width, kv_heads, head);                                                         \
    }
WRITE(cache_write_16, uint4)
WRITE(cache_write_4, u32)
WRITE(cache_write_2, unsigned short)

// Copies block `from` of each pair (blockIdx.x) to block `to`, in each layer's cache (blockIdx.y): `units` of 16 bytes.
struct Pair {
    u32 from, to;
};
extern "C" __global__ void cache_copies(uint4 *const *layers, const Pair *pairs, u32 units) {
    const Pair pair = pairs[blockIdx.x];
    uint4 *cache = layers[blockIdx.y];
    for (u32 i = threadIdx.x; i < units; i += blockDim.x)
        cache[(u64)pair.to * units + i] = cache[(u64)pair.from * units + i];
}
