// wgmma, for compute capability 9.0: a warpgroup (four warps) multiplies 64 rows, with operands in shared memory. A warp has 16
// of the rows, and its accumulators have the register layout of mma.sync in attention/tile.cu.
//
// A matrix in shared memory is stored in panels of 64 columns. A row of a panel is 128 bytes, whose 16-byte units are permuted by
// the row (unit ^ row % 8): 128-byte swizzle. This serves both uses of a matrix: reducing over the head's columns, and over the
// rows. HEAD_DIM is 64 or 128.
//

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Offset of the 8 columns from `column` on of a row, in a matrix of R rows.
template <int R> __device__ __forceinline__ int place(int row, int column) {
    return column / 64 * (R * 64) + row * 64 + ((column % 64 / 8) ^ (row & 7)) * 8;
}

// Matrix descriptor: address, bytes between panels, and bytes between groups of 8 rows.
__device__ __forceinline__ u64 described(u32 address, u32 panel) {
    return (address & 0x3ffff) >> 4 | (u64)(panel >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// The same matrix, starting `elements` later.
__device__ __forceinline__ u64 further(u64 matrix, u32 elements) { return matrix + (elements * 2 >> 4); }

// Copies 16 bytes from global to shared memory; zeros unless `valid`.
__device__ __forceinline__ void copy_to(u32 to, const bf16 *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Shared memory aligned to 1024 bytes, as swizzling requires.
__device__ __forceinline__ u32 aligned(const unsigned char *shared) { return (shared_address(shared) + 1023) & ~1023u; }

// Warp index, in a form that the compiler knows to be uniform.
__device__ __forceinline__ int own_warp() { return __shfl_sync(ALL, (int)threadIdx.x / 32, 0); }

// Fence: registers written before may be read by wgmma after this.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the wgmmas issued since the last commit as a group.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most LEFT groups are pending.
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Makes this thread's copies to shared memory visible to wgmma.
__device__ __forceinline__ void products_see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// x += a bᵀ for 64 rows and k = 16, or x = a bᵀ unless `more`; both operands are K-major.
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

// x += a b for 64 rows and k = 16: a in registers, b MN-major (a row holds one k).
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

// Compiler barrier: accumulators of pending wgmmas are not accessed before this point.
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
