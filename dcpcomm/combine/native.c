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

/* Write header, rows and LSEs of one destination: `block` has 1 + t * h rows of `pitch` bytes, each LSE at `lse_at`. */
EXPORT void dcpcomm_pack(char *block, const Source *from, int64_t t, int64_t h, int64_t row_bytes, int64_t pitch,
                         int64_t lse_at, const int64_t *header) {
    memcpy(block, header, 32);
    for (int64_t i = 0; i < t; i++)
        for (int64_t j = 0; j < h; j++) {
            float lse = load_lse(from->lse + i * from->lse_t + j * from->lse_h, from->lse_dtype);
            block += pitch;
            memcpy(block, from->rows + i * from->rows_t + j * from->rows_h, (size_t)row_bytes);
            memcpy(block + lse_at, &lse, 4);
        }
}

/* The shares of one row's sources, and its merged LSE if it is wanted. All LSEs are known before the first is weighed. */
static inline float shares_of(const Source *sources, int32_t n, int64_t i, int64_t j, int32_t base_two, int want_lse,
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
        share[s] = exp2f(base_two ? below : below * 1.44269504088896340736f);
        total += share[s];
    }
    float whole = 1.0f / total;
    for (int32_t s = 0; s < n; s++) share[s] *= whole;
    if (!want_lse) return 0.0f;
    return top + (base_two ? log2f(total) : logf(total));
}

#define COMBINE(NAME, TYPE, LOAD, STORE)                                                                              \
    CLONES static void NAME(const Source *sources, int32_t n, int64_t t, int64_t h, int64_t d, int32_t base_two,      \
                            TYPE *restrict out, float *out_lse, float *share, float *restrict merged) {               \
        for (int64_t i = 0; i < t; i++)                                                                               \
            for (int64_t j = 0; j < h; j++) {                                                                         \
                float lse = shares_of(sources, n, i, j, base_two, out_lse != NULL, share);                            \
                memset(merged, 0, (size_t)d * sizeof(float));                                                         \
                for (int32_t s = 0; s < n; s++) {                                                                     \
                    const TYPE *row = (const TYPE *)(sources[s].rows + i * sources[s].rows_t + j * sources[s].rows_h); \
                    float weight = share[s];                                                                          \
                    if (weight > 0.0f) /* what an empty row holds isn't looked at */                                  \
                        for (int64_t k = 0; k < d; k++) merged[k] = fmaf(weight, LOAD(row[k]), merged[k]);             \
                }                                                                                                     \
                for (int64_t k = 0; k < d; k++) out[k] = STORE(merged[k]);                                            \
                out += d;                                                                                             \
                if (out_lse) *out_lse++ = lse;                                                                        \
            }                                                                                                         \
    }

#define SAME(value) (value)
COMBINE(combine_float32, float, SAME, SAME)
COMBINE(combine_bfloat16, uint16_t, from_bfloat16, to_bfloat16)
COMBINE(combine_float16, uint16_t, from_float16, to_float16)

/* `out [t, h, d]` and, unless null, `out_lse [t, h]`; `scratch` has room for n + d floats. */
EXPORT void dcpcomm_combine(const Source *sources, int32_t n, int64_t t, int64_t h, int64_t d, int32_t dtype,
                            int32_t base_two, void *out, float *out_lse, float *scratch) {
    if (dtype == FLOAT32)
        combine_float32(sources, n, t, h, d, base_two, out, out_lse, scratch, scratch + n);
    else if (dtype == BFLOAT16)
        combine_bfloat16(sources, n, t, h, d, base_two, out, out_lse, scratch, scratch + n);
    else
        combine_float16(sources, n, t, h, d, base_two, out, out_lse, scratch, scratch + n);
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
