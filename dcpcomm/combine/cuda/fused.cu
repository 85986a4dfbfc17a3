// The whole merge of a peer-memory transport in one launch: a thread stores its vector of a row straight into each peer's memory,
// waits for the same vector from each, and merges them in registers. Why that is safe: docs/fused-kernel.md.
//
// Compiled for one KERNEL_DTYPE and one KERNEL_RANKS (0: any number), and for one KERNEL_VECTORS a row and one KERNEL_HEADS (0:
// told at run time). KERNEL_STRICT: with the fence that PTX asks for. KERNEL_EARLY: under a programmatic launch, the next grid
// becomes resident while this one runs.

#include "peer.cuh"

constexpr int DTYPE = KERNEL_DTYPE;
constexpr int ITEM = Element<DTYPE>::BYTES;
constexpr int N = KERNEL_RANKS;
constexpr u32 WARP = 32;
constexpr i32 AT_ENTRY = N < 8 ? N : 8;  // ranks whose poison is looked for beside the first loads
constexpr u32 AT_ONCE = N > 8 ? 4 : N > 1 ? N - 1 : 1;  // loads for how many peers are under way at once
// Threads of a block at the most: what waits for many ranks at once takes many registers. See kernels.py's `fused_threads`.
constexpr u32 THREADS_16 = N > 8 ? 256 : 512;
constexpr u32 THREADS_1 = N > 4 ? 256 : 512;
constexpr u32 RESIDENT = N == 2 && __CUDA_ARCH__ >= 900 ? 2 : 1;  // such blocks on a multiprocessor
constexpr u32 PATIENCE = 64;                            // looks at what it waits for before it looks around

struct Place {
    u32 row, t, h, vector;
};

__device__ __forceinline__ Place place_of(const FusedParams &p, u32 index) {
    constexpr u32 VECTORS = KERNEL_VECTORS, HEADS = KERNEL_HEADS;
    Place at;
    at.row = VECTORS ? index / (VECTORS ? VECTORS : 1) : quotient(index, p.by_vectors);
    at.vector = index - at.row * (VECTORS ? VECTORS : p.vectors);
    at.t = HEADS ? at.row / (HEADS ? HEADS : 1) : quotient(at.row, p.by_heads);
    at.h = at.row - at.t * (HEADS ? HEADS : p.heads);
    return at;
}

__device__ __forceinline__ u32 peers_of(const FusedParams &p) { return (N ? N : p.ranks) - 1; }

// ---------------------------------------------------------------- this rank's rows

template <bool ALIGNED>
__device__ __forceinline__ Vector gather(const FusedParams &p, const Place &at, u32 n) {
    const u64 row = p.rows + (i64)n * p.rows_n + (i64)at.t * p.rows_t + (i64)at.h * p.rows_h;
    if (ALIGNED) return load_vector(row + (u64)at.vector * 16);
    return load_elements<ITEM>(row, at.vector, p.row_bytes, p.rows_d, p.rows_unit);
}

__device__ __forceinline__ u32 lse_bits(const FusedParams &p, const Place &at, u32 n) {
    return load_lse_bits(p.lse + (i64)n * p.lse_n + (i64)at.t * p.lse_t + (i64)at.h * p.lse_h, p.lse_kind);
}

__device__ __forceinline__ bool is_empty(const FusedParams &p, const Place &at, u32 n) {
    return row_is_empty(p.counts, p.counts.token0 + (i64)n * p.counts.token_n + (i64)at.t);
}

template <bool ALIGNED>
__device__ __forceinline__ void scatter(const FusedParams &p, const Place &at, const Vector &v) {
    const u64 row = p.out + (i64)at.t * p.out_t + (i64)at.h * p.out_h;
    if (ALIGNED) store_vector(row + (u64)at.vector * 16, v);
#pragma unroll
    for (u32 i = 0; !ALIGNED && i < 16; i += ITEM) {
        const u32 byte = at.vector * 16 + i;
        if (byte < p.row_bytes)
            store_element<ITEM>(row + (i64)(byte / ITEM) * p.out_d, v.word[i / 4] >> (i % 4 * 8), p.out_unit);
    }
}

