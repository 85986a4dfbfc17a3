// What no merge can be faster than: the smallest kernel, the smallest exchange, and peers' memory stored to by a plain copy.
//
// Every kernel stands here twice, for a plain launch and for a programmatic one, which lets it begin before the kernel in front
// of it has ended: it then waits for that one before it touches memory.

#include "memory.cuh"

constexpr u32 MOST_RANKS = 32;

struct ExchangeParams {
    u64 peers[MOST_RANKS];  // where the ranks' memory begins; in the parameters, to spare a load
    u64 state;              // u64 [2] of this rank: number of the last exchange; 1 where a peer did not come
    i64 words;              // word of source n at words + 128 n
    u32 ranks;
    u32 rank;
    u32 most_polls;
    u32 unused;
};

struct CopyParams {
    u64 peers[MOST_RANKS];
    u64 from;  // what is for rank n at from + n * block_stride
    i64 block_stride;
    i64 offset;  // of this rank's block in every peer's memory
    i64 nbytes;  // to each peer, a multiple of 16
    u32 ranks;
    u32 rank;
};

struct SpinParams {
    u64 duration;  // nanoseconds
};

static_assert(sizeof(ExchangeParams) == KERNEL_EXCHANGE_PARAMS_BYTES, "ExchangeParams differs from bench/limits.py");
static_assert(sizeof(CopyParams) == KERNEL_COPY_PARAMS_BYTES, "CopyParams differs from bench/limits.py");
static_assert(sizeof(SpinParams) == KERNEL_SPIN_PARAMS_BYTES, "SpinParams differs from bench/limits.py");

// First the wait, so that never more than one grid stands in line: what is behind it may be launched from then on.
__device__ __forceinline__ void await_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(32) nothing(const __grid_constant__ SpinParams p) {}

extern "C" __global__ void __launch_bounds__(32) nothing_programmatic(const __grid_constant__ SpinParams p) {
    await_previous_grid();
}

// One word to each peer, one from each. A number that only grows needs no second slot: whoever is ahead is ahead by one.
__device__ __forceinline__ void exchange_words(const ExchangeParams &p) {
    const u32 peer = threadIdx.x;
    const u64 number = load_relaxed(p.state) + 1;
    bool missing = false;
    if (peer < p.ranks && peer != p.rank) {
        store_relaxed(p.peers[peer] + p.words + 128 * p.rank, number);
        const u64 word = p.peers[p.rank] + p.words + 128 * peer;
        for (u32 polls = 0; load_relaxed(word) < number && !missing; polls++) missing = polls >= p.most_polls;
    }
    __syncwarp();  // all have read the number
    if (missing) store_relaxed(p.state + 8, 1);
    if (threadIdx.x == 0) store_relaxed(p.state, number);
}

extern "C" __global__ void __launch_bounds__(32) exchange(const __grid_constant__ ExchangeParams p) { exchange_words(p); }

extern "C" __global__ void __launch_bounds__(32) exchange_programmatic(const __grid_constant__ ExchangeParams p) {
    await_previous_grid();
    exchange_words(p);
}

// A peer to each grid y. Four loads under way before the first store.
extern "C" __global__ void __launch_bounds__(512) copy(const __grid_constant__ CopyParams p) {
    const u32 peer = blockIdx.y + (blockIdx.y >= p.rank);
    const u64 from = p.from + (i64)peer * p.block_stride;
    const u64 to = p.peers[peer] + p.offset;
    const i64 step = (i64)gridDim.x * blockDim.x * 16;
    i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
    for (; at + 3 * step < p.nbytes; at += 4 * step) {
        Vector v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = load_vector(from + at + i * step);
#pragma unroll
        for (int i = 0; i < 4; i++) store_vector(to + at + i * step, v[i]);
    }
    for (; at < p.nbytes; at += step) store_vector(to + at, load_vector(from + at));
}

// Keeps a stream busy while the host puts on it what is to follow.
extern "C" __global__ void __launch_bounds__(32) spin(const __grid_constant__ SpinParams p) {
    const u64 started = nanoseconds();
    while (nanoseconds() - started < p.duration) {
    }
}
