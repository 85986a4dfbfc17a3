// What the fused kernel keeps in memory that peers write: where it lies, words that carry the epoch of their call, headers, and
// what a rank does that has waited for long. docs/fused-kernel.md has the protocol, tests/protocol its model.

#pragma once

#include "canonical.cuh"

constexpr u32 SENTINEL = 0xffffffffu;
constexpr u32 HEADER_BYTES = 128;  // a line for each source
enum Kind { KIND_ROWS = 0, KIND_CALLED_OFF = 1 };
constexpr u32 KIND_BIT = 0x80000000u;  // of a header's last word

// Why a thread has nothing to merge. CALLED_OFF is no failure of the channel; of the others, the first ends its wait.
enum Trouble { FINE = 0, CALLED_OFF = 1, DIFFERS = 2, GIVEN_UP = 4, MISSING = 8 };

// This call of the channel.
struct Now {
    u32 epoch;
    u64 slot;  // offset of its slot from a rank's base
};

// ---------------------------------------------------------------- a value and the epoch it belongs to, seen as a whole

__device__ __forceinline__ u64 stamped(u32 value, u32 epoch) { return (u64)epoch << 32 | value; }
__device__ __forceinline__ u32 stamp_of(u64 word) { return (u32)(word >> 32); }
__device__ __forceinline__ u32 value_of(u64 word) { return (u32)word; }

// ---------------------------------------------------------------- places

// The i-th of the other ranks.
__device__ __forceinline__ u32 peer_at(const FusedParams &p, u32 i) { return i + (i >= p.rank); }
template <int N>
__device__ __forceinline__ u64 base_of(const FusedParams &p, u32 rank) {
    return N ? p.peer[rank] : ((const u64 *)p.table)[rank];
}
__device__ __forceinline__ u64 payload_at(const FusedParams &p, u64 slot, u32 source, u32 index) {
    return slot + (i64)source * p.source_stride + (u64)index * 16;
}
__device__ __forceinline__ u64 lse_at(const FusedParams &p, u64 slot, u32 source, u32 row) {
    return slot + p.lse_offset + (i64)source * p.lse_stride + (u64)row * 8;
}
__device__ __forceinline__ u64 header_at(const FusedParams &p, u64 slot, u32 source) {
    return slot + p.header_offset + (u64)source * HEADER_BYTES;
}
__device__ __forceinline__ u64 poison_at(const FusedParams &p, u64 base, u32 source) {
    return base + p.poison_offset + (u64)source * 8;
}

// ---------------------------------------------------------------- headers

__device__ __forceinline__ u32 header_word(const FusedParams &p, u32 i) {
    return i == 0 ? p.tag : i == 1 ? p.tokens : i == 2 ? p.chunk : p.width | (p.kind ? KIND_BIT : 0);
}

// By one warp, to every peer and in every call: also one that was called off is a call to them.
template <int N>
__device__ __forceinline__ void send_headers(const FusedParams &p, const Now &now) {
    for (u32 n = threadIdx.x % 32; n < p.ranks; n += 32) {
        if (n == p.rank) continue;
        const u64 to = header_at(p, base_of<N>(p, n) + now.slot, p.rank);
        for (u32 i = 0; i < 4; i++) store_relaxed(to + 8 * i, stamped(header_word(p, i), now.epoch));
    }
}

// Whether it has come, and if so, what it means for this rank's call.
__device__ __forceinline__ bool header_came(const FusedParams &p, const Now &now, u64 at, u32 &trouble) {
    u64 word[4];
    bool came = true;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        word[i] = load_relaxed(at + 8 * i);
        came &= stamp_of(word[i]) == now.epoch;
    }
    if (!came) return false;
    const bool off = value_of(word[3]) & KIND_BIT;
    bool same = value_of(word[1]) == p.tokens && value_of(word[2]) == p.chunk;
    same &= (value_of(word[3]) & ~KIND_BIT) == p.width;
    if (!off && !p.kind) same &= value_of(word[0]) == p.tag;  // who called its call off knows the rest of it
    trouble = !same ? DIFFERS : off ? CALLED_OFF : FINE;
    return true;
}

