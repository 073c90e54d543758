// SPDX-License-Identifier: Apache-2.0
//
// Values with byte dot products: what both paths do with codes and with the middles of codes.
#ifndef KVQ_KERNELS_VNNI_V_AVX512_H
#define KVQ_KERNELS_VNNI_V_AVX512_H

#include <immintrin.h>

#include "kernels/vnni_avx512.h"

// What the loops are written out for: codes of so many bits with a scale and a zero for 32
// channels, or of four levels with one scale for a token.
struct kvq__v_how {
    int bits;
    bool lloyd;
};

// The largest scale of each of 32 tokens, none of them 0: fp16 that is not negative is ordered like
// its bits.
KVQ__INLINE void kvq__find_largest(const uint8_t *scales, uint32_t dim, float *largest)
{
    __m512i m = _mm512_set1_epi16(1); // a scale of 0 would give 0 / 0
    for (uint32_t i = 0; i < dim; i += KVQ_GROUP_CHANNELS)
        m = _mm512_max_epu16(m, _mm512_load_si512(scales + 2 * i));
    _mm512_store_ps(largest, _mm512_cvtph_ps(_mm512_castsi512_si256(m)));
    _mm512_store_ps(largest + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(m, 1)));
}

// Words of set `set`: half z of 32, or all 16 of them for head_dim 64.
KVQ__INLINE __m512i kvq__load_set(const uint8_t *plane, unsigned set, unsigned z, uint32_t dim)
{
    unsigned j = set / 2;
    if (dim == 64)
        return kvq__load_row_64(plane, set ^ (j & 1), j);
    return kvq__load_row(plane + KVQ__ROW_BYTES * set, z, j);
}

// Their high plane, as 2-bit fields. Of 3-bit codes two sets share a row.
KVQ__INLINE __m512i kvq__load_v_high(const uint8_t *plane, unsigned set, unsigned z, uint32_t dim,
                                     int bits)
{
    unsigned j = set / 2;
    if (bits == 4)
        return kvq__load_set(plane, set, z, dim);
    __m512i x =
        dim == 64 ? kvq__load_row_64(plane, j, j) : kvq__load_row(plane + KVQ__ROW_BYTES * j, z, j);
    return _mm512_and_si512(set % 2 ? _mm512_srli_epi16(x, 1) : x, _mm512_set1_epi8(0x55));
}

// Lines that are fetched for each four tokens: those of codes, or all of a record of kvq2.
KVQ__INLINE uint32_t kvq__v_lines(struct kvq__v_how how)
{
    return (uint32_t)how.bits + (how.lloyd ? 1 : 0);
}

// Entry i is 2 * code - (2^bits - 1), or the level, for the code that stands in i from bit `at` on.
KVQ__INLINE __m512i kvq__v_table(int at, struct kvq__v_how how)
{
    _Alignas(64) int8_t table[64];
    for (int i = 0; i < 64; i++) {
        int code = i >> at & (how.bits == 2 ? 3 : 15);
        table[i] = (int8_t)(how.lloyd ? kvq__lloyd2_byte(code) : 2 * code - ((1 << how.bits) - 1));
    }
    return _mm512_load_si512(table);
}

// What codes at position s of a word's bytes stand for. vpermb looks at 6 bits of a byte.
KVQ__INLINE __m512i kvq__v_part(__m512i low, __m512i high, int s, struct kvq__v_how how)
{
    if (how.bits == 2) {
        __m512i x = s == 3 ? _mm512_srli_epi16(low, 2) : low;
        return _mm512_permutexvar_epi8(x, kvq__v_table(s == 3 ? 4 : 2 * s, how));
    }
    struct kvq__nibbles n = kvq__join_planes(low, high);
    __m512i x = s % 2 ? n.odd : n.even;
    return _mm512_permutexvar_epi8(s < 2 ? x : _mm512_srli_epi16(x, 4), kvq__v_table(0, how));
}

// The V planes of one group, from a slab on.
struct kvq__v_planes {
    const uint8_t *low, *high;
    struct kvq__ahead ahead; // what to fetch meanwhile
};

// Every pass over the groups, one for each 32 channels, fetches the next part of the record.
KVQ__INLINE struct kvq__v_planes kvq__v_planes_of(const struct kvq__tile *tile, uint32_t group,
                                                  uint32_t pass, uint32_t dim,
                                                  struct kvq__v_how how)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint8_t *codes = v->chunk->group[group].packed.group + tile->codec->layout.v_codes;
    uint32_t slab = pass / 4, share = 2 * kvq__v_lines(how) * 64;
    size_t line = pass * KVQ__GROUPS_A_RECORD + group % KVQ__GROUPS_A_RECORD;
    return (struct kvq__v_planes){
        .low = codes + slab * KVQ_GROUP_TOKENS * KVQ__SLAB / 4,
        .high = codes + 8 * dim + slab * KVQ_GROUP_TOKENS * KVQ__SLAB / (how.bits == 3 ? 8 : 4),
        .ahead = kvq__ahead_at(v, group, v->ahead_of_dots + line * share, dim),
    };
}

// Share n of so many.
KVQ__INLINE void kvq__v_fetch(const struct kvq__v_planes *p, unsigned n, unsigned shares,
                              struct kvq__v_how how)
{
    unsigned lines = 2 * kvq__v_lines(how);
    for (unsigned i = n * lines / shares; i < (n + 1) * lines / shares; i++)
        kvq__fetch_twice(p->ahead, 64 * (size_t)i);
}

// What the codes of one set of four tokens and 16 words stand for: position s of half z of the
// words, or of head_dim 64 position 2 s + z.
KVQ__INLINE __m512i kvq__v_code(const struct kvq__v_planes *p, unsigned set, unsigned z,
                                uint32_t dim, int s, struct kvq__v_how how)
{
    __m512i low = kvq__load_set(p->low, set, z, dim);
    __m512i high = how.bits > 2 ? kvq__load_v_high(p->high, set, z, dim, how.bits) : low;
    return kvq__v_part(low, high, dim == 64 ? 2 * s + (int)z : s, how);
}

enum { KVQ__AT_ONCE = 4 }; // channel groups

// The sums of p * middle of up to four rows and four channel groups, over all groups of tokens.
KVQ__INLINE void kvq__sum_middles(const struct kvq__tile *tile, uint32_t first, uint32_t from,
                                  uint32_t n, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512 sum[KVQ__TILE4][KVQ__AT_ONCE];
    for (int i = 0; i < rows; i++)
        for (uint32_t g = 0; g < n; g++)
            sum[i][g] = _mm512_setzero_ps();
    for (uint32_t group = 0; group < v->chunk->groups; group++) {
        if (!v->chunk->group[group].packed_tokens)
            continue;
        for (uint32_t half = 0; half < KVQ_GROUP_TOKENS; half += 16) {
            const float *middle = v->opened[group].middle + from * KVQ_GROUP_TOKENS + half;
            __m512 m[KVQ__AT_ONCE];
            for (uint32_t g = 0; g < n; g++)
                m[g] = _mm512_load_ps(middle + g * KVQ_GROUP_TOKENS);
            for (int i = 0; i < rows; i++) {
                __m512 p = _mm512_load_ps(v->p[group][i] + half);
                for (uint32_t g = 0; g < n; g++)
                    sum[i][g] = _mm512_fmadd_ps(p, m[g], sum[i][g]);
            }
        }
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t g = 0; g < n; g++)
            _mm512_store_ps(v->middle[first + (uint32_t)i][from + g], sum[i][g]);
}

#endif
