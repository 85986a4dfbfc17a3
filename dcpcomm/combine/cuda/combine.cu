// The LSE-weighted sum over sources, and the check that all of them came to the same call.
//
// A thread merges one 16-byte vector of a row, or one element where something isn't aligned. Compiled for one
// KERNEL_DTYPE and one KERNEL_RANKS; 0 ranks: any number, told at run time.

#include "canonical.cuh"

constexpr int DTYPE = KERNEL_DTYPE;
constexpr int ITEM = Element<DTYPE>::BYTES;

// BYTES of one source's row, as words. The last may be half used.
template <int BYTES>
struct Piece {
    u32 word[(BYTES + 3) / 4];
};

template <int BYTES>
__device__ __forceinline__ Piece<BYTES> load_piece(u64 row, u32 column, i64 step, u32 unit) {
    Piece<BYTES> piece;
    if (BYTES == 16) {
        const Vector v = load_vector(row + (u64)column * 16);
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) piece.word[i] = v.word[i];
    } else {
        piece.word[0] = load_element<ITEM>(row + (i64)column * step, unit);
    }
    return piece;
}

// Where it isn't wanted, nothing is loaded and `piece` stays what it is.
template <int BYTES>
__device__ __forceinline__ void load_piece_if(Piece<BYTES> &piece, u64 row, u32 column, i64 step, u32 unit, bool wanted) {
    if (BYTES == 16) {
        Vector v;
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) v.word[i] = piece.word[i];
        load_vector_if(v, row + (u64)column * 16, wanted);
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) piece.word[i] = v.word[i];
    } else if (wanted) {
        piece = load_piece<BYTES>(row, column, step, unit);
    }
}

// Of a row that may be laid out otherwise than the rest.
template <int BYTES>
__device__ __forceinline__ Piece<BYTES> load_odd_piece(u64 row, u32 column, i64 step, u32 unit) {
    if (BYTES != 16 || unit == 16) return load_piece<BYTES>(row, column, step, unit);
    Piece<BYTES> piece;
#pragma unroll
    for (int i = 0; i < (BYTES + 3) / 4; i++) piece.word[i] = 0;
#pragma unroll
    for (int i = 0; i < BYTES / ITEM; i++)
        piece.word[i * ITEM / 4] |= load_element<ITEM>(row + ((i64)column * (BYTES / ITEM) + i) * step, unit)
                                    << (i * ITEM % 4 * 8);
    return piece;
}

template <int BYTES>
struct Sum {
    static constexpr int COUNT = BYTES / ITEM;
    float value[COUNT];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] = 0.0f;
    }
    __device__ __forceinline__ void add(float share, const Piece<BYTES> &piece) {
        if (COUNT == 1)
            value[0] = __fmaf_rn(share, Element<DTYPE>::decode(piece.word[0]), value[0]);
        else
#pragma unroll
            for (int i = 0; i < BYTES / 4; i++) add_word<DTYPE>(value + i * 4 / ITEM, share, piece.word[i]);
    }
    __device__ __forceinline__ Piece<BYTES> rounded() const {
        Piece<BYTES> piece;
        if (COUNT == 1)
            piece.word[0] = Element<DTYPE>::encode(value[0]);
        else
#pragma unroll
            for (int i = 0; i < BYTES / 4; i++) piece.word[i] = round_word<DTYPE>(value + i * 4 / ITEM);
        return piece;
    }
};

// Where this thread's row of every source lies.
struct Place {
    u64 rows, lse, own_rows, own_lse;
    u32 column;
    i64 token;
};

__device__ __forceinline__ u32 own_lse_bits(const CombineParams &p, const Place &at) {
    return p.own >= 0 ? load_lse_bits(at.own_lse, p.own_lse_kind) : 0;
}

__device__ __forceinline__ float own_lse_value(const CombineParams &p, const Place &at, u32 bits) {
    return p.own < 0 || row_is_empty(p.counts, at.token) ? -INFINITY_F : lse_from_bits(bits, p.own_lse_kind);
}

// One row's piece merged into `sum`; returns its LSE.
template <int N, int BYTES>
struct Merge {
    static __device__ __forceinline__ float row(const CombineParams &p, const Place &at, Sum<BYTES> &sum) {
        u32 bits[N];
        const u32 own_bits = own_lse_bits(p, at);
#pragma unroll
        for (int n = 0; n < N; n++) {
            bits[n] = 0;
            if (n != p.own) bits[n] = load_lse_bits(at.lse + (i64)n * p.lse_n, p.lse_kind);
        }
        float share[N], top, total, inverse;
        const float own_lse = own_lse_value(p, at, own_bits);
#pragma unroll
        for (int n = 0; n < N; n++) share[n] = n == p.own ? own_lse : lse_from_bits(bits[n], p.lse_kind);
        shares_of<N>(share, p.base_two, top, total, inverse);

        // Weighed a second time: picked out of an array by a number known at run time, it would push the array out to memory.
        const float own_share = share_of(weight_of(own_lse, top, p.base_two), inverse);
        Piece<BYTES> own = {};
        if (counts(own_share)) own = load_odd_piece<BYTES>(at.own_rows, at.column, p.own_d, p.own_unit);

        // Loads of up to eight sources are under way at once; more would cost registers that hide more than they do.
        constexpr int GROUP = N < 8 ? N : 8;
#pragma unroll
        for (int first = 0; first < N; first += GROUP) {
            Piece<BYTES> piece[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                const int n = first + i;
                piece[i] = own;
                if (n < N)
                    load_piece_if<BYTES>(piece[i], at.rows + (i64)n * p.rows_n, at.column, p.rows_d, p.rows_unit,
                                         n != p.own && counts(share[n < N ? n : 0]));
            }
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                const int n = first + i;
                if (n < N && counts(share[n < N ? n : 0])) sum.add(share[n < N ? n : 0], piece[i]);
            }
        }
        return p.out_lse ? merged_lse(top, total, p.base_two) : 0.0f;
    }
};

