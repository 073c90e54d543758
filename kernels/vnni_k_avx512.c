// SPDX-License-Identifier: Apache-2.0
//
// Logits of packed groups with byte dot products. See vnni_avx512.c for the method.
//
// Registers of the dot products, four rows to one unpacking: 16 accumulators (4 rows, 32 tokens,
// codes as they are and codes that stand higher in their byte), 2 registers of words and 4 of
// codes, 2 masks, the broadcast query. A row of the layout has 32 vpdpbusd, 16 broadcasts, 10
// unpacking instructions and at most 2 shuffles.
//
// Keys of 4 bits that are neither rotated nor divided by norms have channels much stronger than the
// others. There the others set the step of q * scale, and what is beyond a byte has a second digit,
// for which only the words that have one are unpacked once more.
#include "kernels/vnni_avx512.h"

// ---- K: q * scale as int8, for all groups of the chunk ----

KVQ__INLINE void open_k(struct kvq__vnni *v, uint32_t index, __m512 centre, uint32_t dim)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    const uint8_t *scales = packed->k_scales, *zeros = packed->k_zeros;
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 0, index, dim);
    struct kvq__opened *g = &v->opened[index];
    __m512 factor = kvq__open_unit(g, scales, KVQ__INT16_TOP, dim);
    for (uint32_t i = 0; i < dim; i += 32) {
        __m512 a = kvq__load_f16(scales + 2 * i), b = kvq__load_f16(scales + 2 * i + 32);
        __m512i x = _mm512_shuffle_epi8(kvq__to_int16(a, b, factor, factor), kvq__byte_order());
        _mm512_store_si512(g->scale16 + i, x);
        __m512 za = kvq__load_f16(zeros + 2 * i), zb = kvq__load_f16(zeros + 2 * i + 32);
        kvq__fetch_twice(ahead, 2 * (size_t)i);
        _mm512_store_ps(g->middle + i, _mm512_fmadd_ps(a, centre, za));
        _mm512_store_ps(g->middle + i + 16, _mm512_fmadd_ps(b, centre, zb));
    }
}

// Of four registers of int16 that are not negative: the largest of each, in each 128-bit lane, and
// the least of the largest of eight parts of it.
struct tops {
    __m512i most, least;
};

static inline struct tops tops_of(const __m512i *m)
{
    __m512i ac =
        _mm512_max_epi16(_mm512_unpacklo_epi32(m[0], m[2]), _mm512_unpackhi_epi32(m[0], m[2]));
    __m512i bd =
        _mm512_max_epi16(_mm512_unpacklo_epi32(m[1], m[3]), _mm512_unpackhi_epi32(m[1], m[3]));
    __m512i x = _mm512_max_epi16(_mm512_unpacklo_epi32(ac, bd), _mm512_unpackhi_epi32(ac, bd));
    __m512i most = _mm512_max_epi16(x, _mm512_shuffle_i64x2(x, x, 0x4e));
    __m512i least = _mm512_min_epi16(x, _mm512_shuffle_i64x2(x, x, 0x4e));
    most = _mm512_max_epi16(most, _mm512_shuffle_i64x2(most, most, 0xb1));
    least = _mm512_min_epi16(least, _mm512_shuffle_i64x2(least, least, 0xb1));
    most = _mm512_max_epi16(most, _mm512_srli_epi32(most, 16));
    least = _mm512_min_epi16(least, _mm512_srli_epi32(least, 16));
    const __m512i word = _mm512_set1_epi32(0xffff);
    return (struct tops){_mm512_and_si512(most, word), _mm512_and_si512(least, word)};
}

KVQ__INLINE __m512i scaled(const int16_t *q, const struct kvq__opened *g, uint32_t i)
{
    return _mm512_mulhrs_epi16(_mm512_load_si512(q + i), _mm512_load_si512(g->scale16 + i));
}

// What becomes 127 at most: so many times what the quietest eighth of the channels has. A normal
// channel's products rarely reach that.
enum { QUIET_TIMES = 3, LEAST_UNITS = 64 };

