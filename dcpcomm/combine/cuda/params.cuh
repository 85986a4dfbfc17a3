// What the host hands to each kernel: one struct, by value. dcpcomm/combine/params.py mirrors every struct, field by field;
// the host passes the size it counts with, so that a struct changed on one side only doesn't compile.
//
// Addresses are u64, strides and offsets are in bytes. No header of the CUDA toolkit is needed.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

// Quotients without a division: n / d == (n * magic) >> 32 >> shift for n < 2^31. magic 0 stands for d == 1.
struct Divisor {
    u32 magic;
    u32 shift;
};

enum CountsMode { COUNTS_NONE = 0, COUNTS_PER_ROW = 1, COUNTS_PER_REQUEST = 2 };

// Which rows are empty on this rank. Row (n, t) of the rows at hand is row token0 + n * token_n + t of the caller's B.
struct Counts {
    u64 counts;       // [B] valid counts, or [requests] sequence lengths
    i64 counts_step;  // bytes from one to the next
    u64 starts;       // [requests + 1], where each request's rows begin
    i64 starts_step;
    i64 token0;
    i64 token_n;
    u32 mode;         // CountsMode
    u32 counts_wide;  // 1: int64, 0: int32
    u32 starts_wide;
    u32 requests;
};

// How an LSE is stored. FLOAT32_HALVES is a float32 that lies at an address which is only a multiple of 2.
enum LseKind { LSE_FLOAT32 = 0, LSE_BFLOAT16 = 1, LSE_FLOAT16 = 2, LSE_FLOAT32_HALVES = 3 };

struct PackParams {
    u64 rows;  // [N, t, h, D]
    i64 rows_n;
    i64 rows_t;
    i64 rows_h;
    i64 rows_d;
    u64 lse;  // [N, t, h]
    i64 lse_n;
    i64 lse_t;
    i64 lse_h;
    u64 send;  // block 0
    i64 block_stride;
    i64 pitch;     // from one row of the wire to the next
    u64 ordinal;   // int64 in device memory, advanced by each launch
    u64 progress;  // pinned host memory, int64 [2]: calls begun, calls ended; or 0
    i64 word1;     // header: tag | B << 32
    i64 word2;     // chunk | width << 32
    i64 kind;
    Counts counts;
    u32 ranks;
    u32 rank;
    u32 heads;      // h
    u32 row_bytes;  // D x itemsize
    u32 vectors;    // 16-byte vectors of payload in a row of the wire
    u32 row_count;  // N * t * h; 0: headers alone
    u32 per_block;  // t * h
    u32 lse_kind;   // LseKind
    Divisor by_block;
    Divisor by_heads;
};

struct CombineParams {
    u64 rows;  // [N, t, h, D], the source rank first
    i64 rows_n;
    i64 rows_t;
    i64 rows_h;
    i64 rows_d;
    u64 lse;  // [N, t, h]
    i64 lse_n;
    i64 lse_t;
    i64 lse_h;
    u64 own_rows;  // [t, h, D], in the place of source `own`
    i64 own_t;
    i64 own_h;
    i64 own_d;
    u64 own_lse;  // [t, h]
    i64 own_lse_t;
    i64 own_lse_h;
    u64 out;  // [t, h, D]
    i64 out_t;
    i64 out_h;
    i64 out_d;
    u64 out_lse;  // [t, h] float32, contiguous; 0: not wanted
    u64 headers;  // of source 0; 0: none are looked at
    i64 header_stride;
    u64 ordinal;  // as in PackParams, which has advanced it
    i64 word1;
    i64 word2;
    i64 word3;
    u64 record;  // pinned host memory, int64 [5 + 4 N]: state, the header expected, the headers that came; or 0
    u64 progress;  // as in PackParams
    Counts counts;  // of source `own` alone
    u32 ranks;
    i32 own;  // -1: none
    u32 heads;
    u32 columns;    // per row, in vectors or elements, as the variant counts
    u32 row_count;  // t * h
    u32 lse_kind;
    u32 own_lse_kind;
    u32 base_two;
    u32 rows_unit;  // bytes that can be loaded at once: 16, or fewer
    u32 own_unit;
    u32 out_unit;
    u32 unused;
    Divisor by_heads;
};

struct ScaleParams {
    u64 rows;  // [M, t, h, D], the destination first; M is 1 where nothing is scattered
    i64 rows_n;
    i64 rows_t;
    i64 rows_h;
    i64 rows_d;
    u64 lse;  // float32 of every source; heads lie side by side
    i64 lse_source;  // from one source to the next
    i64 lse_n;       // from one destination to the next
    i64 lse_t;
    u64 scaled;   // [M, t, h, D], contiguous
    u64 out_lse;  // [t, h] float32, contiguous: of destination `slice`
    u32 ranks;
    u32 rank;
    u32 slice;
    u32 heads;      // h
    u32 columns;    // per row, in vectors or elements, as the variant counts
    u32 row_count;  // M * t * h
    u32 per_block;  // t * h
    u32 base_two;
    u32 rows_unit;  // bytes that can be loaded at once: 16, or fewer
    u32 lanes;      // threads of a row: one for each column, or for two
    Divisor by_block;
    Divisor by_heads;
};

