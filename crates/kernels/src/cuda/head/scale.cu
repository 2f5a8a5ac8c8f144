// Shared by the head's kernels: soft cap, temperature, and loading logits.

// Scales a raw logit: cap * tanh(x / cap) / temperature; cap is 0 without a soft cap.
struct Head {
    float inverse, temperature, cap;
    __device__ __forceinline__ float scale(float raw) const {
        if (cap == 0.0f) return raw * inverse;
        return tanh_(raw * (1.0f / cap)) * cap * inverse;
    }
    // The derivative, given the scaled logit.
    __device__ __forceinline__ float slope(float scaled) const {
        if (cap == 0.0f) return inverse;
        const float t = scaled * (temperature / cap);
        return inverse * (1.0f - t * t);
    }
};

// e^x for x <= about 0, by the GPU's 2^x instruction: fast enough for 10^9 logits per step.
__device__ __forceinline__ float weight(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

// Four raw logits from `at` on; `fill` past the end of the vocabulary.
__device__ __forceinline__ vec4 raw4(const float* row, u32 at, u32 vocab, float fill) {
    if (vocab % 4 == 0 && at < vocab) return load4(row, at);
    vec4 v;
#pragma unroll
    for (int i = 0; i < 4; i++) v.x[i] = at + i < vocab ? row[at + i] : fill;
    return v;
}
