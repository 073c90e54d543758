// SPDX-License-Identifier: Apache-2.0
//
// The steps of attention over one chunk, AVX2 with FMA.
//
// Packed groups whose kind has no loop of its own (packed_avx2.c has) are dequantized once for all
// rows of the tile, into 16 KB at head_dim 128 that stay in the first level cache, and then taken
// like raw rows of fp32. Sixteen registers hold
// 2 rows by 4 tokens of dot products, or 4 rows by 16 channels of sums of values.
#include "kernels/avx2.h"

enum { ROWS_K = 2, ROWS_V = 4, TOKENS = 4, CHANNELS = 16 };

static inline const void *element(const void *p, uint8_t dtype, size_t i)
{
    return (const char *)p + i * (dtype == KVQ_F32 ? 4 : 2);
}

// ---- Logits ----

// Without anything to prefetch, what is read anyway.
static inline const uint8_t *ahead_of(const struct kvq__tile *tile, const void *rows)
{
    return tile->ahead ? tile->ahead : rows;
}

KVQ__INLINE void dot_block(const float *q, const void *k, uint32_t dim, const uint8_t *ahead,
                           __m128 *out, int rows, int tokens, uint8_t dtype)
{
    __m256 acc[ROWS_K][TOKENS];
    for (int i = 0; i < rows; i++)
        for (int t = 0; t < TOKENS; t++)
            acc[i][t] = _mm256_setzero_ps();
    for (uint32_t c = 0; c < dim; c += 8) {
        __m256 y[ROWS_K];
        kvq__fetch(ahead + 8 * c); // of 4 tokens' 16 bytes that are read here
        for (int i = 0; i < rows; i++)
            y[i] = _mm256_load_ps(q + (uint32_t)i * dim + c);
        for (int t = 0; t < tokens; t++) {
            __m256 x = kvq__load8(element(k, dtype, (uint32_t)t * dim + c), dtype);
            for (int i = 0; i < rows; i++)
                acc[i][t] = _mm256_fmadd_ps(x, y[i], acc[i][t]);
        }
    }
    for (int i = 0; i < rows; i++)
        out[i] = kvq__sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

KVQ__INLINE void qk_rows(const float *q, const void *k, uint32_t dim, const uint8_t *ahead,
                         uint32_t from, uint32_t to, float *logits, int rows, uint8_t dtype)
{
    __m128 x[ROWS_K];
    uint32_t t = from;
    for (; t + TOKENS <= to; t += TOKENS) {
        dot_block(q, element(k, dtype, (size_t)t * dim), dim, ahead + 2 * t * dim, x, rows, TOKENS,
                  dtype);
        for (int i = 0; i < rows; i++)
            _mm_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + t, x[i]);
    }
    for (; t < to; t++) {
        dot_block(q, element(k, dtype, (size_t)t * dim), dim, ahead + 2 * t * dim, x, rows, 1,
                  dtype);
        for (int i = 0; i < rows; i++)
            _mm_store_ss(logits + i * KVQ__LOGITS_STRIDE + t, x[i]);
    }
}

KVQ__INLINE void qk_tile(const struct kvq__tile *tile, const float *q, const void *k, uint32_t from,
                         uint32_t to, float *logits, uint8_t dtype)
{
    const uint8_t *ahead = ahead_of(tile, k);
    for (uint32_t r = 0; r < tile->rows; r += ROWS_K) {
        if (r + 1 < tile->rows)
            qk_rows(q, k, tile->dim, ahead, from, to, logits, 2, dtype);
        else
            qk_rows(q, k, tile->dim, ahead, from, to, logits, 1, dtype);
        ahead = k; // what was asked for once is on its way
        q += ROWS_K * tile->dim;
        logits += ROWS_K * KVQ__LOGITS_STRIDE;
    }
}

static void dot_rows_avx2(const struct kvq__tile *tile, const float *q, const float *rows,
                          float *logits)
{
    qk_tile(tile, q, rows, 0, KVQ_GROUP_TOKENS, logits, KVQ_F32);
}

