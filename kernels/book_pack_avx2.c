// SPDX-License-Identifier: Apache-2.0
//
// Codes of codebook formats, AVX2: the nearest centroid of 16 tokens' sub-vectors at a time; see
// book_pack_avx512.c.
#include "kernels/avx2.h"
#include "kernels/kernels_c.h"

enum { HALVES = 2, MOST_VECTOR = 8 };

KVQ__INLINE __m256 distance(const __m256 *x, const float *centroid, int vector)
{
    __m256 sum = _mm256_setzero_ps();
    for (int j = 0; j < vector; j++) {
        __m256 d = _mm256_sub_ps(x[j], _mm256_broadcast_ss(centroid + j));
        d = _mm256_mul_ps(d, d);
        sum = j ? _mm256_add_ps(sum, d) : d;
    }
    return sum;
}

// rows: the first channel of the first of 8 * halves tokens.
KVQ__INLINE void nearest(const float *rows, uint32_t dim, const float *table, uint32_t count,
                         uint32_t *codes, int vector, int halves)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i token = _mm256_mullo_epi32(lanes, _mm256_set1_epi32((int)dim));
    __m256 x[HALVES][MOST_VECTOR], least[HALVES];
    __m256i code[HALVES], now = _mm256_setzero_si256();
    for (int h = 0; h < halves; h++) {
        for (int j = 0; j < vector; j++)
            x[h][j] = _mm256_i32gather_ps(rows + (uint32_t)h * 8 * dim + j, token, 4);
        least[h] = _mm256_set1_ps(INFINITY);
        code[h] = _mm256_setzero_si256();
    }
    for (uint32_t i = 0; i < count; i++) {
        for (int h = 0; h < halves; h++) {
            __m256 sum = distance(x[h], table + i * (uint32_t)vector, vector);
            __m256i nearer = _mm256_castps_si256(_mm256_cmp_ps(sum, least[h], _CMP_LT_OQ));
            least[h] = _mm256_min_ps(sum, least[h]); // the second operand if either is NaN
            code[h] = _mm256_blendv_epi8(code[h], now, nearer);
        }
        now = _mm256_add_epi32(now, _mm256_set1_epi32(1));
    }
    for (int h = 0; h < halves; h++)
        _mm256_store_si256((void *)(codes + 8 * h), code[h]);
}

// Vectors of 8 leave registers for 8 tokens at a time.
KVQ__INLINE void quant(const struct kvq__side *side, uint32_t dim, const float *rows,
                       uint8_t *codes, int vector)
{
    const int halves = vector == 8 ? 1 : HALVES;
    const uint32_t step = 8 * (uint32_t)halves;
    uint32_t bits = side->row.bits, subs = dim / (uint32_t)vector;
    _Alignas(32) uint32_t found[KVQ_GROUP_TOKENS];
    for (uint32_t m = 0; m < subs; m++) {
        for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t += step)
            nearest(rows + t * dim + m * (uint32_t)vector, dim, side->book + m * side->book_sub,
                    1u << bits, found + t, vector, halves);
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

void kvq__init_avx2_book_pack(struct kvq_kernels *k)
{
    k->quant_k[KVQ__BOOK] = quant_k_book;
    k->quant_v[KVQ__BOOK] = quant_v_book;
}
