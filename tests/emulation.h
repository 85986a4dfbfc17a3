// Enough of CUDA C++ for g++ to compile and run dcpcomm's kernels on a CPU: threads of a block are fibers that give way at
// barriers, blocks run one after another; ranks may be threads. Says whether a kernel's arithmetic, addresses and order of things
// are right, nothing of what only a GPU has: concurrency of blocks, memory order, its exp2.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(threads)
#define __align__(bytes) alignas(bytes)

struct Three {
    unsigned int x, y, z;
};
static thread_local Three threadIdx, blockIdx, blockDim, gridDim;
struct uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline float __int_as_float(int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline int __float_as_int(float value) {
    int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline void __threadfence_system() {}
template <typename T>
static inline T atomicAdd(T *at, T value) {
    T before = *at;
    *at += value;
    return before;
}
static inline unsigned atomicOr(unsigned *at, unsigned value) {
    unsigned before = *at;
    *at |= value;
    return before;
}

// ---------------------------------------------------------------- one block at a time, its threads as fibers

static thread_local ucontext_t scheduler;
static thread_local ucontext_t *running;
static thread_local int vote, voted;

static inline int __syncthreads_or(int value) {
    const Three mine = threadIdx;
    vote |= value != 0;
    swapcontext(running, &scheduler);
    threadIdx = mine;
    return voted;
}
static inline void __syncthreads() { __syncthreads_or(0); }

typedef void (*Body)(const void *);
static thread_local Body body;
static thread_local const void *argument;
static thread_local bool *ended;

static void fiber() {
    body(argument);
    *ended = true;
    swapcontext(running, &scheduler);
}

static void run_grid(Body what, const void *params, unsigned gx, unsigned gy, unsigned bx, unsigned by) {
    const size_t stack = 128 << 10;
    static thread_local std::vector<char> stacks;
    if (stacks.size() < stack * bx * by) stacks.resize(stack * bx * by);
    body = what;
    argument = params;
    gridDim = {gx, gy, 1};
    blockDim = {bx, by, 1};
    std::vector<ucontext_t> fibers(bx * by);
    for (unsigned y = 0; y < gy; y++)
        for (unsigned x = 0; x < gx; x++) {
            blockIdx = {x, y, 0};
            std::vector<char> done(bx * by, 0);
            for (unsigned i = 0; i < bx * by; i++) {
                getcontext(&fibers[i]);
                fibers[i].uc_stack.ss_sp = stacks.data() + stack * i;
                fibers[i].uc_stack.ss_size = stack;
                fibers[i].uc_link = nullptr;
                makecontext(&fibers[i], fiber, 0);
            }
            for (bool any = true; any;) {
                any = false;
                vote = 0;
                for (unsigned i = 0; i < bx * by; i++) {
                    if (done[i]) continue;
                    threadIdx = {i % bx, i / bx, 0};
                    running = &fibers[i];
                    ended = (bool *)&done[i];
                    swapcontext(&scheduler, running);
                    any |= !done[i];
                }
                voted = vote;
            }
        }
}

// ---------------------------------------------------------------- what the kernels write in PTX

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

static inline float from_float16(u32 half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    float value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp((float)mantissa, -24)
                                  : std::ldexp((float)(mantissa | 1024), exponent - 25);
    return half & 0x8000u ? -value : value;
}
static inline u32 to_bfloat16(float value) {
    const u32 bits = (u32)__float_as_int(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
static inline u32 to_float16(float value) {
    const u32 sign = (u32)__float_as_int(value) >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (value != value) return 0x7fffu;
    if (size >= 65520.0f) return sign | 0x7c00u;
    int exponent;
    std::frexp(size, &exponent);
    if (size < 6.103515625e-05f) return sign | (u32)std::nearbyint(std::ldexp(size, 24));
    return sign | (((u32)(exponent + 13) << 10) + (u32)std::nearbyint(std::ldexp(size, 11 - exponent)));
}
static inline u64 load_acquire(u64 at) { return *(volatile u64 *)at; }
static inline u64 load_relaxed(u64 at) { return *(volatile u64 *)at; }
static inline void store_release(u64 at, u64 value) { *(volatile u64 *)at = value; }
static inline void store_relaxed(u64 at, u64 value) { *(volatile u64 *)at = value; }
static inline u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
}
