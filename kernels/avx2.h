// SPDX-License-Identifier: Apache-2.0
//
// What the AVX2 files share: 16-bit numbers in eights, 2^x, sums across lanes.
// Only the *_avx2.c files include this; they are compiled with the flags it needs.
#ifndef KVQ_KERNELS_AVX2_H
#define KVQ_KERNELS_AVX2_H

#include <immintrin.h>

#include "kernels/internal.h"
#include "kernels/simd.h"

// Half of the words of a plane's rows: 16 of the 32 of a row, or of V at head_dim 64 all. Rows' 16
// bytes are permuted by XOR 2 * m, which exchanges the halves for m of 2 and 3; at[m / 2] is where
// the half starts in row 0.
struct kvq__half {
    const uint8_t *at[2];
};

KVQ__INLINE struct kvq__half kvq__half_of(const uint8_t *plane, uint32_t half)
{
    return (struct kvq__half){{plane + 64 * half, plane + (64 - 64 * half)}};
}

// Words 8 z to 8 z + 7 of the half of a row. Row and m are constants.
KVQ__INLINE __m256i kvq__load_words(const struct kvq__half *h, uint32_t row, uint32_t z, uint32_t m)
{
    return _mm256_load_si256(
        (const void *)(h->at[m >> 1] + KVQ__ROW_BYTES * row + 32 * (z ^ (m & 1))));
}

// Codes of 3 and 4 bits as nibbles, of the 2-bit planes; the high one's upper bits are 0 for 3.
// Positions 0 and 2 of each byte (odd 0), or 1 and 3.
KVQ__INLINE __m256i kvq__join_planes(__m256i low, __m256i high, int odd)
{
    const __m256i mask = _mm256_set1_epi8(0x33);
    low = _mm256_and_si256(odd ? _mm256_srli_epi16(low, 2) : low, mask);
    if (odd)
        return _mm256_or_si256(low, _mm256_andnot_si256(mask, high));
    return _mm256_or_si256(low, _mm256_slli_epi16(_mm256_and_si256(high, mask), 2));
}

// Four by four, each half for itself: x[i] number k becomes x[k] number i.
KVQ__INLINE void kvq__transpose4(__m256 *x)
{
    __m256 a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    __m256 c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    x[0] = _mm256_shuffle_ps(a, c, 0x44);
    x[1] = _mm256_shuffle_ps(a, c, 0xee);
    x[2] = _mm256_shuffle_ps(b, d, 0x44);
    x[3] = _mm256_shuffle_ps(b, d, 0xee);
}

// 8 n numbers at one position of V, in the order of words, as channels: of n = 4 registers word
// 4 * g + a, at head_dim 64 of n = 2 word 2 * g + a, is channel 8 * a + g.
KVQ__INLINE void kvq__channels_of_words(const float *words, uint32_t n, __m256 *x)
{
    if (n == 2) {
        __m256 a[2], b[2];
        a[0] = _mm256_load_ps(words);
        a[1] = _mm256_load_ps(words + 8);
        b[0] = _mm256_permute2f128_ps(a[0], a[1], 0x20);
        b[1] = _mm256_permute2f128_ps(a[0], a[1], 0x31);
        x[0] = _mm256_shuffle_ps(b[0], b[1], 0x88);
        x[1] = _mm256_shuffle_ps(b[0], b[1], 0xdd);
        return;
    }
    for (uint32_t g = 0; g < 4; g++)
        x[g] = _mm256_set_m128(_mm_load_ps(words + 4 * (g + 4)), _mm_load_ps(words + 4 * g));
    kvq__transpose4(x);
}

