// Products for cards of compute capability 9.0, whose tensor cores read matrices from shared memory by themselves (wgmma):
// four warps together multiply 64 rows. A warp has 16 of them, and its accumulators lie in registers as those of the
// smaller products in attention/tile.cu do.
//
// A matrix in shared memory is cut into panels of 64 columns. A row of a panel is 128 bytes, in which 16-byte units are
// exchanged by the row's number (unit ^ row % 8): the layout the instruction calls 128-byte swizzle. It serves both
// uses of a matrix: with the head's columns as the length of the sums, and with the rows as that. HEAD_DIM is 64 or 128.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Where 8 columns from `column` on of a row are, in a matrix of R rows.
template <int R> __device__ __forceinline__ int place(int row, int column) {
    return column / 64 * (R * 64) + row * 64 + ((column % 64 / 8) ^ (row & 7)) * 8;
}

// What the instruction needs to know of a matrix: address, bytes from one panel to the next, and from 8 rows to the next.
__device__ __forceinline__ u64 described(u32 address, u32 panel) {
    return (address & 0x3ffff) >> 4 | (u64)(panel >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// The same matrix from that many elements on.
__device__ __forceinline__ u64 further(u64 matrix, u32 elements) { return matrix + (elements * 2 >> 4); }

// 16 bytes from global to shared memory, zeros unless `valid`.
__device__ __forceinline__ void copy_to(u32 to, const bf16 *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The address of shared memory; swizzling counts from multiples of 1024.
__device__ __forceinline__ u32 aligned(const unsigned char *shared) { return (shared_address(shared) + 1023) & ~1023u; }

// The warp's number, which the compiler shall know to be the same for all lanes.
__device__ __forceinline__ int own_warp() { return __shfl_sync(ALL, (int)threadIdx.x / 32, 0); }

// Registers may be read and written by products from here on.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products started since the last one.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most LEFT groups are under way.
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes what this thread copied to shared memory visible to wgmma.
__device__ __forceinline__ void products_see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// x += a bᵀ for 64 rows and 16 steps, or x = a bᵀ unless `more`; both matrices lie with the steps in a row.
__device__ __forceinline__ void wgmma(float (&x)[4][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.b32 yes, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, yes, 1, 1, 0, 0; }"
        : "+f"(x[0][0]), "+f"(x[0][1]), "+f"(x[0][2]), "+f"(x[0][3]), "+f"(x[1][0]), "+f"(x[1][1]),
          "+f"(x[1][2]), "+f"(x[1][3]), "+f"(x[2][0]), "+f"(x[2][1]), "+f"(x[2][2]), "+f"(x[2][3]),
          "+f"(x[3][0]), "+f"(x[3][1]), "+f"(x[3][2]), "+f"(x[3][3])
        : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ void wgmma(float (&x)[8][4], u64 a, u64 b, int more) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.b32 yes, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, yes, 1, 1, 0, 0; }"
        : "+f"(x[0][0]), "+f"(x[0][1]), "+f"(x[0][2]), "+f"(x[0][3]), "+f"(x[1][0]), "+f"(x[1][1]),
          "+f"(x[1][2]), "+f"(x[1][3]), "+f"(x[2][0]), "+f"(x[2][1]), "+f"(x[2][2]), "+f"(x[2][3]),
          "+f"(x[3][0]), "+f"(x[3][1]), "+f"(x[3][2]), "+f"(x[3][3]), "+f"(x[4][0]), "+f"(x[4][1]),
          "+f"(x[4][2]), "+f"(x[4][3]), "+f"(x[5][0]), "+f"(x[5][1]), "+f"(x[5][2]), "+f"(x[5][3]),
          "+f"(x[6][0]), "+f"(x[6][1]), "+f"(x[6][2]), "+f"(x[6][3]), "+f"(x[7][0]), "+f"(x[7][1]),
          "+f"(x[7][2]), "+f"(x[7][3])
        : "l"(a), "l"(b), "r"(more));
}

// x += a b for 64 rows and 16 steps: a in registers, a row of b holds one step.
__device__ __forceinline__ void wgmma_left(float (&x)[8][4], const unsigned (&a)[4], u64 b) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.b32 yes, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, yes, 1, 1, 1; }"
        : "+f"(x[0][0]), "+f"(x[0][1]), "+f"(x[0][2]), "+f"(x[0][3]), "+f"(x[1][0]), "+f"(x[1][1]),
          "+f"(x[1][2]), "+f"(x[1][3]), "+f"(x[2][0]), "+f"(x[2][1]), "+f"(x[2][2]), "+f"(x[2][3]),
          "+f"(x[3][0]), "+f"(x[3][1]), "+f"(x[3][2]), "+f"(x[3][3]), "+f"(x[4][0]), "+f"(x[4][1]),
          "+f"(x[4][2]), "+f"(x[4][3]), "+f"(x[5][0]), "+f"(x[5][1]), "+f"(x[5][2]), "+f"(x[5][3]),
          "+f"(x[6][0]), "+f"(x[6][1]), "+f"(x[6][2]), "+f"(x[6][3]), "+f"(x[7][0]), "+f"(x[7][1]),
          "+f"(x[7][2]), "+f"(x[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_left(float (&x)[16][4], const unsigned (&a)[4], u64 b) {
    asm volatile(
        "{ .reg .pred yes; setp.ne.b32 yes, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, yes, 1, 1, 1; }"
        : "+f"(x[0][0]), "+f"(x[0][1]), "+f"(x[0][2]), "+f"(x[0][3]), "+f"(x[1][0]), "+f"(x[1][1]),
          "+f"(x[1][2]), "+f"(x[1][3]), "+f"(x[2][0]), "+f"(x[2][1]), "+f"(x[2][2]), "+f"(x[2][3]),
          "+f"(x[3][0]), "+f"(x[3][1]), "+f"(x[3][2]), "+f"(x[3][3]), "+f"(x[4][0]), "+f"(x[4][1]),
          "+f"(x[4][2]), "+f"(x[4][3]), "+f"(x[5][0]), "+f"(x[5][1]), "+f"(x[5][2]), "+f"(x[5][3]),
          "+f"(x[6][0]), "+f"(x[6][1]), "+f"(x[6][2]), "+f"(x[6][3]), "+f"(x[7][0]), "+f"(x[7][1]),
          "+f"(x[7][2]), "+f"(x[7][3]), "+f"(x[8][0]), "+f"(x[8][1]), "+f"(x[8][2]), "+f"(x[8][3]),
          "+f"(x[9][0]), "+f"(x[9][1]), "+f"(x[9][2]), "+f"(x[9][3]), "+f"(x[10][0]), "+f"(x[10][1]),
          "+f"(x[10][2]), "+f"(x[10][3]), "+f"(x[11][0]), "+f"(x[11][1]), "+f"(x[11][2]), "+f"(x[11][3]),
          "+f"(x[12][0]), "+f"(x[12][1]), "+f"(x[12][2]), "+f"(x[12][3]), "+f"(x[13][0]), "+f"(x[13][1]),
          "+f"(x[13][2]), "+f"(x[13][3]), "+f"(x[14][0]), "+f"(x[14][1]), "+f"(x[14][2]), "+f"(x[14][3]),
          "+f"(x[15][0]), "+f"(x[15][1]), "+f"(x[15][2]), "+f"(x[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// What products under way write is not read or written before this place.
template <int N> __device__ __forceinline__ void settle(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            asm volatile("" : "+f"(x[n][e])::"memory");
}

// x = a bᵀ over the width of the head: 64 rows of a, N rows of b.
template <int N> __device__ __forceinline__ void start_scores(float (&x)[N / 8][4], u64 a, u64 b) {
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) {
        const int panel = d / 64, inside = d % 64;
        wgmma(x, further(a, panel * 64 * 64 + inside), further(b, panel * N * 64 + inside), d > 0);
    }
}

// x += w b: N rows of b, all columns.
template <int N>
__device__ __forceinline__ void start_products(float (&x)[HEAD_DIM / 8][4], const unsigned (&w)[N / 16][4], u64 b) {
#pragma unroll
    for (int r = 0; r < N / 16; ++r)
        wgmma_left(x, w[r], further(b, r * 16 * 64));
}

#endif
