// One rank's rows times their shares, in the order of a reduce-scatter, and this rank's merged LSEs: all that lies between
// the all-gather of the LSEs and the sum over ranks.
//
// A thread scales one 16-byte vector of a row, or one element where something isn't aligned. Compiled for one
// KERNEL_DTYPE and one KERNEL_RANKS; 0 ranks: any number, told at run time.

#include "canonical.cuh"

constexpr int DTYPE = KERNEL_DTYPE;
constexpr int ITEM = Element<DTYPE>::BYTES;

__device__ __forceinline__ float load_lse(u64 at) { return lse_from_bits(load_u32(at), LSE_FLOAT32); }

// This rank's share of the row whose first source's LSE is at `lse`; where it is `wanted`, the merged LSE too.
template <int N>
struct Weigh {
    static __device__ __forceinline__ float row(const ScaleParams &p, u64 lse, bool wanted, float &merged) {
        float share[N], top, total, inverse;
        // From three on loaded and weighed a second time: picked out of an array by a number known at run time, it would
        // push the array out to memory.
        const float mine = N == 2 ? 0.0f : load_lse(lse + (i64)p.rank * p.lse_source);
#pragma unroll
        for (int n = 0; n < N; n++) share[n] = load_lse(lse + (i64)n * p.lse_source);
        shares_of<N>(share, p.base_two, top, total, inverse);
        if (wanted) merged = merged_lse(top, total, p.base_two);
        if (N == 2) return p.rank ? share[N - 1] : share[0];
        return share_of(weight_of(mine, top, p.base_two), inverse);
    }
};

template <>
struct Weigh<0> {
    static __device__ __forceinline__ float row(const ScaleParams &p, u64 lse, bool wanted, float &merged) {
        float top, total, inverse;
        const auto lse_at = [&](u32 n) { return load_lse(lse + (i64)n * p.lse_source); };
        weigh_all(p.ranks, lse_at, p.base_two, top, total, inverse);
        if (wanted) merged = merged_lse(top, total, p.base_two);
        return share_of(weight_of(lse_at(p.rank), top, p.base_two), inverse);
    }
};

// share * what a word holds, as a sum of one source; 0 without a share, because 0 * NaN is NaN.
__device__ __forceinline__ u32 scaled_word(float share, u32 word) {
    float scaled[2] = {0.0f, 0.0f};
    if (counts(share)) add_word<DTYPE>(scaled, share, word);
    return round_word<DTYPE>(scaled);
}

template <int N, int BYTES>
__device__ __forceinline__ void scale(const ScaleParams &p) {
    const u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.y;
    if (column >= p.lanes) return;
    for (u32 row = blockIdx.x * blockDim.y + threadIdx.y; row < p.row_count; row += step) {
        const u32 n = quotient(row, p.by_block);
        const u32 inside = row - n * p.per_block;
        const u32 t = quotient(inside, p.by_heads);
        const u32 h = inside - t * p.heads;
        const u64 from = p.rows + (i64)n * p.rows_n + (i64)t * p.rows_t + (i64)h * p.rows_h;
        const u64 lse = p.lse + (i64)n * p.lse_n + (i64)t * p.lse_t + (u64)h * 4;
        const u64 to = p.scaled + ((u64)row * p.columns + column) * BYTES;
        const bool tells = column == 0 && n == p.slice;

        // Loaded whether it counts or not, so that it doesn't wait for the LSEs.
        float merged = 0.0f;
        if (BYTES == 16) {
            // Two vectors a thread: weighing a row costs more than moving one.
            const bool second = column + p.lanes < p.columns;
            Vector v = load_vector(from + (u64)column * 16), w = v;
            load_vector_if(w, from + (u64)(column + p.lanes) * 16, second);
            const float share = Weigh<N>::row(p, lse, tells, merged);
#pragma unroll
            for (int i = 0; i < 4; i++) v.word[i] = scaled_word(share, v.word[i]);
            store_vector(to, v);
            if (second) {
#pragma unroll
                for (int i = 0; i < 4; i++) w.word[i] = scaled_word(share, w.word[i]);
                store_vector(to + (u64)p.lanes * 16, w);
            }
        } else {
            const u32 bits = load_element<ITEM>(from + (i64)column * p.rows_d, p.rows_unit);
            store_element<ITEM>(to, scaled_word(Weigh<N>::row(p, lse, tells, merged), bits), ITEM);
        }
        if (tells) ((float *)p.out_lse)[inside] = merged;
    }
}

extern "C" __global__ void __launch_bounds__(256) scale_16(const __grid_constant__ ScaleParams p) {
    scale<KERNEL_RANKS, 16>(p);
}

extern "C" __global__ void __launch_bounds__(256) scale_1(const __grid_constant__ ScaleParams p) {
    scale<KERNEL_RANKS, ITEM>(p);
}
