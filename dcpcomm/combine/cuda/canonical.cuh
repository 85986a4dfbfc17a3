// The canonical combine: the one place where CUDA code weighs and adds partials. Every kernel, fused or not, calls these
// functions, so that a fallback to another transport can't change a bit of a result.
//
// Float32. All LSEs are known before the first is weighed; exp2; weights are normalised before the sum, by one reciprocal,
// because a sum of float16 rows could overflow first; sources in rank order, from +0, by fused multiply-add; one rounding.
// Each operation states its rounding: compiled with --fmad=false and without fast-math, nothing is contracted.

#pragma once

#include "memory.cuh"

#define INFINITY_F __int_as_float(0x7f800000)
#define LOWEST_F __int_as_float(0xff7fffff)
#define LOG2E_F 1.44269504088896340736f

// -inf for whatever must not count: NaN and +inf too.
__device__ __forceinline__ float clean_lse(float lse) { return lse < INFINITY_F ? lse : -INFINITY_F; }

// Where a maximum of LSEs begins. Not -inf, so that -inf - top stays -inf instead of NaN.
__device__ __forceinline__ float lowest_top() { return LOWEST_F; }

__device__ __forceinline__ float weight_of(float lse, float top, bool base_two) {
    float below = __fsub_rn(lse, top);
    return exp2f(base_two ? below : __fmul_rn(below, LOG2E_F));
}

// NaN where every source is empty: 0 * (1 / 0). `counts` is false for it, as for a weight of 0.
__device__ __forceinline__ float share_of(float weight, float inverse) { return __fmul_rn(weight, inverse); }

__device__ __forceinline__ bool counts(float share) { return share > 0.0f; }

// -inf where every source is empty: lowest + log 0.
__device__ __forceinline__ float merged_lse(float top, float total, bool base_two) {
    return __fadd_rn(top, base_two ? log2f(total) : logf(total));
}

// N known LSEs, cleaned, become their shares.
template <int N>
__device__ __forceinline__ void shares_of(float (&lse)[N], bool base_two, float &top, float &total, float &inverse) {
    top = lowest_top();
#pragma unroll
    for (int n = 0; n < N; n++) top = fmaxf(top, lse[n]);
    total = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
        lse[n] = weight_of(lse[n], top, base_two);
        total = __fadd_rn(total, lse[n]);
    }
    inverse = __frcp_rn(total);
#pragma unroll
    for (int n = 0; n < N; n++) lse[n] = share_of(lse[n], inverse);
}

// The same for any number of LSEs, which `lse_at(n)` gives again each time it is asked.
template <typename LseAt>
__device__ __forceinline__ void weigh_all(u32 ranks, LseAt lse_at, bool base_two, float &top, float &total,
                                          float &inverse) {
    top = lowest_top();
    for (u32 n = 0; n < ranks; n++) top = fmaxf(top, lse_at(n));
    total = 0.0f;
    for (u32 n = 0; n < ranks; n++) total = __fadd_rn(total, weight_of(lse_at(n), top, base_two));
    inverse = __frcp_rn(total);
}

// ---------------------------------------------------------------- elements: float32, bfloat16, float16

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

__device__ __forceinline__ float from_bfloat16(u32 half) { return __int_as_float((i32)(half << 16)); }

__device__ __forceinline__ float from_float16(u32 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
    return value;
}

__device__ __forceinline__ u32 to_bfloat16(float value) {
#if __CUDA_ARCH__ >= 800
    u16 half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    const u32 bits = (u32)__float_as_int(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
}

__device__ __forceinline__ u32 to_float16(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

template <int DTYPE>
struct Element {
    static constexpr int BYTES = DTYPE == FLOAT32 ? 4 : 2;
    // How many there are in a 32-bit word.
    static constexpr int PER_WORD = 4 / BYTES;

    static __device__ __forceinline__ float decode(u32 bits) {
        if (DTYPE == BFLOAT16) return from_bfloat16(bits & 0xffffu);
        if (DTYPE == FLOAT16) return from_float16(bits & 0xffffu);
        return __int_as_float((i32)bits);
    }

    static __device__ __forceinline__ u32 encode(float value) {
        if (DTYPE == BFLOAT16) return to_bfloat16(value);
        if (DTYPE == FLOAT16) return to_float16(value);
        return (u32)__float_as_int(value);
    }
};

// accumulated += share * what a word holds.
template <int DTYPE>
__device__ __forceinline__ void add_word(float *accumulated, float share, u32 word) {
    typedef Element<DTYPE> E;
    accumulated[0] = __fmaf_rn(share, E::decode(word), accumulated[0]);
    if (E::PER_WORD == 2) accumulated[1] = __fmaf_rn(share, E::decode(word >> 16), accumulated[1]);
}

// A word from what was accumulated: the one rounding.
template <int DTYPE>
__device__ __forceinline__ u32 round_word(const float *accumulated) {
    typedef Element<DTYPE> E;
    return E::PER_WORD == 2 ? E::encode(accumulated[0]) | E::encode(accumulated[1]) << 16 : E::encode(accumulated[0]);
}

// ---------------------------------------------------------------- LSEs as they are stored

// Bits first, so that many loads are under way before the first is looked at.
__device__ __forceinline__ u32 load_lse_bits(u64 at, u32 kind) {
    if (kind == LSE_FLOAT32) return load_u32(at);
    u32 bits = load_u16(at);
    if (kind == LSE_FLOAT32_HALVES) bits |= load_u16(at + 2) << 16;
    return bits;
}

__device__ __forceinline__ float lse_from_bits(u32 bits, u32 kind) {
    float lse = __int_as_float((i32)bits);
    if (kind == LSE_BFLOAT16) lse = from_bfloat16(bits);
    if (kind == LSE_FLOAT16) lse = from_float16(bits);
    return clean_lse(lse);
}
