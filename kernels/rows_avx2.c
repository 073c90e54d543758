// SPDX-License-Identifier: Apache-2.0
//
// Numbers and rows, AVX2: conversions, storing, the Hadamard transform, norms.
//
// What ends up in stored bytes is computed in the order that kernels_c.c writes down, one lane
// for each of its lanes, multiplication and addition apart.
#include "kernels/avx2.h"

static size_t size_of(uint8_t dtype)
{
    return dtype == KVQ_F32 ? 4 : 2;
}

static inline const void *at(const void *p, uint8_t dtype, size_t i)
{
    return (const char *)p + i * size_of(dtype);
}

KVQ__INLINE void load_all(const void *src, uint8_t dtype, float *dst, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, kvq__load8(at(src, dtype, i), dtype));
    if (i == n)
        return;
    float in[8] = {0}, out[8];
    memcpy(in, at(src, dtype, i), (n - i) * size_of(dtype));
    _mm256_storeu_ps(out, kvq__load8(in, dtype));
    memcpy(dst + i, out, (n - i) * sizeof *dst);
}

static void load_avx2(const void *src, uint8_t dtype, float *dst, size_t n)
{
    if (dtype == KVQ_F16)
        load_all(src, KVQ_F16, dst, n);
    else if (dtype == KVQ_BF16)
        load_all(src, KVQ_BF16, dst, n);
    else
        memcpy(dst, src, n * sizeof *dst);
}

KVQ__INLINE void save_all(const float *src, uint8_t dtype, void *dst, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        kvq__save8(_mm256_loadu_ps(src + i), dtype, (char *)dst + i * size_of(dtype));
    if (i == n)
        return;
    float in[8] = {0}, out[8];
    memcpy(in, src + i, (n - i) * sizeof *src);
    kvq__save8(_mm256_loadu_ps(in), dtype, out);
    memcpy((char *)dst + i * size_of(dtype), out, (n - i) * size_of(dtype));
}

static void save_avx2(const float *src, uint8_t dtype, void *dst, size_t n)
{
    if (dtype == KVQ_F16)
        save_all(src, KVQ_F16, dst, n);
    else if (dtype == KVQ_BF16)
        save_all(src, KVQ_BF16, dst, n);
    else
        memcpy(dst, src, n * sizeof *src);
}

// ---- Store ----

// How many of 8 lanes are set.
static inline unsigned count(__m256 mask)
{
    return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_ps(mask));
}

KVQ__INLINE void store8(const void *src, uint8_t from, void *dst, uint8_t to,
                        struct kvq_store_counts *counts)
{
    const __m256 inf = _mm256_set1_ps(INFINITY);
    const __m256 limit = _mm256_set1_ps(to == KVQ_F16 ? 65504.0f : 0x1.fep127f);
    __m256 x = kvq__load8(src, from), size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    __m256 finite = _mm256_cmp_ps(size, inf, _CMP_LT_OQ);
    counts->nonfinite += 8 - count(finite);
    counts->saturated += count(_mm256_and_ps(finite, _mm256_cmp_ps(size, limit, _CMP_GT_OQ)));
    kvq__save8(x, to, dst);
}

// Copies 16-bit numbers, as many as are finite up to a multiple of 16. Returns how many.
KVQ__INLINE size_t copy_finite(const uint16_t *src, uint8_t dtype, uint16_t *dst, size_t n)
{
    const __m256i top =
        _mm256_set1_epi16(dtype == KVQ_F16 ? 0x7c00 : 0x7f80); // the exponent's bits
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i x = _mm256_loadu_si256((const void *)(src + i));
        __m256i endless = _mm256_cmpeq_epi16(_mm256_and_si256(x, top), top);
        if (!_mm256_testz_si256(endless, endless))
            break;
        _mm256_storeu_si256((void *)(dst + i), x);
    }
    return i;
}

KVQ__INLINE void store_all(const void *src, uint8_t from, void *dst, uint8_t to, size_t n,
                           struct kvq_store_counts *counts)
{
    uint16_t *out = dst;
    size_t i = from == to ? copy_finite(src, to, out, n) : 0;
    for (; i + 8 <= n; i += 8)
        store8(at(src, from, i), from, out + i, to, counts);
    if (i == n)
        return;
    float in[8] = {0}; // zeros count as nothing
    uint16_t last[8];
    memcpy(in, at(src, from, i), (n - i) * size_of(from));
    store8(in, from, last, to, counts);
    memcpy(out + i, last, (n - i) * sizeof *out);
}

KVQ__INLINE void store_to(const void *src, uint8_t from, void *dst, uint8_t to, size_t n,
                          struct kvq_store_counts *counts)
{
    switch (from) {
    case KVQ_F16:
        store_all(src, KVQ_F16, dst, to, n, counts);
        break;
    case KVQ_BF16:
        store_all(src, KVQ_BF16, dst, to, n, counts);
        break;
    default:
        store_all(src, KVQ_F32, dst, to, n, counts);
    }
}

static void store_avx2(const void *src, uint8_t from, void *dst, uint8_t to, size_t n,
                       struct kvq_store_counts *counts)
{
    if (to == KVQ_F16)
        store_to(src, from, dst, KVQ_F16, n, counts);
    else
        store_to(src, from, dst, KVQ_BF16, n, counts);
}

// ---- Rows ----

