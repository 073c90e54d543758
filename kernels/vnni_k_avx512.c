// SPDX-License-Identifier: Apache-2.0
//
// Logits of packed groups with byte dot products. See vnni_avx512.c for the method.
//
// Registers of the dot products, four rows to one unpacking: 8 accumulators (4 rows, 32 tokens),
// 2 registers of words and their 8 codes, the mask, the broadcast query. A row of the layout has
// 32 vpdpbusd, 16 broadcasts, 14 unpacking instructions and at most 2 shuffles.
#include "kernels/vnni_avx512.h"

// ---- K: q * scale as int8, for all groups of the chunk ----

// What the rows of a tile share in a group.
struct k_scales {
    __m512i scale16[KVQ__MAX_VECS / 2]; // int16, in the order of q16
    __m512 zero[KVQ__MAX_VECS];         // value of the centre of the codes
    float unit;                         // of scale16
    float centre;
};

KVQ__INLINE void open_k(struct k_scales *g, const struct kvq__codec *c, const uint8_t *group,
                        uint32_t dim)
{
    const uint8_t *scales = group + c->layout.k_scales, *zeros = group + c->layout.k_zeros;
    float max = kvq__max_f16(scales, dim);
    g->unit = max / KVQ__INT16_TOP;
    g->centre = kvq__centre_of(c->k_bits);
    __m512 factor = _mm512_set1_ps(KVQ__INT16_TOP / max), centre = _mm512_set1_ps(g->centre);
    for (uint32_t i = 0; i < dim / 32; i++) {
        __m512 a = kvq__load_f16(scales + 64 * i), b = kvq__load_f16(scales + 64 * i + 32);
        g->scale16[i] = _mm512_shuffle_epi8(kvq__to_int16(a, b, factor), kvq__byte_order());
        g->zero[2 * i] = _mm512_fmadd_ps(a, centre, kvq__load_f16(zeros + 64 * i));
        g->zero[2 * i + 1] = _mm512_fmadd_ps(b, centre, kvq__load_f16(zeros + 64 * i + 32));
    }
}

// The largest int16 of each of four registers of non-negative ones, in each 128-bit lane.
static inline __m512i max4_epi16(const __m512i *m)
{
    __m512i ac =
        _mm512_max_epi16(_mm512_unpacklo_epi32(m[0], m[2]), _mm512_unpackhi_epi32(m[0], m[2]));
    __m512i bd =
        _mm512_max_epi16(_mm512_unpacklo_epi32(m[1], m[3]), _mm512_unpackhi_epi32(m[1], m[3]));
    __m512i x = _mm512_max_epi16(_mm512_unpacklo_epi32(ac, bd), _mm512_unpackhi_epi32(ac, bd));
    x = _mm512_max_epi16(x, _mm512_shuffle_i64x2(x, x, 0x4e));
    x = _mm512_max_epi16(x, _mm512_shuffle_i64x2(x, x, 0xb1));
    return _mm512_and_si512(_mm512_max_epi16(x, _mm512_srli_epi32(x, 16)),
                            _mm512_set1_epi32(0xffff));
}

