// SPDX-License-Identifier: Apache-2.0
//
// Logits of packed groups with byte products. See bytes_avx2.c for the method.
//
// Registers of the products, four rows to one unpacking: 8 accumulators (4 rows, 16 tokens), 2
// registers of words and 2 of codes, the broadcast query, a product, a mask. Half a row of the
// layout has 32 vpmaddubsw and as many additions, 16 broadcasts and 14 instructions of unpacking.
#include "kernels/bytes_avx2.h"

enum { HALVES = 2 };

// ---- q * scale as int8, for all groups of the chunk ----

KVQ__INLINE void open_k(struct kvq__bytes *v, const struct kvq__codec *c, uint32_t index,
                        uint32_t dim)
{
    const struct kvq_packed *packed = &v->chunk->group[index].packed;
    struct kvq__opened *g = &v->opened[index];
    const uint8_t *scales = packed->k_scales, *zeros = packed->k_zeros;
    float max = kvq__max_f16(scales, dim);
    g->unit = max / KVQ__INT16_TOP;
    __m256 factor = _mm256_set1_ps(KVQ__INT16_TOP / max);
    __m256 centre = _mm256_set1_ps(kvq__centre_of(c->k_bits));
    for (uint32_t i = 0; i < dim; i += 16) {
        __m256 a = kvq__load8(scales + 2 * i, KVQ_F16),
               b = kvq__load8(scales + 2 * i + 16, KVQ_F16);
        __m256i x = kvq__byte_order(kvq__to_int16(a, b, factor, factor));
        _mm256_store_si256((void *)(g->scale16 + i), x);
        __m256 za = kvq__load8(zeros + 2 * i, KVQ_F16),
               zb = kvq__load8(zeros + 2 * i + 16, KVQ_F16);
        _mm256_store_ps(g->middle + i, _mm256_fmadd_ps(a, centre, za));
        _mm256_store_ps(g->middle + i + 8, _mm256_fmadd_ps(b, centre, zb));
    }
}

// The largest int16 of each of four registers of non-negative ones.
static inline __m128i max4_epi16(const __m256i *m)
{
    __m256i ac =
        _mm256_max_epi16(_mm256_unpacklo_epi32(m[0], m[2]), _mm256_unpackhi_epi32(m[0], m[2]));
    __m256i bd =
        _mm256_max_epi16(_mm256_unpacklo_epi32(m[1], m[3]), _mm256_unpackhi_epi32(m[1], m[3]));
    __m256i x = _mm256_max_epi16(_mm256_unpacklo_epi32(ac, bd), _mm256_unpackhi_epi32(ac, bd));
    __m128i y = _mm_max_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    return _mm_and_si128(_mm_max_epi16(y, _mm_srli_epi32(y, 16)), _mm_set1_epi32(0xffff));
}

KVQ__INLINE __m256i scaled(const int16_t *q, const struct kvq__opened *g, uint32_t i)
{
    return _mm256_mulhrs_epi16(_mm256_load_si256((const void *)(q + i)),
                               _mm256_load_si256((const void *)(g->scale16 + i)));
}

// What makes bytes of up to four rows: the largest |q * scale| of a row becomes 127. (Taking max
// |q| * max scale for it instead would be cheaper and a third noisier.)
KVQ__INLINE void find_factors(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                              uint32_t dim, int rows)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    __m256i top[KVQ__TILE4];
    for (int n = 0; n < KVQ__TILE4; n++)
        top[n] = _mm256_set1_epi16(1);
    for (uint32_t i = 0; i < dim; i += 16)
        for (int n = 0; n < rows; n++) {
            __m256i x = scaled(v->q16[tile->slot + first + (uint32_t)n], g, i);
            top[n] = _mm256_max_epi16(top[n], _mm256_abs_epi16(x));
        }
    // The whole number is what the bytes really are multiplied with, so it may be truncated.
    __m128 full = _mm_set1_ps(127.0f * 32768.0f);
    __m128 by = _mm_div_ps(full, _mm_cvtepi32_ps(max4_epi16(top)));
    __m128i factor = _mm_min_epi32(_mm_set1_epi32(INT16_MAX), _mm_cvttps_epi32(by));
    _mm_store_si128((void *)(v->factor[group] + first), factor);
    __m128 unit =
        _mm_mul_ps(_mm_loadu_ps(v->q_unit + tile->slot + first), _mm_set1_ps(g->unit * 0x1p30f));
    _mm_store_ps(v->unit[group] + first, _mm_div_ps(unit, _mm_cvtepi32_ps(factor)));
}