template <int BYTES>
struct Merge<0, BYTES> {
    static __device__ __forceinline__ float row(const CombineParams &p, const Place &at, Sum<BYTES> &sum) {
        const float own_lse = own_lse_value(p, at, own_lse_bits(p, at));
        const auto lse_at = [&](u32 n) {
            return (i32)n == p.own ? own_lse
                                   : lse_from_bits(load_lse_bits(at.lse + (i64)n * p.lse_n, p.lse_kind), p.lse_kind);
        };
        float top, total, inverse;
        weigh_all(p.ranks, lse_at, p.base_two, top, total, inverse);
        for (u32 n = 0; n < p.ranks; n++) {
            const float share = share_of(weight_of(lse_at(n), top, p.base_two), inverse);
            if (!counts(share)) continue;
            if ((i32)n == p.own)
                sum.add(share, load_odd_piece<BYTES>(at.own_rows, at.column, p.own_d, p.own_unit));
            else
                sum.add(share, load_piece<BYTES>(at.rows + (i64)n * p.rows_n, at.column, p.rows_d, p.rows_unit));
        }
        return p.out_lse ? merged_lse(top, total, p.base_two) : 0.0f;
    }
};

__device__ __forceinline__ u64 word_of(const CombineParams &p, u32 i) {
    return (u64)(i == 0 ? *(const i64 *)p.ordinal - 1 : i == 1 ? p.word1 : i == 2 ? p.word2 : p.word3);
}

// Whether a header word that this thread looks at isn't what this rank's own call says.
__device__ __forceinline__ int any_header_differs(const CombineParams &p) {
    int differs = 0;
    if (p.headers) {
        const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
        for (u32 i = thread; i < 4 * p.ranks; i += blockDim.x * blockDim.y)
            if ((i32)(i >> 2) != p.own)
                differs |= *(const u64 *)(p.headers + (i64)(i >> 2) * p.header_stride + (i & 3) * 8) != word_of(p, i & 3);
    }
    return differs;
}

__device__ __forceinline__ void write_record(const CombineParams &p) {
    if (!p.record || load_relaxed(p.record) != RECORD_CLEAR) return;
    for (u32 i = 0; i < 4; i++) store_relaxed(p.record + 8 * (1 + i), word_of(p, i));
    for (u32 i = 0; i < 4 * p.ranks; i++) {
        const bool own = (i32)(i >> 2) == p.own;
        const u64 came =
            own ? word_of(p, i & 3) : *(const u64 *)(p.headers + (i64)(i >> 2) * p.header_stride + (i & 3) * 8);
        store_relaxed(p.record + 8 * (5 + i), came);
    }
    __threadfence_system();
    store_release(p.record, RECORD_WRITTEN);
}

template <int N, int BYTES>
__device__ __forceinline__ void combine(const CombineParams &p) {
    const u32 column = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.y;
    int differs = any_header_differs(p);
    bool voted = false;
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    do {
        const bool here = row < p.row_count && column < p.columns;
        const u32 t = quotient(row, p.by_heads);
        const u32 h = row - t * p.heads;
        Sum<BYTES> sum;
        sum.clear();
        float lse = 0.0f;
        if (here) {
            Place at;
            at.rows = p.rows + (i64)t * p.rows_t + (i64)h * p.rows_h;
            at.lse = p.lse + (i64)t * p.lse_t + (i64)h * p.lse_h;
            at.own_rows = p.own_rows + (i64)t * p.own_t + (i64)h * p.own_h;
            at.own_lse = p.own_lse + (i64)t * p.own_lse_t + (i64)h * p.own_lse_h;
            at.column = column;
            at.token = p.counts.token0 + (i64)t;
            lse = Merge<N, BYTES>::row(p, at, sum);
        }
        if (!voted) {
            // Only now, so that the first row's loads don't wait for the headers'. Every thread comes here exactly once.
            differs = __syncthreads_or(differs);
            voted = true;
            if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
                if (differs) write_record(p);
                if (p.progress) store_relaxed(p.progress + 8, *(const u64 *)p.ordinal);
            }
        }
        if (here) {
            Piece<BYTES> piece = sum.rounded();
            if (differs) {
#pragma unroll
                for (int i = 0; i < (BYTES + 3) / 4; i++) piece.word[i] = 0xffffffffu;
                lse = __int_as_float(-1);
            }
            const u64 out = p.out + (i64)t * p.out_t + (i64)h * p.out_h;
            if (BYTES == 16)
                store_vector(out + (u64)column * 16, *(const Vector *)&piece);
            else
                store_element<ITEM>(out + (i64)column * p.out_d, piece.word[0], p.out_unit);
            if (p.out_lse && column == 0) ((float *)p.out_lse)[row] = lse;
        }
        row += step;
    } while (row < p.row_count);
}

extern "C" __global__ void __launch_bounds__(256) combine_16(const __grid_constant__ CombineParams p) {
    combine<KERNEL_RANKS, 16>(p);
}

extern "C" __global__ void __launch_bounds__(256) combine_1(const __grid_constant__ CombineParams p) {
    combine<KERNEL_RANKS, ITEM>(p);
}