// ---------------------------------------------------------------- sending

// One vector of what goes to the peers from `first` on, as many as AT_ONCE. In two parts: all loads, then what they decide.
template <bool ALIGNED>
struct Outgoing {
    Vector v[AT_ONCE];
    u32 bits[AT_ONCE];
    u32 empty;  // by counts: bit i

    __device__ __forceinline__ void load(const FusedParams &p, const Place &at, u32 first) {
        empty = 0;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + i < peers_of(p)) {
                const u32 n = peer_at(p, first + i);
                bits[i] = lse_bits(p, at, n);
                v[i] = gather<ALIGNED>(p, at, n);
            }
        if (p.counts.mode == COUNTS_NONE) return;
        bool one = false;
        for (u32 i = 0; i < AT_ONCE && first + i < peers_of(p); i++) {
            // The same row of the caller's for all peers, but where tokens are scattered.
            if (i == 0 || p.counts.token_n) one = is_empty(p, at, peer_at(p, first + i));
            empty |= (u32)one << i;
        }
    }

    __device__ __forceinline__ void store(const FusedParams &p, const Now &now, const Place &at, u32 index, u32 first) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (first + i >= peers_of(p)) continue;
            const u32 n = peer_at(p, first + i);
            const float lse = empty >> i & 1 ? -INFINITY_F : lse_from_bits(bits[i], p.lse_kind);
            const u64 slot = base_of<N>(p, n) + now.slot;
            if (lse > -INFINITY_F) {
                // A payload that looks like the sentinel is sent as the NaN next to it.
#pragma unroll
                for (int w = 0; w < 4; w++) v[i].word[w] -= v[i].word[w] == SENTINEL;
                store_words(payload_at(p, slot, p.rank, index), v[i]);
            }
            if (at.vector == 0)
                store_relaxed(lse_at(p, slot, p.rank, at.row), stamped((u32)__float_as_int(lse), now.epoch));
        }
    }

    // To all peers. `loaded`: the first are.
    __device__ __forceinline__ void send(const FusedParams &p, const Now &now, const Place &at, u32 index, bool loaded) {
        for (u32 first = 0; first < peers_of(p); first += AT_ONCE) {
            if (first || !loaded) load(p, at, first);
            store(p, now, at, index, first);
        }
    }
};

// ---------------------------------------------------------------- receiving

struct Merged {
    float value[16 / ITEM];
    float lse;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 16 / ITEM; i++) value[i] = 0.0f;
    }
    __device__ __forceinline__ void add(float share, const Vector &v) {
#pragma unroll
        for (int w = 0; w < 4; w++) add_word<DTYPE>(value + w * 4 / ITEM, share, v.word[w]);
    }
};

// Takes a source's vector where it is whole, and puts the sentinel back at once. Whether one comes follows from the LSE that came.
__device__ __forceinline__ bool take(u64 from, float lse, const Vector &v) {
    if (!(lse > -INFINITY_F)) return true;
    bool whole = true;
#pragma unroll
    for (int w = 0; w < 4; w++) whole &= v.word[w] != SENTINEL;
    if (whole) store_words(from, {{SENTINEL, SENTINEL, SENTINEL, SENTINEL}});
    return whole;
}