// What makes bytes of up to four rows: the largest |q * scale| of a row becomes 127. (Taking max
// |q| * max scale for it instead would be cheaper and a third noisier.) With strong channels it may
// become more. Rows whose other channels have too few units of int16 are left to fp32.
KVQ__INLINE void find_factors(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                              uint32_t dim, int rows, bool strong)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    const int16_t *q = v->abs16[tile->slot + first];
    __m512i top[KVQ__TILE4];
    for (int n = 0; n < KVQ__TILE4; n++)
        top[n] = _mm512_set1_epi16(1);
    KVQ__UNROLL
    for (uint32_t i = 0; i < dim; i += 32)
        for (int n = 0; n < rows; n++)
            top[n] = _mm512_max_epi16(top[n], scaled(q + n * KVQ_MAX_HEAD_DIM, g, i));
    // The whole number is what the bytes really are multiplied with, so it may be truncated.
    __m128 full = _mm_set1_ps(127.0f * 32768.0f);
    struct tops tops = tops_of(top);
    __m128i most = _mm512_castsi512_si128(tops.most);
    if (strong) {
        __m128i least = _mm512_castsi512_si128(tops.least);
        __m128i few = _mm_cmplt_epi32(least, _mm_set1_epi32(LEAST_UNITS));
        uint32_t in_use = (1u << rows) - 1;
        v->coarse_rows[group] =
            (uint8_t)((uint32_t)_mm_movemask_ps(_mm_castsi128_ps(few)) & in_use);
        least = _mm_mullo_epi32(least, _mm_set1_epi32(QUIET_TIMES));
        most = _mm_min_epi32(most, _mm_max_epi32(least, _mm_set1_epi32(LEAST_UNITS)));
    }
    __m128 by = _mm_div_ps(full, _mm_cvtepi32_ps(most));
    __m128i factor = _mm_min_epi32(_mm_set1_epi32(INT16_MAX), _mm_cvttps_epi32(by));
    _mm_store_si128((void *)(v->factor[group] + first), factor);
    __m128 unit =
        _mm_mul_ps(_mm_loadu_ps(v->q_unit + tile->slot + first), _mm_set1_ps(g->unit * 0x1p30f));
    _mm_store_ps(v->unit[group] + first, _mm_div_ps(unit, _mm_cvtepi32_ps(factor)));
}

// The bytes of one row. Returns sums of them, to be summed over the lanes.
KVQ__INLINE __m512i make_bytes(const int16_t *q, const struct kvq__opened *g, __m512i factor,
                               uint8_t *bytes, uint32_t dim)
{
    __m512i sum = _mm512_setzero_si512();
    for (uint32_t i = 0; i < dim; i += 64) {
        __m512i b = _mm512_packs_epi16(_mm512_mulhrs_epi16(scaled(q, g, i), factor),
                                       _mm512_mulhrs_epi16(scaled(q, g, i + 32), factor));
        _mm512_store_si512(bytes + i, b);
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), b);
    }
    return sum;
}

// The same in digits of base 256, from -128 to 127. `words` gets the bits of the words that have
// second digits.
KVQ__INLINE __m512i make_two_digits(const int16_t *q, const struct kvq__opened *g, __m512i factor,
                                    uint8_t *bytes, uint8_t *seconds, uint64_t *words, uint32_t dim)
{
    const __m512i low = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(128);
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512(), upper = _mm512_setzero_si512();
    for (uint32_t i = 0; i < dim; i += 64) {
        __m512i a = _mm512_mulhrs_epi16(scaled(q, g, i), factor);
        __m512i b = _mm512_mulhrs_epi16(scaled(q, g, i + 32), factor);
        __m512i d = _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
        a = _mm512_srai_epi16(_mm512_adds_epi16(a, half), 8);
        b = _mm512_srai_epi16(_mm512_adds_epi16(b, half), 8);
        __m512i e = _mm512_packs_epi16(a, b);
        _mm512_store_si512(bytes + i, d);
        _mm512_store_si512(seconds + i, e);
        *words |= (uint64_t)_mm512_test_epi32_mask(e, e) << i / 4;
        sum = _mm512_dpbusd_epi32(sum, ones, d);
        upper = _mm512_dpbusd_epi32(upper, ones, e);
    }
    return _mm512_add_epi32(sum, _mm512_slli_epi32(upper, 8));
}

