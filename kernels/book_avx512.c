// SPDX-License-Identifier: Apache-2.0
//
// Attention over codebook groups in fp32, AVX-512: the exact path.
//
// A group's codes first become offsets into the tables, 16 bits each, for gathering is what these
// formats cost: one load for the offset and one for a centroid of 8, 16 or 32 bytes, put together
// to a register of 16 values by loads that insert. The instruction that gathers is slower by far,
// and tables of dot products (q by centroid) are no faster to read than the centroids and would
// have to be made for every query; 4 rows share each register of values instead.
//
// K: a register holds 16 / vector tokens of one sub-vector, so that one table is read 32 times in
// a row and sums across lanes stay within a token. V: 16 channels of one token, so that nothing is
// added across lanes.
#include "kernels/avx512.h"
#include "kernels/book.h"

enum {
    MOST_SUBS = KVQ_MAX_HEAD_DIM / 2,
    VALUES = 4,    // registers of values at a time; 4 rows by 4 of them are 16 accumulators
    BLOCK = 64,    // channels of V whose sums are kept in registers
    REACH = 65536, // units that an offset reaches
};

// ---- Offsets ----

// A row of a plane as 16-bit numbers.
KVQ__INLINE __m512i fields(const uint8_t *row, int width)
{
    __m512i x;
    uint32_t bits;
    if (width == 8)
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)row));
    if (width == 4) { // byte i holds tokens 2 i and 2 i + 1
        x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)row));
        x = _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
        return _mm512_and_si512(x, _mm512_set1_epi16(15));
    }
    if (width == 2) {
        x = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const void *)row));
        x = _mm512_or_si512(x, _mm512_slli_epi64(x, 14));
        x = _mm512_or_si512(x, _mm512_slli_epi64(x, 28));
        return _mm512_and_si512(x, _mm512_set1_epi16(3));
    }
    memcpy(&bits, row, sizeof bits);
    return _mm512_maskz_mov_epi16(bits, _mm512_set1_epi16(1));
}

// `fold`: see set_offsets.
KVQ__INLINE void offsets_of(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                            size_t fold, uint32_t run, int low, int high)
{
    const uint8_t *low_row = s->low, *high_row = s->high;
    for (uint32_t m = 0; m < s->subs; m++, low_row += 4 * low, high_row += 4 * high) {
        __m512i code = fields(low_row, low);
        if (high)
            code = _mm512_or_si512(code, _mm512_slli_epi16(fields(high_row, high), (unsigned)low));
        code = _mm512_slli_epi16(code, (unsigned)s->shift);
        __m512i start = _mm512_set1_epi16((short)(uint16_t)(fold * (m % run)));
        _mm512_store_si512(offsets[m], _mm512_add_epi16(code, start));
    }
}

// Where centroids lie in their table: code << shift, in units of UNIT bytes (book.h). `fold` is
// the distance from each sub-vector's table to the next, in the same units, within runs of `run`;
// 0 if loads add it themselves.
static void set_offsets(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                        size_t fold, uint32_t run)
{
    KVQ__BY_PLANES(s->bits, offsets_of(s, offsets, fold, run, LOW, HIGH));
}

// ---- Values ----

// Offset i of those that lie `step` apart. Neighbours come out of one load.
KVQ__INLINE size_t offset_at(const uint16_t *offsets, uint32_t step, uint32_t i)
{
    uint64_t four;
    if (step != 1)
        return offsets[step * i];
    memcpy(&four, offsets + (i & ~3u), sizeof four);
    return (uint16_t)(four >> 16 * (i & 3u));
}

KVQ__INLINE __m128 pair(const double *a, const double *b)
{
    return _mm_castpd_ps(_mm_loadh_pd(_mm_castsi128_pd(_mm_loadl_epi64((const void *)a)), b));
}

// The centroids at 16 / vector offsets, one behind the other. Offset i counts from
// table + i * stride, in units of `unit` bytes.
KVQ__INLINE __m512 pick(const uint16_t *offsets, uint32_t step, const char *table, size_t stride,
                        int vector, size_t unit)
{
#define AT(i)   ((const void *)(table + (i)*stride + unit * offset_at(offsets, step, i)))
#define FOUR(i) _mm_loadu_ps(AT(i))
#define TWO(i)  pair(AT(i), AT((i) + 1))
    if (vector == 8) {
        __m512 x = _mm512_castps256_ps512(_mm256_loadu_ps(AT(0)));
        return _mm512_insertf32x8(x, _mm256_loadu_ps(AT(1)), 1);
    }
    if (vector == 4) {
        __m512 x = _mm512_castps128_ps512(FOUR(0));
        x = _mm512_insertf32x4(x, FOUR(1), 1);
        x = _mm512_insertf32x4(x, FOUR(2), 2);
        return _mm512_insertf32x4(x, FOUR(3), 3);
    }
    __m256 x = _mm256_insertf128_ps(_mm256_castps128_ps256(TWO(0)), TWO(2), 1);
    __m256 y = _mm256_insertf128_ps(_mm256_castps128_ps256(TWO(4)), TWO(6), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(x), y, 1);
#undef TWO
#undef FOUR
#undef AT
}

