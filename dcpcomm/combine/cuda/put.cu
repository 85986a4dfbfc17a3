// The exchange of a peer-memory transport in two kernels: `put` stores this rank's blocks into the peers' memory and raises a flag
// there, `take` waits for the peers' flags and copies what they put. Made to be right; the fused kernel is made to be fast.
//
// Two slots, used in turn. A rank writes a slot again only after its own take of the call between, whose rows its peer sent after
// that peer's take of the slot had ended. So no call may be one-way: also a call that is called off puts its headers.
//
// Epoch, counters and record are those of one channel, whose launches are in order. Layout: ChannelState and above it, params.cuh.

#include "memory.cuh"

__device__ __forceinline__ u64 base_of(u64 peers, u32 rank) { return ((const u64 *)peers)[rank]; }

template <typename Params>
__device__ __forceinline__ u64 slot_of(const Params &p, u64 base, u64 epoch, u32 source) {
    return base + (i64)(epoch & 1) * p.slot_stride + (i64)source * p.block_capacity;
}

template <typename Params>
__device__ __forceinline__ u64 flag_of(const Params &p, u64 base, u64 epoch, u32 source) {
    return base + p.flags_offset + ((i64)(epoch & 1) * p.ranks + source) * 128;
}

// The whole block adds one to `counter` after all that it stored; true in the grid's last block, which sees what all stored.
__device__ __forceinline__ bool is_last_block(u32 *counter) {
    __shared__ bool last;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        last = atomicAdd(counter, 1u) == gridDim.x * gridDim.y - 1;
        if (last) *counter = 0;
        __threadfence_system();
    }
    __syncthreads();
    return last;
}

extern "C" __global__ void __launch_bounds__(256) put(const __grid_constant__ PutParams p) {
    ChannelState &state = *(ChannelState *)p.state;
    __shared__ u64 shared_epoch;
    __shared__ bool shared_poisoned;
    if (threadIdx.x == 0) {
        shared_epoch = load_relaxed((u64)&state.epoch) + 1;
        shared_poisoned = load_relaxed(base_of(p.peers, p.rank) + p.poison_offset) != 0;
    }
    __syncthreads();
    const u64 epoch = shared_epoch;
    if (shared_poisoned) {
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && p.record && load_relaxed(p.record) == RECORD_CLEAR) {
            store_relaxed(p.record + 8, epoch);
            store_release(p.record, RECORD_GIVEN_UP_BY_PEER);
        }
    } else {
        const u32 peer = blockIdx.y + (blockIdx.y >= p.rank);
        const u64 from = p.send + (i64)peer * p.send_stride;
        const u64 to = slot_of(p, base_of(p.peers, peer), epoch, p.rank);
        const i64 step = (i64)gridDim.x * blockDim.x * 16;
        for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16; at < p.nbytes; at += step)
            store_vector(to + at, load_vector(from + at));
    }
    // Blocks that found the channel given up count as well, or the counter would not come back to 0. If any did, rows may be
    // missing: the last block then finds the word set too, and raises no flag.
    if (!is_last_block(&state.put_finished)) return;
    if (threadIdx.x == 0) {
        shared_poisoned = load_relaxed(base_of(p.peers, p.rank) + p.poison_offset) != 0;
        if (!shared_poisoned) store_relaxed((u64)&state.epoch, epoch);
    }
    __syncthreads();
    if (shared_poisoned) return;
    for (u32 peer = threadIdx.x; peer < p.ranks; peer += blockDim.x)
        if (peer != p.rank) store_release(flag_of(p, base_of(p.peers, peer), epoch, p.rank), epoch);
}

enum Failure { MISSING = 1, GIVEN_UP = 2 };

// Waits for one source; 0 when its rows are there.
__device__ __forceinline__ u32 await(u64 flag, u64 poison, u64 epoch, u64 started, u64 deadline_ns) {
    for (;;) {
        if (load_acquire(flag) >= epoch) return 0;
        if (load_relaxed(poison)) return GIVEN_UP;
        if (deadline_ns && nanoseconds() - started > deadline_ns) return MISSING;
    }
}

extern "C" __global__ void __launch_bounds__(512) take(const __grid_constant__ TakeParams p) {
    ChannelState &state = *(ChannelState *)p.state;
    const u64 started = nanoseconds();
    const u64 own = base_of(p.peers, p.rank);
    const u64 poison = own + p.poison_offset;
    const u64 epoch = load_relaxed((u64)&state.epoch);

    // Checked before the flags: the put of a channel that was given up hasn't advanced the epoch, whose flags are all there.
    u32 failed = load_relaxed(poison) ? GIVEN_UP : 0;
    for (u32 source = threadIdx.x; source < p.ranks && failed != GIVEN_UP; source += blockDim.x) {
        if (source == p.rank) continue;
        const u32 how = await(flag_of(p, own, epoch, source), poison, epoch, started, p.deadline_ns);
        // Where a peer gave up first, whoever isn't there by now is whom it missed. The record is in the host's memory: to
        // read it in a call that went well would cost more than the call.
        if (how && p.record && load_relaxed(p.record) == RECORD_CLEAR) store_relaxed(p.record + 8 * (2 + source), 1);
        failed |= how;
    }
    // Each block has its own verdict. Should they differ, the headers tell: they are copied last, by a block that knows them all.
    const int given_up = __syncthreads_or(failed & GIVEN_UP);
    const int missing = __syncthreads_or(failed & MISSING);
    if (missing || given_up) {
        if (threadIdx.x == 0) atomicOr(&state.take_failed, missing ? MISSING : GIVEN_UP);
    } else {
        const i64 step = (i64)gridDim.x * blockDim.x * 16;
        for (u32 source = 0; source < p.ranks; source++) {
            const u64 from = source == p.rank ? p.send + (i64)source * p.send_stride : slot_of(p, own, epoch, source);
            const u64 to = p.recv + (i64)source * p.recv_stride;
            for (i64 at = p.header_bytes + ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 16; at < p.nbytes; at += step)
                store_vector(to + at, load_vector(from + at));
        }
    }
    if (!is_last_block(&state.take_finished)) return;

    const u32 verdict = atomicOr(&state.take_failed, 0u);
    __syncthreads();
    const Vector ones = {{~0u, ~0u, ~0u, ~0u}};
    const u32 vectors = (u32)(p.header_bytes / 16);
    for (u32 i = threadIdx.x; i < vectors * p.ranks; i += blockDim.x) {
        const u32 source = i / vectors, at = i % vectors * 16;
        const u64 from = source == p.rank ? p.send + (i64)source * p.send_stride : slot_of(p, own, epoch, source);
        store_vector(p.recv + (i64)source * p.recv_stride + at, verdict ? ones : load_vector(from + at));
    }
    if (!verdict) return;
    for (u32 peer = threadIdx.x; peer < p.ranks; peer += blockDim.x)
        store_release(base_of(p.peers, peer) + p.poison_offset, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        state.take_failed = 0;
        if (p.record && load_relaxed(p.record) == RECORD_CLEAR) {
            store_relaxed(p.record + 8, epoch);
            __threadfence_system();
            store_release(p.record, verdict & MISSING ? RECORD_WRITTEN : RECORD_GIVEN_UP_BY_PEER);
        }
    }
}
