// SPDX-License-Identifier: Apache-2.0
//
// Eight lanes: what the files of scalar codecs (scalar_*_tmpl.h) are written in. lanes_avx512.h has
// the same names with sixteen lanes. Sums, differences, products and quotients are C's operators.
#ifndef KVQ_KERNELS_LANES_H
#define KVQ_KERNELS_LANES_H

#include <immintrin.h>

#include "kernels/avx2.h"

enum {
    KVQ__LANES = 8,
    KVQ__TOKEN_REGS = KVQ_GROUP_TOKENS / KVQ__LANES, // registers that hold a number of each token
    KVQ__BLOCK_ROWS = 2,                             // query rows whose sums stay in registers
    KVQ__CHAINS = 1, // sums of one row and token; 8 registers of them are enough
};

typedef __m256 kvq__floats;
typedef __m256i kvq__words;

// ---- Numbers ----

KVQ__INLINE kvq__floats kvq__all(float x)
{
    return _mm256_set1_ps(x);
}

// a * b + c, rounded once. Not for what ends up in stored bytes.
KVQ__INLINE kvq__floats kvq__fma(kvq__floats a, kvq__floats b, kvq__floats c)
{
    return _mm256_fmadd_ps(a, b, c);
}

// The second where one is NaN.
KVQ__INLINE kvq__floats kvq__max(kvq__floats a, kvq__floats b)
{
    return _mm256_max_ps(a, b);
}

KVQ__INLINE kvq__floats kvq__min(kvq__floats a, kvq__floats b)
{
    return _mm256_min_ps(a, b);
}

KVQ__INLINE kvq__floats kvq__abs(kvq__floats x)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

KVQ__INLINE kvq__floats kvq__negative(kvq__floats x)
{
    return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
}

KVQ__INLINE kvq__floats kvq__sqrt(kvq__floats x)
{
    return _mm256_sqrt_ps(x);
}

KVQ__INLINE kvq__floats kvq__rint(kvq__floats x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lane by lane a > b ? x : y.
KVQ__INLINE kvq__floats kvq__if_greater(kvq__floats a, kvq__floats b, kvq__floats x, kvq__floats y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}

KVQ__INLINE kvq__floats kvq__load(const float *p)
{
    return _mm256_loadu_ps(p);
}

KVQ__INLINE void kvq__store(float *p, kvq__floats x)
{
    _mm256_storeu_ps(p, x);
}

KVQ__INLINE kvq__floats kvq__load_half(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}

KVQ__INLINE void kvq__store_half(void *p, kvq__floats x)
{
    _mm_storeu_si128(p, kvq__to_f16(x));
}

// What fp16 makes of it.
KVQ__INLINE kvq__floats kvq__as_half(kvq__floats x)
{
    return _mm256_cvtph_ps(kvq__to_f16(x));
}

// Integers from 0 to 255, a byte each.
KVQ__INLINE void kvq__store_words(uint8_t *p, kvq__words word)
{
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
    _mm_storel_epi64((void *)p, _mm_packus_epi16(half, half));
}

// Numbers in V's slots (layout.h, 5) to the order of tokens.
KVQ__INLINE kvq__floats kvq__from_slots(kvq__floats x)
{
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
}

KVQ__INLINE kvq__floats kvq__to_slots(kvq__floats x)
{
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// x[i] lane j becomes x[j] lane i.
KVQ__INLINE void kvq__transpose(kvq__floats *x)
{
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int n = 0; n < 2; n++) { // 4 by 4 within each half of a register
            b[i + 2 * n] = _mm256_shuffle_ps(a[i + n], a[i + n + 2], 0x44);
            b[i + 2 * n + 1] = _mm256_shuffle_ps(a[i + n], a[i + n + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

// ---- Words of planes ----

KVQ__INLINE kvq__words kvq__words_at(const void *p)
{
    return _mm256_loadu_si256(p);
}

// Words that are `stride` bytes apart.
KVQ__INLINE kvq__words kvq__words_apart(const void *p, uint32_t stride)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i at = _mm256_mullo_epi32(lane, _mm256_set1_epi32((int)stride));
    return _mm256_i32gather_epi32(p, at, 1);
}

KVQ__INLINE kvq__words kvq__multiply(kvq__words x, uint32_t factor)
{
    return _mm256_mullo_epi32(x, _mm256_set1_epi32((int)factor));
}

KVQ__INLINE kvq__words kvq__all_words(uint32_t x)
{
    return _mm256_set1_epi32((int)x);
}

// Each word shifted to the right by its lane's number and `first`, as long as that is below 32.
KVQ__INLINE kvq__words kvq__right_by_lane(kvq__words x, int first)
{
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_srlv_epi32(x, _mm256_add_epi32(lane, _mm256_set1_epi32(first)));
}

KVQ__INLINE kvq__words kvq__left(kvq__words x, int bits)
{
    return _mm256_slli_epi32(x, bits);
}

KVQ__INLINE kvq__words kvq__right(kvq__words x, int bits)
{
    return _mm256_srli_epi32(x, bits);
}

KVQ__INLINE kvq__words kvq__to_words(kvq__floats x)
{
    return _mm256_cvtps_epi32(x);
}

KVQ__INLINE void kvq__store_bytes(uint8_t *p, kvq__floats x)
{
    kvq__store_words(p, kvq__to_words(x));
}

// How many of 2^bits - 1 ascending numbers are below x. 16 can be read.
KVQ__INLINE kvq__words kvq__count_below(kvq__floats x, const float *numbers, int bits)
{
    __m256i n = _mm256_setzero_si256(); // comparisons give 0 or -1
    for (uint32_t i = 0; i < (1u << bits) - 1; i++) {
        __m256 below = _mm256_cmp_ps(x, _mm256_set1_ps(numbers[i]), _CMP_GT_OQ);
        n = _mm256_sub_epi32(n, _mm256_castps_si256(below));
    }
    return n;
}

// The 32 words of a row of K, in the order of tokens: 32-byte pieces are permuted by XOR m.
KVQ__INLINE void kvq__load_k_row(const uint8_t *row, uint32_t m, kvq__words *words)
{
    for (uint32_t n = 0; n < 4; n++)
        words[n] = _mm256_load_si256((const void *)(row + 32 * (n ^ m)));
}

// Channels 8 n to 8 n + 7 of 32, words 4 * (g ^ 2 j) + n, become words[n].
KVQ__INLINE void kvq__load_v_wide(const uint8_t *row, uint32_t j, kvq__words *words)
{
    __m256i x[4];
    for (uint32_t g = 0; g < 4; g++) {
        __m128i a = _mm_load_si128((const void *)(row + 16 * (g ^ 2 * j)));
        __m128i b = _mm_load_si128((const void *)(row + 16 * ((g + 4) ^ 2 * j)));
        x[g] = _mm256_set_m128i(b, a);
    }
    __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
    __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    words[0] = _mm256_unpacklo_epi64(a, c);
    words[1] = _mm256_unpackhi_epi64(a, c);
    words[2] = _mm256_unpacklo_epi64(b, d);
    words[3] = _mm256_unpackhi_epi64(b, d);
}

// The words of a row of V that belongs to the sets j, in the order of channels: 32 of them, or 16
// where the head has 64 channels.
KVQ__INLINE void kvq__load_v_row(const uint8_t *row, uint32_t j, kvq__words *words, bool narrow)
{
    if (!narrow) {
        kvq__load_v_wide(row, j, words);
        return;
    }
    // Channel 8 n + g is word (2 g + n) ^ 8 * (j >> 1).
    uint32_t swap = 32 * (j >> 1);
    __m256i a = _mm256_load_si256((const void *)(row + swap));
    __m256i b = _mm256_load_si256((const void *)(row + (32 ^ swap)));
    __m256 low = _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x20));
    __m256 high = _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x31));
    words[0] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
    words[1] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
}