// A channel's shared memory on every rank begins at peer[n]. Slot s of two is at s * slot_stride; in it, for source n, payload at
// n * source_stride, {LSE, epoch} of each row at lse_offset + n * lse_stride, a header at header_offset + n * 128. Behind the slots,
// at poison_offset, N words {missing ranks, epoch}, one for each rank that may give the channel up.
struct FusedParams {
    u64 rows;  // [N, t, h, D], the destination first
    i64 rows_n;
    i64 rows_t;
    i64 rows_h;
    i64 rows_d;
    u64 lse;  // [N, t, h]
    i64 lse_n;
    i64 lse_t;
    i64 lse_h;
    u64 out;  // [t, h, D]
    i64 out_t;
    i64 out_h;
    i64 out_d;
    u64 out_lse;  // [t, h] float32, contiguous; 0: not wanted
    i64 slot_stride;
    i64 source_stride;
    i64 lse_offset;
    i64 lse_stride;
    i64 header_offset;
    i64 poison_offset;
    u64 epochs;       // u32 [most_blocks] in device memory, zeroed at first: of each block that a launch may have
    u64 ordinal;      // as in PackParams; or 0
    u64 progress;     // as in PackParams
    u64 headers;      // as `record` of CombineParams
    u64 record;       // pinned host memory, int64 [2 + N]: state, epoch, 1 for each rank that is missing; or 0
    u64 table;    // u64 [N] in device memory: base addresses by rank, where N is above 16
    Counts counts;
    u32 tag;  // a header's four words
    u32 tokens;
    u32 chunk;
    u32 width;
    u32 kind;  // 0: rows; 1: called off, nothing is sent or merged
    u32 ranks;
    u32 rank;
    u32 heads;
    u32 vectors;    // 16-byte vectors of payload in a row
    u32 row_bytes;  // D x itemsize
    u32 row_count;  // t * h
    u32 lse_kind;
    u32 base_two;
    u32 rows_unit;
    u32 out_unit;
    u32 most_blocks;  // of any launch of this channel
    u32 deadline;  // of 2^20 ns; 0: wait on
    u32 unused;
    Divisor by_vectors;
    Divisor by_heads;
    u64 peer[16];  // base addresses by rank, `rank`'s own too
};

// Words that peers add 1 to, one for each call, and how many calls there were.
struct AwaitParams {
    u64 words;   // u64 [N], by source
    u64 count;   // u64 in device memory, advanced by each launch
    u64 state;   // u64 in device memory: RecordState of the channel
    u64 record;  // as in FusedParams
    u64 status;  // u64 [N], by rank: 0, or {missing ranks, call} of one that gave the channel up; this rank's own too
    u32 first;   // 1: of this call, 0: of the calls before it
    u32 ranks;
    u32 rank;
    u32 deadline;  // of 2^20 ns; 0: wait on
};

// A block of each of the other ranks, from one place to another.
struct MoveParams {
    u64 from;  // of rank 0
    u64 to;
    i64 from_stride;
    i64 to_stride;
    u64 count;  // as in AwaitParams, which has advanced it
    u64 state;
    u64 record;
    u32 vectors;  // of 16 bytes in a block
    u32 rank;
};

// States of a record. Only a kernel that finds 0 writes; the host sets it back.
enum RecordState { RECORD_CLEAR = 0, RECORD_WRITTEN = 1, RECORD_GIVEN_UP_BY_PEER = 2 };

static_assert(sizeof(PackParams) == KERNEL_PACK_PARAMS_BYTES, "PackParams differs from dcpcomm/combine/params.py");
static_assert(sizeof(CombineParams) == KERNEL_COMBINE_PARAMS_BYTES, "CombineParams differs from params.py");
static_assert(sizeof(ScaleParams) == KERNEL_SCALE_PARAMS_BYTES, "ScaleParams differs from params.py");
static_assert(sizeof(FusedParams) == KERNEL_FUSED_PARAMS_BYTES, "FusedParams differs from params.py");
static_assert(sizeof(AwaitParams) == KERNEL_AWAIT_PARAMS_BYTES, "AwaitParams differs from params.py");
static_assert(sizeof(MoveParams) == KERNEL_MOVE_PARAMS_BYTES, "MoveParams differs from params.py");
