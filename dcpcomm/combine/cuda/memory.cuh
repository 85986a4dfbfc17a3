// Loads, stores, quotients and waits that the kernels share.

#pragma once

#include "params.cuh"

struct __align__(16) Vector {
    u32 word[4];
};

// Plain pointers, though all of it is global memory: told so by __cvta_global_to_generic, ptxas 12.9 never ends on combine.cu.
__device__ __forceinline__ u32 load_u16(u64 at) { return *(const u16 *)at; }
__device__ __forceinline__ u32 load_u32(u64 at) { return *(const u32 *)at; }
__device__ __forceinline__ Vector load_vector(u64 at) {
    const uint4 four = *(const uint4 *)at;
    return {{four.x, four.y, four.z, four.w}};
}
// `v` stays what it is where nothing is `wanted`. Without a branch, so that the loads of many sources are under way at once.
__device__ __forceinline__ void load_vector_if(Vector &v, u64 at, bool wanted) {
    asm volatile(
        "{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
        : "l"(at), "r"((u32)wanted)
        : "memory");
}
__device__ __forceinline__ void store_vector(u64 at, const Vector &v) {
    *(uint4 *)at = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

__device__ __forceinline__ u32 quotient(u32 n, Divisor by) { return by.magic ? __umulhi(n, by.magic) >> by.shift : n; }

// One element's bits, from an address that is a multiple of its size, or (unit 2) of 2 only.
template <int ITEM>
__device__ __forceinline__ u32 load_element(u64 at, u32 unit) {
    if (ITEM == 2) return load_u16(at);
    return unit >= 4 ? load_u32(at) : load_u16(at) | load_u16(at + 2) << 16;
}

template <int ITEM>
__device__ __forceinline__ void store_element(u64 at, u32 bits, u32 unit) {
    if (ITEM == 4 && unit >= 4) {
        *(u32 *)at = bits;
    } else {
        *(u16 *)at = (u16)bits;
        if (ITEM == 4) *(u16 *)(at + 2) = (u16)(bits >> 16);
    }
}

// Vector `vector` of a row whose elements are `step` bytes apart, 0 behind its end: where not 16 bytes can be loaded at once.
template <int ITEM>
__device__ __forceinline__ Vector load_elements(u64 row, u32 vector, u32 row_bytes, i64 step, u32 unit) {
    Vector v = {{0, 0, 0, 0}};
#pragma unroll
    for (u32 i = 0; i < 16; i += ITEM) {
        const u32 byte = vector * 16 + i;
        if (byte < row_bytes) v.word[i / 4] |= load_element<ITEM>(row + (i64)(byte / ITEM) * step, unit) << (i % 4 * 8);
    }
    return v;
}

// ---------------------------------------------------------------- counts

__device__ __forceinline__ i64 load_count(u64 at, u32 wide) { return wide ? *(const i64 *)at : (i64) * (const i32 *)at; }

// Whether row `token` of the caller's B is empty on this rank; as dcpcomm/rows.py has it.
__device__ __forceinline__ bool row_is_empty(const Counts &c, i64 token) {
    if (c.mode == COUNTS_NONE) return false;
    if (c.mode == COUNTS_PER_ROW) return load_count(c.counts + token * c.counts_step, c.counts_wide) <= 0;
    if (c.requests == 0) return true;
    u32 low = 0, high = c.requests + 1;  // the first start past `token`
    while (low < high) {
        const u32 middle = (low + high) >> 1;
        if (load_count(c.starts + (i64)middle * c.starts_step, c.starts_wide) > token)
            high = middle;
        else
            low = middle + 1;
    }
    if (low == 0 || low > c.requests) return true;
    return load_count(c.counts + (i64)(low - 1) * c.counts_step, c.counts_wide) <= 0;
}

// ---------------------------------------------------------------- words that other GPUs and the host see

__device__ __forceinline__ u64 load_acquire(u64 at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ u64 load_relaxed(u64 at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u64 at, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(u64 at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
// Not from this SM's own cache, where a kernel that ran beside the one before may have left what it was.
__device__ __forceinline__ u32 load_relaxed_u32(u64 at) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
// Of memory that a peer writes at any time: each 32-bit word is whole, the four need not be from one store.
__device__ __forceinline__ Vector load_words(u64 at) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_words(u64 at, const Vector &v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]),
                 "r"(v.word[2]), "r"(v.word[3])
                 : "memory");
}
// Leaves the load and store units to others for a moment.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 40;" ::: "memory"); }

// ---------------------------------------------------------------- programmatic launches: both do nothing in others

__device__ __forceinline__ void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
