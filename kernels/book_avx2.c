// SPDX-License-Identifier: Apache-2.0
//
// Attention over codebook groups in fp32, AVX2: the exact path. As book_avx512.c does it, with half
// the lanes: codes become offsets of 16 bits, and centroids are put together to 8 values, of
// 8 / vector tokens (K) or of 8 channels of a token (V), that up to 4 rows share.
#include "kernels/avx2.h"
#include "kernels/book.h"

enum {
    TILE = 4, // query rows that share the values
    MOST_SUBS = KVQ_MAX_HEAD_DIM / 2,
    VALUES = 2, // registers of values at a time; 4 rows by 2 of them are 8 accumulators
};

// ---- Offsets ----

// Fields 16 h to 16 h + 15 of a row of a plane, as 16-bit numbers.
KVQ__INLINE __m256i fields(const uint8_t *row, uint32_t h, int width)
{
    const uint8_t *at = row + 2 * (uint32_t)width * h;
    __m256i x;
    if (width == 8)
        return _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)at));
    if (width == 4) { // byte i holds tokens 2 i and 2 i + 1
        x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)at));
        x = _mm256_or_si256(x, _mm256_slli_epi32(x, 12));
        return _mm256_and_si256(x, _mm256_set1_epi16(15));
    }
    if (width == 2) {
        x = _mm256_cvtepu8_epi64(_mm_loadu_si32(at));
        x = _mm256_or_si256(x, _mm256_slli_epi64(x, 14));
        x = _mm256_or_si256(x, _mm256_slli_epi64(x, 28));
        return _mm256_and_si256(x, _mm256_set1_epi16(3));
    }
    const __m256i bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                          8192, 16384, INT16_MIN);
    x = _mm256_set1_epi16((short)(at[0] | at[1] << 8));
    return _mm256_srli_epi16(_mm256_cmpeq_epi16(_mm256_and_si256(x, bit), bit), 15);
}

KVQ__INLINE void offsets_of(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                            int low, int high)
{
    const uint8_t *low_row = s->low, *high_row = s->high;
    for (uint32_t m = 0; m < s->subs; m++, low_row += 4 * low, high_row += 4 * high)
        for (uint32_t h = 0; h < 2; h++) {
            __m256i code = fields(low_row, h, low);
            if (high)
                code = _mm256_or_si256(code, _mm256_slli_epi16(fields(high_row, h, high), low));
            _mm256_store_si256((void *)(offsets[m] + 16 * h), _mm256_slli_epi16(code, s->shift));
        }
}

// Where centroids lie in their table: code << shift, in units of UNIT bytes (book.h).
static void set_offsets(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS])
{
    KVQ__BY_PLANES(s->bits, offsets_of(s, offsets, LOW, HIGH));
}

// ---- Values ----

KVQ__INLINE __m128 pair(const double *a, const double *b)
{
    return _mm_castpd_ps(_mm_loadh_pd(_mm_castsi128_pd(_mm_loadl_epi64((const void *)a)), b));
}

// The centroids at 8 / vector offsets that lie `step` apart, one behind the other. Offset i counts
// from table + i * stride, in units of `unit` bytes.
KVQ__INLINE __m256 pick(const uint16_t *offsets, uint32_t step, const char *table, size_t stride,
                        int vector, size_t unit)
{
#define AT(i)   ((const void *)(table + (i)*stride + unit * offsets[step * (i)]))
#define FOUR(i) _mm_loadu_ps(AT(i))
#define TWO(i)  pair(AT(i), AT((i) + 1))
    if (vector == 8)
        return _mm256_loadu_ps(AT(0));
    if (vector == 4)
        return _mm256_insertf128_ps(_mm256_castps128_ps256(FOUR(0)), FOUR(1), 1);
    return _mm256_insertf128_ps(_mm256_castps128_ps256(TWO(0)), TWO(2), 1);
#undef TWO
#undef FOUR
#undef AT
}

// The first four rows pick values and, if others follow, leave them in memory; others load them.
enum source { PICKED, KEPT, LOADED };

// ---- K ----