// Up to four rows: bytes, unit and bias of one group. The largest |q * scale| of a row becomes
// 127; taking max |q| * max scale for it instead would be cheaper and a third noisier.
KVQ__INLINE void scale_queries(const struct kvq__tile *tile, const struct k_scales *g,
                               uint32_t group, uint32_t first, uint32_t dim, int rows)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint32_t n = dim / 32;
    __m512i x[KVQ__TILE4][KVQ__MAX_VECS / 2], top[KVQ__TILE4];
    __m512 bias[KVQ__TILE4];
    for (int i = 0; i < KVQ__TILE4; i++) {
        top[i] = _mm512_set1_epi16(1);
        bias[i] = _mm512_setzero_ps();
    }
    for (int i = 0; i < rows; i++)
        for (uint32_t j = 0; j < n; j++) {
            __m512i q = _mm512_load_si512(v->q16[first + (uint32_t)i] + 32 * j);
            x[i][j] = _mm512_mulhrs_epi16(q, g->scale16[j]);
            top[i] = _mm512_max_epi16(top[i], _mm512_abs_epi16(x[i][j]));
        }
    // The whole number is what the bytes really are multiplied with, so it may be truncated.
    __m512 full = _mm512_set1_ps(127.0f * 32768.0f);
    __m512 by = _mm512_div_ps(full, _mm512_cvtepi32_ps(max4_epi16(top)));
    __m128i factor =
        _mm_min_epi32(_mm_set1_epi32(INT16_MAX), _mm512_castsi512_si128(_mm512_cvttps_epi32(by)));
    __m128 unit = _mm_mul_ps(_mm_load_ps(v->q_unit + first), _mm_set1_ps(g->unit * 0x1p30f));
    unit = _mm_div_ps(unit, _mm_cvtepi32_ps(factor));
    _mm_store_ps(v->unit[group] + first, unit);
    int32_t factors[KVQ__TILE4];
    _mm_storeu_si128((void *)factors, factor);
    for (int i = 0; i < rows; i++) {
        uint32_t r = first + (uint32_t)i;
        const float *q = tile->qt + (size_t)r * dim;
        uint8_t *bytes = kvq__vnni_bytes(tile, group, r);
        __m512i f = _mm512_set1_epi16((int16_t)factors[i]), sum = _mm512_setzero_si512();
        for (uint32_t j = 0; j < n; j += 2) {
            __m512i b = _mm512_packs_epi16(_mm512_mulhrs_epi16(x[i][j], f),
                                           _mm512_mulhrs_epi16(x[i][j + 1], f));
            _mm512_store_si512(bytes + 32 * j, b);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), b);
        }
        for (uint32_t j = 0; j < 2 * n; j++)
            bias[i] = _mm512_fmadd_ps(g->zero[j], _mm512_load_ps(q + 16 * j), bias[i]);
        __m512 taken = _mm512_set1_ps(g->centre * v->unit[group][r]);
        bias[i] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), taken, bias[i]);
    }
    __m512 sums = kvq__sum4(bias[0], bias[1], bias[2], bias[3]);
    _mm_store_ps(v->bias[group] + first, _mm512_castps512_ps128(sums));
}

