// SPDX-License-Identifier: Apache-2.0
//
// Sixteen lanes: what the files of scalar codecs (scalar_*_tmpl.h) are written in. lanes_avx2.h has
// the same names with eight lanes. Sums, differences, products and quotients are C's operators.
#ifndef KVQ_KERNELS_LANES_H
#define KVQ_KERNELS_LANES_H

#include <immintrin.h>

#include "kernels/avx512.h"

enum {
    KVQ__LANES = 16,
    KVQ__TOKEN_REGS = KVQ_GROUP_TOKENS / KVQ__LANES, // registers that hold a number of each token
    KVQ__BLOCK_ROWS = 4,                             // query rows whose sums stay in registers
    KVQ__CHAINS = 2, // sums of one row and token, so that additions need not wait
};

typedef __m512 kvq__floats;
typedef __m512i kvq__words;

// ---- Numbers ----

KVQ__INLINE kvq__floats kvq__all(float x)
{
    return _mm512_set1_ps(x);
}

// a * b + c, rounded once. Not for what ends up in stored bytes.
KVQ__INLINE kvq__floats kvq__fma(kvq__floats a, kvq__floats b, kvq__floats c)
{
    return _mm512_fmadd_ps(a, b, c);
}

// The second where one is NaN.
KVQ__INLINE kvq__floats kvq__min(kvq__floats a, kvq__floats b)
{
    return _mm512_min_ps(a, b);
}

KVQ__INLINE kvq__floats kvq__abs(kvq__floats x)
{
    return _mm512_abs_ps(x);
}

KVQ__INLINE kvq__floats kvq__negative(kvq__floats x)
{
    __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign));
}

KVQ__INLINE kvq__floats kvq__sqrt(kvq__floats x)
{
    return _mm512_sqrt_ps(x);
}

KVQ__INLINE kvq__floats kvq__rint(kvq__floats x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Lane by lane a > b ? x : y.
KVQ__INLINE kvq__floats kvq__if_greater(kvq__floats a, kvq__floats b, kvq__floats x, kvq__floats y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}

KVQ__INLINE kvq__floats kvq__load(const float *p)
{
    return _mm512_loadu_ps(p);
}

KVQ__INLINE void kvq__store(float *p, kvq__floats x)
{
    _mm512_storeu_ps(p, x);
}

KVQ__INLINE kvq__floats kvq__load_half(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

// To fp16: nearest even, finite values saturate, infinities and NaN stay.
KVQ__INLINE __m256i kvq__to_half(kvq__floats x)
{
    __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    __m512 y = _mm512_mask_max_ps(x, finite, x, _mm512_set1_ps(-65504.0f));
    y = _mm512_mask_min_ps(y, finite, y, _mm512_set1_ps(65504.0f));
    return _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT);
}

KVQ__INLINE void kvq__store_half(void *p, kvq__floats x)
{
    _mm256_storeu_si256(p, kvq__to_half(x));
}

// What fp16 makes of it.
KVQ__INLINE kvq__floats kvq__as_half(kvq__floats x)
{
    return _mm512_cvtph_ps(kvq__to_half(x));
}

// Numbers in V's slots (layout.h, 5) to the order of tokens.
KVQ__INLINE kvq__floats kvq__from_slots(kvq__floats x)
{
    const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm512_permutexvar_ps(order, x);
}

KVQ__INLINE kvq__floats kvq__to_slots(kvq__floats x)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    return _mm512_permutexvar_ps(order, x);
}

// x[i] lane j becomes x[j] lane i.
KVQ__INLINE void kvq__transpose(kvq__floats *x)
{
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int n = 0; n < 2; n++) { // 4 by 4 within each quarter of a register
            b[i + 2 * n] = _mm512_shuffle_ps(a[i + n], a[i + n + 2], 0x44);
            b[i + 2 * n + 1] = _mm512_shuffle_ps(a[i + n], a[i + n + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) { // quarters
        __m512 low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
        __m512 high = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
        __m512 low2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
        __m512 high2 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
}

// ---- Words of planes ----

KVQ__INLINE kvq__words kvq__words_at(const void *p)
{
    return _mm512_loadu_si512(p);
}

// Words that are `stride` bytes apart.
KVQ__INLINE kvq__words kvq__words_apart(const void *p, uint32_t stride)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i at = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)stride));
    return _mm512_i32gather_epi32(at, p, 1);
}

KVQ__INLINE kvq__words kvq__multiply(kvq__words x, uint32_t factor)
{
    return _mm512_mullo_epi32(x, _mm512_set1_epi32((int)factor));
}