// 8 numbers of a dtype to fp32, exactly; p is aligned to the dtype only.
KVQ__INLINE __m256 kvq__load8(const void *p, uint8_t dtype)
{
    if (dtype == KVQ_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128(p));
    if (dtype == KVQ_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    return _mm256_loadu_ps(p);
}

// 8 fp32 to fp16: nearest even, finite values saturate, infinities and NaN stay.
KVQ__INLINE __m128i kvq__to_f16(__m256 x)
{
    const __m256 limit = _mm256_set1_ps(65504.0f), inf = _mm256_set1_ps(INFINITY);
    __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    __m256 finite = _mm256_cmp_ps(size, inf, _CMP_LT_OQ);
    __m256 clamped =
        _mm256_min_ps(_mm256_max_ps(x, _mm256_sub_ps(_mm256_setzero_ps(), limit)), limit);
    return _mm256_cvtps_ph(_mm256_blendv_ps(x, clamped, finite), _MM_FROUND_TO_NEAREST_INT);
}

// 8 fp32 to bf16, with the same promises.
KVQ__INLINE __m128i kvq__to_bf16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x);
    __m256i rest = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i top = _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), u),
                                  _mm256_set1_epi32(0x7f7f0000));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7f800000));
    __m256i inf = _mm256_cmpeq_epi32(rest, _mm256_set1_epi32(0x7f800000));
    __m256i big = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7f7f0000));
    __m256i y = _mm256_blendv_epi8(rounded, top, big);
    y = _mm256_blendv_epi8(y, u, inf);
    y = _mm256_blendv_epi8(y, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    y = _mm256_srli_epi32(y, 16);
    y = _mm256_permute4x64_epi64(_mm256_packus_epi32(y, y), 0x08);
    return _mm256_castsi256_si128(y);
}

KVQ__INLINE void kvq__save8(__m256 x, uint8_t dtype, void *p)
{
    if (dtype == KVQ_F32)
        _mm256_storeu_ps(p, x);
    else
        _mm_storeu_si128(p, dtype == KVQ_F16 ? kvq__to_f16(x) : kvq__to_bf16(x));
}

// 2^x for x <= 0, within 2 units in the last place; 0 below -126 and for -inf, NaN for NaN.
KVQ__INLINE __m256 kvq__exp2_ps(__m256 x)
{
    __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(1.5353362e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3398874e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6184373e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5503324e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022651e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314718e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    __m256i power =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), normal);
}

// The sums of a, b, c and d. Each is summed in the same order.
KVQ__INLINE __m128 kvq__sum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ac = _mm256_add_ps(_mm256_unpacklo_ps(a, c), _mm256_unpackhi_ps(a, c));
    __m256 bd = _mm256_add_ps(_mm256_unpacklo_ps(b, d), _mm256_unpackhi_ps(b, d));
    __m256 s = _mm256_add_ps(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

// Of numbers that are not negative: the largest of a, b, c and d.
KVQ__INLINE __m128 kvq__max4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ac = _mm256_max_ps(_mm256_unpacklo_ps(a, c), _mm256_unpackhi_ps(a, c));
    __m256 bd = _mm256_max_ps(_mm256_unpacklo_ps(b, d), _mm256_unpackhi_ps(b, d));
    __m256 x = _mm256_max_ps(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));
    return _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

KVQ__INLINE float kvq__max_all(__m256 x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

KVQ__INLINE float kvq__min_all(__m256 x)
{
    __m128 y = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_min_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_min_ss(y, _mm_movehdup_ps(y)));
}

KVQ__INLINE float kvq__sum_all(__m256 x)
{
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// The file of each area enters its functions into the table.
void kvq__init_avx2_rows(struct kvq_kernels *k);
void kvq__init_avx2_pack(struct kvq_kernels *k);
void kvq__init_avx2_attend(struct kvq_kernels *k);
void kvq__init_avx2_packed(struct kvq_kernels *k);
void kvq__init_avx2_scalar(struct kvq_kernels *k);
void kvq__init_avx2_scalar_quant(struct kvq_kernels *k);
void kvq__init_avx2_book(struct kvq_kernels *k);
void kvq__init_avx2_book_pack(struct kvq_kernels *k);

#endif