// Waits for the rows of all peers, which are taken as they come, then merges all in the order of ranks.
template <bool ALIGNED, int RANKS>
struct Receive {
    static __device__ __forceinline__ u32 row(const FusedParams &p, const Now &now, u64 own, u32 index, u32 &since,
                                              Merged &merged) {
        constexpr u32 PEERS = RANKS - 1;
        const Place at = place_of(p, index);
        const bool merges = p.kind == KIND_ROWS;
        u32 own_bits = 0;
        bool own_empty = false;
        Vector own_row = {{0, 0, 0, 0}};
        if (merges) {  // on its way while the peers' rows are awaited
            own_bits = lse_bits(p, at, p.rank);
            own_row = gather<ALIGNED>(p, at, p.rank);
            own_empty = is_empty(p, at, p.rank);
        }
        Vector v[PEERS];
        float lse[PEERS];
        const u64 slot = own + now.slot;
        u32 pending = (1u << PEERS) - 1;
        for (u32 looks = 1;; looks++) {
            u64 word[PEERS];
#pragma unroll
            for (u32 i = 0; i < PEERS; i++)
                if (pending >> i & 1) {
                    word[i] = load_relaxed(lse_at(p, slot, peer_at(p, i), at.row));
                    v[i] = load_words(payload_at(p, slot, peer_at(p, i), index));
                }
#pragma unroll
            for (u32 i = 0; i < PEERS; i++)
                if (pending >> i & 1 && stamp_of(word[i]) == now.epoch) {
                    lse[i] = __int_as_float((i32)value_of(word[i]));
                    if (take(payload_at(p, slot, peer_at(p, i), index), lse[i], v[i])) pending &= ~(1u << i);
                }
            if (!pending) break;
            if (looks % PATIENCE) continue;
            const u64 seen = look_around<N>(p, now, own, 0, pending, since);
            const u32 off = (u32)(seen >> 32);
#pragma unroll
            for (u32 i = 0; i < PEERS; i++)
                if (off >> i & 1) lse[i] = -INFINITY_F;
            pending &= ~off;
            if (u32 trouble = (u32)seen) return trouble;
            if (!pending) break;
        }
        if (!merges) return FINE;

        // Selected by value: looked up by the rank's number, the arrays would be pushed out to memory.
        const float own_lse = own_empty ? -INFINITY_F : lse_from_bits(own_bits, p.lse_kind);
        float share[RANKS], top, total, inverse;
#pragma unroll
        for (u32 n = 0; n < RANKS; n++) {
            const float below = lse[n < PEERS ? n : 0], above = lse[n ? n - 1 : 0];
            share[n] = n == p.rank ? own_lse : n < p.rank ? below : above;
        }
        shares_of<RANKS>(share, p.base_two, top, total, inverse);
        merged.clear();
#pragma unroll
        for (u32 n = 0; n < RANKS; n++) {
            Vector one;
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const u32 below = v[n < PEERS ? n : 0].word[w], above = v[n ? n - 1 : 0].word[w];
                one.word[w] = n == p.rank ? own_row.word[w] : n < p.rank ? below : above;
            }
            if (counts(share[n])) merged.add(share[n], one);
        }
        merged.lse = merged_lse(top, total, p.base_two);
        return FINE;
    }
};

// The same for what comes from one source.
template <typename Came>
__device__ __forceinline__ u32 await(const FusedParams &p, const Now &now, u64 own, u32 peer, u32 &since, Came came) {
    for (u32 looks = 1; !came(); looks++) {
        if (looks % PATIENCE) continue;
        const u64 seen = look_around<N>(p, now, own, peer, 1, since);
        if (seen) return seen >> 32 ? CALLED_OFF : (u32)seen;
    }
    return FINE;
}

template <bool ALIGNED>
struct Receive<ALIGNED, 0> {
    static __device__ __forceinline__ u32 row(const FusedParams &p, const Now &now, u64 own, u32 index, u32 &since,
                                              Merged &merged) {
        const Place at = place_of(p, index);
        const u64 slot = own + now.slot;
        for (u32 i = 0; i < peers_of(p); i++) {
            const u64 word = lse_at(p, slot, peer_at(p, i), at.row);
            const u32 trouble = await(p, now, own, i, since, [&] { return stamp_of(load_relaxed(word)) == now.epoch; });
            if (trouble > CALLED_OFF) return trouble;
        }
        const bool merges = p.kind == KIND_ROWS;
        const bool counted = merges && !is_empty(p, at, p.rank);
        const float own_lse = counted ? lse_from_bits(lse_bits(p, at, p.rank), p.lse_kind) : -INFINITY_F;
        const auto lse_from = [&](u32 n) {
            if (n == p.rank) return own_lse;
            const u64 word = load_relaxed(lse_at(p, slot, n, at.row));
            return stamp_of(word) == now.epoch ? __int_as_float((i32)value_of(word)) : -INFINITY_F;  // called off
        };
        float top, total, inverse;
        merged.clear();
        weigh_all(p.ranks, lse_from, p.base_two, top, total, inverse);
        for (u32 n = 0; n < p.ranks; n++) {
            const float lse = lse_from(n);
            if (!(lse > -INFINITY_F)) continue;
            const float share = share_of(weight_of(lse, top, p.base_two), inverse);
            Vector v;
            if (n == p.rank) {
                v = gather<ALIGNED>(p, at, n);
            } else {
                const u64 from = payload_at(p, slot, n, index);
                const u32 trouble = await(p, now, own, n - (n > p.rank), since, [&] { return take(from, lse, v = load_words(from)); });
                if (trouble) return trouble;
            }
            if (counts(share)) merged.add(share, v);
        }
        merged.lse = merged_lse(top, total, p.base_two);
        return FINE;
    }
};