// The first four rows pick values and, if others follow, leave them in memory; others load them.
enum source { PICKED, KEPT, LOADED };

// ---- K ----

// Logits of the tokens of four registers, from the sums of their lanes.
KVQ__INLINE void store_logits(const __m512 sum[VALUES], float *logits, int vector)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int i = 0; vector == 2 && i < VALUES; i += 2)
        _mm512_storeu_ps(logits + 8 * i,
                         _mm512_add_ps(_mm512_permutex2var_ps(sum[i], even, sum[i + 1]),
                                       _mm512_permutex2var_ps(sum[i], odd, sum[i + 1])));
    if (vector == 2)
        return;
    // Register j, lane of 128 bits i: token 4 j + i, or half of token 2 j + i / 2.
    __m512 s = kvq__lane_sums(sum[0], sum[1], sum[2], sum[3]);
    if (vector == 4) {
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_ps(logits, _mm512_permutexvar_ps(order, s));
    } else {
        const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11);
        s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0xb1));
        _mm256_storeu_ps(logits, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, s)));
    }
}

KVQ__INLINE __m512 load_query(const float *q, int vector)
{
    if (vector == 8)
        return _mm512_broadcast_f32x8(_mm256_loadu_ps(q));
    if (vector == 4)
        return _mm512_broadcast_f32x4(_mm_loadu_ps(q));
    return _mm512_castpd_ps(_mm512_broadcastsd_pd(_mm_loadl_pd(_mm_setzero_pd(), (const void *)q)));
}

// kept: [sub-vector][32 tokens][vector].
KVQ__INLINE void qk_rows(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                         const float *q, const uint8_t *ahead, float *kept, float *logits,
                         enum source source, int rows, int vector, size_t unit)
{
    const uint32_t lanes = 16 / (uint32_t)vector, ahead_step = KVQ_GROUP_TOKENS * s->bits / 8;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += VALUES * lanes) {
        __m512 acc[KVQ__TILE4][VALUES];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < VALUES; j++)
                acc[i][j] = _mm512_setzero_ps();
        for (uint32_t m = 0; m < s->subs; m++) {
            float *keep = kept + (m * KVQ_GROUP_TOKENS + t) * (uint32_t)vector;
            __m512 x[VALUES];
            if (ahead)
                kvq__fetch(ahead + m * ahead_step);
            for (uint32_t j = 0; j < VALUES; j++) {
                x[j] = source == LOADED ? _mm512_load_ps(keep + 16 * j)
                                        : pick(offsets[m] + t + j * lanes, 1,
                                               s->table + m * s->stride, 0, vector, unit);
                if (source == KEPT)
                    _mm512_store_ps(keep + 16 * j, x[j]);
            }
            for (int i = 0; i < rows; i++) {
                __m512 y = load_query(q + (uint32_t)i * s->dim + m * (uint32_t)vector, vector);
                for (int j = 0; j < VALUES; j++)
                    acc[i][j] = _mm512_fmadd_ps(x[j], y, acc[i][j]);
            }
        }
        for (int i = 0; i < rows; i++)
            store_logits(acc[i], logits + i * KVQ__LOGITS_STRIDE + t, vector);
        ahead = NULL; // what was asked for once is on its way
    }
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const struct kvq__book_codes *s,
                          float *logits, int vector, size_t unit)
{
    _Alignas(64) uint16_t offsets[MOST_SUBS][KVQ_GROUP_TOKENS];
    const float *q = tile->qt;
    float *kept = tile->group_f32;
    set_offsets(s, offsets, 0, 1);
    if (tile->rows > KVQ__TILE4)
        qk_rows(s, offsets, q, tile->ahead, kept, logits, KEPT, KVQ__TILE4, vector, unit);
    else
        KVQ__BY_ROWS(tile->rows,
                     qk_rows(s, offsets, q, tile->ahead, kept, logits, PICKED, ROWS, vector, unit));
    for (uint32_t r = KVQ__TILE4; r < tile->rows; r += KVQ__TILE4) {
        q += KVQ__TILE4 * s->dim;
        logits += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        KVQ__BY_ROWS(tile->rows - r,
                     qk_rows(s, offsets, q, NULL, kept, logits, LOADED, ROWS, vector, unit));
    }
}

