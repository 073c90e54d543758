// SPDX-License-Identifier: Apache-2.0
//
// Attention over raw rows (f16 and bf16), AVX-512: the window, the fresh tail, and whole caches of
// the formats f16 and bf16, which is what every other format is compared with.
//
// Logits: blocks of 4 tokens by up to 4 rows are 16 accumulators; each 16 channels of K are loaded
// and widened once, each of q loaded once, for 16 FMAs. The 16 sums across lanes are made by
// shuffles that add four at a time. Values: up to 4 rows by 64 channels are 16 accumulators, kept
// for all 32 tokens; each 16 channels of V are widened once for 4 FMAs. Both are bound by the FMA
// units at 64 bytes a cycle, well above what memory delivers.
#include "kernels/avx512.h"

enum { TOKENS = 4, CHANNELS = 64 };

// Without anything to prefetch, what is read anyway.
KVQ__INLINE const uint8_t *ahead_of(const struct kvq__tile *tile, const uint16_t *rows)
{
    return tile->ahead ? tile->ahead : (const uint8_t *)rows;
}

KVQ__INLINE __m512 load_raw(const uint16_t *p, bool f16)
{
    return f16 ? kvq__load_f16(p) : kvq__load_bf16(p);
}

// Logits of `tokens` tokens, which stand in the first lanes of out[row].
KVQ__INLINE void dot_block(const float *q, const uint16_t *k, uint32_t dim, const uint8_t *ahead,
                           __m128 *out, int rows, int tokens, bool f16)
{
    __m512 acc[KVQ__TILE4][TOKENS];
    for (int i = 0; i < rows; i++)
        for (int t = 0; t < TOKENS; t++)
            acc[i][t] = _mm512_setzero_ps();
    for (uint32_t c = 0; c < dim; c += 16) {
        __m512 x[TOKENS];
        for (int t = 0; t < tokens; t += 2) // 64 of the 32 bytes a token that are read here
            kvq__fetch(ahead + 8 * c + 32 * t);
        for (int t = 0; t < tokens; t++)
            x[t] = load_raw(k + (uint32_t)t * dim + c, f16);
        for (int i = 0; i < rows; i++) {
            __m512 y = _mm512_load_ps(q + (uint32_t)i * dim + c);
            for (int t = 0; t < tokens; t++)
                acc[i][t] = _mm512_fmadd_ps(x[t], y, acc[i][t]);
        }
    }
    for (int i = 0; i < rows; i++)
        out[i] = _mm512_castps512_ps128(kvq__sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
}

KVQ__INLINE void qk_rows(const float *q, const uint16_t *k, uint32_t dim, const uint8_t *ahead,
                         uint32_t from, uint32_t to, float *logits, int rows, bool f16)
{
    __m128 x[KVQ__TILE4];
    uint32_t t = from;
    for (; t + TOKENS <= to; t += TOKENS) {
        dot_block(q, k + (size_t)t * dim, dim, ahead + 2 * t * dim, x, rows, TOKENS, f16);
        for (int i = 0; i < rows; i++)
            _mm_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + t, x[i]);
    }
    for (; t < to; t++) {
        dot_block(q, k + (size_t)t * dim, dim, ahead + 2 * t * dim, x, rows, 1, f16);
        for (int i = 0; i < rows; i++)
            _mm_store_ss(logits + i * KVQ__LOGITS_STRIDE + t, x[i]);
    }
}

KVQ__INLINE void qk_tile(const struct kvq__tile *tile, const uint16_t *k, uint32_t from,
                         uint32_t to, float *logits, bool f16)
{
    uint32_t dim = tile->dim;
    const float *q = tile->q;
    const uint8_t *ahead = ahead_of(tile, k);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        switch (tile->rows - r) {
        case 1:
            qk_rows(q, k, dim, ahead, from, to, logits, 1, f16);
            break;
        case 2:
            qk_rows(q, k, dim, ahead, from, to, logits, 2, f16);
            break;
        case 3:
            qk_rows(q, k, dim, ahead, from, to, logits, 3, f16);
            break;
        default:
            qk_rows(q, k, dim, ahead, from, to, logits, 4, f16);
        }
        ahead = (const uint8_t *)k; // what was asked for once is on its way
        q += KVQ__TILE4 * dim;
        logits += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
    }
}

static void qk_raw_avx512(const struct kvq__tile *tile, const uint16_t *k, uint32_t from,
                          uint32_t to, float *logits)
{
    if (tile->codec->raw_dtype == KVQ_F16)
        qk_tile(tile, k, from, to, logits, true);
    else
        qk_tile(tile, k, from, to, logits, false);
}

KVQ__INLINE void pv_block(const uint16_t *v, uint32_t dim, const uint8_t *ahead, uint32_t from,
                          uint32_t to, const float *p, float *o, int rows, bool f16)
{
    __m512 acc[KVQ__TILE4][CHANNELS / 16];
    for (int i = 0; i < rows; i++)
        for (uint32_t c = 0; c < CHANNELS / 16; c++)
            acc[i][c] = _mm512_load_ps(o + (uint32_t)i * dim + 16 * c);
    for (uint32_t t = from; t < to; t++) {
        __m512 w[KVQ__TILE4];
        kvq__fetch(ahead + 2 * t * dim);
        kvq__fetch(ahead + 2 * t * dim + 64);
        for (int i = 0; i < rows; i++)
            w[i] = _mm512_set1_ps(p[i * KVQ__LOGITS_STRIDE + (int32_t)t]);
        for (uint32_t c = 0; c < CHANNELS / 16; c++) {
            __m512 x = load_raw(v + (size_t)t * dim + 16 * c, f16);
            for (int i = 0; i < rows; i++)
                acc[i][c] = _mm512_fmadd_ps(x, w[i], acc[i][c]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t c = 0; c < CHANNELS / 16; c++)
            _mm512_store_ps(o + (uint32_t)i * dim + 16 * c, acc[i][c]);
}

KVQ__INLINE void pv_tile(const struct kvq__tile *tile, const uint16_t *v, uint32_t from,
                         uint32_t to, const float *p, bool f16)
{
    uint32_t dim = tile->dim;
    float *o = tile->o;
    const uint8_t *ahead = ahead_of(tile, v);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4) {
        for (uint32_t c = 0; c < dim; c += CHANNELS)
            switch (tile->rows - r) {
            case 1:
                pv_block(v + c, dim, ahead + 2 * c, from, to, p, o + c, 1, f16);
                break;
            case 2:
                pv_block(v + c, dim, ahead + 2 * c, from, to, p, o + c, 2, f16);
                break;
            case 3:
                pv_block(v + c, dim, ahead + 2 * c, from, to, p, o + c, 3, f16);
                break;
            default:
                pv_block(v + c, dim, ahead + 2 * c, from, to, p, o + c, 4, f16);
            }
        ahead = (const uint8_t *)v;
        p += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        o += KVQ__TILE4 * dim;
    }
}

static void pv_raw_avx512(const struct kvq__tile *tile, const uint16_t *v, uint32_t from,
                          uint32_t to, const float *p)
{
    if (tile->codec->raw_dtype == KVQ_F16)
        pv_tile(tile, v, from, to, p, true);
    else
        pv_tile(tile, v, from, to, p, false);
}

void kvq__init_avx512_raw(struct kvq_kernels *k)
{
    k->qk_raw = qk_raw_avx512;
    k->pv_raw = pv_raw_avx512;
}
