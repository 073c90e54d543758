// SPDX-License-Identifier: Apache-2.0
//
// Codes of codebook formats, AVX-512: the nearest centroid of 32 tokens' sub-vectors at a time.
//
// A lane is a token, so each adds up its squared differences in the order of book_c.c, and the
// first of equally near centroids stays. NaN and sums beyond fp32 are nearer than nothing.
#include "kernels/avx512.h"
#include "kernels/kernels_c.h"

enum { HALVES = 2, MOST_VECTOR = 8 };

// Sums of squared differences from one centroid.
KVQ__INLINE __m512 distance(const __m512 *x, const float *centroid, int vector)
{
    __m512 sum = _mm512_setzero_ps();
    for (int j = 0; j < vector; j++) {
        __m512 d = _mm512_sub_ps(x[j], _mm512_set1_ps(centroid[j]));
        d = _mm512_mul_ps(d, d);
        sum = j ? _mm512_add_ps(sum, d) : d;
    }
    return sum;
}

// rows: the first channel of token 0.
KVQ__INLINE void nearest(const float *rows, uint32_t dim, const float *table, uint32_t count,
                         uint32_t *codes, int vector)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i token = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)dim));
    __m512 x[HALVES][MOST_VECTOR], least[HALVES];
    __m512i code[HALVES], now = _mm512_setzero_si512();
    for (int h = 0; h < HALVES; h++) {
        for (int j = 0; j < vector; j++)
            x[h][j] = _mm512_i32gather_ps(token, rows + (uint32_t)h * 16 * dim + j, 4);
        least[h] = _mm512_set1_ps(INFINITY);
        code[h] = _mm512_setzero_si512();
    }
    for (uint32_t i = 0; i < count; i++) {
        for (int h = 0; h < HALVES; h++) {
            __m512 sum = distance(x[h], table + i * (uint32_t)vector, vector);
            __mmask16 nearer = _mm512_cmp_ps_mask(sum, least[h], _CMP_LT_OQ);
            least[h] = _mm512_min_ps(sum, least[h]); // the second operand if either is NaN
            code[h] = _mm512_mask_mov_epi32(code[h], nearer, now);
        }
        now = _mm512_add_epi32(now, _mm512_set1_epi32(1));
    }
    for (int h = 0; h < HALVES; h++)
        _mm512_store_si512(codes + 16 * h, code[h]);
}

KVQ__INLINE void quant(const struct kvq__side *side, uint32_t dim, const float *rows,
                       uint8_t *codes, int vector)
{
    uint32_t bits = side->row.bits, subs = dim / (uint32_t)vector;
    _Alignas(64) uint32_t found[KVQ_GROUP_TOKENS];
    for (uint32_t m = 0; m < subs; m++) {
        nearest(rows + m * (uint32_t)vector, dim, side->book + m * side->book_sub, 1u << bits,
                found, vector);
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
            kvq__put_book_code(codes, bits, subs, m, t, found[t]);
    }
}

static void quant_side(const struct kvq__side *side, uint32_t dim, const float *rows,
                       uint8_t *codes)
{
    switch (side->row.vector) {
    case 2:
        quant(side, dim, rows, codes, 2);
        break;
    case 4:
        quant(side, dim, rows, codes, 4);
        break;
    default:
        quant(side, dim, rows, codes, 8);
    }
}

static void quant_k_book(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    uint8_t *group = kvq_packed_at(&c->layout, record, first).group;
    quant_side(&c->k, c->dim, rows, group + c->layout.k_codes);
}

static void quant_v_book(const struct kvq__codec *c, const float *rows, uint8_t *record,
                         uint32_t first)
{
    uint8_t *group = kvq_packed_at(&c->layout, record, first).group;
    quant_side(&c->v, c->dim, rows, group + c->layout.v_codes);
}

void kvq__init_avx512_book_pack(struct kvq_kernels *k)
{
    k->quant_k[KVQ__BOOK] = quant_k_book;
    k->quant_v[KVQ__BOOK] = quant_v_book;
}