// ---------------------------------------------------------------- a channel that was given up

// In a word of 31 ranks, and one bit for all beyond.
__device__ __forceinline__ u32 bit_of(u32 rank) { return 1u << (rank < 31 ? rank : 31); }

__device__ __forceinline__ void write_state(const FusedParams &p, u32 epoch, u64 state) {
    store_relaxed(p.record + 8, epoch);
    __threadfence_system();
    if (load_relaxed(p.record) == RECORD_CLEAR) store_release(p.record, state);
}

// Whether a rank, this one included, has given the channel up; noted, and told in this rank's own word: that one may have done so
// in a later call than this, which must not be answered here either.
__device__ __forceinline__ bool was_given_up(const FusedParams &p, u32 epoch, u64 own) {
    u32 missing = 0, any = 0;
    for (u32 n = 0; n < p.ranks; n++) {
        const u64 word = load_relaxed(poison_at(p, own, n));
        any |= word != 0;
        missing |= value_of(word);
    }
    if (!any) return false;
    const u64 mine = poison_at(p, own, p.rank);
    if (load_relaxed(mine)) return true;
    if (p.rank < 31) missing &= ~bit_of(p.rank);
    if (p.record && load_relaxed(p.record) == RECORD_CLEAR) {
        for (u32 n = 0; n < p.ranks && n < 31; n++)
            if (missing & bit_of(n)) store_relaxed(p.record + 8 * (2 + n), 1);
        write_state(p, epoch, RECORD_GIVEN_UP_BY_PEER);
    }
    store_relaxed(mine, stamped(missing, epoch));
    return true;
}

// Told to all, this rank itself included; threads that find the same at once say the same. `missing`: as `pending` below.
template <int N>
__device__ __forceinline__ void give_up(const FusedParams &p, u32 epoch, u32 first, u32 missing) {
    u32 named = 0;
    for (u32 i = 0; i < 32; i++)
        if (missing >> i & 1) {
            const u32 n = peer_at(p, first + i);
            named |= bit_of(n);
            if (p.record) store_relaxed(p.record + 8 * (2 + n), 1);
        }
    if (p.record) write_state(p, epoch, RECORD_WRITTEN);
    for (u32 n = 0; n < p.ranks; n++)
        store_release(poison_at(p, base_of<N>(p, n), p.rank), stamped(named, epoch));
}

// What a thread does that has waited for long, for the ranks of `pending`: bit i is the `first` + i-th of its peers. Returns those
// that called their call off, in the upper half, and what keeps the thread from waiting on. `since`: when it first came here; 0.
template <int N>
__device__ __forceinline__ u64 look_around(const FusedParams &p, const Now &now, u64 own, u32 first, u32 pending, u32 &since) {
    pause();
    const u32 time = (u32)(nanoseconds() >> 20) | 1;
    if (!since) since = time;
    if (was_given_up(p, now.epoch, own)) return GIVEN_UP;
    u32 off = 0, here = 0, trouble = FINE;
    for (u32 i = 0; i < 32; i++) {
        u32 why;
        if (!(pending >> i & 1) || !header_came(p, now, header_at(p, own + now.slot, peer_at(p, first + i)), why)) continue;
        here |= 1u << i;
        if (why == CALLED_OFF)
            off |= 1u << i;
        else
            trouble |= why;
    }
    pending &= ~off;
    if (pending && !trouble && p.deadline && time - since > p.deadline) {
        // Who is in this call, and whose rows lack all the same, waits for somebody itself: not to be named while another can be.
        const u32 absent = pending & ~here;
        give_up<N>(p, now.epoch, first, absent ? absent : pending);
        trouble = MISSING;
    }
    return (u64)off << 32 | trouble;
}
