// The put design of public engines, in four launches: count the call, store the rows into the peers' memory, signal them, wait and
// combine. Arithmetic and rounding are those of canonical.cuh, so its results are the transports' bit for bit.
//
// Order comes from kernel boundaries: the signal is raised by a kernel of its own, after all that the dispatch stored. Two slots, in
// turn: a rank writes a slot again only after its own combine of the call between, whose signal each peer raised after it had
// combined what lay in the slot.
//
// Compiled for one KERNEL_DTYPE and one KERNEL_RANKS.

#include "canonical.cuh"

constexpr int DTYPE = KERNEL_DTYPE;
constexpr int RANKS = KERNEL_RANKS;
constexpr u32 MOST_RANKS = 16;

struct FourLaunchParams {
    u64 peers[MOST_RANKS];  // where the ranks' memory begins
    u64 rows;               // [B, H, D] contiguous, 16-byte aligned
    u64 lse;                // [B, H] float32
    u64 out;                // [B, H/N, D]
    u64 state;              // u64 [2] of this rank: number of the call; 1 where a peer did not come
    i64 slot_stride;        // a slot: a block of each source
    i64 block_stride;       // a block: rows, then at lse_offset their LSEs
    i64 lse_offset;
    i64 flags_offset;  // the signal of source n at flags_offset + 128 n
    u32 rank;
    u32 heads;         // H/N
    u32 vectors;       // 16-byte vectors in a row
    u32 row_count;     // B * H/N
    u32 vector_count;  // row_count * vectors
    u32 base_two;
    u32 most_polls;
    u32 unused;
    Divisor by_heads;
    Divisor by_slice;  // heads * vectors
    Divisor by_vectors;
};

static_assert(sizeof(FourLaunchParams) == KERNEL_FOUR_LAUNCH_PARAMS_BYTES, "FourLaunchParams differs from four_launch_put.py");
static_assert(RANKS >= 2 && RANKS <= MOST_RANKS, "2 to 16 ranks");

__device__ __forceinline__ u64 block_of(const FourLaunchParams &p, u64 base, u64 call, u32 source) {
    return base + (i64)(call & 1) * p.slot_stride + (i64)source * p.block_stride;
}

// Of the caller's [B, N, H/N, ...]: where piece `i` of rank `whose` slice [B, H/N, ...] lies; `slice` pieces to a row of tokens.
__device__ __forceinline__ u64 place_of(u32 i, u32 t, u32 whose, u32 slice) {
    return (u64)i + ((u64)t * (RANKS - 1) + whose) * slice;
}

extern "C" __global__ void four_count(const __grid_constant__ FourLaunchParams p) { *(u64 *)p.state += 1; }

// A peer to each grid y.
extern "C" __global__ void __launch_bounds__(256) four_dispatch(const __grid_constant__ FourLaunchParams p) {
    const u32 peer = blockIdx.y + (blockIdx.y >= p.rank);
    const u64 to = block_of(p, p.peers[peer], *(const u64 *)p.state, p.rank);
    const u32 first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (u32 i = first; i < p.vector_count; i += step) {
        const u32 t = quotient(i, p.by_slice);
        store_vector(to + (u64)i * 16, load_vector(p.rows + place_of(i, t, peer, p.heads * p.vectors) * 16));
    }
    for (u32 i = first; i < p.row_count; i += step) {
        const u32 t = quotient(i, p.by_heads);
        *(u32 *)(to + p.lse_offset + (u64)i * 4) = load_u32(p.lse + place_of(i, t, peer, p.heads) * 4);
    }
}

extern "C" __global__ void __launch_bounds__(32) four_signal(const __grid_constant__ FourLaunchParams p) {
    const u32 peer = threadIdx.x;
    if (peer >= RANKS || peer == p.rank) return;
    __threadfence_system();
    store_release(p.peers[peer] + p.flags_offset + 128 * p.rank, *(const u64 *)p.state);
}

extern "C" __global__ void __launch_bounds__(256) four_combine(const __grid_constant__ FourLaunchParams p) {
    const u64 call = *(const u64 *)p.state, own = p.peers[p.rank];
    if (threadIdx.x < RANKS && threadIdx.x != p.rank) {
        const u64 flag = own + p.flags_offset + 128 * threadIdx.x;
        for (u32 polls = 0; load_acquire(flag) < call; polls++)
            if (polls >= p.most_polls) {
                store_relaxed(p.state + 8, 1);
                break;
            }
    }
    __syncthreads();
    const u64 slot = block_of(p, own, call, 0);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.vector_count; i += gridDim.x * blockDim.x) {
        const u32 row = quotient(i, p.by_vectors);
        const u32 t = quotient(row, p.by_heads);
        const u64 own_row = p.rows + place_of(i, t, p.rank, p.heads * p.vectors) * 16;
        const u64 own_lse = p.lse + place_of(row, t, p.rank, p.heads) * 4;
        Vector piece[RANKS];
        float share[RANKS], top, total, inverse;
        u32 bits[RANKS];
#pragma unroll
        for (int n = 0; n < RANKS; n++) {  // all loads are under way before the first is looked at
            const u64 block = slot + (i64)n * p.block_stride;
            bits[n] = load_u32(n == p.rank ? own_lse : block + p.lse_offset + (u64)row * 4);
            piece[n] = load_vector(n == p.rank ? own_row : block + (u64)i * 16);
        }
#pragma unroll
        for (int n = 0; n < RANKS; n++) share[n] = lse_from_bits(bits[n], LSE_FLOAT32);
        shares_of<RANKS>(share, p.base_two, top, total, inverse);
        float sum[16 / Element<DTYPE>::BYTES];
#pragma unroll
        for (int c = 0; c < 16 / Element<DTYPE>::BYTES; c++) sum[c] = 0.0f;
#pragma unroll
        for (int n = 0; n < RANKS; n++)
            if (counts(share[n])) {
#pragma unroll
                for (int w = 0; w < 4; w++) add_word<DTYPE>(sum + w * Element<DTYPE>::PER_WORD, share[n], piece[n].word[w]);
            }
        Vector merged;
#pragma unroll
        for (int w = 0; w < 4; w++) merged.word[w] = round_word<DTYPE>(sum + w * Element<DTYPE>::PER_WORD);
        store_vector(p.out + (u64)i * 16, merged);
    }
}
