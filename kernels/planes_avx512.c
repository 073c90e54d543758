// SPDX-License-Identifier: Apache-2.0
//
// From codes to the planes of layout.h, AVX-512. Codes come as quads (pack_avx512.h), whose lanes
// are such that shifts of whole registers bring the codes of a byte together, and one shuffle the
// bytes of a word.
#include "kernels/avx512.h"
#include "kernels/pack_avx512.h"

// ---- Fields of codes that stand at positions 0 to 3 of a byte ----

KVQ__INLINE __m512i masked(__m512i x, int mask)
{
    return _mm512_and_si512(x, _mm512_set1_epi8((char)mask));
}

KVQ__INLINE __m512i join(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i abc = _mm512_ternarylogic_epi32(a, b, c, 0xfe);
    return _mm512_or_si512(abc, d);
}

// The lower two bits. Codes of a wide quarter have a third.
KVQ__INLINE __m512i low_fields(const __m512i *s)
{
    return join(masked(s[0], 3), _mm512_slli_epi16(masked(s[1], 3), 2),
                _mm512_slli_epi16(masked(s[2], 3), 4), _mm512_slli_epi16(masked(s[3], 3), 6));
}

// The upper two bits of 4, the third of 3, the only one of 1.
KVQ__INLINE __m512i high_fields(const __m512i *s, int bits)
{
    if (bits == 1)
        return join(s[0], _mm512_slli_epi16(s[1], 2), _mm512_slli_epi16(s[2], 4),
                    _mm512_slli_epi16(s[3], 6));
    int mask = bits == 3 ? 0x04 : 0x0c;
    return join(_mm512_srli_epi16(masked(s[0], mask), 2), masked(s[1], mask),
                _mm512_slli_epi16(masked(s[2], mask), 2), _mm512_slli_epi16(masked(s[3], mask), 4));
}

// ---- Words ----

// Sixteen words of low and of high planes; of 8 bits those of each position.
struct words {
    __m512i low, high, whole[4];
};

KVQ__INLINE struct words words_of(const __m512i *s, int bits, __m512i order)
{
    struct words w = {0};
    if (bits == 8) {
        for (int i = 0; i < 4; i++)
            w.whole[i] = _mm512_shuffle_epi8(s[i], order);
        return w;
    }
    if (bits > 1)
        w.low = _mm512_shuffle_epi8(low_fields(s), order);
    if (bits != 2)
        w.high = _mm512_shuffle_epi8(high_fields(s, bits), order);
    return w;
}

// One above the other, where codes share a plane of single bits.
KVQ__INLINE __m512i share(__m512i even, __m512i odd)
{
    return _mm512_or_si512(even, _mm512_slli_epi16(odd, 1));
}

// Half z of a row whose 32-byte pieces are permuted by XOR m.
KVQ__INLINE void put_half(uint8_t *row, uint32_t z, uint32_t m, __m512i words)
{
    _mm256_store_si256((void *)(row + 32 * ((2 * z) ^ m)), _mm512_castsi512_si256(words));
    _mm256_store_si256((void *)(row + 32 * ((2 * z + 1) ^ m)), _mm512_extracti64x4_epi64(words, 1));
}

// ---- K ----

