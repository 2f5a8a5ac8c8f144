// Shared by the attention kernels: tensor-core products of 16-row tiles, copies to shared memory, and score arithmetic.
//
// The query heads of a key head are rows of one problem ("stacked rows"): row r is head r % GROUP of new token r / GROUP. Keys
// come in tiles of KEYS tokens counted from the start of their sequence. Rows of a tensor-core product are independent, so a
// row's bits do not depend on the other rows.
//
//
// Set by the launcher: HEAD_DIM (a multiple of 8), GROUP, SOFTCAP and WINDOW (0 or 1).

// Width of a head, zero-padded to the tensor cores' step.
#define WIDE ((HEAD_DIM + 15) / 16 * 16)
// Row pitch in shared memory: an odd number of 16-byte units, so that the eight rows that ldmatrix reads at a time are in
// different banks.
#define PITCH (WIDE + 8)
// 16-byte units per row.
#define UNITS (WIDE / 8)
#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

// Rows of one sequence: of its `count` new tokens, which start at `row` of the batch and at `position` of the sequence, the
// stacked rows (or, in the backward over keys, the tokens) from `first` on. `blocks` is the start of its block table; the batch
// does not write the first `settled` key tiles.
struct Work {
    int row, count, position, blocks, first, settled;
};

// Scale, soft cap and mask. Scores are in units of log 2: x * scale, or out * tanh(x * scale) with a cap.
struct Scoring {
    float scale, out;
    int window;
};

__device__ __forceinline__ unsigned shared_address(const void *p) {
    unsigned a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}

// Copies 16 bytes from global to shared memory; zeros unless `valid`.
__device__ __forceinline__ void copy_unit(bf16 *to, const bf16 *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// Commits the copies issued since the last commit as a group.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT of this thread's copy groups are pending.
template <int LEFT> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ldmatrix: loads four 8x8 matrices, each lane giving the address of one row.
__device__ __forceinline__ void matrices(unsigned (&f)[4], const bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void matrices_across(unsigned (&f)[4], const bf16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Left operand: rows row..row+16 and columns k..k+16 of a matrix in shared memory.
__device__ __forceinline__ void load_left(unsigned (&f)[4], const bf16 *m, int row, int k) {
    int lane = threadIdx.x & 31;
    matrices(f, m + (row + (lane & 15)) * PITCH + k + (lane >> 4) * 8);
}

// Right operand of a product with the transpose: rows n..n+16 of the matrix are the columns of two products, f[0..2] of the first
// and f[2..4] of the second.
__device__ __forceinline__ void load_right_rows(unsigned (&f)[4], const bf16 *m, int n, int k) {
    int lane = threadIdx.x & 31;
    matrices(f, m + (n + (lane & 7) + (lane >> 4) * 8) * PITCH + k + (lane >> 3 & 1) * 8);
}

// Right operand of a product with the matrix itself: rows k..k+16, columns n..n+16.
__device__ __forceinline__ void load_right(unsigned (&f)[4], const bf16 *m, int k, int n) {
    int lane = threadIdx.x & 31;
    matrices_across(f, m + (k + (lane & 15)) * PITCH + n + (lane >> 4) * 8);
}

// c += a b (mma.sync) for 16 rows, 8 columns and k = 16. Lane l holds columns 2(l%4) and the next of rows l/4 and l/4+8.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Converts two adjacent accumulators to the left operand of the next product.
__device__ __forceinline__ void as_left(unsigned (&a)[4], const float (&x)[4], const float (&y)[4]) {
    a[0] = narrow2(x[0], x[1]);
    a[1] = narrow2(x[2], x[3]);
    a[2] = narrow2(y[0], y[1]);
    a[3] = narrow2(y[2], y[3]);
}

// 2^x by the GPU's instruction, within 2 ulp: 1 for 0, 0 below -126, NaN for NaN. A polynomial took half of attention's time.
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The score of a dot product, in units of log 2, and the derivative of the soft cap.
__device__ __forceinline__ float score(const Scoring &op, float dot) {
#if SOFTCAP
    return op.out * tanh_(dot * op.scale);
#else
    return dot * op.scale;
#endif
}

__device__ __forceinline__ float score_and_slope(const Scoring &op, float dot, float &slope) {
#if SOFTCAP
    float t = tanh_(dot * op.scale);
    slope = 1.0f - t * t;
    return op.out * t;
#else
    slope = 1.0f;
    return dot * op.scale;
#endif
}

// Whether the token at `position` attends to the key.
__device__ __forceinline__ bool sees(const Scoring &op, int position, int key) {
#if WINDOW
    return key <= position && key > position - op.window;
#else
    return key <= position;
#endif
}

// First key to which the token at `position` attends.
__device__ __forceinline__ int first_seen(const Scoring &op, int position) {
#if WINDOW
    return max(0, position + 1 - op.window);
#else
    return 0;
#endif
}

// Copies ROWS stacked rows from `first` on to shared memory; `base` is the sequence's first row and the group's first head,
// `width` the row pitch of the batch. Rows from `end` on are zero.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_rows(bf16 *to, const bf16 *base, int width, int first, int end) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
        int r = i / UNITS, c = i % UNITS * 8;
        bool valid = first + r < end && c < HEAD_DIM;
        int row = valid ? first + r : 0;
        const bf16 *from = base + (long long)(row / GROUP) * width + row % GROUP * HEAD_DIM + (valid ? c : 0);
        copy_unit(to + r * PITCH + c, from, valid);
    }
}

// Copies a tile of COUNT keys or values with row pitch `stride` to shared memory; rows from `end` on are zero.
template <int COUNT, int THREADS>
__device__ __forceinline__ void load_tile(bf16 *to, const bf16 *base, long long stride, int end) {
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * UNITS; i += THREADS) {
        int r = i / UNITS, c = i % UNITS * 8;
        bool valid = r < end && c < HEAD_DIM;
        copy_unit(to + r * PITCH + c, valid ? base + r * stride + c : base, valid);
    }
}