// The bytes of one row; returns their sums in eights.
KVQ__INLINE __m256i make_bytes(const struct kvq__tile *tile, uint32_t group, uint32_t row,
                               uint32_t dim, uint8_t *bytes)
{
    const struct kvq__bytes *v = kvq__bytes_of(tile);
    const struct kvq__opened *g = &v->opened[group];
    const int16_t *q = v->q16[tile->slot + row];
    __m256i f = _mm256_set1_epi16((int16_t)v->factor[group][row]), sum = _mm256_setzero_si256();
    for (uint32_t i = 0; i < dim; i += 32) {
        __m256i b = _mm256_packs_epi16(_mm256_mulhrs_epi16(scaled(q, g, i), f),
                                       _mm256_mulhrs_epi16(scaled(q, g, i + 16), f));
        _mm256_store_si256((void *)(bytes + i), b);
        sum = kvq__add_products(sum, _mm256_set1_epi8(1), b); // at most 8 * 254
    }
    return kvq__widen(_mm256_setzero_si256(), sum);
}

// Bytes and bias of up to four rows in one group.
KVQ__INLINE void scale_queries(const struct kvq__tile *tile, uint32_t group, uint32_t first,
                               uint32_t dim, int rows)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    __m256 bias[KVQ__TILE4], centre = _mm256_set1_ps(kvq__centre_of(tile->codec->k_bits));
    for (int n = 0; n < KVQ__TILE4; n++)
        bias[n] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < dim; i += 8) {
        __m256 middle = _mm256_load_ps(v->opened[group].middle + i);
        for (int n = 0; n < rows; n++) {
            const float *q = tile->qt + (size_t)(first + (uint32_t)n) * dim;
            bias[n] = _mm256_fmadd_ps(middle, _mm256_load_ps(q + i), bias[n]);
        }
    }
    for (int n = 0; n < rows; n++) {
        uint32_t r = first + (uint32_t)n;
        __m256i sum = make_bytes(tile, group, r, dim, kvq__row_bytes(tile, group, r));
        // What rounding did to the middle is taken off.
        __m256 taken = _mm256_mul_ps(centre, _mm256_set1_ps(v->unit[group][r]));
        bias[n] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(sum), taken, bias[n]);
    }
    _mm_store_ps(v->bias[group] + first, kvq__sum4(bias[0], bias[1], bias[2], bias[3]));
}

static inline bool has_own_k(const struct kvq__bytes *v, uint32_t group)
{
    return v->chunk->group[group].packed_tokens && v->k_of[group] == group;
}

// In steps that each run over all groups: from scales to bytes is a chain of some hundred cycles,
// which thus hides behind those of other groups.
KVQ__INLINE void prepare_rows(const struct kvq__tile *tile, uint32_t first, uint32_t dim, int rows)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            find_factors(tile, i, first, dim, rows);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            scale_queries(tile, i, first, dim, rows);
}

KVQ__INLINE void prepare_k(const struct kvq__tile *tile, uint32_t dim)
{
    struct kvq__bytes *v = kvq__bytes_of(tile);
    kvq__find_own_k(v->chunk, v->k_of);
    for (uint32_t i = 0; i < v->chunk->groups; i++)
        if (has_own_k(v, i))
            open_k(v, tile->codec, i, dim);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4)
        KVQ__BY_ROWS(tile->rows - r, prepare_rows(tile, r, dim, ROWS));
}

void kvq__bytes_prepare_k(const struct kvq__tile *tile)
{
    KVQ__BY_DIM(tile->dim, prepare_k(tile, DIM));
}

// ---- Products ----

// The planes of K of a group, half of their tokens, from a slab on.
struct planes {
    struct kvq__half low, high;
    const uint8_t *ahead;  // codes to fetch meanwhile
    const uint8_t *params; // and scales and zeros; NULL where they stand apart
};

// Where the four bytes of row r of the layout, position s, stand: two rows to a register, each in
// both of its lanes, as the two packs leave them.
KVQ__INLINE uint32_t query_at(uint32_t r, uint32_t s)
{
    return 32 * (r / 2) + 8 * (r % 2) + 4 * (s / 2) + 16 * (s % 2);
}

// Row r of a slab of n rows as two registers whose bytes hold codes from bits 0 and 4 on, or with
// 2 bits from bits 0, 2, 4 and 6 on (then odd is not set).
struct words {
    __m256i even, odd;
};

