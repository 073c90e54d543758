// SPDX-License-Identifier: Apache-2.0
//
// What the AVX-512 files share: loading swizzled rows, parting planes into codes, 2^x, sums.
// Only the *_avx512.c files include this; they are compiled with the flags it needs.
#ifndef KVQ_KERNELS_AVX512_H
#define KVQ_KERNELS_AVX512_H

#include <immintrin.h>

#include "kernels/internal.h"
#include "kernels/simd.h"

enum { KVQ__SWAP_HALVES = 0x4e };

// A step of a kernel over packed groups of b bits fetches b + 1 lines for each 16 channels of K, or
// for each four tokens of 128 channels of V: that many hold its codes, scales and zeros.
KVQ__INLINE void kvq__fetch_lines(const uint8_t *at, int n)
{
    kvq__fetch_bytes(at, 64 * (size_t)n);
}

// Half z (words 16 z to 16 z + 15 in natural order) of a 128-byte row whose 16-byte chunks are
// permuted by XOR 2 * m. Bit 1 of m exchanges the halves, bit 0 the halves of each half.
KVQ__INLINE __m512i kvq__load_row(const uint8_t *row, unsigned z, unsigned m)
{
    __m512i x = _mm512_load_si512(row + 64 * (z ^ (m >> 1)));
    return m & 1 ? _mm512_shuffle_i64x2(x, x, KVQ__SWAP_HALVES) : x;
}

// A 64-byte row of V at head_dim 64: set j's words are permuted by XOR 8 * (j >> 1).
KVQ__INLINE __m512i kvq__load_row_64(const uint8_t *plane, unsigned row, unsigned j)
{
    __m512i x = _mm512_load_si512(plane + 64 * row);
    return j >> 1 ? _mm512_shuffle_i64x2(x, x, KVQ__SWAP_HALVES) : x;
}

// Codes of 3 and 4 bits as nibbles: even holds positions 0 and 2 of each byte, odd 1 and 3.
struct kvq__nibbles {
    __m512i even, odd;
};

// low and high are 2-bit planes; the high one's upper bits are 0 for 3-bit codes.
KVQ__INLINE struct kvq__nibbles kvq__join_planes(__m512i low, __m512i high)
{
    const __m512i mask = _mm512_set1_epi8(0x33);
    // 0xca selects the second operand where the first is set, else the third.
    return (struct kvq__nibbles){
        _mm512_ternarylogic_epi32(mask, low, _mm512_slli_epi16(high, 2), 0xca),
        _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(low, 2), high, 0xca),
    };
}

// 16 fp16 to fp32.
KVQ__INLINE __m512 kvq__load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}

// Slots are 0, 4, 1, 5, 2, 6, 3, 7 of each 8 tokens; this is the way back.
static inline __m512i kvq__tokens_from_slots(void)
{
    static const uint16_t order[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                       14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                       21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
    return _mm512_loadu_si512(order);
}

// Scales or zeros of V of 32 tokens, in fp32 and in the order of tokens.
static inline void kvq__load_slots(const uint8_t *p, float *out)
{
    __m512i x = _mm512_permutexvar_epi16(kvq__tokens_from_slots(), _mm512_load_si512(p));
    _mm512_store_ps(out, _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
    _mm512_store_ps(out + 16, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
}

// 16 bf16 to fp32.
KVQ__INLINE __m512 kvq__load_bf16(const void *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// 2^x for x <= 0, within 2 units in the last place, 1 for 0 and never more; 0 for -inf, NaN for
// NaN. The polynomial is 2^f on [0, 1], exact at both ends; vscalefps rounds x down by itself.
KVQ__INLINE __m512 kvq__exp2_ps(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(1.8746344e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.0034762e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5805869e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016534e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315070e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

// The same with a relative error of up to 1.1e-4, for what is rounded to bf16, which has 2e-3.
KVQ__INLINE __m512 kvq__exp2_rough(__m512 x)
{
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(7.826801e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.2630768e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.954243e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

// Each 128-bit lane of the result holds that lane's sums of a, b, c and d.
KVQ__INLINE __m512 kvq__lane_sums(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ac = _mm512_add_ps(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    __m512 bd = _mm512_add_ps(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    return _mm512_add_ps(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
}

// The sums of a, b, c and d, repeated in every 128-bit lane. Each is summed in the same order.
KVQ__INLINE __m512 kvq__sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 s = kvq__lane_sums(a, b, c, d);
    s = _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0x4e));
    return _mm512_add_ps(s, _mm512_shuffle_f32x4(s, s, 0xb1));
}

// Of numbers that are not negative: the largest of a, b, c and d, repeated in every 128-bit lane.
KVQ__INLINE __m512 kvq__max4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ac = _mm512_max_ps(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    __m512 bd = _mm512_max_ps(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    __m512 x = _mm512_max_ps(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}

// The largest of all lanes, in every lane.
KVQ__INLINE __m512 kvq__max_all(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
}

// Sum of all lanes, in every lane, in the order of kvq__sum4.
KVQ__INLINE __m512 kvq__sum_all(__m512 x)
{
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
    x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}

// The file of each area enters its functions into the table.
void kvq__init_avx512_softmax(struct kvq_kernels *k);
void kvq__init_avx512_rows(struct kvq_kernels *k);
void kvq__init_avx512_pack(struct kvq_kernels *k);
void kvq__init_avx512_raw(struct kvq_kernels *k);
void kvq__init_avx512_attend(struct kvq_kernels *k);
void kvq__init_avx512_vnni(struct kvq_kernels *k);
void kvq__init_avx512_scalar(struct kvq_kernels *k);
void kvq__init_avx512_book(struct kvq_kernels *k);
void kvq__init_avx512_book_pack(struct kvq_kernels *k);
void kvq__init_avx512_book_pairs(struct kvq_kernels *k);

// The table's qk_packed of affine codes, in fp32 (attend_avx512.c).
void kvq__qk_packed_avx512(const struct kvq__tile *tile, const struct kvq_packed *packed,
                           float *logits);

#endif
