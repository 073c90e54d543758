// SPDX-License-Identifier: Apache-2.0
//
// From codes, a byte each, to the planes of layout.h; AVX2, also where there is AVX-512.
//
// Words of K are tokens and words of V are channels, and byte b of all words holds codes of the
// same four channels (K) or of the same token (V). So with the codes of K as [channel][token] and
// those of V as [token][channel], byte b of 32 words is four loads, shifted and joined; and four
// such bytes interleaved are the words.
#include "kernels/avx2.h"
#include "kernels/scalar_avx2.h"

enum { SLAB = 128, CODES = KVQ_GROUP_TOKENS * KVQ_MAX_HEAD_DIM, HALF = 16 };

// ---- Fields ----

enum plane {
    WHOLE, // all 8 bits
    LOW,   // the lower 2 bits
    HIGH,  // the upper 2 of 4
    THIRD, // the third bit, and that of the code that shares the field, one place up
    ONLY,  // the only bit, likewise
};

// Where the codes of 32 words (16 for V at head_dim 64, the rest is not looked at) stand: that of
// byte 0 and position 0 of the first word, and the distances to others, in bytes.
struct source {
    const uint8_t *at;
    size_t byte[4], position;
    size_t sharing; // to the codes that share a 1-bit plane's fields
};

KVQ__INLINE __m256i bits_of(const uint8_t *p, int shift, uint8_t mask)
{
    __m256i x = _mm256_loadu_si256((const void *)p);
    return _mm256_and_si256(_mm256_srli_epi16(x, shift), _mm256_set1_epi8((char)mask));
}

// The fields of a plane for the codes at p.
KVQ__INLINE __m256i fields_at(const uint8_t *p, size_t sharing, enum plane plane)
{
    if (plane == LOW)
        return bits_of(p, 0, 3);
    if (plane == HIGH)
        return bits_of(p, 2, 3);
    int shift = plane == THIRD ? 2 : 0;
    __m256i upper = bits_of(p + sharing, shift, 1);
    return _mm256_or_si256(bits_of(p, shift, 1), _mm256_add_epi8(upper, upper));
}

// Byte `b` of all words: the fields of its four positions; of whole codes those at `position`.
KVQ__INLINE __m256i byte_of_words(const struct source *s, int b, enum plane plane,
                                  uint32_t position)
{
    const uint8_t *p = s->at + s->byte[b];
    if (plane == WHOLE)
        return _mm256_loadu_si256((const void *)(p + position * s->position));
    __m256i x = fields_at(p, s->sharing, plane);
    x = _mm256_or_si256(x, _mm256_slli_epi16(fields_at(p + s->position, s->sharing, plane), 2));
    x = _mm256_or_si256(x, _mm256_slli_epi16(fields_at(p + 2 * s->position, s->sharing, plane), 4));
    return _mm256_or_si256(x,
                           _mm256_slli_epi16(fields_at(p + 3 * s->position, s->sharing, plane), 6));
}

// 32 words as eight registers of four: words 4 i to 4 i + 3 in out[i].
KVQ__INLINE void words_of(const struct source *s, enum plane plane, uint32_t position, __m128i *out)
{
    __m256i a = byte_of_words(s, 0, plane, position), b = byte_of_words(s, 1, plane, position);
    __m256i c = byte_of_words(s, 2, plane, position), d = byte_of_words(s, 3, plane, position);
    __m256i low[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
    __m256i high[2] = {_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d)};
    for (int i = 0; i < 2; i++) {
        __m256i x = _mm256_unpacklo_epi16(low[i], high[i]);
        __m256i y = _mm256_unpackhi_epi16(low[i], high[i]);
        out[2 * i] = _mm256_castsi256_si128(x);
        out[2 * i + 1] = _mm256_castsi256_si128(y);
        out[2 * i + 4] = _mm256_extracti128_si256(x, 1);
        out[2 * i + 5] = _mm256_extracti128_si256(y, 1);
    }
}

// ---- K ----

// A row of 16 channels of any plane; `row` is the plane's number of it within its slab.
KVQ__INLINE void put_k_row(const struct source *s, enum plane plane, uint32_t position,
                           uint8_t *out, uint32_t row)
{
    __m128i words[8];
    words_of(s, plane, position, words);
    for (uint32_t i = 0; i < 8; i++)
        _mm_store_si128((void *)(out + 16 * (i ^ 2 * (row & 3))), words[i]);
}