KVQ__INLINE struct words load_k(const struct planes *p, uint32_t r, uint32_t n, uint32_t z,
                                int bits)
{
    __m256i low = kvq__load_words(&p->low, r, z, r & 3), high;
    if (bits == 2)
        return (struct words){low, low};
    if (bits == 4) {
        high = kvq__load_words(&p->high, r, z, r & 3);
    } else { // two rows of a slab share one row of bits
        uint32_t row = r % (n / 2);
        high = kvq__load_words(&p->high, row, z, row & 3);
        high = r >= n / 2 ? _mm256_srli_epi16(high, 1) : high;
        high = _mm256_and_si256(high, _mm256_set1_epi8(0x55));
    }
    return (struct words){kvq__join_planes(low, high, 0), kvq__join_planes(low, high, 1)};
}

// The codes at position s.
KVQ__INLINE __m256i part(const struct words *w, uint32_t s, int bits)
{
    const __m256i mask = _mm256_set1_epi8(bits == 2 ? 3 : 15);
    if (bits == 2)
        return _mm256_and_si256(_mm256_srli_epi16(w->even, 2 * (int)s), mask);
    __m256i x = s % 2 ? w->odd : w->even;
    return _mm256_and_si256(_mm256_srli_epi16(x, s / 2 ? 4 : 0), mask);
}

// Row r of a slab of n rows; both are constants.
KVQ__INLINE void k_row(__m256i acc[][2], const struct planes *p, uint32_t r, uint32_t n,
                       const uint8_t *const *q, int rows, int bits)
{
    const uint32_t lines = (uint32_t)bits; // of codes of 16 channels, half of them in each half
    struct words w[2] = {load_k(p, r, n, 0, bits), load_k(p, r, n, 1, bits)};
    for (uint32_t i = r * lines / 2; i < (r + 1) * lines / 2; i++)
        kvq__fetch(p->ahead + 64 * i);
    if (r % 2 && p->params)
        kvq__fetch(p->params + 64 * (r / 2));
    for (uint32_t s = 0; s < 4; s++) {
        __m256i c0 = part(&w[0], s, bits), c1 = part(&w[1], s, bits);
        for (int i = 0; i < rows; i++) {
            __m256i x = kvq__broadcast_word(q[i] + query_at(r, s));
            acc[i][0] = kvq__add_products(acc[i][0], c0, x);
            acc[i][1] = kvq__add_products(acc[i][1], c1, x);
        }
    }
}

KVQ__INLINE void widen(__m256i sum[][2], __m256i acc[][2], int rows)
{
    for (int i = 0; i < rows; i++)
        for (int z = 0; z < 2; z++) {
            sum[i][z] = kvq__widen(sum[i][z], acc[i][z]);
            acc[i][z] = _mm256_setzero_si256();
        }
}

// A slab of n rows, 8 or 4. Written out, for otherwise every address would have to be computed.
// 16 bits hold the sums of 32, 16 and 8 positions.
KVQ__INLINE void k_slab(__m256i sum[][2], const struct planes *p, uint32_t n,
                        const uint8_t *const *q, int rows, int bits)
{
    __m256i acc[KVQ__TILE4][2];
    for (int i = 0; i < rows; i++)
        acc[i][0] = acc[i][1] = _mm256_setzero_si256();
    k_row(acc, p, 0, n, q, rows, bits);
    k_row(acc, p, 1, n, q, rows, bits);
    if (bits == 4)
        widen(sum, acc, rows);
    k_row(acc, p, 2, n, q, rows, bits);
    k_row(acc, p, 3, n, q, rows, bits);
    if (bits > 2 || n == 4)
        widen(sum, acc, rows);
    if (n == 4)
        return;
    k_row(acc, p, 4, n, q, rows, bits);
    k_row(acc, p, 5, n, q, rows, bits);
    if (bits == 4)
        widen(sum, acc, rows);
    k_row(acc, p, 6, n, q, rows, bits);
    k_row(acc, p, 7, n, q, rows, bits);
    widen(sum, acc, rows);
}