// 2-bit planes to nibbles: even holds positions 0 and 2 of each byte, odd 1 and 3.
KVQ__INLINE void kvq__join(kvq__words low, kvq__words high, kvq__words *even, kvq__words *odd)
{
    const __m256i mask = _mm256_set1_epi8(0x33);
    *even = _mm256_or_si256(_mm256_and_si256(mask, low),
                            _mm256_andnot_si256(mask, _mm256_slli_epi16(high, 2)));
    *odd = _mm256_or_si256(_mm256_and_si256(mask, _mm256_srli_epi16(low, 2)),
                           _mm256_andnot_si256(mask, high));
}

KVQ__INLINE kvq__floats kvq__byte(kvq__words x, int byte)
{
    const __m256i take = _mm256_set1_epi32((int)(0x80808000u | (uint32_t)byte));
    const __m256i lane = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                           0x08080808, 0x0c0c0c0c);
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(x, _mm256_or_si256(take, lane)));
}

// What codes stand for: a of the first eight, b of the others.
struct kvq__levels {
    __m256 a, b;
};

// 2^n levels for fields of `bits` bits. NULL: codes stand for themselves.
KVQ__INLINE struct kvq__levels kvq__levels_of(const float *levels, int n, int bits)
{
    static const float own[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float *from = levels ? levels : own;
    (void)bits;
    if (n <= 2) { // the third bit of an index may be the next code's
        __m256 x = _mm256_broadcast_ps((const void *)from);
        return (struct kvq__levels){x, x};
    }
    __m256 x = _mm256_loadu_ps(from);
    return (struct kvq__levels){x, n == 4 ? _mm256_loadu_ps(from + 8) : x};
}

KVQ__INLINE struct kvq__levels kvq__scale_levels(const struct kvq__levels *l, float scale,
                                                 float zero, int bits)
{
    kvq__floats s = kvq__all(scale), z = kvq__all(zero), a = kvq__fma(l->a, s, z);
    return (struct kvq__levels){a, bits == 4 ? kvq__fma(l->b, s, z) : a};
}

// Of the codes that start at `bit` of each word. Those of 3 and 4 bits are nibbles.
KVQ__INLINE kvq__floats kvq__look_up(const struct kvq__levels *l, kvq__words x, int bit, int bits)
{
    kvq__words at = kvq__right(x, bit);
    kvq__floats low = _mm256_permutevar8x32_ps(l->a, at);
    if (bits < 4)
        return low;
    // The highest bit of a nibble as the sign.
    __m256 upper = _mm256_castsi256_ps(kvq__left(x, 28 - bit));
    return _mm256_blendv_ps(low, _mm256_permutevar8x32_ps(l->b, at), upper);
}

#endif