// Bytes and bias of up to four rows in one group.
KVQ__INLINE void scale_queries(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                               __m512 centre, uint32_t dim, int rows, bool strong)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    const float *q = tile->qt + (size_t)first * dim;
    const int16_t *q16 = v->q16[tile->slot + first];
    uint8_t *bytes = kvq__vnni_bytes(tile, group, first, dim);
    const struct kvq__ahead ahead = kvq__ahead_of_step(v, 1, group, dim);
    __m512 bias[KVQ__TILE4];
    for (int n = 0; n < KVQ__TILE4; n++)
        bias[n] = _mm512_setzero_ps();
    KVQ__UNROLL
    for (size_t i = 0; i < dim; i += 16) {
        __m512 middle = _mm512_load_ps(g->middle + i);
        for (int n = 0; n < rows; n++)
            bias[n] = _mm512_fmadd_ps(middle, _mm512_load_ps(q + (size_t)n * dim + i), bias[n]);
    }
    uint64_t words = 0;
    KVQ__UNROLL
    for (int n = 0; n < rows; n++) {
        __m512i factor = _mm512_set1_epi16((int16_t)v->factor[group][first + (uint32_t)n]);
        const int16_t *row = q16 + n * KVQ_MAX_HEAD_DIM;
        __m512i sum = strong ? make_two_digits(row, g, factor, bytes + (size_t)n * dim,
                                               v->digits[group][n], &words, dim)
                             : make_bytes(row, g, factor, bytes + (size_t)n * dim, dim);
        kvq__fetch_share(ahead, dim, n, rows);
        __m512 unit = _mm512_set1_ps(v->unit[group][first + (uint32_t)n]);
        bias[n] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(centre, unit), bias[n]);
    }
    __m512 sums = kvq__sum4(bias[0], bias[1], bias[2], bias[3]);
    _mm_store_ps(v->bias[group] + first, _mm512_castps512_ps128(sums));
    if (strong)
        v->strong_words[group] = words;
}

static inline bool has_own_k(const struct kvq__vnni *v, uint32_t group)
{
    return v->chunk->group[group].packed_tokens && v->k_of[group] == group;
}

KVQ__INLINE void prepare_rows(const struct kvq__tile *tile, uint32_t first, __m512 centre,
                              uint32_t dim, int rows, bool strong)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            find_factors(tile, i, first, dim, rows, strong);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            scale_queries(tile, i, first, centre, dim, rows, strong);
}

KVQ__INLINE void prepare_k(const struct kvq__tile *tile, uint32_t dim)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    __m512 centre = _mm512_set1_ps(kvq__centre_of(tile->codec->k_bits));
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            open_k(v, i, centre, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, prepare_rows(tile, r, centre, dim, ROWS, false));
}

void kvq__vnni_prepare_k(const struct kvq__tile *tile)
{
    KVQ__BY_DIM(tile->dim, prepare_k(tile, DIM));
}

// ---- K: dot products ----

// One half of the words of a row (for 2 bits: positions 2 n and 2 n + 1; else n and n + 2).
KVQ__INLINE void k_dots(__m512i plain[][2], __m512i high[][2], const __m512i *x,
                        const uint8_t *const *q, uint32_t at, uint32_t step, int rows, int bits)
{
    const __m512i low_mask = _mm512_set1_epi8(bits == 2 ? 0x03 : 0x0f);
    const __m512i high_mask = _mm512_set1_epi8(bits == 2 ? 0x0c : (char)0xf0);
    __m512i c0 = _mm512_and_si512(x[0], low_mask), c1 = _mm512_and_si512(x[1], low_mask);
    __m512i d0 = _mm512_and_si512(x[0], high_mask), d1 = _mm512_and_si512(x[1], high_mask);
    for (int i = 0; i < rows; i++) {
        __m512i word = kvq__broadcast_word(q[i] + at);
        plain[i][0] = _mm512_dpbusd_epi32(plain[i][0], c0, word);
        plain[i][1] = _mm512_dpbusd_epi32(plain[i][1], c1, word);
        word = kvq__broadcast_word(q[i] + at + step);
        high[i][0] = _mm512_dpbusd_epi32(high[i][0], d0, word);
        high[i][1] = _mm512_dpbusd_epi32(high[i][1], d1, word);
    }
}