// Sums of up to four rows and half of a group's tokens.
KVQ__INLINE void k_sums(__m256i sum[][2], const struct kvq__tile *tile, const uint8_t *codes,
                        const uint8_t *ahead, uint32_t half, const uint8_t *const *rows_bytes,
                        int rows, int bits)
{
    const uint32_t dim = tile->dim, n = dim == 64 ? 4 : 8, slabs = (dim + 64) / KVQ__SLAB;
    const uint8_t *low = codes, *high = codes + 8 * dim, *q[KVQ__TILE4];
    const struct kvq_layout *l = &tile->codec->layout;
    for (int i = 0; i < rows; i++) {
        q[i] = rows_bytes[i];
        sum[i][0] = sum[i][1] = _mm256_setzero_si256();
    }
    for (uint32_t slab = 0; slab < slabs; slab++) {
        uint32_t lines = n * (uint32_t)bits / HALVES, part = HALVES * slab + half;
        const uint8_t *params = ahead + l->k_scales + 64 * part * n / 2;
        struct planes p = {kvq__half_of(low, half), kvq__half_of(high, half),
                           ahead + 64 * part * lines, l->k_set ? NULL : params};
        if (n == 4)
            k_slab(sum, &p, 4, q, rows, bits);
        else
            k_slab(sum, &p, 8, q, rows, bits);
        low += KVQ__SLAB * 8;
        high += KVQ__SLAB * (bits == 3 ? 4 : 8);
        for (int i = 0; i < rows; i++)
            q[i] += KVQ__SLAB;
    }
}

// Logits of up to four rows.
KVQ__INLINE void qk_rows(const struct kvq__tile *tile, const struct kvq_packed *packed,
                         const uint8_t *ahead, uint32_t group, uint32_t first, float *logits,
                         int rows, int bits)
{
    const struct kvq__bytes *v = kvq__bytes_of(tile);
    const struct kvq_layout *l = &tile->codec->layout;
    const uint32_t own = v->k_of[group];
    const uint8_t *q[KVQ__TILE4];
    for (int i = 0; i < rows; i++)
        q[i] = kvq__row_bytes(tile, own, first + (uint32_t)i);
    for (uint32_t half = 0; half < HALVES; half++) {
        __m256i sum[KVQ__TILE4][2];
        __m256 norm[2] = {_mm256_set1_ps(1.0f), _mm256_set1_ps(1.0f)};
        k_sums(sum, tile, packed->group + l->k_codes, ahead, half, q, rows, bits);
        for (uint32_t z = 0; tile->codec->has_norms && z < 2; z++)
            norm[z] = kvq__load8(packed->group + l->k_norms + 32 * half + 16 * z, KVQ_F16);
        for (int i = 0; i < rows; i++)
            for (uint32_t z = 0; z < 2; z++) {
                __m256 unit = _mm256_set1_ps(v->unit[own][first + (uint32_t)i]);
                __m256 bias = _mm256_set1_ps(v->bias[own][first + (uint32_t)i]);
                __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[i][z]), unit, bias);
                _mm256_storeu_ps(logits + i * KVQ__LOGITS_STRIDE + 16 * half + 8 * z,
                                 _mm256_mul_ps(x, norm[z]));
            }
    }
}

// What k_row does not fetch: norms, and where scales stand before a record's groups, a share of
// them with each group. They are as far from the group ahead as these from this one.
KVQ__INLINE void fetch_rest(const struct kvq_layout *l, const struct kvq_packed *packed,
                            const uint8_t *ahead, uint32_t group)
{
    uint32_t share = l->k_set / KVQ_BLOCK_GROUPS;
    const uint8_t *scales = ahead + (packed->k_scales - packed->group);
    kvq__fetch(ahead + l->k_norms);
    for (uint32_t i = 0; i < share; i += 64)
        kvq__fetch(scales + group % KVQ_BLOCK_GROUPS * share + i);
}

KVQ__INLINE void qk_group(const struct kvq__tile *tile, const struct kvq_packed *packed,
                          float *logits, int bits)
{
    const uint8_t *ahead = tile->ahead ? tile->ahead : packed->group;
    uint32_t group = (uint32_t)(logits - tile->logits) / KVQ_GROUP_TOKENS;
    fetch_rest(&tile->codec->layout, packed, ahead, group);
    for (uint32_t r = 0; r < tile->rows; r += KVQ__TILE4, logits += 4 * KVQ__LOGITS_STRIDE) {
        KVQ__BY_ROWS(tile->rows - r, qk_rows(tile, packed, ahead, group, r, logits, ROWS, bits));
        ahead = packed->group; // what was asked for once is on its way
    }
}

void kvq__bytes_qk(const struct kvq__tile *tile, const struct kvq_packed *packed, float *logits)
{
    KVQ__BY_BITS(tile->codec->k_bits, qk_group(tile, packed, logits, BITS));
}
