// Instantiates the kernels of decode/gemm.cu and decode/ring.cu under the launcher's names.

#if RING
#define BLOCKS 1
#define PRODUCT decode_gemm_ring
#else
#define BLOCKS 5
#define PRODUCT decode_gemm
#endif

#define DECODE_GEMM(name, EPILOGUE)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                    \
        name(const bf16* w, const float* bias, void* out, const void* x, const float* norm_weight,                   \
             const float* norm_bias, float offset, float eps, u32 centred, const float* cos, const float* sin,       \
             const u32* positions, const u32* slots, bf16* cache, u32 heads, u32 kv_heads, u32 dim, bool gelu,       \
             u32 rows, u32 n, u32 k, u32 warps) {                                                                    \
        const Prologue prologue = {x, norm_weight, norm_bias, offset, eps, centred};                                     \
        const Rope rope = {cos, sin, positions, slots, cache, heads, kv_heads, dim};                               \
        PRODUCT<EPILOGUE>(w, bias, out, prologue, rope, gelu, rows, n, k, warps);                                        \
    }
DECODE_GEMM(decode_gemm_sums, SUMS)
DECODE_GEMM(decode_gemm_add, ADD)
DECODE_GEMM(decode_gemm_gated, GATED)
DECODE_GEMM(decode_gemm_rope, ROPE)
