// Products of up to eight rows with a block's weights, for decode/gemm.cu: one chain of additions over k per feature, 16 at a
// time, by the same instruction for every k.
//
// Weights are the left operand, `mine` features of them, and arrive in pieces; x is the right one. This file defines their
// layout in shared memory. A warp gets the sums of its own tile: eight features, or CHAINS groups of eight; a lane those of row
// lane / 4 and features 2 (lane % 4) and the next.

// Pieces of k in which weights are copied: the first can be used before the last has arrived. Multiples of STEP.
#define PIECES 2
#define STEP 128

__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Elements of k per piece.
__device__ __forceinline__ u32 piece_of(u32 k) { return (k / STEP + PIECES - 1) / PIECES * STEP; }

// Waits for this thread's copies of a piece; the instruction needs the number of pending groups as a constant.
__device__ __forceinline__ void wait_for_piece(u32 piece) {
    if (piece == 0) {
        asm volatile("cp.async.wait_group %0;" ::"n"(PIECES - 1) : "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// wgmma reads both operands from shared memory, and has half the latency of mma.sync between additions of a chain. It has 64
// features: missing ones alias the first eight, or the memory behind them; their results are discarded.

// Weights are in panels of 64 columns with 128-byte swizzle.
__device__ __forceinline__ u32 weight_place(u32 feature, u32 column, u32 mine, u32) {
    return (column / 64 * mine + feature) * 64 + ((column % 64 / 8) ^ (feature & 7)) * 8;
}
// The 16-byte units of all rows of x, unit by unit; missing rows alias later units.
__device__ __forceinline__ u32 x_place(u32 row, u32 column, u32 rows, u32) {
    return (column / 8 * rows + row) * 8 + column % 8;
}

// c += a b, or c = a b if `add` is 0.
__device__ __forceinline__ void multiply(float (&c)[4], u64 a, u64 b, u32 add) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.b32 yes, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3}, %4, %5, yes, 1, 1, 0, 0; }"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"(b), "r"(add));
}

// A lane holds features lane / 4 and lane / 4 + 8 of rows 2 (lane % 4) and the next; it gets those of row lane / 4.
template <int CHAINS>
__device__ __forceinline__ void by_rows(float (&sum)[CHAINS][2], const float (&c)[4]) {
    const u32 lane = threadIdx.x % WARP, from = lane % 4 * 8 + lane / 8;
#pragma unroll
    for (int i = 0; i < CHAINS; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float even = __shfl_sync(ALL, c[2 * i], from + 4 * j), odd = __shfl_sync(ALL, c[2 * i + 1], from + 4 * j);
            sum[i][j] = lane / 4 % 2 ? odd : even;
        }
    }
}

template <int CHAINS>
__device__ __forceinline__ void product(float (&sum)[CHAINS][2], const bf16* weights, const bf16* xs, u32 mine, u32 rows,
                                        u32 k) {
    // Matrix descriptor: address, bytes to the next unit of k (if not swizzled), bytes to the next eight rows, all divided by 16.
    u64 a = (shared_address(weights) & 0x3ffff) >> 4 | (u64)(mine > 8 ? 1024 >> 4 : 0) << 32 | 1ull << 62;
    u64 b = (shared_address(xs) & 0x3ffff) >> 4 | (u64)rows << 16;
    float c[4] = {};
    u32 piece = 0, next = 0;
#pragma unroll 1
    for (u32 i = 0; i < k; i += STEP) {
        if (i == next) {
            wait_for_piece(piece++);
            next += piece_of(k);
            // Makes what was copied and stored visible to wgmma.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncthreads();
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        }
#pragma unroll
        for (int j = 0; j < STEP / 16; j++) multiply(c, a + j / 4 * mine * 8 + j % 4 * 2, b + j * 2 * rows, 1);
        a += STEP / 64 * mine * 8, b += STEP / 8 * rows;
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    by_rows<CHAINS>(sum, c);
}

#else

// Row pitch k + 8, so that eight rows start in different banks.
__device__ __forceinline__ u32 weight_place(u32 feature, u32 column, u32, u32 k) { return feature * (k + 8) + column; }
__device__ __forceinline__ u32 x_place(u32 row, u32 column, u32, u32 k) { return row * (k + 8) + column; }

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(0u), "r"(a2), "r"(0u), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void matrices(u32 (&f)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Operands for STEP elements of k: of eight rows, and of eight features of each group. All are loaded before the chain continues:
// with one load per addition, the chain of 4864 took 13 us instead of 8.
template <int CHAINS>
struct Operands {
    u32 a[STEP / 32][4], b[STEP / 32][CHAINS][4];
    __device__ __forceinline__ void read(const bf16* x, const bf16* w, u32 pitch) {
#pragma unroll
        for (int i = 0; i < STEP / 32; i++) {
            matrices(a[i], x + 32 * i);
#pragma unroll
            for (int c = 0; c < CHAINS; c++) matrices(b[i][c], w + c * 8 * pitch + 32 * i);
        }
    }
    __device__ __forceinline__ void add_to(float (&sum)[CHAINS][4]) const {
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) {
            const int j = i / 2, h = i % 2 * 2;
#pragma unroll
            for (int c = 0; c < CHAINS; c++) multiply(sum[c], a[j][h], a[j][h + 1], b[j][c][h], b[j][c][h + 1]);
        }
    }
};

// Here rows are the upper half of the left operand's 16 rows.
template <int CHAINS>
__device__ __forceinline__ void product(float (&sum)[CHAINS][2], const bf16* weights, const bf16* xs, u32 mine, u32 rows,
                                        u32 k) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pitch = k + 8;
    float c[CHAINS][4] = {};
    // A lane gives the address of a row of each matrix; missing rows alias row 0; their results are discarded.
    const bf16* x = xs + (lane % 8 < rows ? lane % 8 : 0) * pitch + lane / 8 * 8;
    const bf16* w = weights + (warp * CHAINS * 8 + lane % 8) * pitch + lane / 8 * 8;
    const u32 piece = piece_of(k);
#pragma unroll 1
    for (u32 g = 0; g < PIECES; g++) {
        const u32 from = g * piece, to = min(from + piece, k);
        wait_for_piece(g);
        __syncthreads();
        if (warp * CHAINS * 8 >= mine || from >= to) continue;
#pragma unroll 1
        for (u32 i = from; i < to; i += STEP) {
            Operands<CHAINS> now;
            now.read(x + i, w + i, pitch);
            now.add_to(c);
        }
    }
#pragma unroll
    for (int i = 0; i < CHAINS; i++) sum[i][0] = c[i][0], sum[i][1] = c[i][1];
}

#endif
