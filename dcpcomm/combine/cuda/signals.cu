// What stands around puts that a library makes on the stream: waiting for the words that peers add to, and moving blocks between the
// framework's buffers and memory that peers put to. Why that is safe, replayed too: docs/transports/nvshmem_put.md.
//
// A channel that was given up stays so: its launches end at once, and what they would have moved says so in its header.

#include "memory.cuh"

constexpr u32 PATIENCE = 64;        // looks at a word before the clock is read
constexpr u64 GIVEN_UP = ~(u64)0;   // in each word of a header: of no call
constexpr u32 HEADER_WORDS = 4;

// Only the first to find something writes: the words behind the state belong to it.
__device__ __forceinline__ void note(u64 record, u64 epoch, u64 state) {
    if (!record || load_relaxed(record) != RECORD_CLEAR) return;
    store_relaxed(record + 8, epoch);
    __threadfence_system();
    store_release(record, state);
}

// What a rank puts to the others behind every call: 0, or {missing ranks, call}, once it has given the channel up. It may come in two
// halves, so nothing counts before both are there.
constexpr u32 NAMED = 30;  // ranks with a bit of their own; the next is of all beyond
constexpr u32 WHOLE = 0x80000000u;

__device__ __forceinline__ u32 name_of(u32 n) { return 1u << (n < NAMED ? n : NAMED); }

// Of all others together: whom they miss, with WHOLE where any has given up.
__device__ __forceinline__ u32 told_by_peers(const AwaitParams &p) {
    u32 told = 0;
    for (u32 n = 0; n < p.ranks; n++) {
        const u64 word = n == p.rank ? 0 : load_relaxed(p.status + (u64)n * 8);
        if (word >> 32 && (u32)word) told |= (u32)word;
    }
    return told;
}

// By one thread. Who was told names whom the others miss; else those are missing whose words lack.
__device__ __forceinline__ void give_up(const AwaitParams &p, u64 target, u64 call, u32 told) {
    const bool notes = p.record && load_relaxed(p.record) == RECORD_CLEAR;
    u32 missing = told & ~WHOLE & ~(p.rank < NAMED ? name_of(p.rank) : 0);
    for (u32 n = 0; n < p.ranks; n++) {
        if (n == p.rank) continue;
        if (!told && load_acquire(p.words + (u64)n * 8) < target) missing |= name_of(n);
        if (told && notes && n < NAMED && missing & name_of(n)) store_relaxed(p.record + 8 * (2 + n), 1);
    }
    __threadfence_system();
    note(p.record, call, told ? RECORD_GIVEN_UP_BY_PEER : RECORD_WRITTEN);
    store_relaxed(p.status + (u64)p.rank * 8, (u64)(u32)call << 32 | missing | WHOLE);
    store_relaxed(p.state, told ? RECORD_GIVEN_UP_BY_PEER : RECORD_WRITTEN);
}

// One block. Every peer's word must reach as many calls as this channel has made, this one (`first`) or those before it (0). They
// only grow, and so does the count, here: a replay awaits its own call, not the captured one.
extern "C" __global__ void await_signals(const __grid_constant__ AwaitParams p) {
    const u64 count = load_relaxed(p.count), target = count + p.first;
    const bool given_up = load_relaxed(p.state) != RECORD_CLEAR;
    u32 since = 0, missing = 0;
    bool told = false;
    for (u32 n = threadIdx.x; n < p.ranks && !given_up && !told; n += blockDim.x) {
        if (n == p.rank) continue;
        for (u32 looks = 1; load_acquire(p.words + (u64)n * 8) < target; looks++) {
            if (looks % PATIENCE) continue;
            pause();
            told = told_by_peers(p);
            if (told) break;
            const u32 time = (u32)(nanoseconds() >> 20) | 1;
            if (!since) since = time;
            if (!p.deadline || time - since <= p.deadline) continue;
            missing = 1;
            if (p.record && load_relaxed(p.record) == RECORD_CLEAR) store_relaxed(p.record + 8 * (2 + n), 1);
            break;
        }
    }
    // All have read the count before the barrier.
    const bool lacking = __syncthreads_or(missing);
    if (threadIdx.x) return;
    if (!given_up) {
        const u32 names = told_by_peers(p);  // also where all came: nobody awaits this rank's next call
        if (names || lacking) give_up(p, target, count + 1, names);
    }
    store_relaxed(p.count, count + 1);
}

// A row of blocks for each of the other ranks. Of a channel that was given up no payload moves: what lies in `to` may be on its way
// for a second time, and must then have the same bits.
extern "C" __global__ void move_blocks(const __grid_constant__ MoveParams p) {
    const u32 n = blockIdx.y + (blockIdx.y >= p.rank);
    const u64 from = p.from + (i64)n * p.from_stride, to = p.to + (i64)n * p.to_stride;
    const bool leads = blockIdx.x == 0 && threadIdx.x == 0;
    // The same for all threads of a block, whatever another block finds meanwhile.
    if (__syncthreads_or(load_relaxed(p.state) != RECORD_CLEAR)) {
        if (leads)
            for (u32 i = 0; i < HEADER_WORDS; i++) *(u64 *)(to + 8 * i) = GIVEN_UP;
        return;
    }
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.vectors; i += gridDim.x * blockDim.x)
        store_vector(to + (u64)i * 16, load_vector(from + (u64)i * 16));
    __syncthreads();
    if (!leads) return;
    // As combine will see it: a header may be replaced while it is copied.
    bool told = false;
    for (u32 i = 0; i < HEADER_WORDS; i++) told |= *(const u64 *)(to + 8 * i) == GIVEN_UP;
    if (!told) return;
    note(p.record, load_relaxed(p.count), RECORD_GIVEN_UP_BY_PEER);
    store_relaxed(p.state, RECORD_GIVEN_UP_BY_PEER);
}