// The butterflies within 8 elements, h = 1, 2, 4: each lane and its partner's become their sum
// in the lower of the two and the difference, lower minus upper, in the other.
KVQ__INLINE __m256 butterfly8(__m256 x)
{
    __m256 y = _mm256_permute_ps(x, 0xb1);
    x = _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xaa);
    y = _mm256_permute_ps(x, 0x4e);
    x = _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xcc);
    y = _mm256_permute2f128_ps(x, x, 1);
    return _mm256_blend_ps(_mm256_add_ps(x, y), _mm256_sub_ps(y, x), 0xf0);
}

static void butterflies(float *row, uint32_t dim, uint32_t h)
{
    for (uint32_t block = 0; block < dim; block += 2 * h)
        for (float *p = row + block; p < row + block + h; p += 8) {
            __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + h);
            _mm256_storeu_ps(p, _mm256_add_ps(a, b));
            _mm256_storeu_ps(p + h, _mm256_sub_ps(a, b));
        }
}

// x, or -x where a bit is set.
static void put_signs(const uint32_t *signs, float x, float *out, uint32_t dim)
{
    for (uint32_t c = 0; c < dim; c++)
        out[c] = kvq__float(kvq__bits(x) ^ (signs ? signs[c / 32] >> c % 32 << 31 : 0));
}

static void hadamard_avx2(float *rows, uint32_t n, uint32_t dim, const uint32_t *before,
                          const uint32_t *after)
{
    float first[KVQ_MAX_HEAD_DIM], last[KVQ_MAX_HEAD_DIM]; // 0 or -0; the norm
    put_signs(before, 0.0f, first, dim);
    put_signs(after, kvq__hadamard_norm(dim), last, dim);
    for (float *row = rows; row < rows + (size_t)n * dim; row += dim) {
        for (uint32_t i = 0; i < dim; i += 8) {
            __m256 x = _mm256_xor_ps(_mm256_loadu_ps(row + i), _mm256_loadu_ps(first + i));
            _mm256_storeu_ps(row + i, butterfly8(x));
        }
        for (uint32_t h = 8; h < dim; h *= 2)
            butterflies(row, dim, h);
        for (uint32_t i = 0; i < dim; i += 8) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(row + i), _mm256_loadu_ps(last + i));
            _mm256_storeu_ps(row + i, x);
        }
    }
}

static void sumsq_avx2(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    for (uint32_t r = 0; r < n; r++) {
        const float *row = rows + (size_t)r * dim;
        __m256 low = _mm256_setzero_ps(), high = low;
        for (uint32_t i = 0; i < dim; i += 16) {
            __m256 x = _mm256_loadu_ps(row + i), y = _mm256_loadu_ps(row + i + 8);
            low = _mm256_add_ps(low, _mm256_mul_ps(x, x));
            high = _mm256_add_ps(high, _mm256_mul_ps(y, y));
        }
        sums[r] = kvq__sum_all(_mm256_add_ps(low, high));
    }
}

static void sum_abs_avx2(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (uint32_t r = 0; r < n; r++) {
        const float *row = rows + (size_t)r * dim;
        __m256 low = _mm256_setzero_ps(), high = low;
        for (uint32_t i = 0; i < dim; i += 16) {
            low = _mm256_add_ps(low, _mm256_andnot_ps(sign, _mm256_loadu_ps(row + i)));
            high = _mm256_add_ps(high, _mm256_andnot_ps(sign, _mm256_loadu_ps(row + i + 8)));
        }
        sums[r] = kvq__sum_all(_mm256_add_ps(low, high));
    }
}

static void sum_columns_avx2(const float *rows, uint32_t n, uint32_t dim, const bool *left_out,
                             float *sums)
{
    for (uint32_t i = 0; i < dim; i += 8) {
        __m256 sum = _mm256_setzero_ps();
        for (uint32_t r = 0; r < n; r++)
            if (!left_out[r])
                sum = _mm256_add_ps(sum, _mm256_loadu_ps(rows + (size_t)r * dim + i));
        _mm256_storeu_ps(sums + i, sum);
    }
}

static void scale_rows_avx2(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++, rows += dim)
        for (uint32_t i = 0; i < dim; i += 8)
            _mm256_storeu_ps(rows + i,
                             _mm256_mul_ps(_mm256_loadu_ps(rows + i), _mm256_set1_ps(factor[r])));
}

static void scale_columns_avx2(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++, rows += dim)
        for (uint32_t i = 0; i < dim; i += 8)
            _mm256_storeu_ps(rows + i,
                             _mm256_mul_ps(_mm256_loadu_ps(rows + i), _mm256_loadu_ps(factor + i)));
}

static void blend_rows_avx2(float *a, const float *fa, const float *b, const float *fb, uint32_t n,
                            uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++, a += dim, b += dim)
        for (uint32_t i = 0; i < dim; i += 8) {
            __m256 x = _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_set1_ps(fa[r]));
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(b + i), _mm256_set1_ps(fb[r]));
            _mm256_storeu_ps(a + i, _mm256_add_ps(x, y));
        }
}

void kvq__init_avx2_rows(struct kvq_kernels *k)
{
    k->load = load_avx2;
    k->save = save_avx2;
    k->store = store_avx2;
    k->hadamard = hadamard_avx2;
    k->sumsq = sumsq_avx2;
    k->sum_abs = sum_abs_avx2;
    k->sum_columns = sum_columns_avx2;
    k->scale_rows = scale_rows_avx2;
    k->scale_columns = scale_columns_avx2;
    k->blend_rows = blend_rows_avx2;
}
