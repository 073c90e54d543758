// SPDX-License-Identifier: Apache-2.0
//
// Rows of numbers on the way into packed blocks, AVX-512: loading, the Hadamard transform, sums of
// squares, scaling. The bytes are those of kernels_c.c: every lane computes what it says there.
#include "kernels/avx512.h"

static void load_avx512(const void *src, uint8_t dtype, float *dst, size_t n)
{
    const uint16_t *half = src;
    size_t i = 0;
    if (dtype == KVQ_F32) {
        memcpy(dst, src, n * sizeof *dst);
        return;
    }
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i,
                         dtype == KVQ_F16 ? kvq__load_f16(half + i) : kvq__load_bf16(half + i));
    __mmask16 rest = (__mmask16)((1u << (n - i)) - 1);
    __m256i x = _mm256_maskz_loadu_epi16(rest, half + i);
    __m512 wide = _mm512_cvtph_ps(x);
    if (dtype == KVQ_BF16)
        wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    _mm512_mask_storeu_ps(dst + i, rest, wide);
}

// ---- Hadamard ----

// Each lane and its partner's, `swapped`: their sum in the lower of the two, in the upper the lower
// one minus the upper. The product with 1 or -1 is exact, so this rounds once, like an addition.
KVQ__INLINE __m512 butterfly(__m512 x, __m512 swapped, __m512 sign)
{
    return _mm512_fmadd_ps(x, sign, swapped);
}

// -1 in the lanes that have the bit.
KVQ__INLINE __m512 signs(__mmask16 upper)
{
    return _mm512_mask_blend_ps(upper, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
}

// Distances 1, 2, 4 and 8.
KVQ__INLINE __m512 butterflies16(__m512 x)
{
    x = butterfly(x, _mm512_permute_ps(x, 0xb1), signs(0xaaaa));
    x = butterfly(x, _mm512_permute_ps(x, 0x4e), signs(0xcccc));
    x = butterfly(x, _mm512_shuffle_f32x4(x, x, 0xb1), signs(0xf0f0));
    return butterfly(x, _mm512_shuffle_f32x4(x, x, 0x4e), signs(0xff00));
}

// `first` is 0 or -0 for each channel, `last` the norm or its negative.
KVQ__INLINE void hadamard_row(float *row, uint32_t dim, const float *first, const float *last)
{
    __m512 x[KVQ_MAX_HEAD_DIM / 16];
    uint32_t n = dim / 16;
    KVQ__UNROLL
    for (uint32_t i = 0; i < n; i++)
        x[i] = butterflies16(
            _mm512_xor_ps(_mm512_loadu_ps(row + 16 * i), _mm512_load_ps(first + 16 * i)));
    KVQ__UNROLL
    for (uint32_t h = 1; h < n; h *= 2)
        KVQ__UNROLL
    for (uint32_t i = 0; i < n; i++)
        if (!(i & h)) {
            __m512 a = x[i], b = x[i + h];
            x[i] = _mm512_add_ps(a, b);
            x[i + h] = _mm512_sub_ps(a, b);
        }
    KVQ__UNROLL
    for (uint32_t i = 0; i < n; i++)
        _mm512_storeu_ps(row + 16 * i, _mm512_mul_ps(x[i], _mm512_load_ps(last + 16 * i)));
}

// x, or -x where a bit is set.
static void put_signs(const uint32_t *signs, float x, float *out, uint32_t dim)
{
    for (uint32_t c = 0; c < dim; c += 16) {
        __mmask16 own = (__mmask16)(signs ? signs[c / 32] >> c % 32 : 0);
        _mm512_store_ps(out + c, _mm512_mask_blend_ps(own, _mm512_set1_ps(x), _mm512_set1_ps(-x)));
    }
}

static void hadamard_avx512(float *rows, uint32_t n, uint32_t dim, const uint32_t *before,
                            const uint32_t *after)
{
    _Alignas(64) float first[KVQ_MAX_HEAD_DIM], last[KVQ_MAX_HEAD_DIM];
    put_signs(before, 0.0f, first, dim);
    put_signs(after, kvq__hadamard_norm(dim), last, dim);
    for (uint32_t r = 0; r < n; r++)
        KVQ__BY_DIM(dim, hadamard_row(rows + (size_t)r * DIM, DIM, first, last));
}

// ---- Sums and factors ----

// Lane i of the first 8 becomes the sum of all 16, in the order of kernels_c.c.
KVQ__INLINE float sum16(__m512 x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static void sumsq_avx512(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    for (uint32_t r = 0; r < n; r++) {
        __m512 sum = _mm512_setzero_ps();
        for (uint32_t i = 0; i < dim; i += 16) {
            __m512 x = _mm512_loadu_ps(rows + (size_t)r * dim + i);
            sum = _mm512_add_ps(sum, _mm512_mul_ps(x, x));
        }
        sums[r] = sum16(sum);
    }
}

static void sum_abs_avx512(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    for (uint32_t r = 0; r < n; r++) {
        __m512 sum = _mm512_setzero_ps();
        for (uint32_t i = 0; i < dim; i += 16)
            sum = _mm512_add_ps(sum, _mm512_abs_ps(_mm512_loadu_ps(rows + (size_t)r * dim + i)));
        sums[r] = sum16(sum);
    }
}

static void sum_columns_avx512(const float *rows, uint32_t n, uint32_t dim, const bool *left_out,
                               float *sums)
{
    for (uint32_t i = 0; i < dim; i += 64) {
        __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                         _mm512_setzero_ps()};
        for (uint32_t r = 0; r < n; r++)
            for (uint32_t j = 0; j < 4 && !left_out[r]; j++)
                sum[j] =
                    _mm512_add_ps(sum[j], _mm512_loadu_ps(rows + (size_t)r * dim + i + 16 * j));
        for (uint32_t j = 0; j < 4; j++)
            _mm512_storeu_ps(sums + i + 16 * j, sum[j]);
    }
}

static void scale_rows_avx512(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++, rows += dim)
        for (uint32_t i = 0; i < dim; i += 16)
            _mm512_storeu_ps(rows + i,
                             _mm512_mul_ps(_mm512_loadu_ps(rows + i), _mm512_set1_ps(factor[r])));
}

static void scale_columns_avx512(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++, rows += dim)
        for (uint32_t i = 0; i < dim; i += 16)
            _mm512_storeu_ps(rows + i,
                             _mm512_mul_ps(_mm512_loadu_ps(rows + i), _mm512_loadu_ps(factor + i)));
}

void kvq__init_avx512_rows(struct kvq_kernels *k)
{
    k->load = load_avx512;
    k->hadamard = hadamard_avx512;
    k->sumsq = sumsq_avx512;
    k->sum_abs = sum_abs_avx512;
    k->sum_columns = sum_columns_avx512;
    k->scale_rows = scale_rows_avx512;
    k->scale_columns = scale_columns_avx512;
}