// By one warp of every block, while the others wait for rows: where a header differs, no block answers.
__device__ __forceinline__ u32 await_headers(const FusedParams &p, const Now &now, u64 own, u32 &since) {
    u32 all = FINE;
    for (u32 i = threadIdx.x % WARP; i < peers_of(p) && all <= CALLED_OFF; i += WARP) {
        const u64 at = header_at(p, own + now.slot, peer_at(p, i));
        u32 why = FINE;
        const u32 trouble = await(p, now, own, i, since, [&] { return header_came(p, now, at, why); });
        all |= trouble | why;
    }
    return all;
}

// The headers as this rank saw them, where one isn't this call's; then this channel is spent, unless calls were called off alone.
__device__ __noinline__ void record_headers(const FusedParams &p, Now now, u64 own, u64 ordinal) {
    u32 worst = FINE;
    for (u32 n = 0; n < p.ranks; n++)
        if (n != p.rank) {
            u32 why;
            if (header_came(p, now, header_at(p, own + now.slot, n), why)) worst = why > worst ? why : worst;
        }
    if (worst == FINE || (worst == CALLED_OFF && p.kind != KIND_ROWS)) return;
    if (worst == DIFFERS) store_relaxed(poison_at(p, own, p.rank), stamped(0, now.epoch));
    if (!p.headers || load_relaxed(p.headers) != RECORD_CLEAR) return;
    for (u32 n = 0; n <= p.ranks; n++) {  // this rank's own first
        u32 value[4];
        u32 why;
        const u64 at = header_at(p, own + now.slot, n ? n - 1 : 0);
        const bool came = n && n - 1 != p.rank && header_came(p, now, at, why);
        for (u32 i = 0; i < 4; i++) value[i] = came ? value_of(load_relaxed(at + 8 * i)) : header_word(p, i);
        const u64 to = p.headers + 8 * (1 + 4 * n);
        store_relaxed(to, ordinal);
        store_relaxed(to + 8, (u64)value[1] << 32 | value[0]);
        store_relaxed(to + 16, (u64)(value[3] & ~KIND_BIT) << 32 | value[2]);
        store_relaxed(to + 24, value[3] & KIND_BIT ? KIND_CALLED_OFF : KIND_ROWS);
    }
    __threadfence_system();
    store_release(p.headers, RECORD_WRITTEN);
}

