// SPDX-License-Identifier: Apache-2.0
//
// The steps of attention over one chunk in plain C: logits, soft-cap, softmax, values.
#include "kernels/internal.h"
#include "kernels/kernels_c.h"

enum { LANES = 8 };

static float dot(const float *a, const float *b, uint32_t dim)
{
    float lane[LANES] = {0};
    for (uint32_t j = 0; j < dim; j += LANES)
        for (uint32_t i = 0; i < LANES; i++)
            lane[i] += a[j + i] * b[j + i];
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
           ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static void raw_row(const struct kvq__tile *tile, const uint16_t *src, float *dst)
{
    bool f16 = tile->codec->raw_dtype == KVQ_F16;
    for (uint32_t i = 0; i < tile->dim; i++)
        dst[i] = f16 ? kvq__f16_to_f32(src[i]) : kvq__bf16_to_f32(src[i]);
}

static void dot_rows_c(const struct kvq__tile *tile, const float *q, const float *rows,
                       float *logits)
{
    uint32_t dim = tile->dim;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t r = 0; r < tile->rows; r++)
            logits[(size_t)r * KVQ__LOGITS_STRIDE + t] =
                dot(q + (size_t)r * dim, rows + (size_t)t * dim, dim);
}

static void qk_raw_c(const struct kvq__tile *tile, const uint16_t *k, uint32_t from, uint32_t to,
                     float *logits)
{
    float row[KVQ_MAX_HEAD_DIM];
    for (uint32_t t = from; t < to; t++) {
        raw_row(tile, k + (size_t)t * tile->dim, row);
        for (uint32_t r = 0; r < tile->rows; r++)
            logits[(size_t)r * KVQ__LOGITS_STRIDE + t] =
                dot(tile->q + (size_t)r * tile->dim, row, tile->dim);
    }
}

static void softcap_c(const struct kvq__tile *tile, uint32_t n)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        for (uint32_t t = 0; t < n; t++) {
            float *x = &tile->logits[(size_t)r * KVQ__LOGITS_STRIDE + t];
            *x = tile->cap * tanhf(*x);
        }
}

// One row: turns logits into p, and returns the factor for what was summed before.
static float softmax_row(float *x, uint32_t n, int32_t lo, int32_t hi, float *m, float *l)
{
    float max = *m, sum = 0.0f;
    for (int32_t t = lo; t < hi; t++)
        max = x[t] > max ? x[t] : max;
    bool blind = max == -INFINITY && !kvq__sees_nan(x, lo, hi);
    float factor = blind ? 1.0f : kvq__exp2(*m - max);
    for (int32_t t = 0; t < (int32_t)n; t++) {
        bool seen = t >= lo && t < hi && !blind;
        x[t] = seen ? kvq__exp2(x[t] - max) : 0.0f;
        sum += x[t];
    }
    if (isunordered(max, sum))
        return kvq__spoil_row(x, (int32_t)n, m, l);
    *m = max;
    *l = *l * factor + sum;
    return factor;
}

static void softmax_c(struct kvq__tile *tile, uint32_t n)
{
    for (uint32_t r = 0; r < tile->rows; r++)
        tile->factor[r] = softmax_row(tile->logits + (size_t)r * KVQ__LOGITS_STRIDE, n, tile->lo[r],
                                      tile->hi[r], &tile->m[r], &tile->l[r]);
}

static void axpy(float *o, float p, const float *v, uint32_t dim)
{
    for (uint32_t i = 0; i < dim; i++)
        o[i] += p * v[i];
}

static void sum_rows_c(const struct kvq__tile *tile, const float *p, const float *rows, float *o)
{
    uint32_t dim = tile->dim;
    for (uint32_t t = 0; t < KVQ_GROUP_TOKENS; t++)
        for (uint32_t r = 0; r < tile->rows; r++)
            axpy(o + (size_t)r * dim, p[(size_t)r * KVQ__LOGITS_STRIDE + t], rows + (size_t)t * dim,
                 dim);
}

static void pv_raw_c(const struct kvq__tile *tile, const uint16_t *v, uint32_t from, uint32_t to,
                     const float *p)
{
    float row[KVQ_MAX_HEAD_DIM];
    for (uint32_t t = from; t < to; t++) {
        raw_row(tile, v + (size_t)t * tile->dim, row);
        for (uint32_t r = 0; r < tile->rows; r++)
            axpy(tile->o + (size_t)r * tile->dim, p[(size_t)r * KVQ__LOGITS_STRIDE + t], row,
                 tile->dim);
    }
}

void kvq__init_attend_c(struct kvq_kernels *k)
{
    k->dot_rows = dot_rows_c;
    k->sum_rows = sum_rows_c;
    k->qk_raw = qk_raw_c;
    k->softcap = softcap_c;
    k->softmax = softmax_c;
    k->pv_raw = pv_raw_c;
}