KVQ__INLINE void prepare_k(const struct kvq__tile *tile, const uint8_t *packed, uint32_t group,
                           uint32_t dim)
{
    struct k_scales g;
    open_k(&g, tile->codec, packed, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        switch (tile->rows - r) {
        case 1:
            scale_queries(tile, &g, group, r, dim, 1);
            break;
        case 2:
            scale_queries(tile, &g, group, r, dim, 2);
            break;
        case 3:
            scale_queries(tile, &g, group, r, dim, 3);
            break;
        default:
            scale_queries(tile, &g, group, r, dim, 4);
        }
}

void kvq__vnni_prepare_k(const struct kvq__tile *tile, const uint8_t *packed, uint32_t group)
{
    // With head_dim a constant, what the four rows make of the scales stays in registers.
    if (tile->dim == 64)
        prepare_k(tile, packed, group, 64);
    else if (tile->dim == 128)
        prepare_k(tile, packed, group, 128);
    else
        prepare_k(tile, packed, group, 256);
}

// ---- K: dot products ----

// A row of the planes as bytes: position s of half z of the row is at[s].
struct codes {
    __m512i at[4];
};

KVQ__INLINE struct codes part_codes(__m512i low, __m512i high, int bits)
{
    if (bits == 2) {
        const __m512i mask = _mm512_set1_epi8(0x03);
        return (struct codes){{
            _mm512_and_si512(low, mask),
            _mm512_and_si512(_mm512_srli_epi16(low, 2), mask),
            _mm512_and_si512(_mm512_srli_epi16(low, 4), mask),
            _mm512_and_si512(_mm512_srli_epi16(low, 6), mask),
        }};
    }
    const __m512i mask = _mm512_set1_epi8(0x0f);
    struct kvq__nibbles n = kvq__join_planes(low, high);
    return (struct codes){{
        _mm512_and_si512(n.even, mask),
        _mm512_and_si512(n.odd, mask),
        _mm512_and_si512(_mm512_srli_epi16(n.even, 4), mask),
        _mm512_and_si512(_mm512_srli_epi16(n.odd, 4), mask),
    }};
}

// The high plane of row r as 2-bit fields.
KVQ__INLINE __m512i load_k_high(const struct kvq__planes *p, uint32_t r, unsigned z, int bits)
{
    if (bits == 4)
        return kvq__load_row(p->high + KVQ__ROW_BYTES * r, z, r & 3);
    // Two rows of a slab share one row of bits.
    uint32_t in_slab = p->dim < KVQ__SLAB ? p->dim / 16 : KVQ__SLAB / 16, half = in_slab / 2;
    uint32_t row = r / in_slab * half + r % half;
    __m512i x = kvq__load_row(p->high + KVQ__ROW_BYTES * row, z, r % half & 3);
    x = r % in_slab >= half ? _mm512_srli_epi16(x, 1) : x;
    return _mm512_and_si512(x, _mm512_set1_epi8(0x55));
}

// Row r, r % 4 == m. q are the bytes of the queries.
KVQ__INLINE void k_row(__m512i acc[][2], const struct kvq__planes *p, uint32_t r, unsigned m,
                       const uint8_t *const *q, int rows, int bits)
{
    struct codes code[2];
    if (p->ahead)
        kvq__fetch_lines(p->ahead + 64 * (size_t)(bits + 1) * r, bits + 1);
    for (unsigned z = 0; z < 2; z++) {
        __m512i low = kvq__load_row(p->low + KVQ__ROW_BYTES * r, z, m);
        code[z] = part_codes(low, bits > 2 ? load_k_high(p, r, z, bits) : low, bits);
    }
    uint32_t at = 16 * (r - m) + 4 * m;
    for (int s = 0; s < 4; s++)
        for (int i = 0; i < rows; i++) {
            __m512i word = kvq__broadcast_word(q[i] + at + 16 * s);
            acc[i][0] = _mm512_dpbusd_epi32(acc[i][0], code[0].at[s], word);
            acc[i][1] = _mm512_dpbusd_epi32(acc[i][1], code[1].at[s], word);
        }
}

// Logits of up to four rows for one group.
KVQ__INLINE void qk_rows(const struct kvq__tile *tile, const struct kvq__planes *p, uint32_t group,
                         uint32_t first, const uint8_t *norms, float *logits, int rows, int bits)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint8_t *q[KVQ__TILE4];
    __m512i acc[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++) {
        q[i] = kvq__vnni_bytes(tile, group, first + (uint32_t)i);
        acc[i][0] = acc[i][1] = _mm512_setzero_si512();
    }
    for (uint32_t r = 0; r < tile->dim / 16; r += 4) {
        k_row(acc, p, r, 0, q, rows, bits);
        k_row(acc, p, r + 1, 1, q, rows, bits);
        k_row(acc, p, r + 2, 2, q, rows, bits);
        k_row(acc, p, r + 3, 3, q, rows, bits);
    }
    __m512 norm0 = norms ? kvq__load_f16(norms) : _mm512_set1_ps(1.0f);
    __m512 norm1 = norms ? kvq__load_f16(norms + 32) : norm0;
    for (int i = 0; i < rows; i++, logits += KVQ__LOGITS_STRIDE) {
        __m512 unit = _mm512_set1_ps(v->unit[group][first + (uint32_t)i]);
        __m512 bias = _mm512_set1_ps(v->bias[group][first + (uint32_t)i]);
        __m512 s0 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[i][0]), unit, bias);
        __m512 s1 = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[i][1]), unit, bias);
        _mm512_storeu_ps(logits, _mm512_mul_ps(s0, norm0));
        _mm512_storeu_ps(logits + 16, _mm512_mul_ps(s1, norm1));
    }
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const uint8_t *packed, float *logits,
                          int bits)
{
    const struct kvq__codec *c = tile->codec;
    const uint8_t *low = packed + c->layout.k_codes;
    const uint8_t *norms = c->has_norms ? packed + c->layout.k_norms : NULL;
    struct kvq__planes p = {low, low + 8 * c->dim, tile->ahead, c->dim};
    uint32_t group = (uint32_t)(logits - tile->logits) / KVQ_GROUP_TOKENS;
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4, logits += 4 * KVQ__LOGITS_STRIDE) {
        switch (tile->rows - r) {
        case 1:
            qk_rows(tile, &p, group, r, norms, logits, 1, bits);
            break;
        case 2:
            qk_rows(tile, &p, group, r, norms, logits, 2, bits);
            break;
        case 3:
            qk_rows(tile, &p, group, r, norms, logits, 3, bits);
            break;
        default:
            qk_rows(tile, &p, group, r, norms, logits, 4, bits);
        }
        p.ahead = NULL; // what was asked for once is on its way
    }
}

void kvq__vnni_qk(const struct kvq__tile *tile, const uint8_t *packed, float *logits)
{
    switch (tile->codec->k_bits) {
    case 2:
        qk_group(tile, packed, logits, 2);
        break;
    case 3:
        qk_group(tile, packed, logits, 3);
        break;
    default:
        qk_group(tile, packed, logits, 4);
    }
}