template <bool ALIGNED>
__device__ __forceinline__ void fused(const FusedParams &p) {
    wait_for_grid_before();
    if (KERNEL_EARLY) let_next_grid_begin();
    const u64 own = base_of<N>(p, p.rank);
    Now now;
    now.epoch = load_relaxed_u32(p.epochs + (u64)blockIdx.x * 4) + 1;
    now.slot = (now.epoch & 1) * p.slot_stride;
    u32 poison[AT_ENTRY ? AT_ENTRY : 1];  // the epochs alone: 0 where there is none
#pragma unroll
    for (i32 n = 0; n < AT_ENTRY; n++) poison[n] = load_relaxed_u32(poison_at(p, own, n) + 4);

    // The last warp of a block has no rows. Its part, the headers, is done beside the others', not before or after it.
    const u32 workers = blockDim.x - WARP;
    const bool works = threadIdx.x < workers;
    const bool leads = blockIdx.x == 0 && threadIdx.x == workers;
    const u32 total = works ? p.row_count * (KERNEL_VECTORS ? KERNEL_VECTORS : p.vectors) : 0;
    const u32 step = gridDim.x * workers;
    u32 index = works ? blockIdx.x * workers + threadIdx.x : 0;
    Outgoing<ALIGNED> outgoing;
    const bool sends = p.kind == KIND_ROWS;
    if (index < total && sends) outgoing.load(p, place_of(p, index), 0);

    // Given up in an earlier call: nothing is sent any more. In this one or a later: sent, or peers would miss the header; but
    // whoever comes so late isn't answered either. All above is on its way by now.
    u32 trouble = FINE, told = FINE;
    const auto heed = [&](u32 since) {
        if (since) told = GIVEN_UP;
        if (since && (i32)(since - now.epoch) < 0) trouble = GIVEN_UP;
    };
#pragma unroll
    for (i32 n = 0; n < AT_ENTRY; n++) heed(poison[n]);
    for (u32 n = AT_ENTRY; n < (N ? N : p.ranks); n++) heed(load_relaxed_u32(poison_at(p, own, n) + 4));
    u64 ordinal = 0;
    if (works) {
        if (index < total && sends && !trouble) outgoing.send(p, now, place_of(p, index), index, true);
    } else if (blockIdx.x == 0) {
        if (!trouble) send_headers<N>(p, now);
        if (leads) {
            if (p.ordinal) {
                ordinal = load_relaxed(p.ordinal);
                store_relaxed(p.ordinal, ordinal + 1);
            }
            if (p.progress) store_relaxed(p.progress, ordinal + 1);
            if (told) was_given_up(p, now.epoch, own);
        }
    }
    trouble |= told;

    u32 since = 0;
    do {
        const u32 next = index + step;
        if (next < total && sends && trouble <= CALLED_OFF) outgoing.send(p, now, place_of(p, next), next, false);
        Merged merged;
        if (index < total && trouble <= CALLED_OFF) trouble |= Receive<ALIGNED, N>::row(p, now, own, index, since, merged);
        if (index < step) {  // in the first tile, where every thread comes once
            if (!works && trouble <= CALLED_OFF) trouble |= await_headers(p, now, own, since);
            if (__syncthreads_or(trouble)) {
                trouble |= CALLED_OFF;
                if (__syncthreads_or(trouble > CALLED_OFF)) trouble |= GIVEN_UP;
            }
            // Whoever gives no answer has told why: a poison may come between two blocks' looks for it.
            if (trouble > CALLED_OFF && threadIdx.x == 0) was_given_up(p, now.epoch, own);
            if (leads) {
                if (trouble) record_headers(p, now, own, ordinal);
                if (p.progress) store_relaxed(p.progress + 8, ordinal + 1);
            }
        }
        if (index < total && sends) {
            const Place at = place_of(p, index);
            Vector v;
#pragma unroll
            for (int w = 0; w < 4; w++)
                v.word[w] = !trouble ? round_word<DTYPE>(merged.value + w * 4 / ITEM) : 0xffffffffu;
            scatter<ALIGNED>(p, at, v);
            if (p.out_lse && at.vector == 0)
                ((float *)p.out_lse)[at.row] = !trouble ? merged.lse : __int_as_float(-1);
        }
        index = next;
    } while (index < total);
    // All have read this block's epoch before the barrier; with it, its share of those of blocks that this launch lacks.
    for (u32 at = blockIdx.x + threadIdx.x * gridDim.x; at < p.most_blocks; at += gridDim.x * blockDim.x)
        *(u32 *)(p.epochs + (u64)at * 4) = now.epoch;
    if (KERNEL_STRICT) __threadfence_system();
}

extern "C" __global__ void __launch_bounds__(THREADS_16, RESIDENT) fused_16(const __grid_constant__ FusedParams p) {
    fused<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS_1, RESIDENT) fused_1(const __grid_constant__ FusedParams p) {
    fused<false>(p);
}