// Logits of the tokens of two registers, from the sums of their lanes.
KVQ__INLINE void store_logits(__m256 a, __m256 b, float *logits, int vector)
{
    __m256 s = _mm256_hadd_ps(a, b);
    if (vector == 2) { // tokens 0, 1, 4, 5, 2, 3, 6, 7
        __m256d order = _mm256_permute4x64_pd(_mm256_castps_pd(s), 0xd8);
        _mm256_storeu_ps(logits, _mm256_castpd_ps(order));
        return;
    }
    s = _mm256_hadd_ps(s, s); // lanes of 128 bits: a's sum, then b's
    __m128 low = _mm256_castps256_ps128(s), high = _mm256_extractf128_ps(s, 1);
    if (vector == 4)
        _mm_storeu_ps(logits, _mm_unpacklo_ps(low, high));
    else
        _mm_storel_pi((void *)logits, _mm_add_ps(low, high));
}

KVQ__INLINE __m256 load_query(const float *q, int vector)
{
    if (vector == 8)
        return _mm256_loadu_ps(q);
    if (vector == 4)
        return _mm256_broadcast_ps((const void *)q);
    return _mm256_castpd_ps(_mm256_broadcast_sd((const void *)q));
}

// kept: [sub-vector][32 tokens][vector].
KVQ__INLINE void qk_rows(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                         const float *q, const uint8_t *ahead, float *kept, float *logits,
                         enum source source, int rows, int vector, size_t unit)
{
    const uint32_t lanes = 8 / (uint32_t)vector, ahead_step = KVQ_GROUP_TOKENS * s->bits / 8;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += VALUES * lanes) {
        __m256 acc[TILE][VALUES];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < VALUES; j++)
                acc[i][j] = _mm256_setzero_ps();
        for (uint32_t m = 0; m < s->subs; m++) {
            float *keep = kept + (m * KVQ_GROUP_TOKENS + t) * (uint32_t)vector;
            __m256 x[VALUES];
            if (ahead)
                kvq__fetch(ahead + m * ahead_step);
            for (uint32_t j = 0; j < VALUES; j++) {
                x[j] = source == LOADED ? _mm256_load_ps(keep + 8 * j)
                                        : pick(offsets[m] + t + j * lanes, 1,
                                               s->table + m * s->stride, 0, vector, unit);
                if (source == KEPT)
                    _mm256_store_ps(keep + 8 * j, x[j]);
            }
            for (int i = 0; i < rows; i++) {
                __m256 y = load_query(q + (uint32_t)i * s->dim + m * (uint32_t)vector, vector);
                for (int j = 0; j < VALUES; j++)
                    acc[i][j] = _mm256_fmadd_ps(x[j], y, acc[i][j]);
            }
        }
        for (int i = 0; i < rows; i++)
            store_logits(acc[i][0], acc[i][1], logits + i * KVQ__LOGITS_STRIDE + t, vector);
        ahead = NULL; // what was asked for once is on its way
    }
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const struct kvq__book_codes *s,
                          float *logits, int vector, size_t unit)
{
    _Alignas(64) uint16_t offsets[MOST_SUBS][KVQ_GROUP_TOKENS];
    const float *q = tile->qt;
    float *kept = tile->group_f32;
    set_offsets(s, offsets);
    if (tile->rows > TILE)
        qk_rows(s, offsets, q, tile->ahead, kept, logits, KEPT, TILE, vector, unit);
    else
        KVQ__BY_ROWS(tile->rows,
                     qk_rows(s, offsets, q, tile->ahead, kept, logits, PICKED, ROWS, vector, unit));
    for (uint32_t r = TILE; r < tile->rows; r += TILE) {
        q += TILE * s->dim;
        logits += TILE * KVQ__LOGITS_STRIDE;
        KVQ__BY_ROWS(tile->rows - r,
                     qk_rows(s, offsets, q, NULL, kept, logits, LOADED, ROWS, vector, unit));
    }
}

static void multiply_norms(const struct kvq__tile *tile, const uint8_t *norms, float *logits)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += 8) {
        __m256 norm = kvq__load8(norms + 2 * t, KVQ_F16);
        for (uint32_t r = 0; r < tile->rows; r++) {
            float *at = logits + (size_t)r * KVQ__LOGITS_STRIDE + t;
            _mm256_storeu_ps(at, _mm256_mul_ps(_mm256_loadu_ps(at), norm));
        }
    }
}