// Row r of a slab (r is a constant). Position s of the row meets the queries' bytes at
// 64 * (r / 4) + 4 * (r % 4) + 16 * s.
KVQ__INLINE void k_row(__m512i plain[][2], __m512i high[][2], const struct kvq__planes *p,
                       unsigned r, unsigned n, const uint8_t *const *q, int rows, int bits)
{
    __m512i even[2], odd[2];
    kvq__fetch_place(p, 2 * r, bits);
    for (unsigned z = 0; z < 2; z++) {
        __m512i low = kvq__load_row(p->low + KVQ__ROW_BYTES * r, z, r & 3);
        if (bits == 2) {
            even[z] = low;
            odd[z] = _mm512_srli_epi16(low, 4);
        } else {
            struct kvq__nibbles x = kvq__join_planes(low, kvq__load_k_high(p, r, n, z, bits));
            even[z] = x.even;
            odd[z] = x.odd;
        }
    }
    unsigned at = 64 * (r / 4) + 4 * (r % 4), step = bits == 2 ? 16 : 32;
    k_dots(plain, high, even, q, at, step, rows, bits);
    kvq__fetch_place(p, 2 * r + 1, bits);
    k_dots(plain, high, odd, q, at + 48 - step, step, rows, bits);
}

// A slab of n rows, 8 or 4. Written out, for otherwise every address would have to be computed.
KVQ__INLINE void k_slab(__m512i plain[][2], __m512i high[][2], const struct kvq__planes *p,
                        unsigned n, const uint8_t *const *q, int rows, int bits)
{
    k_row(plain, high, p, 0, n, q, rows, bits);
    k_row(plain, high, p, 1, n, q, rows, bits);
    k_row(plain, high, p, 2, n, q, rows, bits);
    k_row(plain, high, p, 3, n, q, rows, bits);
    if (n == 4)
        return;
    k_row(plain, high, p, 4, n, q, rows, bits);
    k_row(plain, high, p, 5, n, q, rows, bits);
    k_row(plain, high, p, 6, n, q, rows, bits);
    k_row(plain, high, p, 7, n, q, rows, bits);
}

// What the second digits of up to four rows add, in units of the first. Codes have 4 bits.
static __attribute__((noinline)) void add_seconds(const struct kvq__vnni *v, uint32_t own,
                                                  const struct kvq__planes *p, int rows,
                                                  __m512i sum[][2])
{
    const __m512i mask = _mm512_set1_epi8(0x0f);
    __m512i acc[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = _mm512_setzero_si512();
    for (uint64_t left = v->strong_words[own]; left; left &= left - 1) {
        unsigned w = (unsigned)__builtin_ctzll(left);
        unsigned r = w / 16 * 4 + w % 4, s = w / 4 % 4; // row and position, as k_row has them
        for (unsigned z = 0; z < 2; z++) {
            struct kvq__nibbles x =
                kvq__join_planes(kvq__load_row(p->low + KVQ__ROW_BYTES * r, z, r & 3),
                                 kvq__load_row(p->high + KVQ__ROW_BYTES * r, z, r & 3));
            __m512i code = s % 2 ? x.odd : x.even;
            code = _mm512_and_si512(s < 2 ? code : _mm512_srli_epi16(code, 4), mask);
            for (int i = 0; i < rows; i++)
                acc[i][z] = _mm512_dpbusd_epi32(acc[i][z], code,
                                                kvq__broadcast_word(v->digits[own][i] + 4 * w));
        }
    }
    for (int i = 0; i < rows; i++)
        for (int z = 0; z < 2; z++)
            sum[i][z] = _mm512_add_epi32(sum[i][z], _mm512_slli_epi32(acc[i][z], 8));
}

// Logits of up to four rows for one group.
KVQ__INLINE void qk_rows(const struct kvq__tile *tile, struct kvq__planes p, uint32_t group,
                         uint32_t first, const uint8_t *norms, float *logits, int rows, int bits,
                         bool strong)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    const uint32_t own = v->k_of[group];
    const struct kvq__planes all = p;
    const uint8_t *q[KVQ__TILE4];
    __m512i plain[KVQ__TILE4][2], high[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++) {
        q[i] = kvq__vnni_bytes(tile, own, first + (uint32_t)i, p.dim);
        plain[i][0] = plain[i][1] = high[i][0] = high[i][1] = _mm512_setzero_si512();
    }
    if (p.dim == 64)
        k_slab(plain, high, &p, 4, q, rows, bits);
    for (uint32_t slab = 0; slab < p.dim / KVQ__SLAB; slab++) {
        k_slab(plain, high, &p, 8, q, rows, bits);
        kvq__next_slab(&p, bits);
        for (int i = 0; i < rows; i++)
            q[i] += KVQ__SLAB;
    }
    if (strong && v->strong_words[own])
        add_seconds(v, own, &all, rows, plain);
    __m512 norm[2] = {_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f)};
    for (int z = 0; norms && z < 2; z++)
        norm[z] = kvq__load_f16(norms + 32 * z);
    for (int i = 0; i < rows; i++)
        for (int z = 0; z < 2; z++) {
            __m512 unit = _mm512_set1_ps(v->unit[own][first + (uint32_t)i]);
            __m512 bias = _mm512_set1_ps(v->bias[own][first + (uint32_t)i]);
            __m512i sum = _mm512_srai_epi32(high[i][z], bits == 2 ? 2 : 4);
            sum = _mm512_add_epi32(plain[i][z], sum);
            __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), unit, bias);
            _mm512_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + 16 * z, _mm512_mul_ps(x, norm[z]));
        }
}

