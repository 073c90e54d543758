// SPDX-License-Identifier: Apache-2.0
//
// Logits of packed groups on the exact path, by byte dot products. vnni_avx512.c has the method.
//
// Registers of the dot products, four rows to one unpacking: 12 accumulators (4 rows, 16 tokens, 3
// digits), the codes, their mask, the words that they come from, the broadcast query. With 32
// tokens at once the accumulators were 24: gcc 12 spilled them, and the loops took twice as long. A
// row of the layout has 96 vpdpbusd and as many broadcasts, from memory, and up to 28 unpacking
// instructions; in fp32 it has 128 FMA.
#include "kernels/vnni_avx512.h"

enum { ROW_DIGITS = 4 * KVQ_MAX_HEAD_DIM }; // bytes from row to row

// ---- q * scale as numbers of three digits ----

// fp32 scales, and what code 0 stands for.
KVQ__INLINE void open_k(struct kvq__vnni *v, uint32_t index, uint32_t dim)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 0, index, dim);
    struct kvq__opened *g = &v->opened[index];
    for (uint32_t i = 0; i < dim; i += 32) {
        kvq__fetch_twice(ahead, 2 * (size_t)i);
        for (uint32_t n = i; n < i + 32; n += 16) {
            _mm512_store_ps(g->scale + n, kvq__load_f16(packed->k_scales + 2 * n));
            _mm512_store_ps(g->middle + n, kvq__load_f16(packed->k_zeros + 2 * n));
        }
    }
}

// Balanced digits of base 256, from -128 to 127, in place of a number's bytes: with 128 added to
// each of them the number's own digits are theirs plus 128.
KVQ__INLINE __m512i balanced(__m512i x)
{
    const __m512i half = _mm512_set1_epi32(0x808080);
    return _mm512_xor_si512(_mm512_add_epi32(x, half), half);
}

// Digits, unit and bias of up to four rows in one group.
KVQ__INLINE void write_queries(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                               uint32_t dim, int rows)
{
    // Of channels 4 s + {0, 2, 1, 3}, the order of a word of codes, digit by digit.
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15));
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    const float *q = tile->qt + (size_t)first * dim;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 1, group, dim);
    __m512 top[KVQ__TILE4], bias[KVQ__TILE4];
    for (int n = 0; n < KVQ__TILE4; n++) {
        top[n] = _mm512_set1_ps(1e-30f); // with this floor nothing overflows
        bias[n] = _mm512_setzero_ps();
    }
    for (uint32_t i = 0; i < dim; i += 16) {
        __m512 scale = _mm512_load_ps(g->scale + i), zero = _mm512_load_ps(g->middle + i);
        for (int n = 0; n < rows; n++) {
            __m512 x = _mm512_load_ps(q + (size_t)n * dim + i);
            top[n] = _mm512_max_ps(top[n], _mm512_abs_ps(_mm512_mul_ps(x, scale)));
            bias[n] = _mm512_fmadd_ps(zero, x, bias[n]);
        }
    }
    __m128 most = _mm512_castps512_ps128(kvq__max4(top[0], top[1], top[2], top[3]));
    __m512 sums = kvq__sum4(bias[0], bias[1], bias[2], bias[3]);
    _mm_store_ps(v->bias[group] + first, _mm512_castps512_ps128(sums));
    _mm_store_ps(v->unit[group] + first, _mm_div_ps(most, _mm_set1_ps(KVQ__DIGITS_TOP)));
    _Alignas(16) float factor[KVQ__TILE4];
    _mm_store_ps(factor, _mm_div_ps(_mm_set1_ps(KVQ__DIGITS_TOP), most));
    for (int n = 0; n < rows; n++) {
        const __m512 f = _mm512_set1_ps(factor[n]);
        kvq__fetch_share(ahead, dim, n, rows);
        for (uint32_t i = 0; i < dim; i += 16) {
            __m512 x = _mm512_mul_ps(_mm512_load_ps(q + (size_t)n * dim + i),
                                     _mm512_load_ps(g->scale + i));
            __m512i d = balanced(_mm512_cvtps_epi32(_mm512_mul_ps(x, f)));
            _mm512_store_si512(v->digits[group][n] + 4 * i, _mm512_shuffle_epi8(d, order));
        }
    }
}

// ---- Dot products ----

// Row r of a slab (r is a constant), half z: position s of the row meets the digits at 64 r + 16 s.
KVQ__INLINE void k_row(__m512i acc[][KVQ__DIGITS], const struct kvq__planes *p, unsigned r,
                       unsigned n, unsigned z, const uint8_t *q, int rows, int bits)
{
    const __m512i mask = _mm512_set1_epi8(bits == 2 ? 0x03 : 0x0f);
    struct kvq__nibbles x;
    kvq__fetch_place(p, 2 * r + z, bits);
    x.even = x.odd = kvq__load_row(p->low + KVQ__ROW_BYTES * r, z, r & 3);
    if (bits > 2)
        x = kvq__join_planes(x.even, kvq__load_k_high(p, r, n, z, bits));
    KVQ__UNROLL
    for (int s = 0; s < 4; s++) {
        __m512i code = bits > 2 && s % 2 ? x.odd : x.even;
        int shift = bits == 2 ? 2 * s : s / 2 * 4;
        code = _mm512_and_si512(shift ? _mm512_srli_epi16(code, shift) : code, mask);
        const uint8_t *at = q + 64 * r + 16 * s;
        for (int i = 0; i < rows; i++, at += ROW_DIGITS)
            for (int k = 0; k < KVQ__DIGITS; k++)
                acc[i][k] = _mm512_dpbusd_epi32(acc[i][k], code, kvq__broadcast_word(at + 4 * k));
    }
}

