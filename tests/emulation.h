// Enough of CUDA C++ for g++ to compile and run dcpcomm's kernels on a CPU: threads of a block are fibers that give way at
// barriers and where they wait; blocks run one after another, or take turns; ranks may be threads. Says whether a kernel's
// arithmetic, addresses and order of things are right, nothing of what only a GPU has: memory order, say, or its exp2.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define __CUDA_ARCH__ 0
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local
#define __launch_bounds__(...)
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
static inline void __threadfence_system();
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

// ---------------------------------------------------------------- threads as fibers

static thread_local bool turns;  // whether the blocks of the grid at work take turns
static thread_local unsigned seed;
static inline unsigned roll() {
    seed ^= seed << 13;
    seed ^= seed >> 17;
    return seed ^= seed << 5;
}
static inline void all_arrive();

enum Fiber { READY, AT_BARRIER, ENDED };
struct Block {
    Three index;
    unsigned left, waiting;  // fibers that have not ended, and those of them at the barrier
    int vote, voted;
};
static thread_local ucontext_t scheduler;
static thread_local ucontext_t *running;
static thread_local Block *block;
static thread_local char *state;

static inline void give_way(Fiber as) {
    const Three mine = threadIdx;
    *state = as;
    swapcontext(running, &scheduler);
    threadIdx = mine;
}
static inline int __syncthreads_or(int value) {
    block->vote |= value != 0;
    give_way(AT_BARRIER);
    return block->voted;
}
static inline void __syncthreads() { __syncthreads_or(0); }
static inline void pause() { give_way(READY); }

typedef void (*Body)(const void *);
static thread_local Body body;
static thread_local const void *argument;

static void fiber() {
    body(argument);
    give_way(ENDED);
}

// Blocks `first` to `first` + `count` - 1, which take turns.
static void run_blocks(unsigned first, unsigned count, unsigned gx, unsigned bx, unsigned by) {
    const size_t threads = bx * by, stack = 128 << 10, all = stack * threads * count;
    char *stacks = (char *)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::vector<ucontext_t> fibers(threads * count);
    std::vector<char> states(threads * count, READY);
    std::vector<Block> blocks(count);
    for (unsigned b = 0; b < count; b++)
        blocks[b] = {{(first + b) % gx, (first + b) / gx, 0}, (unsigned)threads, 0, 0, 0};
    for (size_t i = 0; i < fibers.size(); i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks + stack * i;
        fibers[i].uc_stack.ss_size = stack;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], fiber, 0);
    }
    for (size_t left = fibers.size(); left;) {
        bool moved = false;
        const size_t from = turns ? roll() % fibers.size() : 0;
        for (size_t k = 0; k < fibers.size(); k++) {
            const size_t i = (from + k) % fibers.size();
            if (states[i] != READY) continue;
            block = &blocks[i / threads];
            blockIdx = block->index;
            threadIdx = {(unsigned)(i % threads) % bx, (unsigned)(i % threads) / bx, 0};
            running = &fibers[i];
            state = &states[i];
            swapcontext(&scheduler, running);
            moved |= states[i] != READY;
            block->waiting += states[i] == AT_BARRIER;
            block->left -= states[i] == ENDED;
            left -= states[i] == ENDED;
        }
        for (unsigned b = 0; b < count; b++) {
            Block &one = blocks[b];
            if (!one.left || one.waiting < one.left) continue;
            one.voted = one.vote;
            one.vote = one.waiting = 0;
            for (size_t i = b * threads; i < (b + 1) * threads; i++)
                if (states[i] == AT_BARRIER) states[i] = READY;
        }
        if (!moved) sched_yield();  // all wait for another rank
    }
    all_arrive();
    munmap(stacks, all);
}

// `together`: all blocks are there at once, as a kernel needs that waits; it may then have no __shared__ memory.
static void run_grid(Body what, const void *params, unsigned gx, unsigned gy, unsigned bx, unsigned by, bool together) {
    body = what;
    argument = params;
    turns = together;
    seed = seed ? seed : (unsigned)(size_t)&seed * 2654435761u ^ (unsigned)clock() | 1;
    gridDim = {gx, gy, 1};
    blockDim = {bx, by, 1};
    const unsigned at_once = together ? gx * gy : 1;
    for (unsigned b = 0; b < gx * gy; b += at_once) run_blocks(b, at_once, gx, bx, by);
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

// What a rank stores arrives later, word by word in any order, but that of two stores to one word; all of it when its grid ends.
struct Late {
    u64 at, value;
    int bytes;
};
static thread_local std::vector<Late> under_way;

static inline void arrive(size_t i) {
    for (size_t before = 0; before < i; before++)
        if (under_way[before].at == under_way[i].at) i = before;
    const Late one = under_way[i];
    under_way.erase(under_way.begin() + i);
    if (one.bytes == 4)
        *(volatile u32 *)one.at = (u32)one.value;
    else
        *(volatile u64 *)one.at = one.value;
}
static inline void all_arrive() {
    while (!under_way.empty()) arrive(roll() % under_way.size());
}
static inline void store_late(u64 at, u64 value, int bytes) {
    under_way.push_back({at, value, bytes});
    if (!turns || under_way.size() > 64) all_arrive();
}
// Where a kernel's blocks take turns, they also do so at any access to memory that others see.
static inline void stir() {
    if (!turns) return;
    const unsigned dice = roll();
    if (dice % 4 == 0 && !under_way.empty()) arrive((dice >> 8) % under_way.size());
    if (dice >> 2 & 31) return;
    give_way(READY);
}
static inline void __threadfence_system() { all_arrive(); }
static inline u64 load_relaxed(u64 at) {
    stir();
    return *(volatile u64 *)at;
}
static inline u64 load_acquire(u64 at) { return load_relaxed(at); }
static inline u32 load_relaxed_u32(u64 at) { return *(volatile u32 *)at; }
static inline void store_relaxed(u64 at, u64 value) {
    stir();
    store_late(at, value, 8);
}
static inline void store_release(u64 at, u64 value) {
    all_arrive();
    *(volatile u64 *)at = value;
}
struct Vector;  // of memory.cuh; what takes one is defined behind the kernels
static inline Vector load_words(u64 at);
static inline void store_words(u64 at, const Vector &v);
static inline void wait_for_grid_before() {}
static inline void let_next_grid_begin() {}
static inline u64 nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (u64)now.tv_sec * 1000000000u + (u64)now.tv_nsec;
}