static void qk_book(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    const struct kvq__codec *c = tile->codec;
    struct kvq__book_codes s = kvq__book_codes_of(&c->k, c->dim, packed->group + c->layout.k_codes);
    KVQ__BY_BOOK(&c->k.row, qk_group(tile, &s, logits, VECTOR, UNIT));
    if (c->has_norms)
        multiply_norms(tile, packed->group + c->layout.k_norms, logits);
}

// ---- V ----

// 16 channels from c on. kept: [32 tokens][dim].
KVQ__INLINE void pv_block(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                          uint32_t c, const float *p, const uint8_t *ahead, float *kept, float *o,
                          enum source source, int rows, int vector, size_t unit)
{
    const uint32_t lanes = 8 / (uint32_t)vector, first = c / (uint32_t)vector;
    const char *table = s->table + first * s->stride;
    __m256 acc[TILE][VALUES];
    for (int i = 0; i < rows; i++)
        for (uint32_t j = 0; j < VALUES; j++)
            acc[i][j] = _mm256_load_ps(o + (uint32_t)i * s->dim + c + 8 * j);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        if (ahead)
            kvq__fetch(ahead + t * (VALUES * lanes) * s->bits / 8);
        for (uint32_t j = 0; j < VALUES; j++) {
            float *keep = kept + t * s->dim + c + 8 * j;
            __m256 x = source == LOADED
                           ? _mm256_load_ps(keep)
                           : pick(offsets[first + j * lanes] + t, KVQ_GROUP_TOKENS,
                                  table + j * lanes * s->stride, s->stride, vector, unit);
            if (source == KEPT)
                _mm256_store_ps(keep, x);
            for (int i = 0; i < rows; i++) {
                __m256 w = _mm256_broadcast_ss(p + i * KVQ__LOGITS_STRIDE + (int)t);
                acc[i][j] = _mm256_fmadd_ps(x, w, acc[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t j = 0; j < VALUES; j++)
            _mm256_store_ps(o + (uint32_t)i * s->dim + c + 8 * j, acc[i][j]);
}

KVQ__INLINE void pv_rows(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                         const float *p, const uint8_t *ahead, float *kept, float *o,
                         enum source source, int rows, int vector, size_t unit)
{
    const uint32_t step = 8 * VALUES;
    for (uint32_t c = 0; c < s->dim; c += step) {
        pv_block(s, offsets, c, p, ahead, kept, o, source, rows, vector, unit);
        ahead = ahead ? ahead + step / (uint32_t)vector * KVQ_GROUP_TOKENS * s->bits / 8 : NULL;
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const struct kvq__book_codes *s,
                          const float *p, int vector, size_t unit)
{
    _Alignas(64) uint16_t offsets[MOST_SUBS][KVQ_GROUP_TOKENS];
    float *o = tile->ot, *kept = tile->group_f32;
    set_offsets(s, offsets);
    if (tile->rows > TILE)
        pv_rows(s, offsets, p, tile->ahead, kept, o, KEPT, TILE, vector, unit);
    else
        KVQ__BY_ROWS(tile->rows,
                     pv_rows(s, offsets, p, tile->ahead, kept, o, PICKED, ROWS, vector, unit));
    for (uint32_t r = TILE; r < tile->rows; r += TILE) {
        p += TILE * KVQ__LOGITS_STRIDE;
        o += TILE * s->dim;
        KVQ__BY_ROWS(tile->rows - r,
                     pv_rows(s, offsets, p, NULL, kept, o, LOADED, ROWS, vector, unit));
    }
}

static void pv_book(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    const struct kvq__codec *c = tile->codec;
    struct kvq__book_codes s = kvq__book_codes_of(&c->v, c->dim, packed->group + c->layout.v_codes);
    KVQ__BY_BOOK(&c->v.row, pv_group(tile, &s, p, VECTOR, UNIT));
}

void kvq__init_avx2_book(struct kvq_kernels *k)
{
    k->qk_packed[KVQ__BOOK] = qk_book;
    k->pv_packed[KVQ__BOOK] = pv_book;
}