KVQ__INLINE kvq__words kvq__all_words(uint32_t x)
{
    return _mm512_set1_epi32((int)x);
}

// Each word shifted to the right by its lane's number and `first`, as long as that is below 32.
KVQ__INLINE kvq__words kvq__right_by_lane(kvq__words x, int first)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_srlv_epi32(x, _mm512_add_epi32(lane, _mm512_set1_epi32(first)));
}

KVQ__INLINE kvq__words kvq__left(kvq__words x, int bits)
{
    return _mm512_slli_epi32(x, (unsigned)bits);
}

KVQ__INLINE kvq__words kvq__right(kvq__words x, int bits)
{
    return _mm512_srli_epi32(x, (unsigned)bits);
}

// The 32 words of a row of K, in the order of tokens: 32-byte pieces are permuted by XOR m.
KVQ__INLINE void kvq__load_k_row(const uint8_t *row, uint32_t m, kvq__words *words)
{
    for (uint32_t n = 0; n < 2; n++) {
        __m256i a = _mm256_load_si256((const void *)(row + 32 * ((2 * n) ^ m)));
        __m256i b = _mm256_load_si256((const void *)(row + 32 * ((2 * n + 1) ^ m)));
        words[n] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    }
}

// The words of a row of V that belongs to the sets j, in the order of channels: 32 of them, or 16
// where the head has 64 channels.
KVQ__INLINE void kvq__load_v_row(const uint8_t *row, uint32_t j, kvq__words *words, bool narrow)
{
    // Channel 8 n + g is word 4 * (g ^ 2 j) + n; narrow: word (2 g + n) ^ 8 * (j >> 1).
    const __m512i eights =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m512i a = _mm512_load_si512(row);
    if (narrow) {
        __m512i at = _mm512_xor_si512(pairs, _mm512_set1_epi32((int)(8 * (j >> 1))));
        words[0] = _mm512_permutexvar_epi32(at, a);
        return;
    }
    __m512i b = _mm512_load_si512(row + 64);
    __m512i at = _mm512_xor_si512(eights, _mm512_set1_epi32((int)(8 * j)));
    words[0] = _mm512_permutex2var_epi32(a, at, b);
    words[1] = _mm512_permutex2var_epi32(a, _mm512_add_epi32(at, _mm512_set1_epi32(2)), b);
}

// 2-bit planes to nibbles: even holds positions 0 and 2 of each byte, odd 1 and 3.
KVQ__INLINE void kvq__join(kvq__words low, kvq__words high, kvq__words *even, kvq__words *odd)
{
    struct kvq__nibbles n = kvq__join_planes(low, high);
    *even = n.even;
    *odd = n.odd;
}

KVQ__INLINE kvq__floats kvq__byte(kvq__words x, int byte)
{
    const __m512i take = _mm512_set1_epi32((int)(0x80808000u | (uint32_t)byte));
    const __m512i lane = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(x, _mm512_or_si512(take, lane)));
}

// What codes stand for, by nibbles. Those of 1 and 2 bits have two to a nibble: a is of the lower
// one, b of the upper one.
struct kvq__levels {
    __m512 a, b;
};

// 2^n levels for fields of `bits` bits. NULL: codes stand for themselves.
KVQ__INLINE struct kvq__levels kvq__levels_of(const float *levels, int n, int bits)
{
    const __m512i all = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 x = _mm512_cvtepi32_ps(all);
    if (levels)
        x = _mm512_maskz_loadu_ps((__mmask16)((1u << (1u << n)) - 1), levels);
    if (bits > 2)
        return (struct kvq__levels){x, x};
    return (struct kvq__levels){
        _mm512_permutexvar_ps(_mm512_and_si512(all, _mm512_set1_epi32(3)), x),
        _mm512_permutexvar_ps(_mm512_srli_epi32(all, 2), x),
    };
}

KVQ__INLINE struct kvq__levels kvq__scale_levels(const struct kvq__levels *l, float scale,
                                                 float zero, int bits)
{
    (void)bits;
    kvq__floats s = kvq__all(scale), z = kvq__all(zero);
    return (struct kvq__levels){kvq__fma(l->a, s, z), kvq__fma(l->b, s, z)};
}

// Of the codes that start at `bit` of each word. Those of 3 and 4 bits are nibbles.
KVQ__INLINE kvq__floats kvq__look_up(const struct kvq__levels *l, kvq__words x, int bit, int bits)
{
    return _mm512_permutexvar_ps(kvq__right(x, bit & ~3), bits <= 2 && bit & 2 ? l->b : l->a);
}

#endif