static void qk_raw_avx2(const struct kvq__tile *tile, const uint16_t *k, uint32_t from, uint32_t to,
                        float *logits)
{
    if (tile->codec->raw_dtype == KVQ_F16)
        qk_tile(tile, tile->q, k, from, to, logits, KVQ_F16);
    else
        qk_tile(tile, tile->q, k, from, to, logits, KVQ_BF16);
}

// ---- Values ----

KVQ__INLINE void pv_block(const void *v, uint32_t dim, const uint8_t *ahead, uint32_t from,
                          uint32_t to, const float *p, float *o, int rows, uint8_t dtype)
{
    __m256 acc[ROWS_V][CHANNELS / 8];
    for (int i = 0; i < rows; i++)
        for (uint32_t c = 0; c < CHANNELS / 8; c++)
            acc[i][c] = _mm256_load_ps(o + (uint32_t)i * dim + 8 * c);
    for (uint32_t t = from; t < to; t++) {
        kvq__fetch(ahead + 2 * t * dim);
        for (uint32_t c = 0; c < CHANNELS / 8; c++) {
            __m256 x = kvq__load8(element(v, dtype, (size_t)t * dim + 8 * c), dtype);
            for (int i = 0; i < rows; i++)
                acc[i][c] = _mm256_fmadd_ps(
                    x, _mm256_set1_ps(p[i * KVQ__LOGITS_STRIDE + (int32_t)t]), acc[i][c]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t c = 0; c < CHANNELS / 8; c++)
            _mm256_store_ps(o + (uint32_t)i * dim + 8 * c, acc[i][c]);
}

KVQ__INLINE void pv_tile(const struct kvq__tile *tile, float *o, const void *v, uint32_t from,
                         uint32_t to, const float *p, uint8_t dtype)
{
    uint32_t dim = tile->dim;
    const uint8_t *first = ahead_of(tile, v);
    for (uint32_t r = 0; r < tile->rows; r += ROWS_V) {
        for (uint32_t c = 0; c < dim; c += CHANNELS) {
            const void *at = element(v, dtype, c);
            const uint8_t *ahead = first + 2 * c; // a line twice, for 32 bytes each
            switch (tile->rows - r) {
            case 1:
                pv_block(at, dim, ahead, from, to, p, o + c, 1, dtype);
                break;
            case 2:
                pv_block(at, dim, ahead, from, to, p, o + c, 2, dtype);
                break;
            case 3:
                pv_block(at, dim, ahead, from, to, p, o + c, 3, dtype);
                break;
            default:
                pv_block(at, dim, ahead, from, to, p, o + c, 4, dtype);
            }
        }
        first = v;
        p += ROWS_V * KVQ__LOGITS_STRIDE;
        o += ROWS_V * dim;
    }
}

static void sum_rows_avx2(const struct kvq__tile *tile, const float *p, const float *rows, float *o)
{
    pv_tile(tile, o, rows, 0, KVQ_GROUP_TOKENS, p, KVQ_F32);
}

static void pv_raw_avx2(const struct kvq__tile *tile, const uint16_t *v, uint32_t from, uint32_t to,
                        const float *p)
{
    if (tile->codec->raw_dtype == KVQ_F16)
        pv_tile(tile, tile->o, v, from, to, p, KVQ_F16);
    else
        pv_tile(tile, tile->o, v, from, to, p, KVQ_BF16);
}

// ---- Softmax ----

// Lanes of tokens t to t + 7 that lie in [lo, hi).
KVQ__INLINE __m256 seen(int32_t t, int32_t lo, int32_t hi)
{
    __m256i at = _mm256_add_epi32(_mm256_set1_epi32(t), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i from = _mm256_cmpgt_epi32(_mm256_set1_epi32(lo), at);
    __m256i to = _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), at);
    return _mm256_castsi256_ps(_mm256_andnot_si256(from, to));
}

// `all`, a constant: lo and hi leave nothing out.
KVQ__INLINE float softmax_row(float *x, int32_t n, int32_t lo, int32_t hi, float *m, float *l,
                              bool all)
{
    __m256 top = _mm256_set1_ps(-INFINITY), none = top, sum = _mm256_setzero_ps();
    for (int32_t t = 0; t < n; t += 8) {
        __m256 y = _mm256_load_ps(x + t);
        if (!all)
            y = _mm256_blendv_ps(none, y, seen(t, lo, hi));
        top = _mm256_max_ps(y, top); // the second where one is NaN
    }
    float max = kvq__max_all(top);
    max = max > *m ? max : *m;
    if (max == -INFINITY && !kvq__sees_nan(x, lo, hi)) {
        memset(x, 0, (size_t)n * sizeof *x);
        return 1.0f;
    }
    float factor = kvq__exp2(*m - max);
    for (int32_t t = 0; t < n; t += 8) {
        __m256 p = kvq__exp2_ps(_mm256_sub_ps(_mm256_load_ps(x + t), _mm256_set1_ps(max)));
        if (!all)
            p = _mm256_and_ps(p, seen(t, lo, hi));
        sum = _mm256_add_ps(sum, p);
        _mm256_store_ps(x + t, p);
    }
    float added = kvq__sum_all(sum);
    if (isunordered(max, added))
        return kvq__spoil_row(x, n, m, l);
    *m = max;
    *l = *l * factor + added;
    return factor;
}

static void softmax_avx2(struct kvq__tile *tile, uint32_t n)
{
    for (uint32_t r = 0; r < tile->rows; r++) {
        float *x = tile->logits + (size_t)r * KVQ__LOGITS_STRIDE, *m = &tile->m[r],
              *l = &tile->l[r];
        int32_t lo = tile->lo[r], hi = tile->hi[r], end = (int32_t)n;
        bool all = lo <= 0 && hi >= end;
        tile->factor[r] = all ? softmax_row(x, end, lo, hi, m, l, true)
                              : softmax_row(x, end, lo, hi, m, l, false);
    }
}

// tanh(x) = 1 - 2 / (e^2x + 1); near 0, where that cancels, its series.
static inline __m256 tanh8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    __m256 size = _mm256_andnot_ps(sign, x), square = _mm256_mul_ps(x, x);
    __m256 s = _mm256_set1_ps(62.0f / 2835);
    s = _mm256_fmadd_ps(s, square, _mm256_set1_ps(-17.0f / 315));
    s = _mm256_fmadd_ps(s, square, _mm256_set1_ps(2.0f / 15));
    s = _mm256_fmadd_ps(s, square, _mm256_set1_ps(-1.0f / 3));
    s = _mm256_mul_ps(size, _mm256_fmadd_ps(s, square, one));
    // With u = e^-2|x|, which cannot overflow: (1 - u) / (1 + u).
    __m256 u = kvq__exp2_ps(_mm256_mul_ps(size, _mm256_set1_ps(-2.0f * 1.44269504f)));
    __m256 far = _mm256_div_ps(_mm256_sub_ps(one, u), _mm256_add_ps(one, u));
    __m256 near = _mm256_cmp_ps(size, _mm256_set1_ps(0.35f), _CMP_LT_OQ);
    return _mm256_or_ps(_mm256_blendv_ps(far, s, near), _mm256_and_ps(x, sign));
}

static void softcap_avx2(const struct kvq__tile *tile, uint32_t n)
{
    __m256 cap = _mm256_set1_ps(tile->cap);
    for (uint32_t r = 0; r < tile->rows; r++) {
        float *x = tile->logits + (size_t)r * KVQ__LOGITS_STRIDE;
        for (uint32_t t = 0; t < n; t += 8)
            _mm256_store_ps(x + t, _mm256_mul_ps(cap, tanh8(_mm256_load_ps(x + t))));
    }
}

void kvq__init_avx2_attend(struct kvq_kernels *k)
{
    k->dot_rows = dot_rows_avx2;
    k->qk_raw = qk_raw_avx2;
    k->softcap = softcap_avx2;
    k->softmax = softmax_avx2;
    k->sum_rows = sum_rows_avx2;
    k->pv_raw = pv_raw_avx2;
}
