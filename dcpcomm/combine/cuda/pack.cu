// Rows and LSEs of one rank, put into one block for each destination: the layout of dcpcomm/combine/wire.py.
//
// A thread stores one 16-byte vector of a row on the wire, whose last vector is {LSE, 0, 0, 0}: the stores of a warp lie side by
// side, whatever the strides of what is read. The variants differ in how many bytes are loaded at once.
//
// Compiled for one KERNEL_ITEM, the bytes of an element: payload is moved as bits.

#include "canonical.cuh"

template <int ITEM, int UNIT>
__device__ __forceinline__ Vector gather(const PackParams &p, u64 row, u32 vector) {
    if (UNIT == 16) return load_vector(row + (u64)vector * 16);
    Vector v = {{0, 0, 0, 0}};
    const u32 begin = vector * 16;
    if (UNIT == 8) {
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            if (begin + 8 * i < p.row_bytes) {
                const uint2 two = *(const uint2 *)(row + begin + 8 * i);
                v.word[2 * i] = two.x;
                v.word[2 * i + 1] = two.y;
            }
    } else if (UNIT == 4 && ITEM == 2) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (begin + 4 * i < p.row_bytes) v.word[i] = load_u32(row + begin + 4 * i);
    } else {
        return load_elements<ITEM>(row, vector, p.row_bytes, p.rows_d, UNIT);  // only here the last axis may have a stride
    }
    return v;
}

template <int ITEM, int UNIT>
__device__ __forceinline__ void pack(const PackParams &p) {
    const u32 lane = blockIdx.y * blockDim.x + threadIdx.x;
    const u32 step = gridDim.x * blockDim.y;
    // One thread of the grid for the headers: the ordinal is read and advanced once, whatever the grid.
    const bool leader = blockIdx.x == 0 && threadIdx.y == 0 && lane == 0;
    const i64 ordinal = leader ? *(const i64 *)p.ordinal : 0;

    if (lane <= p.vectors) {
        for (u32 row = blockIdx.x * blockDim.y + threadIdx.y; row < p.row_count; row += step) {
            const u32 n = quotient(row, p.by_block);
            const u32 inside = row - n * p.per_block;
            const u32 t = quotient(inside, p.by_heads);
            const u32 h = inside - t * p.heads;
            const bool carries = lane < p.vectors && n != p.rank;  // a rank's own rows don't travel
            if (!carries && lane < p.vectors) continue;

            // Both loads are under way at once; what an empty row holds is replaced, not looked at.
            const u32 bits = load_lse_bits(p.lse + (i64)n * p.lse_n + (i64)t * p.lse_t + (i64)h * p.lse_h, p.lse_kind);
            Vector v = {{0, 0, 0, 0}};
            if (carries)
                v = gather<ITEM, UNIT>(p, p.rows + (i64)n * p.rows_n + (i64)t * p.rows_t + (i64)h * p.rows_h, lane);
            float lse = lse_from_bits(bits, p.lse_kind);
            if (row_is_empty(p.counts, p.counts.token0 + (i64)n * p.counts.token_n + (i64)t)) lse = -INFINITY_F;
            if (!carries)
                v.word[0] = (u32)__float_as_int(lse);
            else if (lse == -INFINITY_F)
                v = {{0, 0, 0, 0}};
            store_vector(p.send + (i64)n * p.block_stride + (i64)(1 + inside) * p.pitch + (u64)lane * 16, v);
        }
    }

    if (leader) {
        for (u32 n = 0; n < p.ranks; n++) {
            i64 *header = (i64 *)(p.send + (i64)n * p.block_stride);
            header[0] = ordinal;
            header[1] = p.word1;
            header[2] = p.word2;
            header[3] = p.kind;
        }
        *(i64 *)p.ordinal = ordinal + 1;
        if (p.progress) store_relaxed(p.progress, (u64)(ordinal + 1));
    }
}

#define PACK(UNIT)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) pack_##UNIT(const __grid_constant__ PackParams p) { \
        pack<KERNEL_ITEM, UNIT>(p);                                                                  \
    }

PACK(16)
PACK(8)
PACK(4)
PACK(2)