KVQ__INLINE void qk_groups(const struct kvq__tile *tile, uint32_t dim, int bits)
{
    const struct kvq__chunk *chunk = kvq__vnni_of(tile)->chunk;
    const struct kvq__codec *c = tile->codec;
    for (uint32_t i = 0; i < chunk->groups; i++) {
        if (chunk->group[i].packed_tokens == 0)
            continue;
        const uint8_t *group = chunk->group[i].packed.group;
        const uint8_t *norms = c->has_norms ? group + c->layout.k_norms : NULL;
        struct kvq__planes p = kvq__planes_of(tile, i, group + c->layout.k_codes, dim, bits);
        float *logits = tile->logits + i * KVQ_GROUP_TOKENS;
        for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4, logits += 4 * KVQ__LOGITS_STRIDE) {
            KVQ__BY_ROWS(tile->rows - r, qk_rows(tile, p, i, r, norms, logits, ROWS, bits, false));
        }
    }
}

void kvq__vnni_qk(const struct kvq__tile *tile)
{
    KVQ__BY_BITS(tile->codec->k_bits, KVQ__BY_DIM(tile->dim, qk_groups(tile, DIM, BITS)));
}

// ---- Keys with strong channels ----

// Four rows' logits that are too coarse as bytes, in fp32.
static void redo_coarse(const struct kvq__tile *tile, uint32_t first)
{
    const struct kvq__vnni *v = kvq__vnni_of(tile);
    struct kvq__tile one = *tile;
    one.rows = 1;
    one.ahead = NULL;
    for (uint32_t i = 0; i < v->chunk->groups; i++) {
        const struct kvq__group *group = &v->chunk->group[i];
        uint32_t left = group->packed_tokens ? v->coarse_rows[v->k_of[i]] : 0;
        for (; left; left &= left - 1) {
            uint32_t r = first + (uint32_t)__builtin_ctz(left);
            one.qt = tile->qt + (size_t)r * tile->dim;
            kvq__qk_packed_avx512(&one, &group->packed,
                                  tile->logits + (size_t)r * KVQ__LOGITS_STRIDE +
                                      i * KVQ_GROUP_TOKENS);
        }
    }
}

// Up to four rows, all groups. A codec with strong channels has no norms.
KVQ__INLINE void strong_rows(const struct kvq__tile *tile, uint32_t first, __m512 centre,
                             uint32_t dim, int rows)
{
    const struct kvq__chunk *chunk = kvq__vnni_of(tile)->chunk;
    float *logits = tile->logits + (size_t)first * KVQ__LOGITS_STRIDE;
    prepare_rows(tile, first, centre, dim, rows, true);
    for (uint32_t i = 0; i < chunk->groups; i++, logits += KVQ_GROUP_TOKENS) {
        if (chunk->group[i].packed_tokens == 0)
            continue;
        const uint8_t *codes = chunk->group[i].packed.group + tile->codec->layout.k_codes;
        struct kvq__planes p = kvq__planes_of(tile, i, codes, dim, 4);
        qk_rows(tile, p, i, first, NULL, logits, rows, 4, true);
    }
    redo_coarse(tile, first);
}

KVQ__INLINE void strong_chunk(const struct kvq__tile *tile, uint32_t dim)
{
    struct kvq__vnni *v = kvq__vnni_of(tile);
    const __m512 centre = _mm512_set1_ps(kvq__centre_of(4));
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            open_k(v, i, centre, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, strong_rows(tile, r, centre, dim, ROWS));
}

void kvq__vnni_qk_strong(const struct kvq__tile *tile)
{
    KVQ__BY_DIM(tile->dim, strong_chunk(tile, DIM));
}