// s[i] lane j = x[j] lane i, lanes of 128 bits.
KVQ__INLINE void transpose_lanes(const __m512i *x, __m512i *s)
{
    __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
    __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    s[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    s[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    s[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    s[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// Half z of row `row`, 16 channels of 16 tokens. Position s belongs to channels 4 s to 4 s + 3,
// byte 2 h + e of a word to the channels 2 e + h of these.
KVQ__INLINE struct words words_k(const uint8_t *quads, uint32_t dim, uint32_t row, uint32_t z,
                                 int bits)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    __m512i x[4], s[4];
    for (uint32_t i = 0; i < 4; i++)
        x[i] = _mm512_load_si512(quads + (size_t)(4 * z + i) * 4 * dim + 64 * row);
    transpose_lanes(x, s);
    return words_of(s, bits, order);
}

// Rows r and r + half of a slab's 2 * half, which share a row of single bits; all planes from the
// slab's first row on.
KVQ__INLINE void put_k_rows(const struct words *a, const struct words *b, uint32_t dim, uint32_t r,
                            uint32_t half, uint32_t z, int bits, uint8_t *low, uint8_t *high)
{
    uint8_t *first = low + KVQ__ROW_BYTES * r, *second = first + KVQ__ROW_BYTES * half;
    uint32_t m = r & 3, n = (r + half) & 3;
    for (uint32_t i = 0; i < 4 && bits == 8; i++) {
        put_half(first + (size_t)8 * dim * i, z, m, a->whole[i]);
        put_half(second + (size_t)8 * dim * i, z, n, b->whole[i]);
    }
    if (bits > 1 && bits < 8) {
        put_half(first, z, m, a->low);
        put_half(second, z, n, b->low);
    }
    high += KVQ__ROW_BYTES * r;
    if (bits == 1 || bits == 3)
        put_half(high, z, m, share(a->high, b->high));
    if (bits == 4) {
        put_half(high, z, m, a->high);
        put_half(high + KVQ__ROW_BYTES * half, z, n, b->high);
    }
}

KVQ__INLINE void put_k(const uint8_t *quads, uint32_t dim, int bits, uint8_t *planes)
{
    const uint32_t half = dim == 64 ? 2 : 4;
    const uint32_t high_rows = bits == 4 ? 2 * half : half; // of a slab
    uint8_t *high = planes + (bits == 1 ? 0 : 8 * dim);
    for (uint32_t i = 0; i < dim / 32; i++)
        for (uint32_t z = 0; z < 2; z++) {
            uint32_t slab = i / half, r = i % half, row = 2 * half * slab + r;
            struct words a = words_k(quads, dim, row, z, bits);
            struct words b = words_k(quads, dim, row + half, z, bits);
            put_k_rows(&a, &b, dim, r, half, z, bits, planes + 2 * half * KVQ__ROW_BYTES * slab,
                       high + high_rows * KVQ__ROW_BYTES * slab);
        }
}

// ---- V ----

// Channels 16 u on of one set and slab: a word's position s stands `step` channels behind position
// s - 1. The words are in the order of channels.
KVQ__INLINE struct words words_v(const uint8_t *quads, uint32_t step, uint32_t u, int bits)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i s[4];
    for (uint32_t i = 0; i < 4; i++)
        s[i] = _mm512_load_si512(quads + 4 * (step * i + 16 * u));
    return words_of(s, bits, order);
}

// The row of a set, from words in the order of channels 16 u + 8 rh + g to 4 (g ^ 2 j) + 2 u + rh.
KVQ__INLINE void put_wide_row(__m512i first, __m512i second, uint32_t j, uint8_t *row)
{
    const __m512i order =
        _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i upper = _mm512_add_epi32(order, _mm512_set1_epi32(4));
    put_half(row, 0, j, _mm512_permutex2var_epi32(first, order, second));
    put_half(row, 1, j, _mm512_permutex2var_epi32(first, upper, second));
}

// The same at head_dim 64, to (2 g + rh) ^ 8 (j >> 1).
KVQ__INLINE void put_narrow_row(__m512i words, uint32_t j, uint8_t *row)
{
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    put_half(row, 0, j >> 1, _mm512_permutexvar_epi32(order, words));
}

// Words of one set and slab, for u = 0 and 1; narrow rows only have u = 0.
struct set {
    struct words u[2];
};

KVQ__INLINE void put_row(__m512i first, __m512i second, uint32_t j, bool narrow, uint8_t *row)
{
    if (narrow)
        put_narrow_row(first, j, row);
    else
        put_wide_row(first, second, j, row);
}

// What a set has for itself; `row` and `high` are its rows.
KVQ__INLINE void put_set(const struct set *s, uint32_t dim, uint32_t j, int bits, bool narrow,
                         uint8_t *row, uint8_t *high)
{
    for (uint32_t i = 0; i < 4 && bits == 8; i++)
        put_row(s->u[0].whole[i], s->u[1].whole[i], j, narrow, row + (size_t)8 * dim * i);
    if (bits > 1 && bits < 8)
        put_row(s->u[0].low, s->u[1].low, j, narrow, row);
    if (bits == 4)
        put_row(s->u[0].high, s->u[1].high, j, narrow, high);
}

KVQ__INLINE void put_v(const uint8_t *quads, uint32_t dim, int bits, bool narrow, uint8_t *planes)
{
    const uint32_t row_bytes = narrow ? 64 : KVQ__ROW_BYTES, step = narrow ? 16 : 32;
    uint8_t *high = planes + (bits == 1 ? 0 : 8 * dim);
    for (uint32_t i = 0; i < (narrow ? 1 : dim / KVQ__SLAB) * 4; i++) { // slab i / 4, j = i % 4
        uint32_t j = i % 4;
        struct set s[2] = {0};
        for (uint32_t half = 0; half < 2; half++) {
            const uint8_t *own = quads + (size_t)(2 * j + half) * 4 * dim + 4 * KVQ__SLAB * (i / 4);
            uint32_t row = (2 * i + (narrow ? half ^ (j & 1) : half)) * row_bytes;
            for (uint32_t u = 0; u < step / 16; u++)
                s[half].u[u] = words_v(own, step, u, bits);
            put_set(&s[half], dim, j, bits, narrow, planes + row, high + row);
        }
        if (bits == 1 || bits == 3)
            put_row(share(s[0].u[0].high, s[1].u[0].high), share(s[0].u[1].high, s[1].u[1].high), j,
                    narrow, high + i * row_bytes);
    }
}

// ---- Either ----

// The third bits of the first quarter.
static void put_wide(const uint8_t *quads, uint32_t dim, uint8_t *wide, bool v)
{
    const __m512i by_token =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (uint32_t set = 0; set < KVQ__SETS; set++)
        for (uint32_t c = 0; c < dim / 4; c += 16) {
            __m512i x = _mm512_load_si512(quads + (size_t)set * 4 * dim + 4 * c);
            x = _mm512_slli_epi16(_mm512_permutexvar_epi32(by_token, x), 5);
            uint64_t bits = _mm512_movepi8_mask(x);
            for (uint32_t k = 0; k < 4; k++, bits >>= 16) {
                uint32_t t = kvq__set_token(set, v) + k * kvq__set_step(v);
                uint16_t own = (uint16_t)bits;
                memcpy(wide + t * (dim / 32) + c / 8, &own, sizeof own);
            }
        }
}

KVQ__INLINE void put(const uint8_t *quads, uint32_t dim, int bits, uint8_t *planes, bool v)
{
    if (!v)
        put_k(quads, dim, bits, planes);
    else if (dim == 64)
        put_v(quads, dim, bits, true, planes);
    else
        put_v(quads, dim, bits, false, planes);
}

void kvq__put_planes_avx512(const struct kvq__side *side, uint32_t dim, const uint8_t *quads,
                            uint8_t *planes, bool v)
{
    uint32_t bits = side->row.bits;
    if (bits == 1)
        put(quads, dim, 1, planes, v);
    else if (bits == 8)
        put(quads, dim, 8, planes, v);
    else
        KVQ__BY_BITS(bits, put(quads, dim, BITS, planes, v));
    if (side->row.wide)
        put_wide(quads, dim, planes + KVQ_GROUP_TOKENS * dim * bits / 8, v);
}