static struct source k_source(const uint8_t *codes, uint32_t r, uint32_t half)
{
    const size_t channel = KVQ_GROUP_TOKENS; // 4 s + 2 e + h, byte 2 h + e
    return (struct source){codes + 16 * r * channel,
                           {0, 2 * channel, channel, 3 * channel},
                           4 * channel,
                           16 * half * channel};
}

static void put_k_bits(const uint8_t *codes, uint32_t dim, enum plane plane, uint8_t *out)
{
    uint32_t in_slab = dim == 64 ? 4 : 8, half = in_slab / 2;
    for (uint32_t i = 0; i < dim / 32; i++, out += SLAB) {
        struct source s = k_source(codes, i / half * in_slab + i % half, half);
        if (plane == THIRD)
            put_k_row(&s, THIRD, 0, out, i % half);
        else
            put_k_row(&s, ONLY, 0, out, i % half);
    }
}

static void put_k(const uint8_t *codes, uint32_t dim, uint32_t bits, uint8_t *planes)
{
    if (bits == 1) {
        put_k_bits(codes, dim, ONLY, planes);
        return;
    }
    for (uint32_t r = 0; r < dim / 16; r++) {
        struct source s = k_source(codes, r, 0);
        uint8_t *out = planes + SLAB * r;
        for (uint32_t i = 0; i < 4 && bits == 8; i++)
            put_k_row(&s, WHOLE, i, out + i * 8 * dim, r);
        if (bits != 8)
            put_k_row(&s, LOW, 0, out, r);
        if (bits == 4)
            put_k_row(&s, HIGH, 0, out + 8 * dim, r);
    }
    if (bits == 3)
        put_k_bits(codes, dim, THIRD, planes + 8 * dim);
}

// ---- V ----

// Words in the order of channels 8 n + g go to words 4 * (g ^ 2 j) + n.
KVQ__INLINE void put_v_wide(const __m128i *words, uint8_t *out, uint32_t j)
{
    for (uint32_t half = 0; half < 2; half++) { // g from 4 * half
        __m128i a = _mm_unpacklo_epi32(words[half], words[2 + half]);
        __m128i b = _mm_unpackhi_epi32(words[half], words[2 + half]);
        __m128i c = _mm_unpacklo_epi32(words[4 + half], words[6 + half]);
        __m128i d = _mm_unpackhi_epi32(words[4 + half], words[6 + half]);
        uint32_t g = 4 * half;
        _mm_store_si128((void *)(out + 16 * (g ^ 2 * j)), _mm_unpacklo_epi64(a, c));
        _mm_store_si128((void *)(out + 16 * ((g + 1) ^ 2 * j)), _mm_unpackhi_epi64(a, c));
        _mm_store_si128((void *)(out + 16 * ((g + 2) ^ 2 * j)), _mm_unpacklo_epi64(b, d));
        _mm_store_si128((void *)(out + 16 * ((g + 3) ^ 2 * j)), _mm_unpackhi_epi64(b, d));
    }
}

// head_dim 64: channels 8 n + g of 16 go to words (2 g + n) ^ 8 * (j >> 1).
KVQ__INLINE void put_v_narrow(const __m128i *words, uint8_t *out, uint32_t j)
{
    uint32_t swap = 2 * (j >> 1); // in 16 bytes
    for (uint32_t half = 0; half < 2; half++) {
        __m128i low = _mm_unpacklo_epi32(words[half], words[2 + half]);
        __m128i high = _mm_unpackhi_epi32(words[half], words[2 + half]);
        _mm_store_si128((void *)(out + 16 * ((2 * half) ^ swap)), low);
        _mm_store_si128((void *)(out + 16 * ((2 * half + 1) ^ swap)), high);
    }
}

KVQ__INLINE void put_v_row(const struct source *s, enum plane plane, uint32_t position,
                           uint8_t *out, uint32_t j, bool narrow)
{
    __m128i words[8];
    words_of(s, plane, position, words);
    if (narrow)
        put_v_narrow(words, out, j);
    else
        put_v_wide(words, out, j);
}

static struct source v_source(const uint8_t *codes, uint32_t dim, uint32_t slab, uint32_t set)
{
    return (struct source){codes + (size_t)(8 * (set / 2) + set % 2) * dim + slab * SLAB,
                           {0, 2 * dim, 4 * dim, 6 * dim},
                           dim == 64 ? 16 : 32,
                           dim};
}