// A slab of n rows, 8 or 4. Written out, for otherwise every address would have to be computed.
KVQ__INLINE void k_slab(__m512i acc[][KVQ__DIGITS], const struct kvq__planes *p, unsigned n,
                        unsigned z, const uint8_t *q, int rows, int bits)
{
    k_row(acc, p, 0, n, z, q, rows, bits);
    k_row(acc, p, 1, n, z, q, rows, bits);
    k_row(acc, p, 2, n, z, q, rows, bits);
    k_row(acc, p, 3, n, z, q, rows, bits);
    if (n == 4)
        return;
    k_row(acc, p, 4, n, z, q, rows, bits);
    k_row(acc, p, 5, n, z, q, rows, bits);
    k_row(acc, p, 6, n, z, q, rows, bits);
    k_row(acc, p, 7, n, z, q, rows, bits);
}

// Logits of up to four rows for half a group.
KVQ__INLINE void qk_half(const struct kvq__tile *tile, struct kvq__planes p, uint32_t group,
                         uint32_t first, unsigned z, const uint8_t *norms, float *logits, int rows,
                         int bits)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint32_t own = v->k_of[group];
    const uint8_t *q = v->digits[own][0];
    __m512i acc[KVQ__TILE4][KVQ__DIGITS];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < KVQ__DIGITS; k++)
            acc[i][k] = _mm512_setzero_si512();
    if (p.dim == 64)
        k_slab(acc, &p, 4, z, q, rows, bits);
    for (uint32_t slab = 0; slab < p.dim / KVQ__SLAB; slab++) {
        k_slab(acc, &p, 8, z, q, rows, bits);
        kvq__next_slab(&p, bits);
        q += 4 * KVQ__SLAB;
    }
    __m512 norm = norms ? kvq__load_f16(norms + 32 * z) : _mm512_set1_ps(1.0f);
    for (int i = 0; i < rows; i++) {
        __m512 unit = _mm512_set1_ps(v->unit[own][first + (uint32_t)i]);
        __m512 bias = _mm512_set1_ps(v->bias[own][first + (uint32_t)i]);
        __m512 x = _mm512_fmadd_ps(kvq__of_digits(acc[i]), unit, bias);
        _mm512_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + 16 * z, _mm512_mul_ps(x, norm));
    }
}

static inline bool has_own_k(const struct kvq__vnni *v, uint32_t group)
{
    return v->chunk->group[group].packed_tokens && v->k_of[group] == group;
}

// Up to four rows, all groups.
KVQ__INLINE void qk_groups(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows,
                           int bits)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const struct kvq__codec *c = tile->codec;
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            write_queries(tile, i, first, dim, rows);
    float *logits = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE;
    for (uint32_t i = 0; i < v->chunk->groups; i++, logits += KVQ_GROUP_TOKENS) {
        if (v->chunk->group[i].packed_tokens == 0)
            continue;
        const uint8_t *group = v->chunk->group[i].packed.group;
        const uint8_t *norms = c->has_norms ? group + c->layout.k_norms : NULL;
        struct kvq__planes p = kvq__planes_of(tile, i, group + c->layout.k_codes, dim, bits);
        qk_half(tile, p, i, first, 0, norms, logits, rows, bits);
        qk_half(tile, p, i, first, 1, norms, logits, rows, bits);
    }
}

// ---- Tokens far from the others ----

// A key is code * scale + zero. Where one token of a group is far from the others the scales are
// large, and the others' logits are small differences of two large sums, which both were rounded:
// by 2^-24 of what the largest code adds. A row to which it adds more than this in one channel (in
// powers of two, as logits are) is multiplied in fp32, which makes each key first. Keys that are
// divided by their norms have no such tokens.
#define FAR 16.0f

// A row's way depends on itself and the group alone, and so do its bits.
static void redo_far(const struct kvq__tile *tile)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const float most = FAR / (KVQ__DIGITS_TOP * (float)((1 << tile->codec->k_bits) - 1));
    struct kvq__tile one = *tile;
    one.rows = 1;
    one.ahead = NULL;
    for (uint32_t i = 0; i < v->chunk->groups; i++) {
        const struct kvq__group *group = &v->chunk->group[i];
        for (uint32_t r = 0; group->packed_tokens && r < tile->rows; r++) {
            if (v->unit[v->k_of[i]][r] <= most)
                continue;
            one.qt = tile->qt + (size_t)r * tile->dim;
            float *logits = tile->logits + (size_t)r * KVQ__LOGITS_STRIDE + i * KVQ_GROUP_TOKENS;
            kvq__qk_packed_avx512(&one, &group->packed, logits);
        }
    }
}

KVQ__INLINE void qk_chunk(const struct kvq__tile *tile, uint32_t dim, int bits)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            open_k(v, i, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, qk_groups(tile, r, dim, ROWS, bits));
}

void kvq__digits_qk(const struct kvq__tile *tile)
{
    KVQ__BY_BITS(tile->codec->k_bits, KVQ__BY_DIM(tile->dim, qk_chunk(tile, DIM, BITS)));
    redo_far(tile);
}