static void multiply_norms(const struct kvq__tile *tile, const uint8_t *norms, float *logits)
{
    __m512 first = kvq__load_f16(norms), second = kvq__load_f16(norms + 32);
    for (uint32_t r = 0; r < tile->rows; r++, logits += KVQ__LOGITS_STRIDE) {
        _mm512_storeu_ps(logits, _mm512_mul_ps(_mm512_loadu_ps(logits), first));
        _mm512_storeu_ps(logits + 16, _mm512_mul_ps(_mm512_loadu_ps(logits + 16), second));
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

// 64 channels from c on. kept: [32 tokens][dim].
KVQ__INLINE void pv_block(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                          uint32_t c, const float *p, const uint8_t *ahead, float *kept, float *o,
                          enum source source, int rows, bool folded, int vector, size_t unit)
{
    const uint32_t lanes = 16 / (uint32_t)vector, first = c / (uint32_t)vector;
    const char *table = s->table + first * s->stride;
    const size_t stride = folded ? 0 : s->stride;
    __m512 acc[KVQ__TILE4][VALUES];
    for (int i = 0; i < rows; i++)
        for (uint32_t j = 0; j < VALUES; j++)
            acc[i][j] = _mm512_load_ps(o + (uint32_t)i * s->dim + c + 16 * j);
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++) {
        if (ahead)
            kvq__fetch(ahead + t * (BLOCK / (uint32_t)vector) * s->bits / 8);
        for (uint32_t j = 0; j < VALUES; j++) {
            float *keep = kept + t * s->dim + c + 16 * j;
            __m512 x = source == LOADED ? _mm512_load_ps(keep)
                                        : pick(offsets[first + j * lanes] + t, KVQ_GROUP_TOKENS,
                                               table + j * lanes * stride, stride, vector, unit);
            if (source == KEPT)
                _mm512_store_ps(keep, x);
            for (int i = 0; i < rows; i++) {
                __m512 w = _mm512_set1_ps(p[i * KVQ__LOGITS_STRIDE + (int)t]);
                acc[i][j] = _mm512_fmadd_ps(x, w, acc[i][j]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t j = 0; j < VALUES; j++)
            _mm512_store_ps(o + (uint32_t)i * s->dim + c + 16 * j, acc[i][j]);
}

KVQ__INLINE void pv_rows(const struct kvq__book_codes *s, uint16_t (*offsets)[KVQ_GROUP_TOKENS],
                         const float *p, const uint8_t *ahead, float *kept, float *o,
                         enum source source, int rows, bool folded, int vector, size_t unit)
{
    size_t ahead_step = BLOCK / (uint32_t)vector * KVQ_GROUP_TOKENS * s->bits / 8;
    for (uint32_t c = 0; c < s->dim; c += BLOCK) {
        pv_block(s, offsets, c, p, ahead, kept, o, source, rows, folded, vector, unit);
        ahead = ahead ? ahead + ahead_step : NULL;
    }
}

KVQ__INLINE void pv_group(const struct kvq__tile *tile, const struct kvq__book_codes *s,
                          const float *p, bool folded, int vector, size_t unit)
{
    _Alignas(64) uint16_t offsets[MOST_SUBS][KVQ_GROUP_TOKENS];
    float *o = tile->ot, *kept = tile->group_f32;
    set_offsets(s, offsets, folded ? s->stride / unit : 0, BLOCK / (uint32_t)vector);
    if (tile->rows > KVQ__TILE4)
        pv_rows(s, offsets, p, tile->ahead, kept, o, KEPT, KVQ__TILE4, folded, vector, unit);
    else
        KVQ__BY_ROWS(tile->rows, pv_rows(s, offsets, p, tile->ahead, kept, o, PICKED, ROWS, folded,
                                         vector, unit));
    for (uint32_t r = KVQ__TILE4; r < tile->rows; r += KVQ__TILE4) {
        p += KVQ__TILE4 * KVQ__LOGITS_STRIDE;
        o += KVQ__TILE4 * s->dim;
        KVQ__BY_ROWS(tile->rows - r,
                     pv_rows(s, offsets, p, NULL, kept, o, LOADED, ROWS, folded, vector, unit));
    }
}

// Whether an offset reaches every table of a block.
static bool is_folded(const struct kvq__book_codes *s, uint32_t vector, size_t unit)
{
    size_t table = (sizeof(float) * vector) << s->bits;
    return s->stride * (BLOCK / vector - 1) + table <= REACH * unit && s->stride % unit == 0;
}

KVQ__INLINE void pv_vector(const struct kvq__tile *tile, const struct kvq__book_codes *s,
                           const float *p, int vector, size_t unit)
{
    if (is_folded(s, (uint32_t)vector, unit))
        pv_group(tile, s, p, true, vector, unit);
    else
        pv_group(tile, s, p, false, vector, unit);
}

static void pv_book(const struct kvq__tile *tile, const struct kvq_packed *packed, const float *p)
{
    const struct kvq__codec *c = tile->codec;
    struct kvq__book_codes s = kvq__book_codes_of(&c->v, c->dim, packed->group + c->layout.v_codes);
    KVQ__BY_BOOK(&c->v.row, pv_vector(tile, &s, p, VECTOR, UNIT));
}

void kvq__init_avx512_book(struct kvq_kernels *k)
{
    k->qk_packed[KVQ__BOOK] = qk_book;
    k->pv_packed[KVQ__BOOK] = pv_book;
}