// Four tokens of one slab: their rows of all planes but 1-bit ones.
KVQ__INLINE void put_v_set(const struct source *s, uint32_t dim, uint32_t bits, uint8_t *out,
                           uint32_t j, bool narrow)
{
    for (uint32_t i = 0; i < 4 && bits == 8; i++)
        put_v_row(s, WHOLE, i, out + i * 8 * dim, j, narrow);
    if (bits != 8)
        put_v_row(s, LOW, 0, out, j, narrow);
    if (bits == 4)
        put_v_row(s, HIGH, 0, out + 8 * dim, j, narrow);
}

KVQ__INLINE void put_v(const uint8_t *codes, uint32_t dim, uint32_t bits, uint8_t *planes,
                       bool narrow)
{
    uint32_t row_bytes = narrow ? 64 : SLAB;
    uint8_t *high = planes + (bits == 1 ? 0 : 8 * dim);
    for (uint32_t i = 0; i < dim / (narrow ? 64 : SLAB) * 8; i++) {
        uint32_t slab = i / 8, set = i % 8, j = set / 2;
        struct source s = v_source(codes, dim, slab, set);
        uint32_t row = 2 * j + (narrow ? set % 2 ^ (j & 1u) : set % 2);
        if (bits != 1)
            put_v_set(&s, dim, bits, planes + (slab * 8 + row) * row_bytes, j, narrow);
        if (bits == 1 && set % 2 == 0)
            put_v_row(&s, ONLY, 0, high + (slab * 4 + j) * row_bytes, j, narrow);
        if (bits == 3 && set % 2 == 0)
            put_v_row(&s, THIRD, 0, high + (slab * 4 + j) * row_bytes, j, narrow);
    }
}

// ---- Either ----

// 16 rows of 16 bytes.
KVQ__INLINE void transpose_bytes(const uint8_t *in, size_t in_stride, uint8_t *out,
                                 size_t out_stride)
{
    __m128i x[16], y[16];
    for (uint32_t i = 0; i < 16; i++)
        x[i] = _mm_loadu_si128((const void *)(in + i * in_stride));
    for (int round = 0; round < 4; round++) { // a perfect shuffle of all bytes each time
        for (int i = 0; i < 8; i++) {
            y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
            y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
        }
        memcpy(x, y, sizeof x);
    }
    for (uint32_t i = 0; i < 16; i++)
        _mm_storeu_si128((void *)(out + i * out_stride), x[i]);
}

static void transpose_codes(const uint8_t *in, uint32_t rows, uint32_t columns, uint8_t *out)
{
    for (uint32_t r = 0; r < rows; r += 16)
        for (uint32_t c = 0; c < columns; c += 16)
            transpose_bytes(in + r * columns + c, columns, out + c * rows + r, rows);
}

// The third bits of the first quarter, of codes in [token][channel].
static void put_wide(const uint8_t *codes, uint32_t dim, uint8_t *wide)
{
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t c = 0; c < dim / 4; c += 16) {
            __m128i x = _mm_loadu_si128((const void *)(codes + t * dim + c));
            uint16_t bits = (uint16_t)_mm_movemask_epi8(_mm_slli_epi16(x, 5));
            memcpy(wide + t * (dim / 32) + c / 8, &bits, sizeof bits);
        }
}

void kvq__put_planes_avx2(const struct kvq__side *side, uint32_t dim, const uint8_t *codes,
                          bool by_token, uint8_t *planes, bool v)
{
    _Alignas(64) uint8_t other[CODES + HALF]; // the narrow V reads 16 codes more than there are
    const uint8_t *rows = by_token ? other : codes, *columns = by_token ? codes : other;
    uint32_t bits = side->row.bits;
    if (by_token && (v || side->row.wide))
        transpose_codes(codes, dim, KVQ_GROUP_TOKENS, other);
    if (!by_token && !v)
        transpose_codes(codes, KVQ_GROUP_TOKENS, dim, other);
    if (!v)
        put_k(columns, dim, bits, planes);
    else if (dim == 64)
        put_v(rows, dim, bits, planes, true);
    else
        put_v(rows, dim, bits, planes, false);
    if (side->row.wide)
        put_wide(rows, dim, planes + KVQ_GROUP_TOKENS * dim * bits / 8);
}
