/* Pack and combine on CPU in one pass each: the canonical arithmetic of docs/architecture.md, without temporaries.

   Loaded through ctypes, which releases the GIL while a call runs. Compiled where the package is installed, if there is a compiler;
   torch_engine.py says the same in torch operations, and serves where this file isn't compiled. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* One binary for all x86-64 processors: the loader picks the clone, and only newer ones have FMA and half conversions. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? (bits >> 16) | 0x40u : rounded);
}

static inline float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    /* Scaling by 2^112 puts the exponent where float32 has it, subnormals included. */
    float value = from_bits(rest << 13) * from_bits(0x77800000u);
    uint32_t bits = rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : to_bits(value);
    return from_bits(bits | sign);
}

static inline uint16_t to_float16(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);       /* rounds to infinity */
    if (size < 0x38800000u) {                                           /* subnormal: let the adder round */
        float shifted = from_bits(size) + 0.5f;
        return (uint16_t)(sign | (to_bits(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13));
}

/* sum += weight * a row of halves, and a sum as a row of halves. Compilers find no cheap conversion by themselves;
   processors that have one are asked for it when the library is loaded. */
CLONES static void add_portable(const uint16_t *row, float weight, float *restrict sum, int64_t d) {
    for (int64_t k = 0; k < d; k++) sum[k] = fmaf(weight, from_float16(row[k]), sum[k]);
}

CLONES static void narrow_portable(const float *restrict sum, uint16_t *restrict row, int64_t d) {
    for (int64_t k = 0; k < d; k++) row[k] = to_float16(sum[k]);
}

/* Two rows at once, summed in registers. */
CLONES static void merge_two_portable(const uint16_t *a, float of_a, const uint16_t *b, float of_b, uint16_t *restrict row,
                                      int64_t d) {
    for (int64_t k = 0; k < d; k++)
        row[k] = to_float16(fmaf(of_b, from_float16(b[k]), fmaf(of_a, from_float16(a[k]), 0.0f)));
}

static void (*add_halves)(const uint16_t *, float, float *, int64_t) = add_portable;
static void (*narrow)(const float *, uint16_t *, int64_t) = narrow_portable;
static void (*merge_two)(const uint16_t *, float, const uint16_t *, float, uint16_t *, int64_t) = merge_two_portable;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

__attribute__((target("avx,fma,f16c"))) static void add_f16c(const uint16_t *row, float weight, float *sum, int64_t d) {
    int64_t k = 0;
    for (; k + 8 <= d; k += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + k)));
        _mm256_storeu_ps(sum + k, _mm256_fmadd_ps(_mm256_set1_ps(weight), wide, _mm256_loadu_ps(sum + k)));
    }
    add_portable(row + k, weight, sum + k, d - k);
}

__attribute__((target("avx,fma,f16c"))) static void narrow_f16c(const float *sum, uint16_t *row, int64_t d) {
    int64_t k = 0;
    for (; k + 8 <= d; k += 8)
        _mm_storeu_si128((__m128i *)(row + k), _mm256_cvtps_ph(_mm256_loadu_ps(sum + k), _MM_FROUND_TO_NEAREST_INT));
    narrow_portable(sum + k, row + k, d - k);
}

__attribute__((target("avx,fma,f16c"))) static void merge_two_f16c(const uint16_t *a, float of_a, const uint16_t *b,
                                                                    float of_b, uint16_t *row, int64_t d) {
    const __m256 weigh_a = _mm256_set1_ps(of_a), weigh_b = _mm256_set1_ps(of_b);
    int64_t k = 0;
    for (; k + 8 <= d; k += 8) {
        __m256 wide_a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + k)));
        __m256 wide_b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + k)));
        __m256 both = _mm256_fmadd_ps(weigh_b, wide_b, _mm256_fmadd_ps(weigh_a, wide_a, _mm256_setzero_ps()));
        _mm_storeu_si128((__m128i *)(row + k), _mm256_cvtps_ph(both, _MM_FROUND_TO_NEAREST_INT));
    }
    merge_two_portable(a + k, of_a, b + k, of_b, row + k, d - k);
}

__attribute__((constructor)) static void choose_conversions(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        add_halves = add_f16c;
        narrow = narrow_f16c;
        merge_two = merge_two_f16c;
    }
}
#endif

static inline float load_lse(const char *at, int32_t dtype) {
    uint16_t half;
    float value;
    if (dtype == FLOAT32) {
        memcpy(&value, at, 4);
        return value;
    }
    memcpy(&half, at, 2);
    return dtype == BFLOAT16 ? from_bfloat16(half) : from_float16(half);
}

/* Rows of one source: where (t, h) = (0, 0) lies, and the bytes from one t, and one h, to the next. */
typedef struct {
    const char *rows;
    int64_t rows_t, rows_h;
    const char *lse;
    int64_t lse_t, lse_h;
    int32_t lse_dtype;
} Source;

