// SPDX-License-Identifier: Apache-2.0
//
// The reference: numbers, rows, and the C table of functions. Groups are in quant_c.c, attention
// in attend_c.c. Plain loops that say what every other instruction set must compute.
#include "kernels/kernels_c.h"
#include "kernels/internal.h"

static void load_c(const void *src, uint8_t dtype, float *dst, size_t n)
{
    const uint16_t *half = src;
    switch (dtype) {
    case KVQ_F16:
        for (size_t i = 0; i < n; i++)
            dst[i] = kvq__f16_to_f32(half[i]);
        break;
    case KVQ_BF16:
        for (size_t i = 0; i < n; i++)
            dst[i] = kvq__bf16_to_f32(half[i]);
        break;
    default:
        memcpy(dst, src, n * sizeof *dst);
    }
}

static void save_c(const float *src, uint8_t dtype, void *dst, size_t n)
{
    uint16_t *half = dst;
    switch (dtype) {
    case KVQ_F16:
        for (size_t i = 0; i < n; i++)
            half[i] = kvq__f32_to_f16(src[i]);
        break;
    case KVQ_BF16:
        for (size_t i = 0; i < n; i++)
            half[i] = kvq__f32_to_bf16(src[i]);
        break;
    default:
        memcpy(dst, src, n * sizeof *src);
    }
}

static void store_c(const void *src, uint8_t from, void *dst, uint8_t to, size_t n,
                    struct kvq_store_counts *counts)
{
    uint16_t *half = dst;
    for (size_t i = 0; i < n; i++) {
        float x = kvq__element(src, from, i);
        counts->nonfinite += !kvq__is_finite(x);
        counts->saturated += kvq__saturates(x, to);
        half[i] = kvq__stored(x, to);
    }
}

static void butterflies(float *row, uint32_t dim)
{
    for (uint32_t h = 1; h < dim; h *= 2)
        for (uint32_t block = 0; block < dim; block += 2 * h)
            for (uint32_t i = block; i < block + h; i++) {
                float a = row[i], b = row[i + h];
                row[i] = a + b;
                row[i + h] = a - b;
            }
}

static void flip(const uint32_t *signs, float *row, uint32_t dim)
{
    for (uint32_t c = 0; signs && c < dim; c++)
        row[c] = kvq__float(kvq__bits(row[c]) ^ signs[c / 32] >> c % 32 << 31);
}

static void hadamard_c(float *rows, uint32_t n, uint32_t dim, const uint32_t *before,
                       const uint32_t *after)
{
    const float norm = kvq__hadamard_norm(dim);
    for (uint32_t r = 0; r < n; r++) {
        float *row = rows + (size_t)r * dim;
        flip(before, row, dim);
        butterflies(row, dim);
        for (uint32_t i = 0; i < dim; i++)
            row[i] *= norm;
        flip(after, row, dim);
    }
}

float kvq__sumsq(const float *row, uint32_t n)
{
    float lane[16] = {0};
    for (uint32_t j = 0; j < n; j += 16)
        for (uint32_t i = 0; i < 16; i++)
            lane[i] += row[j + i] * row[j + i];
    for (uint32_t half = 8; half > 0; half /= 2)
        for (uint32_t i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static void sumsq_c(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    for (uint32_t r = 0; r < n; r++)
        sums[r] = kvq__sumsq(rows + (size_t)r * dim, dim);
}

static void sum_abs_c(const float *rows, uint32_t n, uint32_t dim, float *sums)
{
    for (uint32_t r = 0; r < n; r++, rows += dim) {
        float lane[16] = {0};
        for (uint32_t i = 0; i < dim; i++)
            lane[i % 16] += fabsf(rows[i]);
        for (uint32_t half = 8; half > 0; half /= 2)
            for (uint32_t i = 0; i < half; i++)
                lane[i] += lane[i + half];
        sums[r] = lane[0];
    }
}

static void sum_columns_c(const float *rows, uint32_t n, uint32_t dim, const bool *left_out,
                          float *sums)
{
    memset(sums, 0, dim * sizeof *sums);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < dim && !left_out[r]; i++)
            sums[i] += rows[(size_t)r * dim + i];
}

static void scale_rows_c(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < dim; i++)
            rows[(size_t)r * dim + i] *= factor[r];
}

static void scale_columns_c(float *rows, const float *factor, uint32_t n, uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < dim; i++)
            rows[(size_t)r * dim + i] *= factor[i];
}

static void blend_rows_c(float *a, const float *fa, const float *b, const float *fb, uint32_t n,
                         uint32_t dim)
{
    for (uint32_t r = 0; r < n; r++)
        for (size_t i = (size_t)r * dim; i < (size_t)(r + 1) * dim; i++)
            a[i] = a[i] * fa[r] + b[i] * fb[r];
}

void kvq__init_c(struct kvq_kernels *k)
{
    *k = (struct kvq_kernels){
        .load = load_c,
        .save = save_c,
        .store = store_c,
        .hadamard = hadamard_c,
        .sumsq = sumsq_c,
        .sum_abs = sum_abs_c,
        .sum_columns = sum_columns_c,
        .scale_rows = scale_rows_c,
        .scale_columns = scale_columns_c,
        .blend_rows = blend_rows_c,
        .attend_chunk = kvq__attend_chunk,
    };
    kvq__init_quant_c(k);
    kvq__init_book_c(k);
    kvq__init_attend_c(k);
}