/* What calls with the same layouts have in common. `rows [n, t, h, d]` and `lse [n, t, h]`, destination first, are this
   rank's partials, of which only the addresses change; strides are in bytes. A block of a wire buffer has 1 + t * h rows
   of `pitch` bytes, each LSE at `lse_at`. */
typedef struct {
    int64_t n, rank, t, h, d;
    int64_t rows_n, rows_t, rows_h, lse_n, lse_t, lse_h;
    char *send, *recv;
    int64_t send_block, recv_block, pitch, lse_at;
    int32_t dtype, lse_dtype, base_two;
} Call;

static inline int64_t item_bytes(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/* Write header, rows and LSEs of every destination; of this rank's own block, which doesn't travel, the header alone. */
EXPORT void dcpcomm_pack(const Call *call, const char *rows, const char *lse, const int64_t *header) {
    size_t row_bytes = (size_t)(call->d * item_bytes(call->dtype));
    for (int64_t to = 0; to < call->n; to++) {
        char *at = call->send + to * call->send_block;
        memcpy(at, header, 32);
        if (to == call->rank) continue;
        for (int64_t i = 0; i < call->t; i++) {
            const char *row = rows + to * call->rows_n + i * call->rows_t;
            const char *weight = lse + to * call->lse_n + i * call->lse_t;
            for (int64_t j = 0; j < call->h; j++, row += call->rows_h, weight += call->lse_h) {
                float one = load_lse(weight, call->lse_dtype);
                at += call->pitch;
                memcpy(at, row, row_bytes);
                memcpy(at + call->lse_at, &one, 4);
            }
        }
    }
}

/* The shares of one row's sources, and its merged LSE if it is wanted. All LSEs are known before the first is weighed. */
INLINE float shares_of(const Source *sources, int32_t n, int64_t i, int64_t j, int32_t base_two, int want_lse,
                              float *share) {
    float top = -INFINITY, total = 0.0f;
    for (int32_t s = 0; s < n; s++) {
        float lse = load_lse(sources[s].lse + i * sources[s].lse_t + j * sources[s].lse_h, sources[s].lse_dtype);
        share[s] = lse < INFINITY ? lse : -INFINITY; /* NaN and +inf mean an empty row, as -inf does */
        top = share[s] > top ? share[s] : top;
    }
    if (top == -INFINITY) {
        for (int32_t s = 0; s < n; s++) share[s] = 0.0f;
        return -INFINITY;
    }
    for (int32_t s = 0; s < n; s++) {
        float below = share[s] - top;
        share[s] = below == 0.0f ? 1.0f : exp2f(base_two ? below : below * 1.44269504088896340736f);
        total += share[s];
    }
    float whole = 1.0f / total;
    for (int32_t s = 0; s < n; s++) share[s] *= whole;
    if (!want_lse) return 0.0f;
    return top + (base_two ? log2f(total) : logf(total));
}

/* Two sources that both count, the most frequent case, are summed in registers; others source by source in `sum`. */
#define COMBINE(NAME, TYPE, LOAD, STORE)                                                                              \
    CLONES static void NAME(const Source *sources, int32_t n, int64_t t, int64_t h, int64_t d, int32_t base_two,      \
                            char *to, int64_t to_t, int64_t to_h, float *out_lse, float *share, float *restrict sum) {\
        for (int64_t i = 0; i < t; i++)                                                                               \
            for (int64_t j = 0; j < h; j++) {                                                                         \
                TYPE *restrict out = (TYPE *)(to + i * to_t + j * to_h);                                              \
                float lse = shares_of(sources, n, i, j, base_two, out_lse != NULL, share);                            \
                if (out_lse) *out_lse++ = lse;                                                                        \
                if (n == 2 && share[0] > 0.0f && share[1] > 0.0f) {                                                   \
                    const TYPE *a = (const TYPE *)(sources[0].rows + i * sources[0].rows_t + j * sources[0].rows_h);  \
                    const TYPE *b = (const TYPE *)(sources[1].rows + i * sources[1].rows_t + j * sources[1].rows_h);  \
                    float of_a = share[0], of_b = share[1];                                                           \
                    for (int64_t k = 0; k < d; k++)                                                                   \
                        out[k] = STORE(fmaf(of_b, LOAD(b[k]), fmaf(of_a, LOAD(a[k]), 0.0f)));                         \
                    continue;                                                                                         \
                }                                                                                                     \
                memset(sum, 0, (size_t)d * sizeof(float));                                                            \
                for (int32_t s = 0; s < n; s++) {                                                                     \
                    const TYPE *row = (const TYPE *)(sources[s].rows + i * sources[s].rows_t + j * sources[s].rows_h);\
                    float weight = share[s];                                                                          \
                    if (weight > 0.0f) /* what an empty row holds isn't looked at */                                  \
                        for (int64_t k = 0; k < d; k++) sum[k] = fmaf(weight, LOAD(row[k]), sum[k]);                  \
                }                                                                                                     \
                for (int64_t k = 0; k < d; k++) out[k] = STORE(sum[k]);                                               \
            }                                                                                                         \
    }

#define SAME(value) (value)
COMBINE(combine_float32, float, SAME, SAME)
COMBINE(combine_bfloat16, uint16_t, from_bfloat16, to_bfloat16)

static void combine_float16(const Source *sources, int32_t n, int64_t t, int64_t h, int64_t d, int32_t base_two, char *to,
                            int64_t to_t, int64_t to_h, float *out_lse, float *share, float *sum) {
    for (int64_t i = 0; i < t; i++)
        for (int64_t j = 0; j < h; j++) {
            float lse = shares_of(sources, n, i, j, base_two, out_lse != NULL, share);
            if (out_lse) *out_lse++ = lse;
            if (n == 2 && share[0] > 0.0f && share[1] > 0.0f) {
                merge_two((const uint16_t *)(sources[0].rows + i * sources[0].rows_t + j * sources[0].rows_h), share[0],
                          (const uint16_t *)(sources[1].rows + i * sources[1].rows_t + j * sources[1].rows_h), share[1],
                          (uint16_t *)(to + i * to_t + j * to_h), d);
                continue;
            }
            memset(sum, 0, (size_t)d * sizeof(float));
            for (int32_t s = 0; s < n; s++)
                if (share[s] > 0.0f)
                    add_halves((const uint16_t *)(sources[s].rows + i * sources[s].rows_t + j * sources[s].rows_h),
                               share[s], sum, d);
            narrow(sum, (uint16_t *)(to + i * to_t + j * to_h), d);
        }
}

/* `out [t, h, d]`, with the columns of a row side by side, and, unless null, `out_lse [t, h]`; `share` has room for
   n + d floats. */
EXPORT void dcpcomm_combine(const Source *sources, int32_t n, int64_t t, int64_t h, int64_t d, int32_t dtype,
                            int32_t base_two, char *out, int64_t out_t, int64_t out_h, float *out_lse, float *share) {
    if (dtype == FLOAT32)
        combine_float32(sources, n, t, h, d, base_two, out, out_t, out_h, out_lse, share, share + n);
    else if (dtype == BFLOAT16)
        combine_bfloat16(sources, n, t, h, d, base_two, out, out_t, out_h, out_lse, share, share + n);
    else
        combine_float16(sources, n, t, h, d, base_two, out, out_t, out_h, out_lse, share, share + n);
}

/* What arrived and this rank's own rows, these from where they are. 0, and nothing is written, where a peer's header
   isn't `header`. `sources` has room for n, `share` for n + d. */
EXPORT int dcpcomm_combine_packed(const Call *call, const char *rows, const char *lse, const int64_t *header, char *out,
                                  int64_t out_t, int64_t out_h, float *out_lse, Source *sources, float *share) {
    for (int64_t s = 0; s < call->n; s++) {
        char *block = call->recv + s * call->recv_block;
        Source came = {block + call->pitch, call->h * call->pitch, call->pitch,
                       block + call->pitch + call->lse_at, call->h * call->pitch, call->pitch, FLOAT32};
        Source own = {rows + s * call->rows_n, call->rows_t, call->rows_h,
                      lse + s * call->lse_n, call->lse_t, call->lse_h, call->lse_dtype};
        if (s != call->rank && memcmp(block, header, 32) != 0) return 0;
        sources[s] = s == call->rank ? own : came;
    }
    dcpcomm_combine(sources, (int32_t)call->n, call->t, call->h, call->d, call->dtype, call->base_two, out, out_t, out_h,
                    out_lse, share);
    return 1;
}

/* One send or receive of NCCL's. */
typedef struct {
    int (*transfer)(void *buffer, size_t count, int type, int peer, void *comm, void *stream);
    void *buffer;
    int64_t nbytes;
    int32_t peer;
} Message;

typedef struct {
    int (*begin)(void);
    int (*end)(void);
    void *comm;
    const Message *messages;
    int32_t count, type;
} Transfers;

/* All of them as one group, on `stream`. The first status that isn't 0, or 0. */
EXPORT int dcpcomm_transfer(const Transfers *all, void *stream) {
    int status = all->begin();
    if (status) return status;
    for (int32_t i = 0; i < all->count && !status; i++) {
        const Message *one = all->messages + i;
        status = one->transfer(one->buffer, (size_t)one->nbytes, all->type, one->peer, all->comm, stream);
    }
    int ended = all->end();
    return status ? status : ended;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
